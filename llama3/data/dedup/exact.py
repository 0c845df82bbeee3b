"""Exact deduplication: drop older versions of a URL, and all but one of equal texts.

Both steps are one shuffle and one window query over a few columns of the attributes. Two spellings of one URL (a
trailing slash, another order of parameters) count as two URLs.
"""

from __future__ import annotations

from llama3.data.mapreduce import CurationJob, rows_of_part, write_by_key, write_drops

KEEP = '"rank" DESC, date DESC, id, url, source_index, licence, language, "row"'
"""SQL order of copies; the first is kept. Highest rank, then newest, then columns that break ties; never read order."""
KEEP_COLUMNS = '"row", id, "rank", date, url, source_index, licence, language'


def map_url(job: CurationJob, item: int) -> None:
    """Write the documents of shard `item` that have a date and a URL (contains "://", so no path), keyed by the URL."""
    documents = job.survivors(job.shards[item], before="url", columns=f"{KEEP_COLUMNS}, domain")
    key = "md5_number_lower(concat_ws(chr(10), domain, language, url))"
    query = f"SELECT {key} AS key, * FROM ({documents}) WHERE contains(url, '://') AND date <> ''"
    write_by_key(job, query, "url/map", item)


def reduce_url(job: CurationJob, part: int) -> None:
    """Drop the documents of a URL that are older than its newest one as `old_version`.

    Documents without a date, or with the same date, are kept: they may be sections of one page.
    """
    # A date without a time is not older than a time on the same day.
    older = "date < newest AND NOT starts_with(newest, date)"
    _drop(job, part, "url", "domain, language, url", f"date DESC, {KEEP}", "old_version", older)


def map_exact(job: CurationJob, item: int) -> None:
    """Write the documents of shard `item`, keyed by id, which is a hash of domain and text."""
    documents = job.survivors(job.shards[item], before="exact", columns=f"{KEEP_COLUMNS}, domain")
    write_by_key(job, f"SELECT md5_number_lower(id) AS key, * FROM ({documents})", "exact/map", item)


def reduce_exact(job: CurationJob, part: int) -> None:
    """Drop all but the first, in KEEP order, of the documents of a domain with the same id as `exact_duplicate`."""
    _drop(job, part, "exact", "domain, id", KEEP, "exact_duplicate", "place > 1")


def _drop(job: CurationJob, part: int, step: str, group: str, order: str, outcome: str, condition: str) -> None:
    """Write the documents of each `group` that meet `condition` as drops; the first in `order` is kept."""
    query = f"""SELECT "row", '{outcome}' AS outcome, kept FROM (
        SELECT "row", date, row_number() OVER copies AS place, first_value(id) OVER copies AS kept,
            first_value(date) OVER copies AS newest
        FROM ({rows_of_part(job, f"{step}/map", part)}) WINDOW copies AS (PARTITION BY {group} ORDER BY {order}))
    WHERE {condition}"""
    write_drops(job, query, step, part)
