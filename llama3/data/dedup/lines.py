"""Lines that go: those that stand too often among the documents of a language, and those that repeat themselves.

The first rule is that of arXiv 2407.21783, section 3.1.1 (as in ccNet): documents of one domain and language are cut
into buckets of 30M; a line that stands more than 6 times in a bucket is removed there, *every* copy of it. What this
gives up: some good lines (refrains, common code) go with the menus and licences. A line is compared without blanks at
both ends and without ASCII case; unlike ccNet we keep digits and punctuation, or `x = 3` and `x = 7` would be one line.
The second rule (the paper's "duplicated n-gram coverage ratio" after Rae et al. 2021, arXiv 2112.11446) removes long,
unique lines such as logs: those with a large share of words inside n-grams that the same line holds twice or more.

Exact up to equal 64-bit hashes. Counting goes by ranges of the hash: a worker holds a shard or a range, not the corpus.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llama3.data.kernels.arrow import Bytes, Hashes, Offsets, hash_lists, list_buffers, text_buffers
from llama3.data.kernels.lines import (
    count_newlines,
    hash_lines,
    hash_strings,
    line_keys,
    mark_copies,
    mark_repeats,
    strip,
)
from llama3.data.kernels.ngrams import Flags, key_table
from llama3.data.kernels.words import mixed
from llama3.data.mapreduce import CurationJob, Runner, listed, quoted, rows_of_part, run, write_by_key, write_table

DOCUMENTS, BUCKETS, MAP, BAD, COMMON = "lines/documents", "lines/buckets", "lines/map", "lines/bad", "lines/common"
SHOWN = 200
"""Removed lines in the table for people."""
_SHOWN_CHARS = 200
_BATCH = 8192
_COUNTS = pa.schema({"key": pa.uint64(), "copies": pa.int64(), "row": pa.int64()})
_COMMON = pa.schema({"domain": pa.string(), "language": pa.string(), "copies": pa.int64(), "line": pa.string()})
_SEPARATOR = "\x00"


def line_hashes(texts: Any, min_chars: int) -> pa.LargeListArray:
    """Return for each text one hash per line (split at newlines), 0 for fences of code and below `min_chars`."""
    return _hashes(*text_buffers(texts), min_chars)


def _hashes(data: Bytes, offsets: Offsets, min_chars: int) -> pa.LargeListArray:
    hashes = np.empty(count_newlines(data, offsets) + len(offsets) - 1, np.uint64)
    ends = np.zeros(len(offsets), np.int64)
    hash_lines(data, offsets, min_chars, hashes, ends)
    return hash_lists(hashes, ends)


def count_lines(runner: Runner, job: CurationJob) -> None:
    """Find the lines that stand too often among the documents that no step has dropped.

    Leaves `lines/bad` (what `strip_lines` removes) and `lines/common` (the most frequent of them, with their text).
    """
    if job.recipe.curate.lines.max_copies is None:
        return
    shards = range(len(job.shards))
    run(runner, job, DOCUMENTS, count_documents, shards)
    run(runner, job, BUCKETS, count_buckets, [0])
    run(runner, job, MAP, map_lines, shards)
    run(runner, job, BAD, reduce_lines, range(job.parts))
    run(runner, job, COMMON, common_lines, [0])


def count_documents(job: CurationJob, item: int) -> None:
    """Count the documents of a shard by domain and language."""
    survivors = job.survivors(job.shards[item], "end", "domain, language")
    _write(job, f"SELECT domain, language, count(*) AS documents FROM ({survivors}) GROUP BY ALL", DOCUMENTS, item)


def count_buckets(job: CurationJob, item: int) -> None:
    """Write how many buckets the documents of each domain and language make."""
    bucket = job.recipe.curate.lines.bucket
    counts = f"read_parquet({listed(job.files(DOCUMENTS))})"
    buckets = f"((sum(documents) + {bucket - 1}) // {bucket})::BIGINT"
    _write(job, f"SELECT domain, language, {buckets} AS buckets FROM {counts} GROUP BY ALL", BUCKETS, item)


def _write(job: CurationJob, query: str, step: str, item: int) -> None:
    with job.session() as connection:
        write_table(connection.sql(f"SELECT * FROM ({query}) ORDER BY ALL").to_arrow_table(), job.file(step, item))


def map_lines(job: CurationJob, item: int) -> None:
    """Count the lines of a shard by key; `row` is one document that holds the line."""
    buckets, keys, rows = _buckets(job), [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    survivors = job.survivors(job.shards[item], "end", '"row", id, domain, language, lines')
    with job.session() as connection:
        for batch in connection.sql(survivors).to_arrow_reader(_BATCH):
            groups = _groups(buckets, batch["domain"], batch["language"], batch["id"])
            found, texts = _keys(*list_buffers(batch["lines"]), groups)
            keys.append(found)
            rows.append(batch["row"].to_numpy()[texts])
    write_table(_counted(np.concatenate(keys), np.concatenate(rows)), job.file(MAP, item))


def _counted(keys: Hashes, rows: NDArray[np.int64]) -> pa.Table:
    """Return (key, copies, least row) ordered by key."""
    order = np.argsort(keys)
    keys, rows = keys[order], rows[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=keys[:1] + np.uint64(1)))  # the first differs from itself + 1
    copies = np.diff(firsts, append=len(keys))
    least = np.minimum.reduceat(rows, firsts) if len(firsts) else rows
    return pa.table([keys[firsts], copies, least], schema=_COUNTS)


def reduce_lines(job: CurationJob, part: int) -> None:
    """Write the lines of a range of keys that stand too often, with the number of copies."""
    with job.session() as connection:
        query = f"""SELECT key, sum(copies)::BIGINT AS copies, min("row") AS "row" FROM ({rows_of_part(job, MAP, part)})
            GROUP BY key HAVING sum(copies) > {job.recipe.curate.lines.max_copies}"""
        write_by_key(connection, query, job, BAD, part)


class Stripped(NamedTuple):
    """Texts without the lines that go, and what went of each: lines, and bytes with their line ends and blank lines."""

    texts: pa.LargeStringArray
    lines: NDArray[np.int64]
    bytes: NDArray[np.int64]


def strip_lines(job: CurationJob, texts: Any, domains: Any, languages: Any, ids: Any) -> Stripped:
    """Return `texts` (Arrow columns of equal length, documents that no step has dropped) without the lines that go.

    A text that loses nothing stays as it is, to the byte; one that loses all its lines becomes "". Memory: about 24
    bytes for each line of these texts, and 8 for each bad line of one range of keys.
    """
    data, offsets = text_buffers(texts)
    lines, ends = list_buffers(_hashes(data, offsets, job.recipe.curate.lines.min_chars))
    marks = np.zeros(len(lines), np.uint8)
    _mark(job, data, offsets, (lines, ends), (domains, languages, ids), marks)
    out, stops = np.empty(int(offsets[-1] - offsets[0]), np.uint8), np.zeros(len(offsets), np.int64)
    size = strip(data, offsets, marks, ends, out, stops)
    buffers = [None, pa.py_buffer(stops), pa.py_buffer(out[:size])]
    stripped = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)
    gone = np.diff(np.concatenate(([0], np.cumsum(marks != 0)))[ends])
    return Stripped(stripped, gone, np.diff(offsets) - np.diff(stops))


def _mark(
    job: CurationJob,
    data: Bytes,
    offsets: Offsets,
    hashes: tuple[Hashes, Offsets],
    columns: tuple[Any, Any, Any],
    marks: Flags,
) -> None:
    """Mark the lines that go; `columns` are domains, languages and ids."""
    rule = job.recipe.curate.lines
    if rule.max_copies is not None:
        groups = _groups(_buckets(job), *columns)
        bad = _bad_among(job, np.sort(_keys(*hashes, groups)[0]))
        mark_copies(*hashes, groups, key_table(bad), marks)
    share = rule.max_repeated_grams
    if share is not None:
        mark_repeats(data, offsets, (rule.gram, share.numerator, share.denominator), marks)


def _bad_among(job: CurationJob, keys: Hashes) -> Hashes:
    """Return those of the sorted `keys` that are bad, each once; looks at one range of bad lines at a time."""
    found = [np.zeros(0, np.uint64)]
    for file in job.files(BAD):
        bad = pq.read_table(file, columns=["key"])["key"].to_numpy()
        if len(bad):
            within = keys[np.searchsorted(keys, bad[0]) : np.searchsorted(keys, bad[-1], "right")]
            places = np.searchsorted(bad, within)
            found.append(within[bad[places] == within])
    hits = np.concatenate(found)
    once: Hashes = hits[np.diff(hits, prepend=hits[:1] + np.uint64(1)) != 0]
    return once


def _keys(hashes: Hashes, offsets: Offsets, groups: Hashes) -> tuple[Hashes, Offsets]:
    """Return the keys of all lines that have a hash, and the text that each stands in."""
    room = int(offsets[-1] - offsets[0])
    keys, texts = np.empty(room, np.uint64), np.empty(room, np.int64)
    count = line_keys(hashes, offsets, groups, keys, texts)
    return keys[:count], texts[:count]


def _buckets(job: CurationJob) -> dict[str, int]:
    rows = pq.read_table(job.file(BUCKETS, 0)).to_pylist()
    return {f"{row['domain']}{_SEPARATOR}{row['language']}": row["buckets"] for row in rows}


def _groups(buckets: dict[str, int], domains: Any, languages: Any, ids: Any) -> Hashes:
    """Return the hash of (domain, language, bucket) of each document; the bucket is a hash of the id alone."""
    names = pc.binary_join_element_wise(domains, languages, _SEPARATOR)
    names = names.combine_chunks() if isinstance(names, pa.ChunkedArray) else names
    encoded = names.dictionary_encode()
    known = encoded.dictionary.to_pylist()
    which = encoded.indices.to_numpy(zero_copy_only=False)
    seeds = np.array([_seed(name) for name in known], np.uint64)[which]
    counts = np.array([buckets[name] for name in known], np.uint64)[which]
    hashes = np.empty(len(which), np.uint64)
    hash_strings(*text_buffers(ids), hashes)
    groups: Hashes = seeds + hashes % counts
    return groups


def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def common_lines(job: CurationJob, item: int) -> None:
    """Write the bad lines with the most copies: domain, language, copies, line (as compared, its beginning)."""
    with job.session() as connection:
        top = connection.sql(
            f"""SELECT key, copies, "row" FROM read_parquet({listed(job.files(BAD))})
            ORDER BY copies DESC, key LIMIT {SHOWN}"""
        ).to_arrow_table()
        wanted = {row["key"]: row for row in top.to_pylist()}
        for shard in job.shards:
            low, high = shard.rows
            rows = sorted({row["row"] for row in wanted.values() if low <= row["row"] < high})
            if rows:
                columns = '"row", id, domain, language, text'
                query = f"""SELECT {columns} FROM read_parquet({quoted(str(shard.text))})
                    WHERE "row" IN ({", ".join(map(str, rows))})"""
                _name_lines(job, connection.sql(query).to_arrow_table(), wanted)
    named = [{name: row[name] for name in _COMMON.names} for row in wanted.values()]
    write_table(pa.Table.from_pylist(named, _COMMON), job.file(COMMON, item))


def _name_lines(job: CurationJob, documents: pa.Table, wanted: dict[int, dict[str, Any]]) -> None:
    """Add domain, language and line to those of `wanted` that stand in `documents`."""
    groups = _groups(_buckets(job), documents["domain"], documents["language"], documents["id"])
    hashes, offsets = list_buffers(line_hashes(documents["text"], job.recipe.curate.lines.min_chars))
    for number, document in enumerate(documents.to_pylist()):
        for place, line in enumerate(document["text"].split("\n"), int(offsets[number])):
            key = int(mixed(hashes[place] ^ groups[number])) if hashes[place] else None
            if key in wanted:
                text = _compared(line)[:_SHOWN_CHARS]
                wanted[key] |= {"domain": document["domain"], "language": document["language"], "line": text}


def _compared(line: str) -> str:
    """Return `line` in the form in which lines are compared."""
    blanks = "".join(map(chr, range(0x21)))
    return line.strip(blanks).translate({upper: upper + 32 for upper in range(0x41, 0x5B)})
