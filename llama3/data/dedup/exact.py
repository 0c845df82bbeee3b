"""Removal of documents that repeat another one: older versions of a URL go, one of equal texts stays.

Only dates say which version is newer: documents of one URL without a date, or with the same one, are its sections.
Both steps are one shuffle and one window query over a few columns of the attributes. Which copy stays is decided by
columns of the documents alone (`KEEP`), never by the order in which they were read. Two spellings of one URL (a
trailing slash, another order of parameters) are two URLs.
"""

from __future__ import annotations

from llama3.data.mapreduce import CurationJob, rows_of_part, write_by_key, write_drops

KEEP = '"rank" DESC, date DESC, id, url, source_index, licence, language, "row"'
"""SQL order of copies; the first is kept. Highest rank, newest, then what is left to tell them apart."""
_OLDER = "date < newest AND NOT starts_with(newest, date)"
"""A day alone does not say that a time of that day is later."""
KEEP_COLUMNS = '"row", id, "rank", date, url, source_index, licence, language'


def map_url(job: CurationJob, item: int) -> None:
    """Write the documents of shard `item` that have a date and a URL (contains "://", so no path), keyed by the URL."""
    shard = job.shards[item]
    documents = job.survivors(shard, before="url", columns=f"{KEEP_COLUMNS}, domain")
    key = "md5_number_lower(concat_ws(chr(10), domain, language, url))"
    query = f"SELECT {key} AS key, * FROM ({documents}) WHERE contains(url, '://') AND date <> ''"
    with job.session() as connection:
        write_by_key(connection, query, job, "url/map", item)


def reduce_url(job: CurationJob, part: int) -> None:
    """Drop the documents of a URL that are older than its newest one as `old_version`."""
    newest = f"date DESC, {KEEP}"
    _drop(job, part, "url", "domain, language, url", newest, "old_version", _OLDER)


def map_exact(job: CurationJob, item: int) -> None:
    """Write the documents of shard `item`, keyed by id, which is a hash of domain and text."""
    documents = job.survivors(job.shards[item], before="exact", columns=f"{KEEP_COLUMNS}, domain")
    with job.session() as connection:
        query = f"SELECT md5_number_lower(id) AS key, * FROM ({documents})"
        write_by_key(connection, query, job, "exact/map", item)


def reduce_exact(job: CurationJob, part: int) -> None:
    """Drop all but one of the documents of a domain that have the same id as `exact_duplicate`, by the keep rule."""
    _drop(job, part, "exact", "domain, id", KEEP, "exact_duplicate", "place > 1")


def _drop(job: CurationJob, part: int, step: str, group: str, order: str, outcome: str, goes: str) -> None:
    """Write as drops the documents of each `group` for which `goes` is true; the first in `order` stays."""
    query = f"""SELECT "row", '{outcome}' AS outcome, kept FROM (
        SELECT "row", date, row_number() OVER copies AS place, first_value(id) OVER copies AS kept,
            first_value(date) OVER copies AS newest
        FROM ({rows_of_part(job, f"{step}/map", part)}) WINDOW copies AS (PARTITION BY {group} ORDER BY {order}))
    WHERE {goes}"""
    with job.session() as connection:
        write_drops(connection, query, job, step, part)
