"""Reads the sources of a recipe into text shards: extracted, normalised, identified, nothing judged yet.

The sources are cut into items, one file or some small ones, that are read independently of each other on any runner;
an item that is done has left its list of shards, so a killed job reads only what is missing. Rows are numbered by item
and shard and sorted by id inside a shard, so it does not show which worker read what. What this gives up: shards are as
uneven as files are; a source with a limit is read by one worker, because its limit counts in the order of the files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llama3.data.kernels.arrow import text_buffers
from llama3.data.mapreduce import ROW_BITS, Runner, draw_and_id, in_turn, run, write_table
from llama3.data.readers.document import UNREAD, DocumentBatch
from llama3.data.readers.files import (
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
from llama3.data.readers.files import SCHEMA as SKIPPED
from llama3.data.readers.sources import INSTALLED, read_source, source_names
from llama3.data.text.extract import plain_text
from llama3.data.text.language import UNDETERMINED, detect, primary
from llama3.data.text.normalize import normalise_texts, replaced
from llama3.data.write_shards import ITEM_BITS, ShardWriter
from llama3.data.write_shards import SHARD_BYTES as MOST_TEXT
from llama3.recipe.base import Domain
from llama3.recipe.data_schema import Curate, Source
from llama3.recipe.schema import Recipe
from storage.filesystem import write_atomic

# Raw documents made ready to be judged: markup removed, decoding repaired, normalised, identified, told by
# language.
#
# Works on whole columns; single texts are touched only where they are HTML, Markdown, garbled or not composed. Per
# 4.5 KB of ASCII text this costs about 9 us, most of it for the hash, and 20 us more where the language has to be
# told.

_primary = cache(primary)


def prepare(
    batch: DocumentBatch, domain: Domain, source: str, index: int, curate: Curate, skips: ReadErrors
) -> pa.Table:
    """Return the documents of `batch` that have any text as rows of a shard but `row`; the others go to `skips`."""
    sizes, batch = _without_markup(batch, curate.extractor, skips)
    batch = batch.with_text(normalise_texts(batch.text, curate.repair))
    full = batch.sizes > 0
    for place in np.flatnonzero(~full).tolist():
        skips.count(batch.place[place].rpartition(":")[0], batch.place[place], EMPTY, int(sizes[place]))
    batch = batch.keep(full)
    draws, ids = _hashes(batch.text, domain)
    count = len(batch)
    skips.unread_dates += batch.date.count(UNREAD)
    columns = {
        "id": pa.array(ids, pa.string()),
        "text": batch.text,
        "domain": pa.repeat(pa.scalar(domain), count),
        "source": pa.repeat(pa.scalar(source), count),
        "source_index": pa.repeat(pa.scalar(index, pa.int32()), count),
        "language": pa.array(_languages(batch, domain), pa.string()),
        "url": pa.array(batch.url, pa.string()),
        "licence": pa.array(batch.licence, pa.string()),
        "date": pa.array(["" if date == UNREAD else date for date in batch.date], pa.string()),
        "bytes": pa.array(batch.sizes),
        "draw": pa.array(draws, pa.uint64()),
    }
    return pa.table(columns)


def _without_markup(batch: DocumentBatch, extractor: str, skips: ReadErrors) -> tuple[NDArray[np.int64], DocumentBatch]:
    """Return the documents as plain text, and their sizes as found; what cannot be converted goes to `skips`."""
    places = [place for place, form in enumerate(batch.format) if form != "text"]
    if not places:
        return batch.sizes, batch
    sizes, good, following = batch.sizes, np.ones(len(batch), np.bool_), iter(places)

    def plain(text: str) -> str:
        place = next(following)
        found = plain_text(text, batch.format[place], extractor)
        if isinstance(found, Fault):
            name, good[place] = batch.place[place], False
            skips.fault(name.rpartition(":")[0], name, found, int(sizes[place]))
            return ""
        return found

    text, _ = replaced(batch.text, places, plain)
    return sizes[good], batch.with_text(text).keep(good)


def _hashes(text: Any, domain: Domain) -> tuple[list[int], list[str]]:
    data, offsets = text_buffers(text)
    view, ends, key = memoryview(data.data), offsets.tolist(), domain.encode()
    pairs = [draw_and_id(view[start:stop], key) for start, stop in pairwise(ends)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _languages(batch: DocumentBatch, domain: Domain) -> list[str]:
    """Return what the source says, else what is detected; code is not asked about."""
    return [
        _primary(named) if named else UNDETERMINED if domain == "code" else detect(batch.text[place].as_py())
        for place, named in enumerate(batch.language)
    ]


STEP, TEXT = "items", "text"
ITEM_BYTES = 64_000_000
"""Bytes of files in an item; a larger file is one by itself. More, where there would be too many items."""
MOST_ITEMS = 1 << 63 - ROW_BITS - ITEM_BITS
"""Items whose rows can be numbered."""


class CollectItem(NamedTuple):
    """What one worker reads at a time: some files of one source, or all of a source with a limit."""

    domain: Domain
    place: int
    """Place of the source in its domain."""
    source: str
    files: tuple[File, ...]
    """None of them for `installed`."""


@dataclass(frozen=True)
class CollectJob:
    """What a worker needs to know; pickled to workers."""

    recipe: Recipe
    folder: Path
    items: tuple[CollectItem, ...]
    passed_over: tuple[tuple[str, str, str, str, int, int], ...] = ()
    """Rows of what is left out: files that are no data, by source."""

    def file(self, step: str, item: int) -> Path:
        """Return the file that says that item `item` of `step` is done."""
        return self.folder / step / f"{item:05}.parquet"


class TextShard(NamedTuple):
    """A file of documents of one domain; `row` of its first document is `number << 32`."""

    number: int
    domain: Domain
    path: Path
    documents: int
    bytes: int


def collect(recipe: Recipe, folder: Path, runner: Runner = in_turn) -> dict[str, Any]:
    """Read every source of `recipe` into `folder`: shards in `text`, and `skipped.parquet` with what was left out.

    Goes on where an earlier call in this folder stopped, unless the files of the sources have changed since. Returns
    facts: documents and bytes by domain, what was skipped by domain, source and reason,
    and by domain how many dates could not be read. Raises SourceError on bad input
    if `curate.on_error` says so, where a store does not answer, and where a domain lost more than `curate.max_lost` or
    has no document; nothing but `folder/items` and `folder/text` was written then.
    """
    job = plan_job(recipe, folder)
    _go_on_or_begin(job)
    run(runner, job, STEP, collect_item, range(len(job.items)))
    skipped = _skipped(job)
    dates = skipped.filter(pc.field("reason") == UNREAD_DATE)
    skipped = skipped.filter(pc.field("reason") != UNREAD_DATE)
    documents, sizes = dict.fromkeys(recipe.sources, 0), dict.fromkeys(recipe.sources, 0)
    for shard in shards_of(folder):
        documents[shard.domain] += shard.documents
        sizes[shard.domain] += shard.bytes
    _check_losses(job, skipped, documents, sizes)
    write_table(skipped, folder / "skipped.parquet")
    return {"documents": documents, "bytes": sizes, "skipped": _by_reason(skipped), "unread_dates": _by_domain(dates)}


def shards_of(folder: Path) -> list[TextShard]:
    """Return the text shards in `folder`, in order of their numbers."""
    return sorted(_shard(path) for path in (folder / TEXT).glob("[a-z]*.parquet"))


def plan_job(recipe: Recipe, folder: Path) -> CollectJob:
    """Return the job that reads the sources of `recipe` as their files are now. Raises SourceError."""
    listed = [
        (domain, place, name, source, SourceListing([], 0, 0) if source.uri == INSTALLED else list_source(source))
        for domain, sources in recipe.sources.items()
        for place, (source, name) in enumerate(zip(sources, source_names(sources), strict=True))
    ]
    total = sum(file.size for *_, listing in listed for file in listing.files)
    size = max(ITEM_BYTES, 4 * total // MOST_ITEMS)
    items: list[CollectItem] = []
    for domain, place, name, source, listing in listed:
        if source.uri != INSTALLED and not listing.files:
            raise SourceError(f"sources.{domain}.{place}.uri: {source.uri!r} has no file now; correct the address")
        if source.uri == INSTALLED or source.limit is not None:
            items.append(CollectItem(domain, place, name, tuple(listing.files)))
        else:
            items += [CollectItem(domain, place, name, files) for files in _groups(listing.files, size)]
        if source.limit is not None and source.limit >= MOST_TEXT << ITEM_BITS:
            most = f"{(MOST_TEXT << ITEM_BITS) // 10**9} GB"
            raise SourceError(
                f"sources.{domain}.{place}.limit: {source.limit} is too much for one worker; {most} is most"
            )
    if len(items) > MOST_ITEMS:
        raise SourceError(f"sources: {len(items):,} pieces to read are more than {MOST_ITEMS:,}; name fewer sources")
    over = tuple(
        (domain, name, "", PASSED_OVER, listing.passed_over, listing.passed_over_bytes)
        for domain, _, name, _, listing in listed
        if listing.passed_over
    )
    return CollectJob(recipe, folder, tuple(items), over)


def collect_item(job: CollectJob, number: int) -> None:
    """Read item `number` into shards, and then write the list of them and of what was skipped."""
    item, curate = job.items[number], job.recipe.curate
    source, skips = job.recipe.sources[item.domain][item.place], ReadErrors(curate.on_error == "fail")
    writer = ShardWriter(job.folder / TEXT, item.domain, number)
    for batch in read_source(source, item.domain, job.recipe.documents_seed, skips, item.files):
        writer.add(prepare(batch, item.domain, item.source, item.place, curate, skips))
        del batch  # a line of 200 MB is in memory once while it is written
        if writer.full:
            writer.flush()
    writer.flush()
    shards = [(item.domain, item.source, name, "", documents, size) for name, documents, size in writer.written]
    rows = [*shards, *skips.rows(item.domain, item.source)]
    columns = zip(*rows, strict=True) if rows else [()] * len(SKIPPED)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, SKIPPED.types, strict=True)]
    write_table(pa.table(arrays, schema=SKIPPED), job.file(STEP, number))


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


def _go_on_or_begin(job: CollectJob) -> None:
    """Remove what was read from other files or in another way, so that only items of this very job count as done."""
    rules = job.recipe.curate.model_dump(mode="json", include={"on_error", "extractor", "repair"})
    sources = {domain: [source.model_dump(mode="json") for source in found] for domain, found in _sources(job)}
    state = json.dumps([sources, rules, job.recipe.documents_seed, job.items])
    note = job.folder / "listing.json"
    if not note.exists() or note.read_text() != state:
        for step in (STEP, TEXT):
            shutil.rmtree(job.folder / step, ignore_errors=True)
        write_atomic(note, state)
    (job.folder / TEXT).mkdir(exist_ok=True)


def _sources(job: CollectJob) -> Iterable[tuple[Domain, list[Source]]]:
    return job.recipe.sources.items()


def _skipped(job: CollectJob) -> pa.Table:
    """Return what all items left out, one row for each place and reason."""
    tables = [pq.read_table(job.file(STEP, item), schema=SKIPPED) for item in range(len(job.items))]
    columns = zip(*job.passed_over, strict=True) if job.passed_over else [()] * len(SKIPPED)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, SKIPPED.types, strict=True)]
    table = pa.concat_tables([*tables, pa.table(arrays, schema=SKIPPED)])
    keys = ["domain", "source", "place", "reason"]
    summed = table.filter(pc.field("reason") != "").group_by(keys).aggregate([("documents", "sum"), ("bytes", "sum")])
    return summed.rename_columns(SKIPPED.names).sort_by([(key, "ascending") for key in keys])


def _check_losses(job: CollectJob, skipped: pa.Table, documents: dict[Domain, int], sizes: dict[Domain, int]) -> None:
    """Raise SourceError where a domain has no document, or lost a larger share of its files or bytes than allowed."""
    for domain, sources in job.recipe.sources.items():
        here = skipped.filter(pc.field("domain") == domain)
        reasons = ", ".join(f"{line['reason']} {line['documents']:,}" for line in _by_reason(here)) or "no file"
        if sources and not documents[domain]:
            raise SourceError(f"sources.{domain}: holds no document with text ({reasons}); name other files")
        files = {file.uri: file.size for item in job.items if item.domain == domain for file in item.files}
        lost = [line for line in here.to_pylist() if line["reason"] not in NO_LOSS]
        gone = [line for line in lost if line["place"] in files and line["bytes"] >= files[line["place"]]]
        size = sum(line["bytes"] for line in lost)
        for what, share, whole in (
            ("files", len({line["place"] for line in gone}), len(files)),
            ("bytes", size, max(sum(files.values()), sizes[domain] + size)),
        ):
            if share > whole * job.recipe.curate.max_lost:
                raise SourceError(
                    f"sources.{domain}: {share:,} of {whole:,} {what} could not be read ({reasons}), more than "
                    f"curate.max_lost, which is {job.recipe.curate.max_lost}; repair them or allow more; "
                    f"the first is {(gone or lost)[0]['place']!r}"
                )


def _by_reason(skipped: pa.Table) -> list[dict[str, Any]]:
    keys = ["domain", "source", "reason"]
    summed = skipped.group_by(keys).aggregate([("documents", "sum"), ("bytes", "sum")])
    renamed = summed.rename_columns([*keys, "documents", "bytes"])
    return list(renamed.sort_by([(key, "ascending") for key in keys]).to_pylist())


def _by_domain(table: pa.Table) -> dict[str, int]:
    summed = table.group_by("domain").aggregate([("documents", "sum")])
    return dict(zip(summed["domain"].to_pylist(), summed["documents_sum"].to_pylist(), strict=True))


def _shard(path: Path) -> TextShard:
    metadata = pq.read_metadata(path)
    domain, item, place = path.stem.split("-")
    number = int(item) << ITEM_BITS | int(place)
    return TextShard(number, cast("Domain", domain), path, metadata.num_rows, int(metadata.metadata[b"bytes"]))
