"""Why a document is not, or not whole, in the training data: a row for each one that a step dropped or changed.

`drops/<shard>.parquet` of a curated artifact has the columns of SCHEMA, sorted by id, so that one of them is found
without reading all. DuckDB reads it: `SELECT outcome, count(*) FROM 'drops/*.parquet' GROUP BY ALL`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from herd.llama3.data.filters import Broken, broken_bound
from herd.llama3.data.mapreduce import LISTS, CurationJob, hash_and_id, open_parquet, schema_of, write_table
from herd.llama3.data.text.normalize import normalize
from herd.llama3.recipe.base import DOMAINS
from herd.storage.files import file_names, open_file

STEP = "drops"
SCHEMA = schema_of(
    "id string, url string, domain string, source string, language string, step string, outcome string, field string, "
    "value double, bound double, kept string, bytes int64, lines int64, redacted int64"
)
"""`step` and `outcome` as in the ledger; `field`: the bound of `curate.quality` that the document broke, with its
`value`; `kept`: id of the document kept instead; `lines`, `redacted`: lines removed from a document that stays, and
replacements of personal data in it."""
_STAYS = ("kept", "held_out")
LEAST = 8
"""Characters of an id that identify a document."""


def write_drops(job: CurationJob, index: int, documents: pa.Table) -> None:
    """Write the rows of a shard; `documents` has the columns of SCHEMA but the broken bound, one row per document."""
    changed = pc.or_(pc.greater(documents["lines"], 0), pc.greater(documents["redacted"], 0))
    rows = documents.filter(pc.or_(pc.invert(pc.is_in(documents["outcome"], pa.array(_STAYS))), changed))
    rows = rows.take(pc.sort_indices(rows, sort_keys=[("id", "ascending"), ("url", "ascending")]))
    dropped = rows.filter(pc.equal(rows["step"], "filter"))
    found = dict(_broken(job, index, dropped)) if len(dropped) else {}
    pairs = zip(rows["id"].to_pylist(), rows["step"].to_pylist(), strict=True)
    bounds = [found.get(name) if step == "filter" else None for name, step in pairs]
    for place, name in enumerate(("field", "value", "bound")):
        values = [None if bound is None else bound[place] for bound in bounds]
        rows = rows.append_column(name, pa.array(values, SCHEMA.field(name).type))
    write_table(rows.select(SCHEMA.names).cast(SCHEMA), job.file(STEP, index))


def _broken(job: CurationJob, index: int, dropped: pa.Table) -> Iterator[tuple[str, Broken]]:
    """Yield the id and the broken bound of the documents that a bound of `curate.quality` dropped."""
    with open_parquet(job.shards[index].attributes) as file:
        names = [name for name in file.schema_arrow.names if name not in LISTS]
        attributes = file.read(columns=names, use_threads=False)
    attributes = attributes.filter(pc.is_in(attributes["id"], dropped["id"].combine_chunks()))
    outcomes = dict(zip(dropped["id"].to_pylist(), dropped["outcome"].to_pylist(), strict=True))
    for row in attributes.to_pylist():
        if (broken := broken_bound(job.recipe.curate, row, outcomes[row["id"]])) is not None:
            yield row["id"], broken


def find_documents(folder: str, asked: str) -> Iterator[dict[str, Any]]:
    """Yield what is known of the documents that `asked` names, in the curated data at `folder` (a path or URI).

    `asked` is an id or its first LEAST digits, a URL, or a text. Rows have the columns of SCHEMA; that of a document
    that stays as it is has no bound and no counts.
    """
    text = normalize(asked).encode("utf-8", "replace")
    ids = {hash_and_id(text, domain.encode())[1] for domain in DOMAINS} | {asked.strip().lower()}
    seen = set[str]()
    for name in file_names(f"{folder}/{STEP}"):
        for row in _matching(f"{folder}/{STEP}/{name}", ids, asked, SCHEMA.names):
            if row["outcome"] in _STAYS:
                seen.add(row["id"])
            yield row
    columns = ["id", "url", "domain", "source", "language", "split"]
    for name in file_names(f"{folder}/documents"):
        for row in _matching(f"{folder}/documents/{name}", ids, asked, columns):
            if row["id"] not in seen:
                yield {
                    **dict.fromkeys(SCHEMA.names),
                    **row,
                    "step": "written",
                    "outcome": "kept" if row["split"] == "train" else row["split"],
                }


def _matching(uri: str, ids: set[str], asked: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows with one of the ids, an id that begins with `asked`, or its URL; row groups are left out by id."""
    with pq.ParquetFile(open_file(uri)) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=["id", "url"])
            wanted = pc.or_(pc.is_in(table["id"], pa.array(sorted(ids))), pc.equal(table["url"], asked))
            if len(asked) >= LEAST:
                wanted = pc.or_(wanted, pc.starts_with(table["id"], asked.strip().lower()))
            if pc.any(wanted).as_py():
                yield from file.read_row_group(number, columns=columns).filter(pc.fill_null(wanted, False)).to_pylist()
