"""Makes the shards of a curation job from a list of documents, for the tests of its steps.

`make_job(folder, [{"text": "..."}, ...])` writes TEXT and ATTRIBUTES as the real steps do: by domain, sorted, cut into
shards. A document may give any column; other keys than those of TEXT become columns of ATTRIBUTES.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from herd.llama3.data.kernels.shingles import band_hashes
from herd.llama3.data.mapreduce import DROP_SCHEMA, ROW_BITS, CurationJob, CurationStage, Shard, add_fates
from herd.llama3.data.write_shards import ORDER
from herd.llama3.data.write_shards import TEXT_SCHEMA as TEXT
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.data_schema import Curate

DERIVED: dict[str, Any] = {"lines": [], "topic": "", "divergence": 0.0, "dirty_words": 0, "rank": 0.0}
"""What annotation would say of a document that says nothing else; its bands are computed."""
LINES = pa.large_list(pa.uint64())
ROWS_PER_GROUP = 16
"""Several row groups even in a small shard."""


def make_job(
    folder: Path,
    documents: list[dict[str, Any]],
    shards: int = 1,
    partitions: int = 1,
    recipe: Any = None,
    stages: Sequence[CurationStage] = (),
    **settings: Any,
) -> CurationJob:
    """Write `documents` as `shards` shards per domain under `folder` and return the job, which works in `folder`/steps.

    `stages` are those that the test runs; `settings` go to the job. `recipe` needs no more than the attribute `curate`;
    left out, that is `Curate()`.
    """
    recipe = recipe or SimpleNamespace(curate=Curate())
    filled = sorted(map(_filled, documents), key=_place)
    schema = _attribute_schema(filled)
    made: list[Shard] = []
    for domain in DOMAINS:
        rows = [row for row in filled if row["domain"] == domain]
        for place in range(shards if rows else 0):
            cut = rows[len(rows) * place // shards : len(rows) * (place + 1) // shards]
            made.append(_write(folder, len(made), domain, cut, schema, recipe.curate))
    return CurationJob(recipe, tuple(made), str(folder / "steps"), partitions, stages=tuple(stages), **settings)


class Earlier(CurationStage):
    """A stage that ran before those of a test."""

    name = "earlier"


def without(job: CurationJob, rows: Collection[int]) -> CurationJob:
    """Return `job` with an earlier stage that has dropped the documents `rows`."""
    job = replace(job, stages=(Earlier(), *job.stages))
    for index in range(len(job.shards)):
        here = [row for row in rows if job.piece_of([row]) == index]
        drops = {"row": here, "outcome": ["gone"] * len(here), "kept": [None] * len(here)}
        add_fates("earlier", job, index, pa.table(drops, schema=DROP_SCHEMA))
    return job


def drops(job: CurationJob, step: str) -> dict[str, tuple[str, str | None]]:
    """Return id -> (outcome, kept) of every document that `step` dropped; fails if one is dropped twice or unknown.

    Where documents of one id exist (exact copies), use `dropped_rows`.
    """
    rows, names = dropped_rows(job, step), ids(job)
    found = {names[row]: why for row, why in rows.items()}
    assert len(found) == len(rows)
    return found


def dropped_rows(job: CurationJob, step: str) -> dict[int, tuple[str, str | None]]:
    """Return row -> (outcome, kept) of every document that `step` dropped."""
    tables = [pq.read_table(file) for file in job.files(f"{step}/fates")]
    rows = [row for table in tables for row in table.to_pylist() if row["step"] == step]
    found = {row["row"]: (row["outcome"], row["kept"]) for row in rows}
    assert len(found) == len(rows)
    return found


def ids(job: CurationJob) -> dict[int, str]:
    """Return row -> id of all documents of `job`."""
    return {row: table["id"] for row, table in attributes(job).items()}


def attributes(job: CurationJob) -> dict[int, dict[str, Any]]:
    """Return row -> attributes of all documents of `job`."""
    tables = [pq.read_table(shard.attributes) for shard in job.shards]
    return {row["row"]: row for table in tables for row in table.to_pylist()}


def _filled(document: dict[str, Any]) -> dict[str, Any]:
    text, domain = document["text"], document.get("domain", "general")
    digest = blake2b(f"{domain}\0{text}".encode(), digest_size=16)
    defaults = {
        "id": digest.hexdigest(),
        "domain": domain,
        "source": "sample",
        "source_index": 0,
        "language": "en",
        "url": f"files/{digest.hexdigest()[:8]}.txt",
        "license": "unknown",
        "date": "",
        "bytes": len(text.encode()),
        "draw": int.from_bytes(digest.digest()[:8], "little"),
        **DERIVED,
    }
    return defaults | document


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ORDER)


def _attribute_schema(rows: list[dict[str, Any]]) -> pa.Schema:
    """Return TEXT without `text`, then what else any of `rows` has; the same for all shards."""
    names = dict.fromkeys(name for row in rows for name in row if name not in TEXT.names)
    types = {name: pa.array([row.get(name) for row in rows]).type for name in names} | {"lines": LINES}
    return pa.schema([*(field for field in TEXT if field.name != "text"), *types.items()])


def _write(
    folder: Path, number: int, domain: Any, rows: list[dict[str, Any]], schema: pa.Schema, curate: Curate
) -> Shard:
    rows = [row | {"row": number << ROW_BITS | i} for i, row in enumerate(rows)]
    texts = pa.Table.from_pylist(rows, TEXT)
    table = pa.Table.from_pylist(rows, schema).append_column("bands", band_hashes(texts["text"], curate.dedup))
    paths = folder / "text" / f"{domain}-{number:05}.parquet", folder / "attributes" / f"{number:05}.parquet"
    for path, written in zip(paths, (texts, table), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(written, path, row_group_size=ROWS_PER_GROUP)
    return Shard(number, domain, *map(str, paths), len(rows), sum(row["bytes"] for row in rows))
