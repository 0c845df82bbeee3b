from __future__ import annotations

import os
from pathlib import Path

import pytest

from herd.storage import digests
from herd.storage.digests import content_digests, digest_bytes, digest_file


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read, with a cache of this test alone."""
    names: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "digest_file", lambda path: names.append(path.name) or digest_file(path))
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    return names


def put(path: Path, data: bytes) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return str(path)


def test_a_file_is_read_again_only_if_it_may_have_changed(tmp_path: Path, reads: list[str]) -> None:
    paths = [put(tmp_path / "in/a", b"one"), put(tmp_path / "in/b", b"two"), put(tmp_path / "on/a", b"one")]
    first = content_digests(paths)
    assert first == {path: digest_bytes(Path(path).read_bytes()).sha256 for path in paths}
    assert sorted(reads) == ["a", "a", "b"]
    assert content_digests(reversed(paths)) == first
    assert len(reads) == 3, "nothing changed"
    os.utime(paths[0], (1, 1))
    assert content_digests(paths) == first
    assert reads[3:] == ["a"]
    times = os.stat(paths[1]).st_mtime_ns
    put(tmp_path / "in/b", b"six")
    os.utime(paths[1], ns=(times, times))
    assert content_digests(paths)[paths[1]] == digest_bytes(b"six").sha256, "of the same size and time"
    assert content_digests(paths[:1]) | content_digests(paths) == content_digests(paths)
    assert len(reads) == 5, "a call about some files forgets no others"


def test_a_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED_NS", 2_000_000_000)
    path = put(tmp_path / "a", b"one")
    assert content_digests([path]) == content_digests([path])
    assert reads == ["a", "a"]


def test_a_cache_that_is_torn_or_cannot_be_written_costs_a_read(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "in/a", b"one")
    first = content_digests([path])
    (cached,) = (tmp_path / "cache/herd/digests").iterdir()
    for torn in ("{", "[]", '{"a": 3}', '{"a": [[1], "f"]}'):
        cached.write_text(torn)
        assert content_digests([path]) == first
    assert len(reads) == 5
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert content_digests([path]) == first
    with pytest.raises(FileNotFoundError):
        content_digests([f"{path}-gone"])
