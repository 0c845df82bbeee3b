"""Several files at the same time, and none after the first that failed.

A pool's map goes on with what is queued while its caller learns of an error, so a server that hangs would be waited
for once more than the deadline says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from storage.digests import THREADS

READERS = 16
"""Small documents read at the same time: each is one request that waits for the network."""

T = TypeVar("T")
R = TypeVar("R")


def each(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Return what `work` returns for every item, in order. Raises the first error once all threads have ended."""
    failed = threading.Event()

    def guarded(item: T) -> R:
        if failed.is_set():
            raise InterruptedError("another file failed first")
        try:
            return work(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(guarded, item) for item in items]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, InterruptedError)), errors[0])
    return [future.result() for future in futures]
