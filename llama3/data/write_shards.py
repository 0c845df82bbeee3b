"""Write Parquet shards: text shards of documents as read, and the curated documents that no step dropped.

Curated documents have duplicate lines and PII removed and are ordered by id. Ids are hashes, so equal id ranges hold
about equal amounts of text: file k of a domain holds range k, whatever shards the documents were read into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from herd.llama3.data.mapreduce import (
    ROW_BITS,
    CurationJob,
    aggregate,
    count_survivors,
    held_out_bound,
    schema_of,
)
from herd.llama3.data.shuffle import Shuffle
from herd.llama3.data.text.pii import Place, redact
from herd.llama3.data.work_items import Runner, TableFile, read_table, run_step, work_item, write_table
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.data_schema import HELD_OUT_BYTES, HELD_OUT_CUT, HELD_OUT_DOCUMENTS
from herd.storage.files import atomic_file

if TYPE_CHECKING:
    from herd.llama3.data.kernels.ngrams import Table

STEP, COUNTS, DRAWS = "written", "output/counts", "output/draws"
SHARD_BYTES = 64_000_000
"""Text per piece of a text shard, and per file of curated documents."""
FILES, LARGEST_FILE = 8192, 512_000_000
"""Curated files of a domain beyond which they get larger, and their largest size in text: each file becomes three of
tokens, which every trainer's index lists. 512 MB are 128M tokens, and a worker holds one file in memory."""
PIECES = 8
"""Ranges of ids in which a file is written, one after another; one of them is in memory."""
CURATED_SCHEMA = schema_of(
    "id string, text string, domain string, source string, source_index int32, language string, url string, "
    "license string, date string, topic string, quality float64, split string"
)
"""`source`: a name from `sources.source_names`; `source_index`: its index in the recipe's list of the domain;
`quality`: the first score of the recipe, or 0; `split`: `train` or `held_out`."""
SPANS = pa.list_(pa.struct({"start": pa.int64(), "stop": pa.int64(), "rule": pa.string()}))
"""What was removed or replaced: the characters (Unicode code points, as in Python and DuckDB's `substring`) from
`start` to `stop`, exclusive, of the text as it was read, and the field of `curate` that did it. Lines that follow each
other are one span."""
MOST_SPANS = 1000
"""Spans of a document that are written: of each kind the first ones."""
WRITTEN = schema_of("row int64, outcome string, bytes int64, lines int64, inside int64, redacted int64").append(
    pa.field("spans", SPANS)
)
"""Outcome of each surviving document (kept, held_out or emptied), bytes written, lines removed, those of them with kept
lines around them, redactions, and where they are; null without any."""
_REPEATED_COLUMNS = ["domain", "source", "language", "license", "date", "topic", "split"]
_ID_SPAN = 16**8
ITEM_BITS = 12
"""An item has at most 2^12 pieces of text, 260 GB."""
TEXT_SCHEMA = schema_of(
    "row int64, id string, text large_string, domain string, source string, source_index int32, language string, "
    "url string, license string, date string, bytes int64, draw uint64"
)
"""`row` numbers the documents as read. It joins tables and never decides anything."""
ORDER = ("id", "url", "date", "source_index", "license", "language")
_ROW_GROUP = 1024
_BLANKS = "".join(map(chr, range(0x21)))
_REPEATING = ["domain", "source", "source_index", "language", "license", "date"]


class ShardWriter:
    """Write the documents of one item as text shards of up to `pieces` pieces, each sorted by id; `close` at the end.

    A shard's file is named after its first piece; its metadata has the bytes of text in all.
    """

    def __init__(self, folder: str, domain: Domain, item: int, pieces: int = 1) -> None:
        self.written: list[tuple[str, int, int]] = []
        """Name, documents and bytes of each shard."""
        self._folder, self._domain, self._item, self._most = folder, domain, item, pieces
        self._file: TableFile | None = None
        self._number = self._pieces = 0
        self._tables: list[pa.Table] = []
        self._size = 0

    def add(self, table: pa.Table) -> None:
        """Buffer documents; columns of TEXT_SCHEMA except `row`."""
        self._tables.append(table)
        self._size += int(table["bytes"].to_numpy().sum())

    @property
    def full(self) -> bool:
        """Whether the buffer has enough text for a piece."""
        return self._size >= SHARD_BYTES

    def flush(self) -> None:
        """Write the buffered documents, if any, as a piece."""
        size = self._size
        if not size:
            return
        assert self._number < 1 << ITEM_BITS
        if self._file is None:
            name = f"{self._domain}-{self._item:05}-{self._number:04}.parquet"
            # Dictionary and statistics of the text would cost as much as compressing it. Statistics of ids let a reader
            # of an id range skip row groups. Level 1: a third of the disk for about 10 us per 4.5 KB.
            self._file = TableFile(
                f"{self._folder}/{name}",
                compression="zstd",
                compression_level=1,
                use_dictionary=_REPEATING,
                write_statistics=[column for column in TEXT_SCHEMA.names if column != "text"],
            )
            self.written.append((name, 0, 0))
        table = pa.concat_tables(self._tables)
        self._tables, self._size = [], 0
        table = table.take(pc.sort_indices(table, sort_keys=[(key, "ascending") for key in ORDER]))
        pa.default_memory_pool().release_unused()  # the pool keeps freed memory, and a text may be 200 MB
        first = (self._item << ITEM_BITS | self._number) << ROW_BITS
        table = table.add_column(0, "row", pa.array(np.arange(first, first + table.num_rows, dtype=np.int64)))
        self._file.write(table.select(TEXT_SCHEMA.names).cast(TEXT_SCHEMA), self._pieces, _ROW_GROUP)
        name, documents, total = self.written[-1]
        self.written[-1] = name, documents + table.num_rows, total + size
        self._number, self._pieces = self._number + 1, self._pieces + 1
        if self._pieces == self._most:
            self._commit()

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        if self._file is not None:
            self._commit()

    def discard(self) -> None:
        """Forget the shard that is not complete."""
        if self._file is not None:
            self._file.discard()

    def _commit(self) -> None:
        assert self._file is not None
        file, self._file, self._pieces = self._file, None, 0
        file.commit(bytes=str(self.written[-1][2]))


class OutputFile(NamedTuple):
    """Curated file `number` of the `files` of a domain."""

    domain: Domain
    number: int
    files: int

    def bound(self, piece: int) -> str:
        """Return the first id of a piece of the file, and for PIECES that of the next file."""
        low = (self.number * PIECES + piece) * _ID_SPAN // (self.files * PIECES)
        return f"{low:08x}" if low < _ID_SPAN else "g"

    @property
    def name(self) -> str:
        """File name."""
        return f"{self.domain}-{self.number:05}.parquet"


def write_documents(runner: Runner, job: CurationJob) -> list[str]:
    """Write the documents that no step dropped into `job.folder`/documents and return the names of the files."""
    if not job.files(COUNTS):
        sizes: dict[Domain, int] = dict.fromkeys((shard.domain for shard in job.shards), 0)
        for row in count_survivors(runner, job, "end").to_pylist():
            sizes[row["domain"]] += row["bytes"]
        bounds = held_out_bounds(runner, job)
        held_out = pa.array([bounds[domain] for domain in sizes], pa.uint64())
        counts = {"domain": list(sizes), "files": list(map(files_for, sizes.values())), "held_out": held_out}
        write_table(pa.table(counts), job.file(COUNTS, 0))
    files = _counts(job).files
    documents = _documents(job, files)
    job.each_shard(runner, documents.step(), map_documents)
    documents.merge(runner, job)
    run_step(runner, job, "output/files", write_file, range(documents.partitions))
    return [_output_file(files, item).name for item in range(documents.partitions)]


def files_for(size: int) -> int:
    """Return the number of curated files for `size` bytes of text, counted before lines are removed."""
    return max(1, -(-size // min(max(SHARD_BYTES, size // FILES), LARGEST_FILE)))


# The smallest draws of each domain that have the minimum, and the rest as one row without a draw.
_DRAWS = f"""SELECT domain, CASE WHEN first THEN draw END AS draw, sum(documents)::BIGINT AS documents,
        sum(bytes)::BIGINT AS bytes, sum(counted)::BIGINT AS counted
    FROM (
        SELECT *, draw IS NOT NULL AND (coalesce(sum(documents) OVER before, 0) < {HELD_OUT_DOCUMENTS}
            OR coalesce(sum(counted) OVER before, 0) < {HELD_OUT_BYTES}) AS first
        FROM rows
        WINDOW before AS (PARTITION BY domain ORDER BY draw NULLS LAST
            RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW EXCLUDE GROUP)
    ) GROUP BY ALL ORDER BY ALL"""


def held_out_bounds(runner: Runner, job: CurationJob) -> dict[Domain, int]:
    """Return by domain the draw below which a document is held out."""
    job.each_shard(runner, DRAWS, _count_draws)
    rows = aggregate(runner, job, DRAWS, len(job.shards), _DRAWS).to_pylist()
    share, bounds = job.recipe.curate.validation_fraction, {}
    for domain in dict.fromkeys(shard.domain for shard in job.shards):
        columns = ("draw", "documents", "bytes", "counted")
        own = [tuple(row[name] for name in columns) for row in rows if row["domain"] == domain]
        smallest = sorted(row for row in own if row[0] is not None)
        documents, size = (sum(row[column] for row in own) for column in (1, 2))
        bounds[domain] = held_out_bound(share, smallest, documents, size, HELD_OUT_BYTES)
    return bounds


def _count_draws(job: CurationJob, index: int) -> None:
    survivors = job.survivors(index, "end", ("domain", "source_index", "draw", "bytes"))
    rows = survivors.filter(pa.array(_may_be_held_out(job, job.shard(index).domain, survivors)))
    rows = rows.append_column("documents", pa.array([1] * len(rows), pa.int64()))
    rows = rows.append_column("counted", pc.min_element_wise(rows["bytes"], HELD_OUT_CUT))
    job.write(DRAWS, index, job.query(_DRAWS, rows=rows))


def _may_be_held_out(job: CurationJob, domain: Domain, documents: pa.Table) -> NDArray[np.bool_]:
    # Named sources are never held out: only some runs train on them, and scores must not depend on that.
    return ~np.isin(documents["source_index"].to_numpy(), job.recipe.places_apart(domain))


class OutputCounts(NamedTuple):
    """What is decided of each domain before any is written, in the order of the files."""

    files: dict[Domain, int]
    held_out: dict[Domain, int]
    """Draw below which a document is held out."""


def _counts(job: CurationJob) -> OutputCounts:
    table = read_table(job.file(COUNTS, 0)).to_pydict()
    columns = (table[name] for name in OutputCounts._fields)
    return OutputCounts(*(dict(zip(table["domain"], column, strict=True)) for column in columns))


def _output_file(files: dict[Domain, int], item: int) -> OutputFile:
    for domain, count in files.items():
        if item < count:
            return OutputFile(domain, item, count)
        item -= count
    raise IndexError(item)


def _documents(job: CurationJob, files: dict[Domain, int]) -> Shuffle:
    return Shuffle("output/documents", len(job.shards), sum(files.values()), job.fan, compression="zstd")


def map_documents(job: CurationJob, index: int) -> None:
    """Finish the documents of a piece that no stage dropped, send them to their files, and write WRITTEN for them."""
    from herd.llama3.data.dedup.lines import bad_lines  # imports numba

    domain, (files, bounds) = job.shard(index).domain, _counts(job)
    survivors = job.survivors(index, "end", ("row", "topic", "rank"))
    bad = bad_lines(job, index)
    rows, done = survivors["row"].to_numpy(), 0
    first = sum(files[other] for other in list(files)[: list(files).index(domain)])
    shuffle, written = _documents(job, files), [WRITTEN.empty_table()]
    with work_item(index):
        for batch in job.texts(index):
            alive = pa.array(np.isin(batch["row"].to_numpy(), rows))
            documents = pa.Table.from_batches([batch]).filter(alive)
            chosen = survivors.slice(done, len(documents))  # text and attributes have one order
            done += len(documents)
            documents = documents.append_column("topic", chosen["topic"]).append_column("quality", chosen["rank"])
            table, outcomes = _finished(job, domain, bounds[domain], bad, documents)
            written.append(outcomes)
            heads = np.array([int(document_id[:8], 16) for document_id in table["id"].to_pylist()], np.int64)
            shuffle.write(job, index, table, first + ((heads + 1) * files[domain] - 1) // _ID_SPAN)
        job.write(STEP, index, pa.concat_tables(written))


def write_file(job: CurationJob, item: int) -> None:
    """Write one curated file."""
    files = _counts(job).files
    table = _documents(job, files).read(job, item)
    table = table.take(pc.sort_indices(table, sort_keys=[("id", "ascending"), ("url", "ascending")]))
    heads = pc.utf8_slice_codeunits(table["id"], 0, 8).to_numpy(zero_copy_only=False).astype(str)
    options = {"compression": "zstd", "compression_level": 3, "use_dictionary": _REPEATED_COLUMNS}
    file = _output_file(files, item)
    with (
        atomic_file(f"{job.folder}/documents/{file.name}") as temporary,
        pq.ParquetWriter(temporary, CURATED_SCHEMA, **options) as writer,
    ):
        bounds = np.searchsorted(heads, [file.bound(piece) for piece in range(PIECES + 1)])
        for start, stop in pairwise(bounds.tolist()):
            writer.write_table(table.slice(start, stop - start).combine_chunks(), row_group_size=1024)
    write_table(pa.table({}), job.file("output/files", item))


def _finished(
    job: CurationJob, domain: Domain, bound: int, bad: Table, documents: pa.Table
) -> tuple[pa.Table, pa.Table]:
    """Return the documents as written, without emptied ones, and the rows of WRITTEN for all `documents`.

    Those with a draw below `bound` are held out.
    """
    curate, rules = job.recipe.curate, job.recipe.curate.lines
    texts, lines, removed = documents["text"], np.zeros(len(documents), np.int64), np.zeros((0, 4), np.int64)
    inside = lines
    if domain in rules.domains and (rules.max_copies is not None or rules.max_repeated_ngrams is not None):
        from herd.llama3.data.dedup.lines import strip_lines  # imports numba

        stripped = strip_lines(job, bad, *(documents[name] for name in ("text", "domain", "language", "id")))
        texts, lines, inside, removed = stripped.texts, stripped.lines, stripped.inside, stripped.spans
    texts, redacted, places = redact(without := texts, curate.redact)
    lengths = pc.fill_null(pc.utf8_length(texts), 0).to_numpy(zero_copy_only=False)
    sizes = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    pairs = zip(documents["domain"].to_pylist(), documents["language"].to_pylist(), strict=True)
    min_chars = np.array([curate.quality_of(*pair).min_chars or 0 for pair in pairs], np.int64)
    emptied = (lengths < np.maximum(min_chars, 1)) & (np.asarray(lines) > 0)
    held_out = (documents["draw"].to_numpy() < np.uint64(bound)) & _may_be_held_out(job, domain, documents)
    outcome = np.where(emptied, "emptied", np.where(held_out, "held_out", "kept"))
    spans = document_spans(documents["text"], without, removed, places)
    columns = [pa.array(outcome, pa.string()), *map(pa.array, (sizes, lines, inside, redacted)), spans]
    written = pa.table([documents["row"], *columns], schema=WRITTEN)
    split = pa.array(np.where(held_out, "held_out", "train"), pa.string())
    finished = documents.drop_columns(["text"]).append_column("text", texts).append_column("split", split)
    return finished.filter(pa.array(~emptied)).select(CURATED_SCHEMA.names).cast(CURATED_SCHEMA), written


def document_spans(texts: Any, without: Any, removed: NDArray[np.int64], places: Mapping[int, Sequence[Place]]) -> Any:
    """Return a column of type SPANS for `texts`, of which `without` lack the lines `removed` (see `StrippedTexts`).

    `places` are those of `redact`, in characters of `without`.
    """
    from herd.llama3.data.dedup.lines import RULES  # imports numba

    spans: list[list[tuple[int, int, str]] | None] = [None] * len(texts)
    bounds = np.searchsorted(removed[:, 0], np.arange(len(texts) + 1)).tolist()
    for index in np.unique(removed[:, 0]).tolist():
        lines = removed[bounds[index] : min(bounds[index + 1], bounds[index] + MOST_SPANS)]
        spans[index] = [(start, stop, RULES[mark]) for _, start, stop, mark in lines.tolist()]
    for index, found in places.items():
        cut = removed[bounds[index] : bounds[index + 1], 1:3]
        if len(cut):
            found = _as_read(found, texts[index].as_py(), without[index].as_py(), cut)
        own = [(start, stop, f"redact.{kind}") for start, stop, kind in sorted(found)[:MOST_SPANS]]
        spans[index] = sorted([*(spans[index] or ()), *own])
    return pa.array(spans, SPANS)


def _as_read(places: Sequence[Place], text: str, without: str, cut: NDArray[np.int64]) -> list[Place]:
    """Return `places` of the text `without` the lines at `cut`, int64[n, 2], as places of `text`."""
    # Both have the same lines that are neither removed nor blank, in one order; an address is in one of them.
    starts = _line_starts(text)
    starts = starts[np.searchsorted(cut[:, 0], starts, "right") == np.searchsorted(cut[:, 1], starts, "right")]
    own = _line_starts(without)
    lines = np.searchsorted(own, [start for start, _, _ in places], "right") - 1
    shifts = (starts[lines] - own[lines]).tolist()
    return [(start + shift, stop + shift, kind) for (start, stop, kind), shift in zip(places, shifts, strict=True)]


def _line_starts(text: str) -> NDArray[np.int64]:
    """Return where the lines of a text begin that have more than blanks (up to U+0020)."""
    lines = text.split("\n")
    starts = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    return starts[[bool(line.strip(_BLANKS)) for line in lines]]
