"""Collect: read the sources of a recipe into text shards of plain, normalized documents with ids.

Sources are split into items (one large file or several small ones) that any runner reads independently. A finished item
has written its list of shards, so a killed job reads only what is missing. Rows are numbered by item and shard and
sorted by id within a shard, so the result does not depend on which worker read what.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import text_buffers
from herd.llama3.data.mapreduce import ROW_BITS, hash_and_id
from herd.llama3.data.readers.document import UNREAD, DocumentBatch
from herd.llama3.data.readers.files import (
    EMPTY,
    NO_LOSS,
    PASSED_OVER,
    UNREAD_DATE,
    Fault,
    File,
    ReadErrors,
    SourceError,
    SourceListing,
    list_source,
)
from herd.llama3.data.readers.files import SCHEMA as SKIPPED
from herd.llama3.data.readers.sources import BUILT_IN, content_states, naming, read_source, source_names
from herd.llama3.data.text.extract import plain_text
from herd.llama3.data.text.language import UNDETERMINED, detect_language, primary_subtag
from herd.llama3.data.text.normalize import normalize_texts, replace_texts
from herd.llama3.data.text.tex import plain_tex
from herd.llama3.data.work_items import (
    PIECES,
    Runner,
    open_parquet,
    read_each,
    read_table,
    run_serial,
    run_step,
    write_table,
)
from herd.llama3.data.write_shards import ITEM_BITS, ShardWriter
from herd.llama3.data.write_shards import SHARD_BYTES as MOST_TEXT
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.data_schema import Curate
from herd.llama3.recipe.keys import collected
from herd.llama3.recipe.schema import Recipe
from herd.storage.files import atomic_file, file_names, read_file, remove_tree

STEP, TEXT, LISTING = "items", "text", "listing.json"
ITEM_BYTES, LARGEST_ITEM = 64_000_000, 5_120_000_000
"""Least and most bytes of files in an item; a larger file is an item by itself. Larger ones cost a store fewer
requests, and need more room on a worker's disk: twice the text that an item has after compression."""
LEAST_ITEMS, ITEMS_PER_WORKER = 1000, 4
"""Items, in all and for each worker, before they get larger than ITEM_BYTES."""
MOST_ITEMS = 1 << 63 - ROW_BITS - ITEM_BITS
"""Items whose rows can be numbered; items are larger if there would be more."""
_primary = cache(primary_subtag)


class CollectItem(NamedTuple):
    """Unit of work: some files of one source, or all files of a source with a limit, which counts in file order."""

    domain: Domain
    source_index: int
    """Index of the source in its domain."""
    source: str
    files: tuple[File, ...]
    """Empty for `installed`."""


@dataclass(frozen=True)
class CollectJob:
    """Everything that a work item needs; pickled to workers."""

    recipe: Recipe
    folder: str
    """A path or a URI."""
    items: tuple[CollectItem, ...]
    passed_over: tuple[tuple[str, str, str, str, int, int], ...] = ()
    """Rows of SKIPPED for files that are not data, by source."""
    item_bytes: int = ITEM_BYTES

    def file(self, step: str, item: int) -> str:
        """Return the file that marks item `item` of `step` as done."""
        return f"{self.folder}/{step}/{item:05}.parquet"


class TextShard(NamedTuple):
    """A file of documents of one domain in pieces; `row` of the first document of piece i is `number + i << 32`."""

    number: int
    domain: Domain
    uri: str
    documents: int
    bytes: int
    pieces: int


def collect(recipe: Recipe, folder: str | Path, runner: Runner = run_serial, workers: int = 1) -> dict[str, Any]:
    """Read every source of `recipe` into `folder`: shards in `text`, and `skipped.parquet` with what was left out.

    Resumes an earlier call in this folder unless the files of the sources have changed. Of much text, shards are larger
    the fewer `workers` read it; nothing else depends on their size. Returns metadata: documents and
    bytes by domain; skipped by domain, source and reason; unreadable dates by domain. Raises SourceError for bad input
    if `curate.on_error` is fail, if a store does not answer, and if a domain lost more than `curate.max_lost` or has no
    document; then only `folder/items` and `folder/text` have been written.
    """
    # Remove the items of a job with other files or settings, so that only items of this job count as done.
    listing = f"{folder}/{LISTING}"
    earlier = read_file(listing).decode() if LISTING in file_names(str(folder)) else "[[], [], null]"
    job = plan_job(recipe, str(folder), workers, json.loads(earlier)[2])
    limits = (recipe.sources[item.domain][item.source_index].limit for item in job.items)
    contents = [(*item[:3], content_states(item.files, limit)) for item, limit in zip(job.items, limits, strict=True)]
    state = json.dumps([collected(recipe), contents, job.item_bytes])
    if earlier != state:
        for step in (STEP, TEXT):
            remove_tree(f"{folder}/{step}")
        with atomic_file(listing) as temporary:
            temporary.write_text(state)
    run_step(runner, job, STEP, collect_item, range(len(job.items)))
    skipped = _skipped(job)
    dates = skipped.filter(pc.field("reason") == UNREAD_DATE)
    skipped = skipped.filter(pc.field("reason") != UNREAD_DATE)
    documents, sizes = dict.fromkeys(recipe.sources, 0), dict.fromkeys(recipe.sources, 0)
    for shard in collected_shards(folder):
        documents[shard.domain] += shard.documents
        sizes[shard.domain] += shard.bytes
    _check_losses(job, skipped, documents, sizes)
    write_table(skipped, f"{folder}/skipped.parquet")
    by_domain = dates.group_by("domain").aggregate([("documents", "sum")])
    unread = dict(zip(by_domain["domain"].to_pylist(), by_domain["documents_sum"].to_pylist(), strict=True))
    return {"documents": documents, "bytes": sizes, "skipped": _by_reason(skipped), "unread_dates": unread}


def collected_shards(folder: str | Path) -> list[TextShard]:
    """Return the text shards in `folder` (a path or URI), in order of their numbers."""
    uris = [f"{folder}/{TEXT}/{name}" for name in file_names(f"{folder}/{TEXT}")]
    return sorted(read_each(_text_shard, uris))


def _text_shard(uri: str) -> TextShard:
    with open_parquet(uri) as file:
        metadata = file.metadata.metadata
        documents, size = file.metadata.num_rows, int(metadata[b"bytes"])
        pieces = 1 + metadata.get(PIECES, b"").count(b",")
    domain, item, index = uri.rpartition("/")[2].removesuffix(".parquet").split("-")
    return TextShard(int(item) << ITEM_BITS | int(index), cast("Domain", domain), uri, documents, size, pieces)


def plan_job(recipe: Recipe, folder: str, workers: int = 1, item_bytes: int | None = None) -> CollectJob:
    """Return the job that reads the files that the sources of `recipe` have now. Raises SourceError.

    `item_bytes`: the bytes of an item, if they are decided.
    """
    listings = []
    for domain, sources in recipe.sources.items():
        for index, (source, name) in enumerate(zip(sources, source_names(sources), strict=True)):
            with naming(f"sources.{domain}.{index}"):
                listing = SourceListing([], 0, 0) if source.uri in BUILT_IN else list_source(source)
            listings.append((domain, index, name, source, listing))
    total = sum(file.size for *_, listing in listings for file in listing.files)
    item_bytes = item_bytes or bytes_of_item(total, workers)
    items: list[CollectItem] = []
    for domain, index, name, source, listing in listings:
        where = f"sources.{domain}.{index}"
        if source.uri not in BUILT_IN and not listing.files:
            raise SourceError(f"{where}.uri: {source.uri!r} has no file now; correct the address")
        if source.uri in BUILT_IN or source.limit is not None:
            items.append(CollectItem(domain, index, name, tuple(listing.files)))
        else:
            items += [CollectItem(domain, index, name, files) for files in _groups(listing.files, item_bytes)]
        if source.limit is not None and source.limit >= MOST_TEXT << ITEM_BITS:
            most = f"{(MOST_TEXT << ITEM_BITS) // 10**9} GB"
            raise SourceError(f"{where}.limit: {source.limit} is too much for one worker; use less than {most}")
    if len(items) > MOST_ITEMS:
        raise SourceError(f"sources: {len(items):,} pieces to read are more than {MOST_ITEMS:,}; name fewer sources")
    passed_over = tuple(
        (domain, name, "", PASSED_OVER, listing.passed_over, listing.passed_over_bytes)
        for domain, _, name, _, listing in listings
        if listing.passed_over
    )
    return CollectJob(recipe, folder, tuple(items), passed_over, item_bytes)


def bytes_of_item(total: int, workers: int) -> int:
    """Return how many bytes of files an item has, of `total`."""
    usual = total // max(LEAST_ITEMS, ITEMS_PER_WORKER * workers)
    return max(min(max(ITEM_BYTES, usual), LARGEST_ITEM), 4 * total // MOST_ITEMS)


def _groups(files: Sequence[File], most: int) -> Iterator[tuple[File, ...]]:
    """Yield `files` in order: large ones alone, the others together up to `most` bytes."""
    group: list[File] = []
    size = 0
    for file in files:
        if group and size + file.size > most:
            yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield tuple(group)


def collect_item(job: CollectJob, number: int) -> None:
    """Read item `number` into shards, then write the list of them and of what was skipped."""
    item, curate = job.items[number], job.recipe.curate
    source, skips = job.recipe.sources[item.domain][item.source_index], ReadErrors(curate.on_error == "fail")
    writer = ShardWriter(f"{job.folder}/{TEXT}", item.domain, number, max(1, job.item_bytes // MOST_TEXT))
    try:
        for batch in read_source(source, item.domain, job.recipe.documents_seed, skips, item.files):
            writer.add(prepare(batch, item.domain, item.source, item.source_index, curate, skips))
            del batch  # a line of 200 MB is in memory only once while it is written
            if writer.full:
                writer.flush()
        writer.close()
    except BaseException:
        writer.discard()
        raise
    shards = [(item.domain, item.source, name, "", documents, size) for name, documents, size in writer.written]
    write_table(skipped_table([*shards, *skips.rows(item.domain, item.source)]), job.file(STEP, number))


def prepare(
    batch: DocumentBatch, domain: Domain, source: str, index: int, curate: Curate, skips: ReadErrors
) -> pa.Table:
    """Return the documents of `batch` that have any text as rows of TEXT_SCHEMA without `row`; others go to `skips`.

    4.5 KB of ASCII text takes about 9 us, mostly hashing, and 20 us more where the language must be detected.
    """
    sizes, batch = _without_markup(batch, curate.extractor, skips)
    batch = batch.with_text(normalize_texts(batch.text, curate.repair))
    has_text = batch.sizes > 0
    for row in np.flatnonzero(~has_text).tolist():
        skips.count(batch.location[row].rpartition(":")[0], batch.location[row], EMPTY, int(sizes[row]))
    batch = batch.keep(has_text)
    data, offsets = text_buffers(batch.text)
    view, key = memoryview(data.data), domain.encode()
    hashes = [hash_and_id(view[start:stop], key) for start, stop in pairwise(offsets.tolist())]
    # The language that the source names, else the detected one; code is not detected.
    languages = [
        _primary(named) if named else UNDETERMINED if domain == "code" else detect_language(batch.text[row].as_py())
        for row, named in enumerate(batch.language)
    ]
    count = len(batch)
    skips.unread_dates += batch.date.count(UNREAD)
    columns = {
        "id": pa.array([document_id for _, document_id in hashes], pa.string()),
        "text": batch.text,
        "domain": pa.repeat(pa.scalar(domain), count),
        "source": pa.repeat(pa.scalar(source), count),
        "source_index": pa.repeat(pa.scalar(index, pa.int32()), count),
        "language": pa.array(languages, pa.string()),
        "url": pa.array(batch.url, pa.string()),
        "license": pa.array(batch.license, pa.string()),
        "date": pa.array(["" if date == UNREAD else date for date in batch.date], pa.string()),
        "bytes": pa.array(batch.sizes),
        "draw": pa.array([draw for draw, _ in hashes], pa.uint64()),
    }
    return pa.table(columns)


def _without_markup(batch: DocumentBatch, extractor: str, skips: ReadErrors) -> tuple[NDArray[np.int64], DocumentBatch]:
    """Return the raw sizes of the documents, and the documents as plain text; failed conversions go to `skips`."""
    indices = [index for index, form in enumerate(batch.format) if form != "text"]
    if not indices:
        return batch.sizes, batch
    sizes, good, following = batch.sizes, np.ones(len(batch), np.bool_), iter(indices)

    def plain(text: str) -> str:
        index = next(following)
        form = batch.format[index]
        converted = plain_tex(text) if form == "tex" else plain_text(text, form, extractor)
        if isinstance(converted, Fault):
            name, good[index] = batch.location[index], False
            skips.fault(name.rpartition(":")[0], name, converted, int(sizes[index]))
            return ""
        return converted

    text, _ = replace_texts(batch.text, indices, plain)
    return sizes[good], batch.with_text(text).keep(good)


def skipped_table(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Return `rows` as a table of schema SKIPPED."""
    columns = zip(*rows, strict=True) if rows else [()] * len(SKIPPED)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, SKIPPED.types, strict=True)]
    return pa.table(arrays, schema=SKIPPED)


def _skipped(job: CollectJob) -> pa.Table:
    """Return the input that all items skipped, one row per location and reason."""
    tables = read_each(read_table, [job.file(STEP, item) for item in range(len(job.items))])
    table = pa.concat_tables([*tables, skipped_table(job.passed_over)])
    keys = ["domain", "source", "location", "reason"]
    summed = table.filter(pc.field("reason") != "").group_by(keys).aggregate([("documents", "sum"), ("bytes", "sum")])
    return summed.rename_columns(SKIPPED.names).sort_by([(key, "ascending") for key in keys])


def _check_losses(job: CollectJob, skipped: pa.Table, documents: dict[Domain, int], sizes: dict[Domain, int]) -> None:
    """Raise SourceError if a domain has no document, or lost a larger share of its files or bytes than allowed."""
    max_lost = job.recipe.curate.max_lost
    for domain, sources in job.recipe.sources.items():
        in_domain = skipped.filter(pc.field("domain") == domain)
        reasons = ", ".join(f"{row['reason']} {row['documents']:,}" for row in _by_reason(in_domain)) or "no file"
        if sources and not documents[domain]:
            raise SourceError(f"sources.{domain}: holds no document with text ({reasons}); name other files")
        files = {file.uri: file.size for item in job.items if item.domain == domain for file in item.files}
        lost = [row for row in in_domain.to_pylist() if row["reason"] not in NO_LOSS]
        lost_files = [row for row in lost if row["location"] in files and row["bytes"] >= files[row["location"]]]
        lost_bytes = sum(row["bytes"] for row in lost)
        for unit, count, total in (
            ("files", len({row["location"] for row in lost_files}), len(files)),
            ("bytes", lost_bytes, max(sum(files.values()), sizes[domain] + lost_bytes)),
        ):
            if count > total * max_lost:
                raise SourceError(
                    f"sources.{domain}: {count:,} of {total:,} {unit} could not be read ({reasons}), more than "
                    f"curate.max_lost, which is {max_lost}; repair them or allow more; "
                    f"the first is {(lost_files or lost)[0]['location']!r}"
                )


def _by_reason(skipped: pa.Table) -> list[dict[str, Any]]:
    """Return documents and bytes by domain, source and reason."""
    keys = ["domain", "source", "reason"]
    summed = skipped.group_by(keys).aggregate([("documents", "sum"), ("bytes", "sum")])
    renamed = summed.rename_columns([*keys, "documents", "bytes"])
    return list(renamed.sort_by([(key, "ascending") for key in keys]).to_pylist())
