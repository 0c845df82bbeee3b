"""Line-level deduplication: remove lines that are too frequent in a language, and lines that repeat their own n-grams.

Frequent lines (arXiv 2407.21783, section 3.1.1, as in ccNet): documents of a domain and language are split into buckets
of 30M; a line with more than 6 copies in a bucket loses *every* copy there, good lines too (refrains, common code).
Repetitive lines ("duplicated n-gram coverage ratio", arXiv 2112.11446) are long unique lines such as logs. Exact up to
collisions of 64-bit hashes. Counting goes by hash range: a worker holds a piece of a shard or of a range.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import Bytes, Hashes, Offsets, hash_lists, list_buffers, text_buffers
from herd.llama3.data.kernels.lines import (
    COPY,
    REPEAT,
    count_newlines,
    hash_lines,
    hash_strings,
    line_keys,
    mark_continued,
    mark_copies,
    mark_repeats,
    removed_spans,
    write_unmarked,
)
from herd.llama3.data.kernels.ngrams import Flags, Table, key_table
from herd.llama3.data.kernels.paragraphs import line_flags
from herd.llama3.data.kernels.words import mix64
from herd.llama3.data.mapreduce import CurationJob, CurationStage, aggregate, count_survivors, documents_of, schema_of
from herd.llama3.data.shuffle import Shuffle
from herd.llama3.data.work_items import Runner, read_table, write_table
from herd.llama3.recipe.data_schema import Curate

BUCKETS, BAD, COMMON = "lines/buckets", "lines/bad", "lines/common"
SHOWN = 200
"""Removed lines in the report table."""
_SHOWN_CHARS = 200
_MOST = f"FROM rows ORDER BY copies DESC, key LIMIT {SHOWN}"
_COUNTS = schema_of("key uint64, copies int64, row int64")
_COMMON = schema_of("domain string, language string, copies int64, line string")
_SEPARATOR = "\x00"
RULES = {COPY: "lines.max_copies", REPEAT: "lines.max_repeated_ngrams"}
"""Mark of a removed line -> the field of `curate` that removes it."""


class StrippedTexts(NamedTuple):
    """Texts without the removed lines, and per text the removed lines and bytes (with newlines and blank lines)."""

    texts: pa.LargeStringArray
    lines: NDArray[np.int64]
    bytes: NDArray[np.int64]
    inside: NDArray[np.int64]
    """Removed lines per text with a kept line before and after them and no blank line in between."""
    spans: NDArray[np.int64]
    """int64[n, 4] of `removed_spans`: text, first character, character after the last, key of RULES."""


def flags_of(data: Bytes, offsets: Offsets) -> Bytes:
    """Return the flags of every line of the texts (CONTINUES, BOUND), one after another."""
    flags = np.zeros(count_newlines(data, offsets) + len(offsets) - 1, np.uint8)
    line_flags(data, offsets, flags)
    return flags


def line_hashes(texts: Any, min_chars: int, flags: Flags | None = None) -> pa.LargeListArray:
    """Return for each text one hash per line (split at newlines); see `hash_lines`. `flags` are those of the lines."""
    data, offsets = text_buffers(texts)
    return hash_lists(*_line_hashes(data, offsets, min_chars, flags_of(data, offsets) if flags is None else flags))


def _line_hashes(data: Bytes, offsets: Offsets, min_chars: int, flags: Flags) -> tuple[Hashes, Offsets]:
    hashes, ends = np.empty(len(flags), np.uint64), np.zeros(len(offsets), np.int64)
    hash_lines(data, offsets, flags, min_chars, hashes, ends)
    return hashes, ends


class LineDedup(CurationStage):
    """Count the lines of the documents that are left; `strip_lines` removes those with too many copies at the end.

    Writes `lines/bad` (the lines to remove) and `lines/common` (the most frequent of them, with their text).
    """

    name, title, section, drops = "lines", "lines removed", ("lines",), False
    reasons: ClassVar = {"emptied": "Too short once the lines that many documents share were removed."}
    tables: ClassVar = {COMMON: "lines"}

    def enabled(self, curate: Curate) -> bool:
        return curate.lines.max_copies is not None

    def passes(self, runner: Runner, job: CurationJob) -> None:
        counts, bad = _counts(job), _bad(job)
        write_table(count_buckets(job, count_survivors(runner, job, "lines")), job.file(BUCKETS, 0))
        job.each_shard(runner, counts.step(), map_lines)
        counts.merge(runner, job)
        job.each_partition(runner, bad.step(), reduce_lines)
        bad.merge(runner, job)
        job.each_shard(runner, BAD, write_bad)
        top = aggregate(runner, job, job.by_partition("lines/top"), job.partitions, _MOST)
        write_table(common_lines(job, top), job.file(COMMON, 0))


def _counts(job: CurationJob) -> Shuffle:
    return job.by_key("lines/counts")


def _bad(job: CurationJob) -> Shuffle:
    return job.by_shard("lines/bad")


def count_buckets(job: CurationJob, survivors: pa.Table) -> pa.Table:
    """Return the number of buckets for the documents of each domain and language."""
    bucket = job.recipe.curate.lines.bucket_documents
    query = f"""SELECT domain, language, ((documents + {bucket - 1}) // {bucket})::BIGINT AS buckets
        FROM survivors ORDER BY ALL"""
    return job.query(query, survivors=survivors)


def map_lines(job: CurationJob, index: int) -> None:
    """Count the lines of a piece: key, copies, row (the first document with the line)."""
    survivors = job.survivors(index, "lines", ("row", "id", "domain", "language", "lines"))
    groups = _groups(_buckets(job), survivors["domain"], survivors["language"], survivors["id"])
    keys, texts = _keys(*list_buffers(survivors["lines"]), groups)
    rows = survivors["row"].to_numpy()[texts]
    order = np.argsort(keys)
    keys, rows = keys[order], rows[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=keys[:1] + np.uint64(1)))  # the first differs from itself + 1
    copies = np.diff(firsts, append=len(keys))
    first_rows = np.minimum.reduceat(rows, firsts) if len(firsts) else rows
    table = pa.table([keys[firsts], copies, first_rows], schema=_COUNTS)
    _counts(job).write(job, index, table, job.partition_of(keys[firsts]))


def reduce_lines(job: CurationJob, partition: int) -> None:
    """Send the lines of a partition with too many copies to the shards that have them; write the most frequent ones."""
    query = f"""SELECT * FROM (SELECT key, "row", sum(copies) OVER (PARTITION BY key)::BIGINT AS copies FROM counts)
        WHERE copies > {job.recipe.curate.lines.max_copies}"""
    bad = job.query(query, counts=_counts(job).read(job, partition))
    query = f"""SELECT key, copies, min("row") AS "row" FROM bad GROUP BY ALL ORDER BY copies DESC, key LIMIT {SHOWN}"""
    job.write(job.by_partition("lines/top"), partition, job.query(query, bad=bad))
    _bad(job).write(job, partition, bad.select(["key"]), job.piece_of(bad["row"]))


def write_bad(job: CurationJob, index: int) -> None:
    """Write the keys of the bad lines of a piece, sorted."""
    job.write(BAD, index, _bad(job).read(job, index).sort_by("key"))


def common_lines(job: CurationJob, top: pa.Table) -> pa.Table:
    """Return the bad lines with the most copies: domain, language, copies, line (normalized, its beginning)."""
    lines = {row["key"]: row for row in top.to_pylist()}
    rows = np.unique(np.array([line["row"] for line in lines.values()], np.int64))
    for index in np.unique(job.piece_of(rows)).tolist():
        _add_texts(job, documents_of(job, index, rows, ("id", "domain", "language", "text")), lines)
    return pa.Table.from_pylist([{name: line[name] for name in _COMMON.names} for line in lines.values()], _COMMON)


def _add_texts(job: CurationJob, documents: pa.Table, lines: dict[int, dict[str, Any]]) -> None:
    """Add domain, language and text to those of `lines` (by key) that occur in `documents`."""
    groups = _groups(_buckets(job), documents["domain"], documents["language"], documents["id"])
    hashes, offsets = list_buffers(line_hashes(documents["text"], job.recipe.curate.lines.min_chars))
    blanks = "".join(map(chr, range(0x21)))
    lower = {upper: upper + 32 for upper in range(0x41, 0x5B)}
    for number, document in enumerate(documents.to_pylist()):
        for index, line in enumerate(document["text"].split("\n"), int(offsets[number])):
            key = int(mix64(hashes[index] ^ groups[number])) if hashes[index] else None
            if key in lines:
                text = line.strip(blanks).translate(lower)[:_SHOWN_CHARS]  # as lines are compared
                lines[key] |= {"domain": document["domain"], "language": document["language"], "line": text}


def strip_lines(job: CurationJob, bad: Table, texts: Any, domains: Any, languages: Any, ids: Any) -> StrippedTexts:
    """Return `texts` (Arrow columns of equal length, documents that no step has dropped) without the lines in `bad`.

    A text without a bad line stays equal to the byte; one that loses all its lines becomes "". Memory: about 24 bytes
    per line, and 80 per line of the longest text.
    """
    rule = job.recipe.curate.lines
    data, offsets = text_buffers(texts)
    flags = flags_of(data, offsets)
    hashes, ends = _line_hashes(data, offsets, rule.min_chars, flags)
    marks = np.zeros(len(hashes), np.uint8)
    if rule.max_copies is not None:
        mark_copies(hashes, ends, _groups(_buckets(job), domains, languages, ids), bad, marks)
    share = rule.max_repeated_ngrams
    if share is not None:
        mark_repeats(data, offsets, flags, (rule.ngram, share.numerator, share.denominator), marks)
    mark_continued(flags, marks)
    out, stops = np.empty(int(offsets[-1] - offsets[0]), np.uint8), np.zeros(len(offsets), np.int64)
    size = write_unmarked(data, offsets, marks, ends, out, stops)
    buffers = [None, pa.py_buffer(stops), pa.py_buffer(out[:size])]
    stripped = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)
    removed = np.diff(np.concatenate(([0], np.cumsum(marks != 0)))[ends])
    spans, inside = np.empty((int(removed.sum()), 4), np.int64), np.zeros(len(removed), np.int64)
    count = removed_spans(data, offsets, marks, ends, spans, inside)
    return StrippedTexts(stripped, removed, np.diff(offsets) - np.diff(stops), inside, spans[:count])


def bad_lines(job: CurationJob, index: int) -> Table:
    """Return the lines of a piece that have too many copies, for `strip_lines`; none without such a rule."""
    counted = job.recipe.curate.lines.max_copies is not None
    return key_table(job.read(BAD, index)["key"].to_numpy() if counted else np.zeros(0, np.uint64))


def _keys(hashes: Hashes, offsets: Offsets, groups: Hashes) -> tuple[Hashes, Offsets]:
    """Return the keys of all lines that have a hash, and the index of the text of each."""
    room = int(offsets[-1] - offsets[0])
    keys, texts = np.empty(room, np.uint64), np.empty(room, np.int64)
    count = line_keys(hashes, offsets, groups, keys, texts)
    return keys[:count], texts[:count]


def _buckets(job: CurationJob) -> dict[str, int]:
    """Return the number of buckets by domain and language."""
    rows = read_table(job.file(BUCKETS, 0)).to_pylist()
    return {f"{row['domain']}{_SEPARATOR}{row['language']}": row["buckets"] for row in rows}


def _groups(buckets: dict[str, int], domains: Any, languages: Any, ids: Any) -> Hashes:
    """Return the hash of (domain, language, bucket) of each document; the bucket is a hash of the id alone."""
    names = pc.binary_join_element_wise(domains, languages, _SEPARATOR)
    names = names.combine_chunks() if isinstance(names, pa.ChunkedArray) else names
    encoded = names.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    which = encoded.indices.to_numpy(zero_copy_only=False)
    digests = [blake2b(name.encode(), digest_size=8).digest() for name in distinct]
    seeds = np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)[which]
    counts = np.array([buckets[name] for name in distinct], np.uint64)[which]
    hashes = np.empty(len(which), np.uint64)
    hash_strings(*text_buffers(ids), hashes)
    groups: Hashes = seeds + hashes % counts
    return groups
