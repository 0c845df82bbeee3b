"""The process with limits: what it runs, what it knows, and what is left of it after a job that did not end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from herd.storage import limited_process
from herd.storage.limited_process import limited_values


def run_limited(job: dict[str, Any], data: bytes) -> Iterator[Any]:
    """Run in the process."""
    yield data.decode()
    match job["do"]:
        case "environment":
            yield sorted(os.environ)
        case "fail":
            raise ValueError("it has failed")
        case "loop":
            while True:
                pass
        case "fill":
            yield len(bytearray(2**34))


def values(do: str) -> list[Any]:
    job = {"do": do}
    return list(limited_values(__name__, job, b"data", 1, "x: its work", lambda count: f"x: value {count}: work"))


@pytest.fixture(autouse=True)
def new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that can import this file."""
    limited_process._stop_worker()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    yield
    limited_process._stop_worker()


def test_it_has_no_key_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    first, names = values("environment")
    assert first == "data"
    assert "PATH" in names
    assert "AWS_SECRET_ACCESS_KEY" not in names


def test_an_error_is_raised_here_and_the_process_goes_on() -> None:
    with pytest.raises(ValueError, match=r"^it has failed$"):
        values("fail")
    worker = limited_process._workers[0][1]
    assert values("") == ["data"]
    assert limited_process._workers[0][1] is worker


def test_what_never_ends_is_stopped() -> None:
    with pytest.raises(ValueError, match=r"^x: value 1: work take more than 1 s of processor time"):
        values("loop")
    assert values("") == ["data"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count libraries as memory")
def test_memory_is_bounded() -> None:
    with pytest.raises(ValueError, match=r"^x: its work take more than 2 GiB"):
        values("fill")
    assert values("") == ["data"]
