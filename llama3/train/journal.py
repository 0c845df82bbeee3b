"""The journal of a stage: one JSON line per optimizer step, appended and never changed.

It is the truth about what was trained; trackers are fed from it. A line is written by one call, so a killed process
leaves whole lines and at most one torn one at the end, which readers skip and the next writer cuts off. It reaches the
disk before each checkpoint and not at every step: a power cut may lose lines, but none that a checkpoint builds on.

After a rollback the same positions are trained again, so a line can take back others: a rewind to a position voids
every record after that position which stands before the rewind in the file. Readers return what still holds, one record
a position, ascending; the void ones stay in the file, for whoever asks why.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from storage.filesystem import write_atomic

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
        return _line({"time": self.time, "position": self.position, "metrics": self.metrics})


@dataclass(frozen=True)
class Rewind:
    """Training went back; records before this line and after `position` are void."""

    time: float
    position: int
    until: int
    """The batches from `position` to here are passed over from now on."""

    def line(self) -> bytes:
        return _line({"time": self.time, "position": self.position, "rewind": {"until": self.until}})


Entry = Record | Rewind


def read_journal(path: Path, after: int = -1) -> list[Record]:
    """Return the records of `path` that hold, with positions above `after`, in order; none if there is no file.

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
            entries = _parse(path, file.read(end - start), whole=start == 0)
            # A record before the first entry lies before it, or a rewind between them has made it void.
            if start == 0 or (entries and entries[0].position <= after):
                return [record for record in holding(entries) if record.position > after]
            size *= 4


def read_rewinds(path: Path) -> list[Rewind]:
    """Return all rewinds of `path`, oldest first."""
    entries = _parse(path, path.read_bytes(), whole=True) if path.exists() else []
    return [entry for entry in entries if isinstance(entry, Rewind)]


def holding(entries: Iterable[Entry]) -> list[Record]:
    """Return the records that no later rewind has made void."""
    records: list[Record] = []
    for entry in entries:
        if isinstance(entry, Record):
            records.append(entry)
            continue
        while records and records[-1].position > entry.position:
            records.pop()
    return records


class Tail:
    """Reads what is added to a journal, each line once, rewinds too: for those who follow a trainer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> list[Entry]:
        """Return the whole lines that came since the call before, as they stand in the file.

        Raises ValueError for a broken one.
        """
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return _parse(self.path, data, whole=True)


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

    def add(self, entry: Entry) -> None:
        """Append one record or rewind. Raises OSError if it was not written whole (disk full)."""
        line = entry.line()
        if os.write(self._handle, line) != len(line):
            raise OSError(f"{self.path}: the disk took only part of a line; make room and start again")

    def sync(self) -> None:
        """Return when everything added is on the disk."""
        os.fsync(self._handle)

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        os.ftruncate(self._handle, data.rfind(b"\n") + 1)


def abandon(path: Path, position: int) -> None:
    """Move the records after `position` from the journal to a file beside it: training takes another way from there.

    Only the holder of the stage's lease may do so.
    """
    entries = _parse(path, path.read_bytes(), whole=True) if path.exists() else []
    left = [entry for entry in entries if isinstance(entry, Record) and entry.position > position]
    if left:
        write_atomic(path.with_name(f"abandoned-{time.time_ns()}.jsonl"), b"".join(entry.line() for entry in left))
        write_atomic(path, b"".join(entry.line() for entry in entries if entry not in left))


def to_parquet(journal: Path, path: Path) -> None:
    """Write the records that hold as a table with columns time (s), position (tokens), key, value."""
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


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _parse(path: Path, data: bytes, whole: bool) -> list[Entry]:
    *lines, _ = data.split(b"\n")  # what follows the last newline is torn, or nothing
    try:
        return [_entry(json.loads(line)) for line in (lines if whole else lines[1:])]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: a line is not a record ({error}); move the file away to start the stage anew"
        ) from None


def _entry(fields: Any) -> Entry:
    if "rewind" in fields:
        return Rewind(fields["time"], fields["position"], **fields["rewind"])
    return Record(**fields)
