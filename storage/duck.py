"""DuckDB sessions with bounded memory that spill to a folder of ours.

DuckDB's defaults (80 % of the memory, a spill folder in the current directory) would disturb a trainer on the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb


class _ThreadDatabase(threading.local):
    """The database that this thread used last, and its settings."""

    settings: tuple[str, str, int] | None = None
    connection: duckdb.DuckDBPyConnection | None = None


_last = _ThreadDatabase()


@contextmanager
def session(spill: Path, memory: str = "2GiB", threads: int = 2) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection to an in-memory DuckDB of at most `memory` (DuckDB size text) that spills into `spill`.

    The thread keeps the database for the next call with the same arguments: opening one takes 10 to 15 ms, as much as
    a small step. Tables must be temporary, so that they end with the connection. Row order inside queries is not
    preserved (that costs memory): a result whose order matters needs ORDER BY over columns of the data.
    """
    settings = (str(spill), memory, threads)
    if _last.settings != settings or not spill.is_dir():
        if _last.connection is not None:
            _last.connection.close()
        spill.mkdir(parents=True, exist_ok=True)
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": memory,
            "threads": threads,
            "temp_directory": str(spill),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
        }
        _last.connection, _last.settings = duckdb.connect(":memory:", config=config), settings
        _last.connection.execute("SET enable_progress_bar = false")
        _last.connection.execute("SET parquet_metadata_cache = true")  # a step queries the same files many times
    assert _last.connection is not None
    connection = _last.connection.cursor()
    connection.execute("SET enable_progress_bar = false")
    try:
        yield connection
    finally:
        connection.close()
