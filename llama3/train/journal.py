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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter

from herd.storage.filesystem import write_atomic

FIRST_READ = 2**16
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
    """Return the valid records of `path` with positions above `after`, in order; none if there is no file.

    Reads from the end, only as far as needed. Raises ValueError for a broken line that is not the last.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        end, size = file.seek(0, os.SEEK_END), FIRST_READ
        while True:
            start = max(0, end - size)
            file.seek(start)
            entries = _parse(path, file.read(end - start), whole=start == 0)
            # A record further ahead in the file has a smaller position, or was voided by a rewind in between.
            if start == 0 or (entries and entries[0].position <= after):
                return [record for record in valid_records(entries) if record.position > after]
            size *= 4


def read_rewinds(path: Path) -> list[Rewind]:
    """Return all rewinds of `path`, oldest first."""
    entries = _parse(path, path.read_bytes(), whole=True) if path.exists() else []
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

    def read(self) -> bytes:
        """Return the complete lines since the previous call."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data

    def new(self) -> list[Entry]:
        """Return the entries since the previous call, in file order. Raises ValueError for a broken line."""
        return _parse(self.path, self.read(), whole=True)


class Journal:
    """The journal open for appending; only the holder of the stage's lease may open it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # A line is written by one call, so a killed process leaves at most one torn line, at the end: cut it off.
        data = path.read_bytes()
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
    """Move the records after `position` to a file beside the journal. Only the holder of the lease may call it."""
    entries = _parse(path, path.read_bytes(), whole=True) if path.exists() else []
    later = [entry for entry in entries if isinstance(entry, Record) and entry.position > position]
    if later:
        write_atomic(path.with_name(f"abandoned-{time.time_ns()}.jsonl"), b"".join(entry.line() for entry in later))
        write_atomic(path, b"".join(entry.line() for entry in entries if entry not in later))


def to_parquet(journal: Path, path: Path) -> None:
    """Write the valid records, and those of the nodes' health, as a table: time (s), position (tokens), key, value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [*read_journal(journal), *read_journal(journal.with_name(HEALTH))]
    rows = [(record.time, record.position, key, value) for record in records for key, value in record.metrics.items()]
    types = {"time": pa.float64(), "position": pa.int64(), "key": pa.string(), "value": pa.float64()}
    columns = zip(*rows, strict=True) if rows else [[]] * len(types)
    pq.write_table(
        pa.table([pa.array(column, kind) for column, kind in zip(columns, types.values(), strict=True)], list(types)),
        path,
    )


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

    An attempt whose end nobody saw ends with its last record.
    """
    attempts = read_attempts(work)
    times = [] if all("ended" in each for each in attempts) else [r.time for r in read_journal(work / "journal.jsonl")]
    total = 0.0
    for number, attempt in enumerate(attempts):
        began, following = attempt["time"], attempts[number + 1]["time"] if attempt is not attempts[-1] else math.inf
        last = max((time for time in times if began <= time < following), default=began)
        total += attempt["processes"] * max(0.0, attempt.get("ended", last) - began)
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


_SPANS = TypeAdapter(tuple[SkippedRange, ...])


@dataclass(frozen=True)
class SkippedRanges:
    """`skips.json` of a stage: spans of whole steps, in the order in which they were decided.

    Tokens, recipe and this file decide the weights, so it is written before training goes back. A span begins where the
    journal was rewound to, whichever checkpoints exist.
    """

    spans: tuple[SkippedRange, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> SkippedRanges:
        """Return the spans in `folder`, () without the file. Raises ValueError for a broken file."""
        path = folder / SKIPS
        if not path.exists():
            return cls()
        try:
            return cls(_SPANS.validate_json(path.read_bytes()))
        except ValueError as error:
            raise ValueError(
                f"{path}: is not a list of spans ({error}); restore the file, or train the stage again"
            ) from None

    def write(self, folder: Path) -> None:
        write_atomic(folder / SKIPS, json.dumps(self.facts(), indent=1) + "\n")

    def plus(self, span: SkippedRange) -> SkippedRanges:
        return SkippedRanges((*self.spans, span))

    def covers(self, start: int) -> bool:
        return any(span.start <= start < span.end for span in self.spans)

    def facts(self) -> list[dict[str, Any]]:
        return [span.model_dump() for span in self.spans]


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _parse(path: Path, data: bytes, whole: bool) -> list[Entry]:
    *lines, _ = data.split(b"\n")  # what follows the last newline is torn, or empty
    entries: list[Entry] = []
    try:
        for line in lines if whole else lines[1:]:
            fields = json.loads(line)
            if "rewind" in fields:
                entries.append(Rewind(fields["time"], fields["position"], **fields["rewind"]))
            else:
                entries.append(Record(**fields))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: a line is not a record ({error}); move the file away to train the stage again"
        ) from None
    return entries
