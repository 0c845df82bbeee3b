"""DuckDB sessions with bounded memory that spill to a folder of ours.

DuckDB's default is 80 % of the machine and a spill folder beside the current directory; a curation step that runs
beside a trainer must take neither.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb


def _opened(spill: Path, memory: str, threads: int) -> duckdb.DuckDBPyConnection:
    spill.mkdir(parents=True, exist_ok=True)
    connection = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": memory,
            "threads": threads,
            "temp_directory": str(spill),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
        },
    )
    connection.execute("SET enable_progress_bar = false")
    connection.execute("SET parquet_metadata_cache = true")  # a step asks the same files many times
    return connection


class _Kept(threading.local):
    """The database that this thread used last, with the settings it was opened with."""

    settings: tuple[str, str, int] | None = None
    connection: duckdb.DuckDBPyConnection | None = None


_kept = _Kept()


@contextmanager
def session(spill: Path, memory: str = "2GiB", threads: int = 2) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection to an in-memory DuckDB of at most `memory` (DuckDB size text) that spills into `spill`.

    The thread keeps the database for the next call with the same arguments: opening one takes 10 to 15 ms, as much as
    a small step. Tables must be temporary ones, which go with the connection. Row order is not preserved inside
    queries (that costs memory): every result whose order matters needs ORDER BY over columns of the data.
    """
    settings = (str(spill), memory, threads)
    if _kept.settings != settings or not spill.is_dir():
        if _kept.connection is not None:
            _kept.connection.close()
        _kept.connection, _kept.settings = _opened(spill, memory, threads), settings
    assert _kept.connection is not None
    connection = _kept.connection.cursor()
    connection.execute("SET enable_progress_bar = false")
    try:
        yield connection
    finally:
        connection.close()
