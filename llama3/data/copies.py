"""Removal of documents that repeat another one exactly: newer versions of a URL win, one of equal texts stays.

Both are one shuffle and one window query, so their cost is that of reading a few columns of the attributes. Which copy
stays is decided by columns of the documents alone (`KEEP`), never by the order in which they were read. What this gives
up: two spellings of one URL (a trailing slash, another order of parameters) are two URLs.
"""

from __future__ import annotations

from llama3.data.job import Job
from llama3.data.partition import rows_of_part, write_by_key, write_drops

KEEP = '"rank" DESC, date DESC, id, url, source_index, licence, language, "row"'
"""SQL order of copies; the first is kept. Highest rank, newest, then what is left to tell them apart."""
KEEP_COLUMNS = '"row", id, "rank", date, url, source_index, licence, language'


def map_url(job: Job, item: int) -> None:
    """Write the documents of shard `item` that have a URL (contains "://", so no path), keyed by it."""
    shard = job.shards[item]
    documents = job.survivors(shard, before="url", columns=f"{KEEP_COLUMNS}, domain")
    key = "md5_number_lower(concat_ws(chr(10), domain, language, url))"
    query = f"SELECT {key} AS key, * FROM ({documents}) WHERE contains(url, '://')"
    with job.session() as connection:
        write_by_key(connection, query, job, "url/map", item)


def reduce_url(job: Job, part: int) -> None:
    """Drop all but the newest document of each URL as `old_version`; the keep rule decides among equally new ones."""
    _drop(job, part, "url", "domain, language, url", f"date DESC, {KEEP}", "old_version")


def map_exact(job: Job, item: int) -> None:
    """Write the documents of shard `item`, keyed by id, which is a hash of domain and text."""
    documents = job.survivors(job.shards[item], before="exact", columns=f"{KEEP_COLUMNS}, domain")
    with job.session() as connection:
        query = f"SELECT md5_number_lower(id) AS key, * FROM ({documents})"
        write_by_key(connection, query, job, "exact/map", item)


def reduce_exact(job: Job, part: int) -> None:
    """Drop all but one of the documents of a domain that have the same id as `exact_duplicate`, by the keep rule."""
    _drop(job, part, "exact", "domain, id", KEEP, "exact_duplicate")


def _drop(job: Job, part: int, step: str, group: str, order: str, outcome: str) -> None:
    """Write as drops all documents of each `group` but the first in `order`."""
    query = f"""SELECT "row", '{outcome}' AS outcome, kept FROM (
        SELECT "row", first_value(id) OVER copies AS kept, row_number() OVER copies AS place
        FROM ({rows_of_part(job, f"{step}/map", part)}) WINDOW copies AS (PARTITION BY {group} ORDER BY {order}))
    WHERE place > 1"""
    with job.session() as connection:
        write_drops(connection, query, job, step, part)
