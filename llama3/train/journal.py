"""The journal of a stage, one JSON line per optimizer step, and the list of the batches that a rollback skips.

Lines are appended and never changed; trackers are fed from them. After a rollback the same positions are trained again:
a rewind to a position voids every record after that position that precedes the rewind in the file. Readers return the
valid records, one for each position, ascending.
"""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter

from herd.storage.filesystem import write_atomic

FIRST_READ = 2**16
GROUP_ROWS = 2**17
"""Rows of a row group of the table: held in memory at a time."""
SKIPS = "skips.json"
HEALTH = "health.jsonl"
"""Beside the journal, in its format: the health of the nodes at chosen steps. The supervisor writes it."""
Series = list[tuple[int, float]]
"""(position in tokens, value)"""
SERIES = "SELECT key, position, value FROM read_parquet($tables) ORDER BY key, position"


@dataclass(frozen=True)
class Record:
    """One optimizer step."""

    time: float
    """When the step ended, in seconds since 1970."""
    position: int
    """Position after the step."""
    metrics: Mapping[str, float]

    def line(self) -> bytes:
        return _encode({"time": self.time, "position": self.position, "metrics": self.metrics})


@dataclass(frozen=True)
class Rewind:
    """Training went back; records before this line and after `position` are void."""

    time: float
    position: int
    until: int
    """The batches from `position` to here are skipped from now on."""

    def line(self) -> bytes:
        return _encode({"time": self.time, "position": self.position, "rewind": {"until": self.until}})


Entry = Record | Rewind


def read_journal(path: Path, after: int = -1) -> list[Record]:
    """Return the entries of `iter_journal` as a list."""
    return list(iter_journal(path, after))


def iter_journal(path: Path, after: int = -1) -> Iterator[Record]:
    """Yield the valid records of `path` with positions above `after`, in order; none without the file.

    Holds one record at a time (711K take 7 GB), and reads from the end, only as far as needed. Raises ValueError for a
    broken line that is not the last.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        end, size, start = file.seek(0, os.SEEK_END), FIRST_READ, 0
        # A record further ahead in the file has a smaller position, or was voided by a rewind in between.
        while after >= 0 and size < end:
            file.seek(end - size)
            start = end - size + len(file.readline())
            if any(_parse(path, line).position <= after for line in islice(_lines(file, start, end), 1)):
                break
            start, size = 0, size * 4
        rewinds = [_parse(path, line) for line in _lines(file, start, end) if b'"rewind"' in line]
        later = [entry for entry in rewinds if isinstance(entry, Rewind)]
        for _, record in _valid_lines(path, _lines(file, start, end), later):
            if record is not None and record.position > after:
                yield record


def read_rewinds(path: Path) -> list[Rewind]:
    """Return all rewinds of `path`, oldest first."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        entries = [_parse(path, line) for line in _lines(file) if b'"rewind"' in line]
    return [entry for entry in entries if isinstance(entry, Rewind)]


def valid_records(entries: Iterable[Entry]) -> list[Record]:
    """Return the records that no later rewind voids."""
    records: list[Record] = []
    for entry in entries:
        if isinstance(entry, Record):
            records.append(entry)
            continue
        while records and records[-1].position > entry.position:
            records.pop()
    return records


class Tail:
    """Reads the new lines of a journal, each once, rewinds included: for a process that follows a trainer.

    A journal that was replaced, by that of another machine, is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = self._inode = 0

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines since the last that was yielded."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset = inode, 0
            for line in _lines(file, self._offset):
                self._offset += len(line)
                yield line

    def entries(self) -> Iterator[Entry]:
        """Yield the new entries, in file order. Raises ValueError for a broken line."""
        return (_parse(self.path, line) for line in self.lines())

    def new(self) -> list[Entry]:
        """Return the new entries. Raises ValueError for a broken line."""
        return list(self.entries())


class Journal:
    """The journal open for appending; only the holder of the stage's lease may open it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # A line is written by one call, so a killed process leaves at most one torn line, at the end: cut it off.
        if os.fstat(self._handle).st_size:  # an empty file cannot be mapped
            with mmap(self._handle, 0, access=ACCESS_READ) as data:
                os.ftruncate(self._handle, data.rfind(b"\n") + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def add(self, entry: Entry) -> None:
        """Append one record or rewind. Raises OSError if only a part was written (disk full)."""
        line = entry.line()
        if os.write(self._handle, line) != len(line):
            raise OSError(f"{self.path}: only part of a line was written; free disk space and start again")

    def sync(self) -> None:
        os.fsync(self._handle)


def discard_after(path: Path, position: int) -> None:
    """Move the valid records after `position` to a file beside the journal. Only the lease's holder may call it."""
    if not path.exists():
        return
    kept, discarded = list[bytes](), list[bytes]()
    with path.open("rb") as file:
        for line, record in _valid_lines(path, _lines(file), read_rewinds(path)):
            (discarded if record is not None and record.position > position else kept).append(line)
    if discarded:
        write_atomic(path.with_name(f"abandoned-{time.time_ns()}.jsonl"), b"".join(discarded))
        write_atomic(path, b"".join(kept))


def to_parquet(journal: Path, path: Path) -> None:
    """Write the valid records, and those of the nodes' health, as a table: time (s), position (tokens), key, value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        {"time": pa.float64(), "position": pa.int64(), "key": pa.string(), "value": pa.float64()}.items()
    )
    records = chain(iter_journal(journal), iter_journal(journal.with_name(HEALTH)))
    points = ((record.time, record.position, key, value) for record in records for key, value in record.metrics.items())
    with pq.ParquetWriter(path, schema) as writer:
        while group := list(islice(points, GROUP_ROWS)):
            writer.write_table(pa.table([*map(pa.array, zip(*group, strict=True))], schema=schema))


ATTEMPTS = "attempts.jsonl"
"""File beside the journal: a line per start of the trainer, by rank 0, and one per end, by agent or supervisor."""


def read_attempts(work: Path) -> list[dict[str, Any]]:
    """Return each start of the trainer in the folder `work`: time, processes, environment, and `ended` if it is known.

    A torn line is left out. Times are in seconds since 1970.
    """
    path, attempts = work / ATTEMPTS, list[dict[str, Any]]()
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with suppress(ValueError):
            entry = json.loads(line)
            if "processes" in entry:
                attempts.append(entry)
            elif attempts:
                attempts[-1].setdefault("ended", entry["ended"])
    return attempts


def add_attempt(work: Path, entry: Mapping[str, Any]) -> None:
    """Append a start (`time`, `pid` of rank 0, `processes`, ...) or an end (`ended`). Raises OSError."""
    with (work / ATTEMPTS).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        torn = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(torn + json.dumps(entry).encode() + b"\n")


def end_attempt(work: Path, pid: int = 0) -> None:
    """Record that the last attempt has ended, unless that is known, or its rank 0 is not `pid`. Raises OSError.

    A launch that was refused before it could write its start must not end an earlier attempt.
    """
    last = read_attempts(work)[-1:]
    if last and "ended" not in last[0] and pid in (0, last[0]["pid"]):
        add_attempt(work, {"ended": time.time()})


def device_hours(work: Path) -> float:
    """Return the device-hours of all attempts at the stage in `work`: a process is a device, from its start to its end.

    An attempt without an `ended` entry counts until its last record.
    """
    attempts = read_attempts(work)
    starts: list[float] = [attempt["time"] for attempt in attempts]
    last = starts.copy()
    for record in () if all("ended" in attempt for attempt in attempts) else iter_journal(work / "journal.jsonl"):
        if number := bisect(starts, record.time):
            last[number - 1] = max(last[number - 1], record.time)
    total = 0.0
    for attempt, start, end in zip(attempts, starts, last, strict=True):
        total += attempt["processes"] * max(0.0, attempt.get("ended", end) - start)
    return total / 3600


def read_series(tables: Iterable[Path], query: str = SERIES, **values: Any) -> dict[str, Series]:
    """Return the series that `query` with `values` selects from such tables of consecutive stages, each continuous."""
    import duckdb

    from herd.llama3.data.mapreduce import without_progress_bar

    series: dict[str, Series] = {}
    values["tables"] = [str(table) for table in tables]
    if values["tables"]:
        with duckdb.connect() as connection:
            without_progress_bar(connection)
            for key, position, value in connection.execute(query, values).fetchall():
                series.setdefault(key, []).append((position, value))
    return series


class SkippedRange(BaseModel):
    """Positions [start, end) are skipped because of the spike in the step that begins at `spike`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: int
    end: int
    spike: int
    reason: str


_RANGES = TypeAdapter(tuple[SkippedRange, ...])


@dataclass(frozen=True)
class SkippedRanges:
    """`skips.json` of a stage: ranges of whole steps, in the order in which they were decided.

    Tokens, recipe and this file decide the weights, so it is written before training goes back. A range begins where
    the journal was rewound to, whichever checkpoints exist.
    """

    ranges: tuple[SkippedRange, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> SkippedRanges:
        """Return the ranges in `folder`, none without the file. Raises ValueError for a broken file."""
        path = folder / SKIPS
        if not path.exists():
            return cls()
        try:
            return cls(_RANGES.validate_json(path.read_bytes()))
        except ValueError as error:
            raise ValueError(
                f"{path}: is not a list of skipped ranges ({error}); restore the file, or train the stage again"
            ) from None

    def write(self, folder: Path) -> None:
        write_atomic(folder / SKIPS, json.dumps(self.as_dicts(), indent=1) + "\n")

    def plus(self, skip: SkippedRange) -> SkippedRanges:
        return SkippedRanges((*self.ranges, skip))

    def covers(self, start: int) -> bool:
        return any(skip.start <= start < skip.end for skip in self.ranges)

    def as_dicts(self) -> list[dict[str, Any]]:
        return [skip.model_dump() for skip in self.ranges]


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _lines(file: BinaryIO, start: int = 0, end: float = math.inf) -> Iterator[bytes]:
    """Yield the lines between two offsets; what follows the last newline is torn, or empty."""
    file.seek(start)
    while start < end and (line := file.readline()).endswith(b"\n"):
        start += len(line)
        yield line


def _valid_lines(
    path: Path, lines: Iterable[bytes], rewinds: Iterable[Rewind]
) -> Iterator[tuple[bytes, Record | None]]:
    """Yield each of `lines` with its record; None for a rewind, and for a record that one of `rewinds` voids."""
    later = deque(rewinds)
    for line in lines:
        entry = _parse(path, line)
        if isinstance(entry, Rewind):
            later.popleft()
            yield line, None
        else:
            yield line, entry if all(entry.position <= rewind.position for rewind in later) else None


def _parse(path: Path, line: bytes) -> Entry:
    try:
        fields = json.loads(line)
        if "rewind" in fields:
            return Rewind(fields["time"], fields["position"], **fields["rewind"])
        return Record(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: a line is not a record ({error}); move the file away to train the stage again"
        ) from None
