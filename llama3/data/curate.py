"""Raw text to curated Parquet: collect, judge, drop copies, split, write, account.

Each step reads tables and writes tables of one DuckDB session, so a step can be taken out, measured or replaced. What
is written depends on the documents alone: not on their order, the threads or the memory. What this gives up for now:
one process does a whole recipe; the steps before the global ones are ready to run per shard, but do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llama3.data.collect import Collected, collect
from llama3.data.dedup import near_duplicates
from llama3.data.ledger import write_ledger
from llama3.data.quality import judge
from llama3.data.split import threshold
from llama3.recipe.schema import Recipe
from llama3.recipe.section import Domain
from storage.duck import session

SHARD_BYTES = 64_000_000
"""Text per document file."""
COLUMNS = ("id", "text", "domain", "source", "source_index", "language", "url", "licence", "split")
"""`source` is a name out of `sources.source_names`, `source_index` its place in the recipe's list of the domain."""
_SCHEMA = pa.schema({name: pa.int32() if name == "source_index" else pa.string() for name in COLUMNS})
_REPEATING = ["domain", "source", "language", "licence", "split"]


def curate(recipe: Recipe, folder: Path, scratch: Path, *, memory: str = "2GiB", threads: int = 2) -> dict[str, Any]:
    """Write `documents/<domain>-<shard>.parquet` and `ledger.parquet` for the sources of `recipe` into `folder`.

    Documents are ordered by id and have the columns `COLUMNS`; `split` is `train` or `held_out`. Returns, as plain
    data by domain: `documents` and `bytes` (to train on), `held_out` (documents), `read` (documents), and `languages`
    (documents to train on, by language). `memory` bounds DuckDB, which spills into `scratch`.

    Raises SourceError (a ValueError) if a source cannot be read, ValueError if a domain keeps nothing.
    """
    collected = collect(recipe, scratch / "read")
    with session(scratch / "spill", memory, threads) as connection:
        judge(connection, list(collected.files.values()), recipe.curate)
        _drop_exact_copies(connection)
        _drop_near_copies(connection, recipe, collected)
        _split(connection, recipe)
        (folder / "documents").mkdir(parents=True, exist_ok=True)
        ledger = write_ledger(connection, collected, folder / "ledger.parquet")
        facts = _facts(ledger, recipe, connection)
        _check_something_kept(facts, ledger)
        for domain, path in collected.files.items():
            _write_documents(connection, domain, path, folder / "documents")
    for path in collected.files.values():
        path.unlink()
    return facts


def _drop_exact_copies(connection: duckdb.DuckDBPyConnection) -> None:
    """Keep one row per id: the one whose source, url, licence and language come first."""
    connection.execute(
        """UPDATE judged SET outcome = 'exact_duplicate' WHERE "row" IN (
            SELECT "row" FROM judged WHERE outcome IS NULL
            QUALIFY row_number() OVER (PARTITION BY id ORDER BY source, url, licence, language, "row") > 1)"""
    )


def _drop_near_copies(connection: duckdb.DuckDBPyConnection, recipe: Recipe, collected: Collected) -> None:
    for path in collected.files.values():
        texts = f"""SELECT judged.id, text FROM read_parquet('{_quoted(path)}') AS raw
            JOIN judged USING ("row") WHERE judged.outcome IS NULL"""
        dropped = near_duplicates(connection, texts, recipe.curate.dedup)
        connection.register("dropped", pa.table({"id": pa.array([one for one, _ in dropped], pa.string())}))
        connection.execute(
            "UPDATE judged SET outcome = 'near_duplicate' WHERE outcome IS NULL AND id IN (SELECT id FROM dropped)"
        )
        connection.unregister("dropped")


def _split(connection: duckdb.DuckDBPyConnection, recipe: Recipe) -> None:
    connection.execute(
        """UPDATE judged SET outcome = CASE WHEN draw < $1::UBIGINT THEN 'held_out' ELSE 'kept' END
        WHERE outcome IS NULL""",
        [threshold(recipe.curate.held_out)],
    )


def _write_documents(connection: duckdb.DuckDBPyConnection, domain: Domain, path: Path, folder: Path) -> None:
    """Write the kept documents of `domain` by id, a new file after every `SHARD_BYTES` of text."""
    connection.execute(
        """CREATE OR REPLACE TABLE shards AS SELECT "row", coalesce(sum(bytes) OVER (
            ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) // $2 AS shard
        FROM judged WHERE domain = $1 AND outcome IN ('kept', 'held_out')""",
        [domain, SHARD_BYTES],
    )
    shards = connection.execute("SELECT DISTINCT shard FROM shards ORDER BY shard").fetchall()
    for number, (shard,) in enumerate(shards):
        table = connection.sql(
            """SELECT judged.* EXCLUDE (outcome), raw.text,
                CASE judged.outcome WHEN 'held_out' THEN 'held_out' ELSE 'train' END AS split
            FROM read_parquet($1) AS raw JOIN judged USING ("row") JOIN shards USING ("row")
            WHERE shards.shard = $2 ORDER BY judged.id""",
            params=[str(path), shard],
        ).to_arrow_table()
        _write(table, folder / f"{domain}-{number:05}.parquet")
    connection.execute("DROP TABLE shards")


def _write(table: pa.Table, path: Path) -> None:
    """Write with our own row groups: those of a parallel writer depend on its threads."""
    table = table.select(list(COLUMNS)).cast(_SCHEMA).combine_chunks()
    pq.write_table(table, path, compression="zstd", compression_level=3, row_group_size=1024, use_dictionary=_REPEATING)


def _facts(ledger: pa.Table, recipe: Recipe, connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    def total(domain: Domain, column: str, outcome: str | None = None) -> int:
        chosen = pc.equal(ledger["domain"], domain)
        if outcome is not None:
            chosen = pc.and_(chosen, pc.equal(ledger["outcome"], outcome))
        return int(pc.sum(ledger.filter(chosen)[column]).as_py() or 0)

    languages = connection.execute(
        "SELECT language, count(*) FROM judged WHERE outcome = 'kept' GROUP BY language ORDER BY language"
    ).fetchall()
    return {
        "documents": {domain: total(domain, "documents", "kept") for domain in recipe.sources},
        "bytes": {domain: total(domain, "bytes", "kept") for domain in recipe.sources},
        "held_out": {domain: total(domain, "documents", "held_out") for domain in recipe.sources},
        "read": {domain: total(domain, "documents") for domain in recipe.sources},
        "languages": dict(languages),
    }


def _check_something_kept(facts: dict[str, Any], ledger: pa.Table) -> None:
    """Raise ValueError if a domain is left with nothing to train on, with where its documents went."""
    for domain, kept in facts["documents"].items():
        if facts["read"][domain] and not kept:
            gone = ledger.filter(pc.equal(ledger["domain"], domain)).to_pylist()
            reasons = ", ".join(f"{line['outcome']} {line['documents']:,}" for line in gone)
            raise ValueError(f"sources.{domain}: nothing is left to train on ({reasons}); loosen curate.quality")


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
