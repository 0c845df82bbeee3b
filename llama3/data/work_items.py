"""Work items of a data step: who runs them, and the files that they read and write.

A file that exists is done, so a killed job resumes, and a runner (loop, threads, cluster) may do the items of a step in
any order. A large item is done in pieces, one after another, so that a store answers few requests and one piece is in
memory; what the pieces write to a step is one file, which appears when the last piece is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from herd.storage.files import atomic_file, file_names, open_file
from herd.storage.filesystem import is_local
from herd.storage.processes import READERS, parallel_map

ROW_GROUP = 8192
PIECES = b"pieces"
"""Key in the metadata of a Parquet file of several pieces: the number of row groups up to the end of each piece."""
BLOCK = 32 << 20
"""Bytes that an item of several pieces fetches of a remote file at a time; it reads files of this engine, in order."""
Answer = TypeVar("Answer")
Work = Callable[[Any, int], None]
"""Does one item of a step: `work(job, item)`. A function of a module or a method of a stage, so that it pickles."""
Runner = Callable[[Any, str, Work, Sequence[int]], None]
"""Runs the items of a step in any order: `runner(job, step, work, items)`. Raises the error of a failed item."""


def run_step(runner: Runner, job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do the `items` of `step` whose file does not exist yet."""
    if is_local(job.folder):
        Path(job.folder, step).mkdir(parents=True, exist_ok=True)
    done = set(file_names(f"{job.folder}/{step}"))
    left = [item for item in items if job.file(step, item).rpartition("/")[2] not in done]
    if left:
        runner(job, step, work, left)
    pa.default_memory_pool().release_unused()  # otherwise the process keeps the peak of each step


def run_serial(job: Any, step: str, work: Work, items: Sequence[int]) -> None:
    """Do the items one after another in this process."""
    for item in items:
        work(job, item)


class Output(Protocol):
    """A file that an item writes."""

    def commit(self) -> None:
        """Make the file visible."""

    def discard(self) -> None:
        """Forget what was written."""


class WorkItem:
    """The item that this thread does, and its open files."""

    def __init__(self, number: int, pieces: int) -> None:
        self.number = number
        self.pieces = pieces
        """Pieces of an item; the pieces of a step are numbered through, those of item i begin at i * `pieces`."""
        self.piece = 0
        """The piece of the item that is done now."""
        self.outputs: dict[str, Output] = {}
        self.inputs: dict[Any, Any] = {}
        """What was opened once for all pieces."""
        self.closing = ExitStack()

    def output(self, uri: str, create: Callable[[], Any]) -> Any:
        """Return the output `uri`, created when a piece first writes to it."""
        if uri not in self.outputs:
            self.outputs[uri] = create()
        return self.outputs[uri]

    def input(self, key: Any, create: Callable[[], Answer]) -> Answer:
        """Return what `create` opens, once for all pieces."""
        if key not in self.inputs:
            self.inputs[key] = create()
        return self.inputs[key]  # type: ignore[no-any-return]


class _Thread(threading.local):
    item: WorkItem | None = None


_thread = _Thread()


@contextmanager
def work_item(number: int, pieces: int = 1, last: str = "") -> Iterator[WorkItem]:
    """Yield the item that this thread does now; if it does none, item `number`, whose outputs are committed at the end.

    The output `last` comes last: where it exists, all others of the item do.
    """
    if _thread.item is not None:
        yield _thread.item
        return
    _thread.item = item = WorkItem(number, pieces)
    try:
        with item.closing:
            yield item
        for uri in sorted(item.outputs, key=lambda uri: uri == last):
            item.outputs.pop(uri).commit()
    finally:
        _thread.item = None
        for output in item.outputs.values():
            output.discard()


def do_pieces(step: str, pieces: int, work: Work, job: Any, number: int, count: int) -> None:
    """Do the first `count` of the `pieces` of item `number` of `step`."""
    with work_item(number, pieces, job.file(step, number)) as item:
        for item.piece in range(count):
            work(job, number * pieces + item.piece)


class TableFile:
    """A Parquet file with the rows of each piece in row groups of its own; the bytes depend on the tables alone."""

    def __init__(self, uri: str, **options: Any) -> None:
        self._options = options
        self._atomic = ExitStack()
        self._path = self._atomic.enter_context(atomic_file(uri))
        self._writer: pq.ParquetWriter | None = None
        self._groups = 0
        self._ends: list[int] = []
        self._empty: pa.Table | None = None

    def write(self, table: pa.Table, piece: int, row_group: int = ROW_GROUP) -> None:
        """Append `table` to `piece`, which is not before the piece of an earlier call."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, **self._options)
        self._ends += [self._groups] * (piece + 1 - len(self._ends))
        if len(table):
            self._writer.write_table(table.combine_chunks(), row_group)
            self._groups += -(-len(table) // row_group)
            self._ends[-1] = self._groups
        self._empty = table.slice(0, 0)

    def commit(self, **metadata: str) -> None:
        assert self._writer is not None
        if not self._groups:  # a file has a row group
            self._writer.write_table(self._empty)
        if len(self._ends) > 1:
            metadata[PIECES.decode()] = ",".join(map(str, self._ends))
        self._writer.add_key_value_metadata(metadata)
        self._writer.close()
        self._atomic.close()

    def discard(self) -> None:
        with suppress(InterruptedError), self._atomic:
            raise InterruptedError("its item failed")


def table_options(schema: pa.Schema) -> dict[str, Any]:
    """Return how tables between steps are written."""
    # A dictionary of hashes saves no space and takes a third of the write time.
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    return {"compression": "zstd", "use_dictionary": texts or False}


def write_table(table: pa.Table, uri: str | Path, row_group: int = ROW_GROUP) -> None:
    """Write `table` atomically; the bytes depend on the table alone."""
    with atomic_file(str(uri)) as temporary:
        pq.write_table(table.combine_chunks(), temporary, row_group_size=row_group, **table_options(table.schema))


def piece_groups(file: pq.ParquetFile, piece: int) -> list[int]:
    """Return the row groups of a piece."""
    ends = (file.metadata.metadata or {}).get(PIECES)
    if ends is None:
        return list(range(file.num_row_groups))
    bounds = [0, *map(int, ends.split(b","))]
    return list(range(*bounds[piece : piece + 2])) if piece + 1 < len(bounds) else []


@contextmanager
def open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file by path or URI; an item opens it once."""
    item = _thread.item
    if item is not None and item.pieces > 1:
        yield item.input(uri, lambda: item.closing.enter_context(pq.ParquetFile(open_file(uri, BLOCK, 2))))
        return
    with pq.ParquetFile(open_file(uri)) as file:
        yield file


def read_table(uri: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a Parquet file, read by path or URI on this thread."""
    with open_parquet(uri) as file:
        return file.read(columns=None if columns is None else list(columns), use_threads=False)


def read_piece(uri: str, piece: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a piece of a Parquet file."""
    with open_parquet(uri) as file:
        names = None if columns is None else list(columns)
        return file.read_row_groups(piece_groups(file, piece), columns=names, use_threads=False)


def read_each(read: Callable[[str], Answer], uris: Sequence[str]) -> list[Answer]:
    """Return the result of `read` for each file; many at a time from a store, where a request waits some 30 ms."""
    return list(map(read, uris)) if all(map(is_local, uris)) else parallel_map(read, uris, READERS)
