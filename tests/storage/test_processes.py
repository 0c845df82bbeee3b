"""Parallel work ends at the first error."""

from __future__ import annotations

import threading

import pytest

from herd.storage.processes import parallel_map


def test_after_the_first_error_nothing_new_is_begun() -> None:
    begun, gate = [], threading.Barrier(2)

    def work(item: int) -> int:
        begun.append(item)
        gate.wait(10)
        raise OSError(f"item {item}")

    with pytest.raises(OSError, match=r"item [01]"):
        parallel_map(work, range(100), 2)
    assert sorted(begun) == [0, 1]
    assert parallel_map(str, range(20), 3) == [str(item) for item in range(20)]
