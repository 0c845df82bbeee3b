"""Curated documents: what is left after all drops, without lines and personal data that go, in the order of ids.

Ids are hashes, so equal ranges of ids are equal amounts of text: file k of a domain holds range k, whatever shards the
documents were read into. Shards are sorted by id, so a range touches a few row groups of each. What this gives up:
every file looks into every shard of its domain, which is fine for thousands of shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llama3.data.mapreduce import ROW_BITS, CurationJob, Runner, listed, replacing, run, threshold, write_table
from llama3.data.text.pii import redact
from llama3.recipe.base import Domain

STEP, ALIVE = "written", "output/alive"
SHARD_BYTES = 64_000_000
"""Text per document file."""
PIECES = 8
"""Ranges of ids in which a file is made, one after the other: memory holds one of them."""
CURATED_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "text": pa.string(),
        "domain": pa.string(),
        "source": pa.string(),
        "source_index": pa.int32(),
        "language": pa.string(),
        "url": pa.string(),
        "licence": pa.string(),
        "date": pa.string(),
        "topic": pa.string(),
        "quality": pa.float64(),
        "split": pa.string(),
    }
)
"""`source` is a name out of `sources.source_names`, `source_index` its place in the recipe's list of the domain;
`quality` the first score of the recipe, or 0; `split` is `train` or `held_out`."""
WRITTEN = pa.schema(
    {"row": pa.int64(), "outcome": pa.string(), "bytes": pa.int64(), "lines": pa.int64(), "redacted": pa.int64()}
)
"""What became of each surviving document: kept, held_out or emptied; bytes written, lines removed, redactions."""
_REPEATED_COLUMNS = ["domain", "source", "language", "licence", "date", "topic", "split"]
_ID_SPAN = 16**8


class OutputFile(NamedTuple):
    """File `number` of `files` of a domain."""

    domain: Domain
    number: int
    files: int

    def ids(self, piece: int) -> tuple[str, str]:
        """Return the least id of a piece of the file, and the bound above which ids are in the next one."""
        pieces = self.files * PIECES
        place = self.number * PIECES + piece
        low, high = place * _ID_SPAN // pieces, (place + 1) * _ID_SPAN // pieces
        return f"{low:08x}", f"{high:08x}" if high < _ID_SPAN else "g"

    @property
    def name(self) -> str:
        return f"{self.domain}-{self.number:05}.parquet"


def write_documents(runner: Runner, job: CurationJob) -> list[str]:
    """Write the documents that no step dropped into `job.folder/documents` and return the names of the files."""
    run(runner, job, ALIVE, list_alive, range(len(job.shards)))
    plan = job.file("output/plan", 0)
    if not plan.exists():
        rows = [file._asdict() for file in _plan(job)]
        write_table(pa.Table.from_pylist(rows), plan)
    files = planned(job)
    run(runner, job, STEP, write_file, range(len(files)))
    return [file.name for file in files]


def planned(job: CurationJob) -> list[OutputFile]:
    """Return the files of documents that the job writes, in order."""
    return [OutputFile(**row) for row in pq.read_table(job.file("output/plan", 0)).to_pylist()]


def list_alive(job: CurationJob, item: int) -> None:
    """List the documents of shard `item` that no step dropped, in the order of their ids."""
    survivors = job.survivors(job.shards[item], "end", '"row", id, topic, rank AS quality, bytes')
    with job.session() as connection:
        table = connection.sql(f'SELECT * FROM ({survivors}) ORDER BY id, "row"').to_arrow_table()
    write_table(table, job.file(ALIVE, item), row_group=1024)


def _plan(job: CurationJob) -> list[OutputFile]:
    """Cut every domain's ids so that a file has about SHARD_BYTES, counted before lines go."""
    sizes: dict[Domain, int] = dict.fromkeys((shard.domain for shard in job.shards), 0)
    for item, shard in enumerate(job.shards):
        sizes[shard.domain] += pc.sum(pq.read_table(job.file(ALIVE, item), columns=["bytes"])["bytes"]).as_py() or 0
    counts = {domain: max(1, -(-size // SHARD_BYTES)) for domain, size in sizes.items()}
    return [OutputFile(domain, number, files) for domain, files in counts.items() for number in range(files)]


def write_file(job: CurationJob, item: int) -> None:
    """Write one file of documents, then its rows of `written`."""
    file, written = planned(job)[item], [WRITTEN.empty_table()]
    options = {"compression": "zstd", "compression_level": 3, "use_dictionary": _REPEATED_COLUMNS}
    with (
        replacing(job.folder / "documents" / file.name) as part,
        pq.ParquetWriter(part, CURATED_SCHEMA, **options) as writer,
        job.session() as connection,
    ):
        for ids in map(file.ids, range(PIECES)):
            found = connection.sql(_surviving(job, file.domain, ids)).to_arrow_table()
            documents, fates = _finished(job, file.domain, found.combine_chunks())
            writer.write_table(documents.combine_chunks(), row_group_size=1024)
            written.append(fates)
    write_table(pa.concat_tables(written).sort_by("row"), job.file(STEP, item))


def _surviving(job: CurationJob, domain: Domain, ids: tuple[str, str]) -> str:
    """Return SQL for the surviving documents of `domain` in a range of ids, in their order."""
    items = [item for item, shard in enumerate(job.shards) if shard.domain == domain]
    texts = listed([str(job.shards[item].text) for item in items])
    alive = listed([str(job.file(ALIVE, item)) for item in items])
    here = f"WHERE id >= '{ids[0]}' AND id < '{ids[1]}'"
    return f"""SELECT text.*, alive.topic, alive.quality FROM (FROM read_parquet({texts}) {here}) AS text
        JOIN (SELECT "row" AS place, topic, quality FROM read_parquet({alive}) {here}) AS alive ON place = "row"
        ORDER BY id, url, "row" """


def _finished(job: CurationJob, domain: Domain, documents: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the documents as they are trained on, and the rows of `written` for all that came in."""
    curate = job.recipe.curate
    texts, lines = _stripped(job, domain, documents)
    texts, redacted = redact(texts, curate.redact)
    lengths = pc.fill_null(pc.utf8_length(texts), 0).to_numpy(zero_copy_only=False)
    sizes = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    least = np.array([_least(job, *pair) for pair in zip(*_pairs(documents), strict=True)], np.int64)
    emptied = (lengths < np.maximum(least, 1)) & (np.asarray(lines) > 0)
    held_out = documents["draw"].to_numpy() < np.uint64(threshold(curate.held_out))
    apart = job.recipe.places_apart(domain)  # scores must not depend on whether one trained on them
    held_out &= ~np.isin(documents["source_index"].to_numpy(), apart)
    outcome = np.where(emptied, "emptied", np.where(held_out, "held_out", "kept"))
    written = pa.table(
        [documents["row"], pa.array(outcome, pa.string()), pa.array(sizes), pa.array(lines), pa.array(redacted)],
        schema=WRITTEN,
    )
    split = pa.array(np.where(held_out, "held_out", "train"), pa.string())
    whole = documents.drop_columns(["text"]).append_column("text", texts).append_column("split", split)
    return whole.filter(pa.array(~emptied)).select(CURATED_SCHEMA.names).cast(CURATED_SCHEMA), written


def _stripped(job: CurationJob, domain: Domain, documents: pa.Table) -> tuple[Any, NDArray[np.int64]]:
    """Return the texts without the lines that go in `domain`, and how many went of each."""
    rules = job.recipe.curate.lines
    if domain not in rules.domains or (rules.max_copies is None and rules.max_repeated_grams is None):
        return documents["text"], np.zeros(len(documents), np.int64)
    from llama3.data.dedup.lines import strip_lines  # numba

    stripped = strip_lines(job, *(documents[name] for name in ("text", "domain", "language", "id")))
    return stripped.texts, stripped.lines


def _pairs(documents: pa.Table) -> tuple[list[str], list[str]]:
    return documents["domain"].to_pylist(), documents["language"].to_pylist()


def _least(job: CurationJob, domain: str, language: str) -> int:
    """Return the fewest characters that a document of `domain` in `language` may have."""
    return job.recipe.curate.quality_of(domain, language).min_chars or 0


# Text shards: Parquet of documents sorted by id, about 64 MB of text each.
#
# zstd at its lowest level takes a third of the disk for about 10 us per 4.5 KB. No statistics and no dictionary for
# the text: both cost as much as compressing it and nothing asks for them. Ids have statistics, so that a reader of
# a range of ids skips row groups.

TEXT_SCHEMA = pa.schema(
    {
        "row": pa.int64(),
        "id": pa.string(),
        "text": pa.large_string(),
        "domain": pa.string(),
        "source": pa.string(),
        "source_index": pa.int32(),
        "language": pa.string(),
        "url": pa.string(),
        "licence": pa.string(),
        "date": pa.string(),
        "bytes": pa.int64(),
        "draw": pa.uint64(),
    }
)
"""`row` numbers the documents as read; it joins tables and never decides anything."""

"""Bytes of text after which an item begins another shard."""
ITEM_BITS = 12
"""An item has at most 2^12 shards, 260 GB of text."""
_ROW_GROUP = 1024
_REPEATING = ["domain", "source", "source_index", "language", "licence", "date"]
ORDER = ("id", "url", "date", "source_index", "licence", "language")


class ShardWriter:
    """Writes the rows of one item into shards; `flush` at the end."""

    def __init__(self, folder: Path, domain: Domain, item: int) -> None:
        self.written: list[tuple[str, int, int]] = []
        """Name, documents and bytes of each shard."""
        self._folder, self._domain, self._item = folder, domain, item
        self._tables: list[pa.Table] = []
        self._size = 0

    def add(self, table: pa.Table) -> None:
        """Take rows of SCHEMA but `row`."""
        self._tables.append(table)
        self._size += int(table["bytes"].to_numpy().sum())

    @property
    def full(self) -> bool:
        """Whether the rows since the last shard are enough for one."""
        return self._size >= SHARD_BYTES

    def flush(self) -> None:
        """Write what has come in since the last shard, if anything has."""
        size = self._size
        if not size:
            return
        place = len(self.written)
        assert place < 1 << ITEM_BITS
        name = f"{self._domain}-{self._item:05}-{place:04}.parquet"
        table = pa.concat_tables(self._tables)
        self._tables, self._size = [], 0
        table = table.take(pc.sort_indices(table, sort_keys=[(key, "ascending") for key in ORDER]))
        pa.default_memory_pool().release_unused()  # it keeps what it freed, and a text may be 200 MB
        first = (self._item << ITEM_BITS | place) << ROW_BITS
        table = table.add_column(0, "row", pa.array(np.arange(first, first + table.num_rows, dtype=np.int64)))
        table = table.select(TEXT_SCHEMA.names).cast(TEXT_SCHEMA).replace_schema_metadata({"bytes": str(size)})
        with replacing(self._folder / name) as part:
            pq.write_table(
                table,
                part,
                compression="zstd",
                compression_level=1,
                row_group_size=_ROW_GROUP,
                use_dictionary=_REPEATING,
                write_statistics=[column for column in TEXT_SCHEMA.names if column != "text"],
            )
        self.written.append((name, table.num_rows, size))
