"""Holding down topics that the web has too much of (arXiv 2407.21783, section 3.1.2, "knowledge classification").

A cap is a share of the text that is left in the end, and what is dropped shrinks that whole, so all caps of a domain
are solved together. With S_t bytes of a capped topic t, cap c_t and U bytes of everything else, the most that may stay
is the largest T with T = U + sum of min(S_t, c_t T): begin with no topic at its cap, put at its cap every topic whose
S_t exceeds c_t T, set T = (U + what lies below its cap) / (1 - caps reached), repeat; T only falls, so this ends after
at most as many rounds as there are caps. Documents are whole, so a topic ends a little below c_t T, T shrinks by that,
and the same step is repeated with real sums until every share holds exactly. Lowest score goes first, then by hash.
Held-out documents are not counted and stay, so that models with other caps are scored on the same text.
What this gives up: one process per domain sorts the documents of its capped topics (DuckDB spills to disk) and holds
8 bytes of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import floor
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llama3.data.mapreduce import CurationJob, Runner, listed, quoted, run, threshold, write_drops, write_table
from llama3.recipe.base import DOMAINS
from llama3.recipe.data_schema import Topics

STEP = "topic"
OUTCOME = "topic_cap"
_MAP = f"{STEP}/map"
_KEEP = 'rank DESC, draw, id, url, "date", source_index, licence, language, "row"'
"""Which documents of a topic stay first. The hash after the score: among equals no source or date is preferred."""
_REMEDY = "leave a topic out of caps, or raise them to a sum well above 100%"
_COLUMNS = 'rank, draw, id, url, "date", source_index, licence, language, "row", bytes'


def cap_topics(runner: Runner, job: CurationJob) -> None:
    """Drop documents of capped topics until each holds its share of its domain's bytes; nothing without caps.

    Raises ValueError if caps can only be met by dropping everything.
    """
    topics = job.recipe.curate.topics
    if topics is None or not topics.caps:
        return
    run(
        runner, job, _MAP, map_topics, [item for item, shard in enumerate(job.shards) if shard.domain in topics.domains]
    )
    domains = {shard.domain for shard in job.shards if shard.domain in topics.domains}
    run(runner, job, f"{STEP}/drop", drop_topics, sorted(DOMAINS.index(domain) for domain in domains))


def map_topics(job: CurationJob, item: int) -> None:
    """Write the surviving documents of capped topics in shard `item`, and one row without a topic for all the rest."""
    shard, topics = job.shards[item], _topics(job)
    found, bound = job.survivors(shard, STEP, f"topic, {_COLUMNS}"), threshold(job.recipe.curate.held_out)
    documents = f"SELECT * FROM ({found}) WHERE draw >= {bound}::UBIGINT"  # those below are held out
    capped = ", ".join(quoted(topic) for topic in sorted(topics.caps))
    with job.session() as connection:
        chosen = connection.sql(
            f"SELECT topic, {_COLUMNS} FROM ({documents}) WHERE topic IN ({capped}) ORDER BY topic, {_KEEP}"
        ).to_arrow_table()
        rest = _bytes(connection, f"SELECT bytes FROM ({documents}) WHERE topic NOT IN ({capped})")
    others = pa.table({"bytes": pa.array([int(rest.sum())], pa.int64())})
    write_table(pa.concat_tables([chosen, others], promote_options="default"), job.file(_MAP, item))


def drop_topics(job: CurationJob, item: int) -> None:
    """Write what is dropped in the domain with number `item`."""
    topics, domain = _topics(job), DOMAINS[item]
    files = [str(job.file(_MAP, place)) for place, shard in enumerate(job.shards) if shard.domain == domain]
    rows = f"SELECT * FROM read_parquet({listed(files)})"
    with job.session() as connection:
        others = int(_bytes(connection, f"{rows} WHERE topic IS NULL").sum())
        sizes = {
            topic: _bytes(connection, f"{rows} WHERE topic = {quoted(topic)} ORDER BY {_KEEP}")
            for topic in sorted(topics.caps)
        }
        kept = documents_kept(sizes, topics.caps, others)
        if not others and any(map(len, sizes.values())) and not any(kept.values()):
            raise ValueError(_impossible(sizes, topics, domain))
        limits = ", ".join(f"({quoted(topic)}, {count})" for topic, count in kept.items())
        write_drops(
            connection,
            f"""SELECT "row", '{OUTCOME}' AS outcome, NULL::VARCHAR AS kept FROM (
                SELECT topic, "row", row_number() OVER (PARTITION BY topic ORDER BY {_KEEP}) AS place
                FROM ({rows}) WHERE topic IS NOT NULL
            ) JOIN (VALUES {limits}) AS limits(topic, most) USING (topic) WHERE place > most""",
            job, STEP, item,
        )  # fmt: skip


def documents_kept(sizes: Mapping[str, NDArray[np.int64]], caps: Mapping[str, Fraction], others: int) -> dict[str, int]:
    """Return by topic how many documents stay, the first ones, so that no topic exceeds its cap of what is left.

    `sizes`: bytes of each document by capped topic, in the order in which they are kept; `others`: bytes of everything
    else. It is the most that can stay if documents leave from the end only: any larger choice breaks a cap.
    """
    sums = {topic: np.concatenate([[0], np.cumsum(values)]) for topic, values in sizes.items()}
    total = largest_total({topic: int(found[-1]) for topic, found in sums.items()}, caps, others)
    while True:
        kept = {
            topic: int(np.searchsorted(found, floor(caps[topic] * total), "right")) - 1 for topic, found in sums.items()
        }
        left = others + sum(int(sums[topic][count]) for topic, count in kept.items())
        if left >= total:
            return kept
        total = Fraction(left)


def largest_total(sizes: Mapping[str, int], caps: Mapping[str, Fraction], others: int) -> Fraction:
    """Return the largest T with T = others + sum of min(size, cap T), as if documents could be cut."""
    reached: set[str] = set()
    while True:
        free = others + sum(size for topic, size in sizes.items() if topic not in reached)
        held = sum((Fraction(caps[topic]) for topic in reached), Fraction(0))
        total = free / (1 - held)  # held < 1: what reaches its cap is more than its cap of a total that contains it
        above = {topic for topic, size in sizes.items() if size > caps[topic] * total}
        if above <= reached:
            return total
        reached |= above


def _bytes(connection: duckdb.DuckDBPyConnection, query: str) -> NDArray[np.int64]:
    values: NDArray[np.int64] = connection.sql(query).to_arrow_table()["bytes"].to_numpy()
    return values


def _topics(job: CurationJob) -> Topics:
    topics = job.recipe.curate.topics
    assert topics is not None
    return topics


def _impossible(sizes: Mapping[str, NDArray[np.int64]], topics: Topics, domain: str) -> str:
    total = sum(int(values.sum()) for values in sizes.values())
    shares = ", ".join(
        f"{topic} has {_percent(values.sum() / total)} and may have {topics.caps[topic]}"
        for topic, values in sizes.items() if len(values)
    )  # fmt: skip
    return f"curate.topics.caps: all of {domain} has a capped topic ({shares}), so the caps drop everything; {_REMEDY}"


def _percent(share: Any) -> str:
    return f"{float(share):.1%}"
