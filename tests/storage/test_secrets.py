"""A secret that a root keeps: one for all that ask at once, never an empty one, and none where it cannot be kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from herd.storage.secrets import kept_secret


def test_all_that_ask_at_once_get_the_same_secret(tmp_path: Path) -> None:
    for number in range(50):
        path, start = tmp_path / f"{number}.key", threading.Barrier(8)

        def ask(path: Path = path, start: threading.Barrier = start) -> str:
            start.wait()
            return kept_secret(path, "herd:")

        with ThreadPoolExecutor(8) as pool:
            (secret,) = {answer.result() for answer in [pool.submit(ask) for _ in range(8)]}
        assert secret.startswith("herd:")
        assert len(secret) > 40
        assert (path.read_text(), path.stat().st_mode & 0o777) == (f"{secret}\n", 0o600)
    assert len(list(tmp_path.iterdir())) == 50, "nothing else is left"


def test_a_file_that_was_left_empty_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "pages.key").touch(0o600)
    assert len(kept_secret(tmp_path / "pages.key")) > 40


def test_without_its_folder_it_is_another_one_each_time(tmp_path: Path) -> None:
    first, second = (kept_secret(tmp_path / "gone" / "pages.key") for _ in range(2))
    assert first != second
    assert not (tmp_path / "gone").exists()
