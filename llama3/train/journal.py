"""The journal of a stage: one JSON line per optimizer step, appended and never changed.

It is the truth about what was trained; trackers are fed from it. A line is written by one call, so a killed process
leaves whole lines and at most one torn one at the end, which readers skip and the next writer cuts off. It reaches the
disk before each checkpoint and not at every step: a power cut may lose lines, but none that a checkpoint builds on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

FIRST_READ = 2**16


@dataclass(frozen=True)
class Record:
    """One optimizer step."""

    time: float
    """When it ended, in seconds since 1970."""
    position: int
    """Position after it."""
    metrics: Mapping[str, float]

    def line(self) -> bytes:
        fields = {"time": self.time, "position": self.position, "metrics": self.metrics}
        return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_journal(path: Path, after: int = -1) -> list[Record]:
    """Return the records of `path` with positions above `after`, in order; none if there is no file.

    Reads from the end, so following a long journal costs only what is new. Raises ValueError for a broken line that is
    not the last.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        end, size = file.seek(0, os.SEEK_END), FIRST_READ
        while True:
            start = max(0, end - size)
            file.seek(start)
            records = _parse(path, file.read(end - start), whole=start == 0)
            if start == 0 or (records and records[0].position <= after):
                return [record for record in records if record.position > after]
            size *= 4


def _parse(path: Path, data: bytes, whole: bool) -> list[Record]:
    *lines, _ = data.split(b"\n")  # what follows the last newline is torn, or nothing
    try:
        return [Record(**json.loads(line)) for line in (lines if whole else lines[1:])]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: a line is not a record ({error}); move the file away to start the stage anew"
        ) from None


class Journal:
    """The journal open for appending; only the holder of the stage's lease may have one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._cut_torn_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def add(self, record: Record) -> None:
        """Append one record. Raises OSError if it was not written whole (disk full)."""
        line = record.line()
        if os.write(self._handle, line) != len(line):
            raise OSError(f"{self.path}: the disk took only part of a line; make room and start again")

    def sync(self) -> None:
        """Return when everything added is on the disk."""
        os.fsync(self._handle)

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        os.ftruncate(self._handle, data.rfind(b"\n") + 1)


def to_parquet(journal: Path, path: Path) -> None:
    """Write the journal as a table with columns time (s), position (tokens), key, value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = read_journal(journal)
    rows = [(record.time, record.position, key, value) for record in records for key, value in record.metrics.items()]
    types = {"time": pa.float64(), "position": pa.int64(), "key": pa.string(), "value": pa.float64()}
    columns = zip(*rows, strict=True) if rows else [[]] * len(types)
    pq.write_table(
        pa.table([pa.array(column, kind) for column, kind in zip(columns, types.values(), strict=True)], list(types)),
        path,
    )
