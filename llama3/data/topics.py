"""Topic caps: downsample topics that are over-represented on the web (arXiv 2407.21783, section 3.1.2).

A cap is a share of the text that is left, and dropping text shrinks that total, so all caps of a domain are solved
together (`kept_documents`). Documents with the lowest score are dropped first, ties by hash. Held-out documents are
neither counted nor dropped, so models with other caps are scored on the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import floor
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from herd.llama3.data.mapreduce import CurationJob, CurationStage, hash_threshold, sql_literal, write_drops
from herd.llama3.data.shuffle import Shuffle
from herd.llama3.data.work_items import Runner, run_step
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.data_schema import Curate

STEP = "topic"
_KEEP = 'rank DESC, draw, id, url, "date", source_index, license, language, "row"'
"""Order in which documents of a topic are kept. The hash comes second, so that ties prefer no source or date."""
_COLUMNS = ("rank", "draw", "id", "url", "date", "source_index", "license", "language", "row", "bytes")
_COLUMNS_SQL = ", ".join(f'"{column}"' for column in _COLUMNS)


class TopicCaps(CurationStage):
    """Drop documents of capped topics until each holds at most its share of its domain's bytes.

    Raises ValueError if caps can only be met by dropping everything.
    """

    name, title, section = STEP, "topic caps", ("topics",)
    reasons: ClassVar = {"topic_cap": "Its topic has more text than the recipe allows."}

    def enabled(self, curate: Curate) -> bool:
        return curate.topics is not None and bool(curate.topics.caps)

    def passes(self, runner: Runner, job: CurationJob) -> None:
        job.each_shard(runner, _topics(job).step(), map_topics)
        _topics(job).merge(runner, job)
        drops = job.by_shard("topic/drops", len(DOMAINS))
        run_step(runner, job, drops.step(), drop_topics, range(len(DOMAINS)))
        self.apply_drops(runner, job, drops)


def _topics(job: CurationJob) -> Shuffle:
    """Return the shuffle from the shards to their domains."""
    return Shuffle("topic/documents", len(job.shards), len(DOMAINS), job.fan)


def map_topics(job: CurationJob, index: int) -> None:
    """Send the survivors of capped topics in a shard to its domain, and one row without a topic for all the rest."""
    topics, domain = job.recipe.curate.topics, job.shard(index).domain
    assert topics is not None
    survivors = job.survivors(index, STEP, ("topic", *_COLUMNS))
    bound = hash_threshold(job.recipe.curate.validation_fraction)  # documents below it are held out
    names = ", ".join(sql_literal(topic) for topic in sorted(topics.caps))
    query = f"""WITH documents AS (SELECT topic, {_COLUMNS_SQL} FROM survivors WHERE draw >= {bound}::UBIGINT)
        SELECT * FROM documents WHERE topic IN ({names})
        UNION ALL BY NAME SELECT coalesce(sum(bytes), 0)::BIGINT AS bytes FROM documents WHERE topic NOT IN ({names})"""
    table = job.query(query, survivors=survivors if domain in topics.domains else survivors.slice(0, 0))
    _topics(job).write(job, index, table, np.full(len(table), DOMAINS.index(domain)))


def drop_topics(job: CurationJob, item: int) -> None:
    """Drop documents of the domain with index `item`. DuckDB sorts its capped documents and spills to disk."""
    topics, domain = job.recipe.curate.topics, DOMAINS[item]
    assert topics is not None
    documents = _topics(job).read(job, item)
    uncapped = int(_sizes(job, "FROM documents WHERE topic IS NULL", documents).sum())
    sizes = {
        topic: _sizes(job, f"FROM documents WHERE topic = {sql_literal(topic)} ORDER BY {_KEEP}", documents)
        for topic in sorted(topics.caps)
    }
    kept = kept_documents(sizes, topics.caps, uncapped)
    if not uncapped and any(map(len, sizes.values())) and not any(kept.values()):
        total = sum(int(values.sum()) for values in sizes.values())
        shares = ", ".join(
            f"{topic} has {float(values.sum() / total):.1%} and may have {topics.caps[topic]}"
            for topic, values in sizes.items()
            if len(values)
        )
        raise ValueError(
            f"curate.topics.caps: all of {domain} has a capped topic ({shares}), so the caps drop everything; "
            "leave a topic out of caps, or raise them to a sum well above 100%"
        )
    limits = ", ".join(f"({sql_literal(topic)}, {count})" for topic, count in kept.items())
    query = f"""SELECT "row", 'topic_cap' AS outcome, NULL::VARCHAR AS kept FROM (
            SELECT topic, "row", row_number() OVER (PARTITION BY topic ORDER BY {_KEEP}) AS position
            FROM documents WHERE topic IS NOT NULL
        ) JOIN (VALUES {limits}) AS limits(topic, most) USING (topic) WHERE position > most"""
    write_drops(job, job.by_shard("topic/drops", len(DOMAINS)), item, job.query(query, documents=documents))


def kept_documents(
    sizes: Mapping[str, NDArray[np.int64]], caps: Mapping[str, Fraction], uncapped: int
) -> dict[str, int]:
    """Return by topic how many documents to keep, from the first, so that no topic exceeds its cap of what is left.

    `sizes`: bytes of each document by capped topic, in keep order; `uncapped`: bytes of everything else. The result is
    the largest possible one: any larger count breaks a cap.
    """
    sums = {topic: np.concatenate([[0], np.cumsum(values)]) for topic, values in sizes.items()}
    total = max_total({topic: int(cumulative[-1]) for topic, cumulative in sums.items()}, caps, uncapped)
    while True:
        kept = {
            topic: int(np.searchsorted(cumulative, floor(caps[topic] * total), "right")) - 1
            for topic, cumulative in sums.items()
        }
        left = uncapped + sum(int(sums[topic][count]) for topic, count in kept.items())
        if left >= total:
            return kept
        total = Fraction(left)  # whole documents leave each topic a little below its cap, so the total shrinks: repeat


def max_total(sizes: Mapping[str, int], caps: Mapping[str, Fraction], uncapped: int) -> Fraction:
    """Return the largest T with T = uncapped + sum of min(size, cap T), as if documents could be cut."""
    reached: set[str] = set()  # topics at their cap; T only falls, so there are at most as many rounds as caps
    while True:
        below = uncapped + sum(size for topic, size in sizes.items() if topic not in reached)
        capped_share = sum((Fraction(caps[topic]) for topic in reached), Fraction(0))
        total = below / (1 - capped_share)  # capped_share < 1: each of these topics exceeds its cap of this total
        above = {topic for topic, size in sizes.items() if size > caps[topic] * total}
        if above <= reached:
            return total
        reached |= above


def _sizes(job: CurationJob, query: str, documents: pa.Table) -> NDArray[np.int64]:
    sizes: NDArray[np.int64] = job.query(f"SELECT bytes {query}", documents=documents)["bytes"].to_numpy()
    return sizes
