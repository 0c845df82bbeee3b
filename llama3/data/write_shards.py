"""Write Parquet shards: text shards of documents as read, and the curated documents that no step dropped.

Curated documents have duplicate lines and PII removed and are ordered by id. Ids are hashes, so equal id ranges hold
about equal amounts of text: file k of a domain holds range k, whatever shards the documents were read into. Every file
opens every shard of its domain, which is fine for thousands of shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llama3.data.mapreduce import (
    ROW_BITS,
    CurationJob,
    Runner,
    atomic_path,
    hash_threshold,
    run_step,
    schema_of,
    sql_list,
    write_table,
)
from llama3.data.text.pii import redact
from llama3.recipe.base import Domain

STEP, ALIVE = "written", "output/alive"
SHARD_BYTES = 64_000_000
"""Text per file, of text shards and of curated documents."""
PIECES = 8
"""Ranges of ids in which a file is written, one after another; one of them is in memory."""
CURATED_SCHEMA = schema_of(
    "id string, text string, domain string, source string, source_index int32, language string, url string, "
    "license string, date string, topic string, quality float64, split string"
)
"""`source`: a name from `sources.source_names`; `source_index`: its index in the recipe's list of the domain;
`quality`: the first score of the recipe, or 0; `split`: `train` or `held_out`."""
WRITTEN = schema_of("row int64, outcome string, bytes int64, lines int64, redacted int64")
"""Outcome of each surviving document (kept, held_out or emptied), bytes written, lines removed, redactions."""
_REPEATED_COLUMNS = ["domain", "source", "language", "license", "date", "topic", "split"]
_ID_SPAN = 16**8
ITEM_BITS = 12
"""An item has at most 2^12 text shards, 260 GB of text."""
TEXT_SCHEMA = schema_of(
    "row int64, id string, text large_string, domain string, source string, source_index int32, language string, "
    "url string, license string, date string, bytes int64, draw uint64"
)
"""`row` numbers the documents as read. It joins tables and never decides anything."""
ORDER = ("id", "url", "date", "source_index", "license", "language")
_ROW_GROUP = 1024
_REPEATING = ["domain", "source", "source_index", "language", "license", "date"]


class ShardWriter:
    """Write the documents of one item as text shards, each sorted by id; call `flush` at the end."""

    def __init__(self, folder: Path, domain: Domain, item: int) -> None:
        self.written: list[tuple[str, int, int]] = []
        """Name, documents and bytes of each shard."""
        self._folder, self._domain, self._item = folder, domain, item
        self._tables: list[pa.Table] = []
        self._size = 0

    def add(self, table: pa.Table) -> None:
        """Buffer documents; columns of TEXT_SCHEMA except `row`."""
        self._tables.append(table)
        self._size += int(table["bytes"].to_numpy().sum())

    @property
    def full(self) -> bool:
        """Whether the buffer has enough text for a shard."""
        return self._size >= SHARD_BYTES

    def flush(self) -> None:
        """Write the buffered documents, if any, as a shard."""
        size = self._size
        if not size:
            return
        number = len(self.written)
        assert number < 1 << ITEM_BITS
        name = f"{self._domain}-{self._item:05}-{number:04}.parquet"
        table = pa.concat_tables(self._tables)
        self._tables, self._size = [], 0
        table = table.take(pc.sort_indices(table, sort_keys=[(key, "ascending") for key in ORDER]))
        pa.default_memory_pool().release_unused()  # the pool keeps freed memory, and a text may be 200 MB
        first = (self._item << ITEM_BITS | number) << ROW_BITS
        table = table.add_column(0, "row", pa.array(np.arange(first, first + table.num_rows, dtype=np.int64)))
        table = table.select(TEXT_SCHEMA.names).cast(TEXT_SCHEMA).replace_schema_metadata({"bytes": str(size)})
        with atomic_path(self._folder / name) as temporary:
            pq.write_table(
                table,
                temporary,
                compression="zstd",
                compression_level=1,  # a third of the disk for about 10 us per 4.5 KB
                row_group_size=_ROW_GROUP,
                # Dictionary and statistics of the text would cost as much as compressing it. Statistics of ids let a
                # reader of an id range skip row groups.
                use_dictionary=_REPEATING,
                write_statistics=[column for column in TEXT_SCHEMA.names if column != "text"],
            )
        self.written.append((name, table.num_rows, size))


class OutputFile(NamedTuple):
    """Curated file `number` of the `files` of a domain."""

    domain: Domain
    number: int
    files: int

    def ids(self, piece: int) -> tuple[str, str]:
        """Return the id range of a piece of the file: first id, and the bound above all its ids."""
        pieces = self.files * PIECES
        index = self.number * PIECES + piece
        low, high = index * _ID_SPAN // pieces, (index + 1) * _ID_SPAN // pieces
        return f"{low:08x}", f"{high:08x}" if high < _ID_SPAN else "g"

    @property
    def name(self) -> str:
        """File name."""
        return f"{self.domain}-{self.number:05}.parquet"


def write_documents(runner: Runner, job: CurationJob) -> list[str]:
    """Write the documents that no step dropped into `job.folder/documents` and return the names of the files."""
    run_step(runner, job, ALIVE, list_survivors, range(len(job.shards)))
    plan = job.file("output/plan", 0)
    if not plan.exists():
        # Files of about SHARD_BYTES per domain, counted before lines are removed.
        sizes: dict[Domain, int] = dict.fromkeys((shard.domain for shard in job.shards), 0)
        for item, shard in enumerate(job.shards):
            sizes[shard.domain] += pc.sum(pq.read_table(job.file(ALIVE, item), columns=["bytes"])["bytes"]).as_py() or 0
        counts = {domain: max(1, -(-size // SHARD_BYTES)) for domain, size in sizes.items()}
        plan_rows = [OutputFile(domain, number, count) for domain, count in counts.items() for number in range(count)]
        write_table(pa.Table.from_pylist([file._asdict() for file in plan_rows]), plan)
    files = plan_files(job)
    run_step(runner, job, STEP, write_file, range(len(files)))
    return [file.name for file in files]


def plan_files(job: CurationJob) -> list[OutputFile]:
    """Return the curated files that the job writes, in order."""
    return [OutputFile(**row) for row in pq.read_table(job.file("output/plan", 0)).to_pylist()]


def list_survivors(job: CurationJob, item: int) -> None:
    """List the documents of shard `item` that no step dropped, ordered by id."""
    survivors = job.survivors(job.shards[item], "end", '"row", id, topic, rank AS quality, bytes')
    table = job.query(f'SELECT * FROM ({survivors}) ORDER BY id, "row"')
    write_table(table, job.file(ALIVE, item), row_group=1024)


def write_file(job: CurationJob, item: int) -> None:
    """Write one curated file, then its rows of `written`."""
    file, written = plan_files(job)[item], [WRITTEN.empty_table()]
    indices = [index for index, shard in enumerate(job.shards) if shard.domain == file.domain]
    texts = sql_list([str(job.shards[index].text) for index in indices])
    alive = sql_list([str(job.file(ALIVE, index)) for index in indices])
    options = {"compression": "zstd", "compression_level": 3, "use_dictionary": _REPEATED_COLUMNS}
    with (
        atomic_path(job.folder / "documents" / file.name) as temporary,
        pq.ParquetWriter(temporary, CURATED_SCHEMA, **options) as writer,
        job.session() as connection,
    ):
        for low, high in map(file.ids, range(PIECES)):
            in_range = f"WHERE id >= '{low}' AND id < '{high}'"
            query = f"""SELECT text.*, alive.topic, alive.quality FROM (FROM read_parquet({texts}) {in_range}) AS text
                JOIN (SELECT "row" AS kept_row, topic, quality FROM read_parquet({alive}) {in_range}) AS alive
                ON kept_row = "row" ORDER BY id, url, "row" """
            survivors = connection.sql(query).to_arrow_table().combine_chunks()
            documents, outcomes = _finished(job, file.domain, survivors)
            writer.write_table(documents.combine_chunks(), row_group_size=1024)
            written.append(outcomes)
    write_table(pa.concat_tables(written).sort_by("row"), job.file(STEP, item))


def _finished(job: CurationJob, domain: Domain, documents: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the documents as written, without emptied ones, and the rows of WRITTEN for all `documents`."""
    curate, rules = job.recipe.curate, job.recipe.curate.lines
    texts, lines = documents["text"], np.zeros(len(documents), np.int64)
    if domain in rules.domains and (rules.max_copies is not None or rules.max_repeated_ngrams is not None):
        from llama3.data.dedup.lines import strip_lines  # imports numba

        stripped = strip_lines(job, *(documents[name] for name in ("text", "domain", "language", "id")))
        texts, lines = stripped.texts, stripped.lines
    texts, redacted = redact(texts, curate.redact)
    lengths = pc.fill_null(pc.utf8_length(texts), 0).to_numpy(zero_copy_only=False)
    sizes = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    pairs = zip(documents["domain"].to_pylist(), documents["language"].to_pylist(), strict=True)
    min_chars = np.array([curate.quality_of(*pair).min_chars or 0 for pair in pairs], np.int64)
    emptied = (lengths < np.maximum(min_chars, 1)) & (np.asarray(lines) > 0)
    held_out = documents["draw"].to_numpy() < np.uint64(hash_threshold(curate.validation_fraction))
    # Named sources are never held out: only some runs train on them, and scores must not depend on that.
    held_out &= ~np.isin(documents["source_index"].to_numpy(), job.recipe.places_apart(domain))
    outcome = np.where(emptied, "emptied", np.where(held_out, "held_out", "kept"))
    written = pa.table(
        [documents["row"], pa.array(outcome, pa.string()), pa.array(sizes), pa.array(lines), pa.array(redacted)],
        schema=WRITTEN,
    )
    split = pa.array(np.where(held_out, "held_out", "train"), pa.string())
    finished = documents.drop_columns(["text"]).append_column("text", texts).append_column("split", split)
    return finished.filter(pa.array(~emptied)).select(CURATED_SCHEMA.names).cast(CURATED_SCHEMA), written
