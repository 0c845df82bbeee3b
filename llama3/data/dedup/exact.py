"""Exact deduplication: drop older versions of a URL, and all but one of equal texts.

Both stages are one shuffle and one window query over a few columns of the attributes. Two spellings of one URL (a
trailing slash, another order of parameters) count as two URLs.
"""

from __future__ import annotations

from typing import ClassVar

from herd.llama3.data.mapreduce import CurationJob, CurationStage, write_drops
from herd.llama3.data.work_items import Runner
from herd.llama3.recipe.data_schema import Curate

KEEP = '"rank" DESC, date DESC, id, url, source_index, license, language, "row"'
"""SQL order of copies; the first is kept. Highest rank, then newest, then columns that break ties; never read order."""
KEEP_COLUMNS = ("row", "id", "rank", "date", "url", "source_index", "license", "language")


class _Copies(CurationStage):
    """Drop documents of groups with an equal key; the first document of a group is always kept."""

    key: ClassVar[str]
    """SQL of a 64-bit hash of the columns of `group`."""
    group: ClassVar[str]
    where: ClassVar[str] = "true"
    order: ClassVar[str] = KEEP
    drop: ClassVar[str]
    """SQL condition over `position` (1 is the first), `date` and `newest` (date of the first)."""

    def passes(self, runner: Runner, job: CurationJob) -> None:
        copies = job.by_key(f"{self.name}/copies")
        job.each_shard(runner, copies.step(), self.map_shard)
        copies.merge(runner, job)
        drops = job.by_shard(f"{self.name}/drops")
        job.each_partition(runner, drops.step(), self.drop_copies)
        self.apply_drops(runner, job, drops)

    def map_shard(self, job: CurationJob, index: int) -> None:
        """Send the documents of piece `index` to the partitions of their keys."""
        documents = job.survivors(index, self.name, (*KEEP_COLUMNS, "domain"))
        keyed = job.query(f"SELECT {self.key} AS key, * FROM documents WHERE {self.where}", documents=documents)
        partitions = job.partition_of(keyed["key"])
        job.by_key(f"{self.name}/copies").write(job, index, keyed.drop_columns(["key"]), partitions)

    def drop_copies(self, job: CurationJob, partition: int) -> None:
        """Drop documents among those whose keys are in piece `partition`."""
        (outcome,) = self.reasons
        query = f"""SELECT "row", '{outcome}' AS outcome, kept FROM (
            SELECT "row", date, row_number() OVER copies AS position, first_value(id) OVER copies AS kept,
                first_value(date) OVER copies AS newest
            FROM documents WINDOW copies AS (PARTITION BY {self.group} ORDER BY {self.order}))
        WHERE {self.drop}"""
        drops = job.query(query, documents=job.by_key(f"{self.name}/copies").read(job, partition))
        write_drops(job, job.by_shard(f"{self.name}/drops"), partition, drops)


class NewestVersion(_Copies):
    """Drop the documents of a URL that are older than its newest one."""

    name, title, section = "url", "older versions", ("dedup",)
    reasons: ClassVar = {"old_version": "Another version of the same URL is newer."}
    key = "md5_number_lower(concat_ws(chr(10), domain, language, url))"
    group = "domain, language, url"
    # A path has no "://". Documents without a date, or with the same date, may be sections of one page: keep them.
    where = "contains(url, '://') AND date <> ''"
    order = f"date DESC, {KEEP}"
    # A date without a time is not older than a time on the same day.
    drop = "date < newest AND NOT starts_with(newest, date)"

    def enabled(self, curate: Curate) -> bool:
        return curate.dedup.url == "newest"


class Exact(_Copies):
    """Drop all but the first, in KEEP order, of the documents of a domain with the same id, which is a text hash."""

    name, title, section = "exact", "exact copies", ()
    reasons: ClassVar = {"exact_duplicate": "The same text exists elsewhere in its domain."}
    key = "md5_number_lower(id)"
    group = "domain, id"
    drop = "position > 1"
