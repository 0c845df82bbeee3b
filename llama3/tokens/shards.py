"""Curated documents as token shards: a Megatron pair per file of documents and leaf, with a table beside it.

Per leaf of the mix and curated file: `<leaf>/tokens-NNNNN.bin` and `.idx` (see `megatron.py`) and `<leaf>/
documents-NNNNN.parquet`, one row per document in the order of the bin. Over all of them `tokens.json`. A document is
begin + text + end. The leaves do not depend on the mix, so a new mix needs no new shards. A curated file is one item of
work and its table is written last: what has its table is done, so a killed job goes on, on any runner, to the same
bytes. What this gives up: shards are as long as curated files are (64 MB of text, some 16 million tokens).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llama3.data.mapreduce import in_turn, write_table
from llama3.recipe.base import Domain
from llama3.recipe.schema import Recipe
from llama3.tokens.kernels import Ints, frame
from llama3.tokens.megatron import NARROW_ROWS, write_pair
from llama3.tokens.mix import Leaf, leaves_of
from llama3.tokens.tokenizer import Tokenizer
from storage.filesystem import write_atomic
from storage.page_cache import brought

# `tokens.json`: what a folder of token shards holds, so that opening a stream reads one small file.
#
# Made from what each shard's table says of itself in its Parquet footer, never counted again from tokens. What this
# gives up: a shard that is added later is not seen until the index is written again.

Counts = dict[str, list[int]]
"""Value -> tokens and documents."""
ROW_GROUP = 8192
"""Documents in a row group of a shard's table; a reader takes out single groups by number."""
NAME = "tokens.json"
COUNTED = ("source", "language", "licence")
"""Columns of the tables by whose values tokens and documents are counted."""


def write_index(folder: Path, leaves: Mapping[str, str], dtype: str, vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    """Write and return the index of the shards in `folder`.

    `leaves` gives each leaf's domain; `vocabulary` has rows, begin, end and the tokenizer's digest, which go in as they
    are. The index holds per leaf: domain, tokens, documents, bytes, `shards` (columns number, documents and tokens, no
    empty shards) and `by` (column -> value -> [tokens, documents]).
    """
    described = {name: {"domain": domain, **_leaf(folder / name)} for name, domain in leaves.items()}
    index = {"dtype": dtype, **vocabulary, "leaves": described}
    write_atomic(folder / NAME, json.dumps(index, indent=1) + "\n")
    return index


def read_index(folder: Path, leaves: list[str]) -> dict[str, Any]:
    """Return the index of the shards in `folder`. Raises ValueError unless it lists all of `leaves`."""
    try:
        index: dict[str, Any] = json.loads(brought(folder / NAME).read_text())
    except OSError as error:
        raise ValueError(f"{folder}: {NAME} cannot be read ({error}); tokenise first") from error
    missing = [name for name in leaves if name not in index["leaves"]]
    if missing:
        known = ", ".join(index["leaves"])
        raise ValueError(f"sources: {folder} holds {known}, not {', '.join(missing)}; tokenise with this recipe")
    return index


def _leaf(folder: Path) -> dict[str, Any]:
    shards: dict[str, list[int]] = {"number": [], "documents": [], "tokens": []}
    totals = {"tokens": 0, "documents": 0, "bytes": 0}
    by: dict[str, Counts] = {column: {} for column in COUNTED}
    numbered = {int(file.stem.rsplit("-", 1)[1]): file for file in folder.glob("documents-*.parquet")}
    for number, file in sorted(numbered.items()):
        counts = json.loads(pq.read_schema(file).metadata[b"counts"])
        for total in totals:
            totals[total] += counts[total]
        for column in COUNTED:
            for value, more in counts["by"][column].items():
                add_counts(by[column], value, more)
        if counts["documents"]:
            for column, value in zip(shards, (number, counts["documents"], counts["tokens"]), strict=True):
                shards[column].append(value)
    return {**totals, "shards": shards, "by": {column: dict(sorted(values.items())) for column, values in by.items()}}


def add_counts(totals: Counts, value: str, counts: list[int]) -> None:
    """Add tokens and documents of `value` to `totals`."""
    totals[value] = [one + other for one, other in zip(totals.get(value, [0, 0]), counts, strict=True)]


STEP = "tokens"
BATCH = 1024
"""Documents that are encoded together."""
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "domain": pa.string(),
        "source": pa.string(),
        "source_index": pa.int32(),
        "language": pa.string(),
        "licence": pa.string(),
        "quality": pa.float64(),
        "bytes": pa.int64(),
    }
)
"""Of a document: `offset` and `length` in tokens of its bin, begin and end included; `bytes` of UTF-8 text."""
_CARRIED = ("id", "domain", "source", "source_index", "language", "licence", "quality")
_KEPT = pa.schema([SCHEMA.field(name) for name in (*_CARRIED, "bytes")])
Work = Callable[[Any, int], None]
Runner = Callable[[Any, str, Work, Sequence[int]], None]
"""As in `llama3/data/mapreduce.py`: does the items of a step, in any order."""


@dataclass(frozen=True)
class TokenJob:
    """What a work item needs to know; pickled to workers."""

    recipe: Recipe
    files: tuple[Path, ...]
    """Curated files, `<domain>-NNNNN.parquet`; the items."""
    tokenizer: Path
    folder: Path
    threads: int

    def leaves(self, item: int) -> list[Leaf]:
        """Return the leaves that the documents of a file go to."""
        return [leaf for leaf in leaves_of(self.recipe) if leaf.domain == _domain(self.files[item])]

    def done(self, item: int) -> bool:
        """Return whether all shards of a file are there."""
        number = _number(self.files[item])
        return all(_table(self.folder / leaf.name, number).exists() for leaf in self.leaves(item))


class _Part(NamedTuple):
    """What a batch of documents gives to one leaf."""

    tokens: NDArray[Any]
    lengths: Ints
    documents: pa.Table


def token_dtype(recipe: Recipe, rows: int) -> np.dtype[Any]:
    """Return the integer type for ids below `rows`: uint16, or int32, which is what Megatron calls 32 bits.

    Raises ValueError if the recipe's is too small.
    """
    asked = recipe.tokens.dtype
    if asked == "uint16" and rows > 2**16:
        raise ValueError(
            f"tokens.dtype: uint16 holds 65,536 ids, the tokenizer has {rows:,} rows; write uint32 or auto"
        )
    narrow = asked == "uint16" or (asked == "auto" and rows < NARROW_ROWS)
    return np.dtype(np.uint16 if narrow else np.int32)


def tokenise(
    recipe: Recipe, documents: Path, tokenizer: Path, folder: Path, *, runner: Runner = in_turn, threads: int = 1
) -> dict[str, Any]:
    """Write the training documents under `documents` as token shards into `folder`; go on with what is there.

    `tokenizer` is a folder that `Tokenizer.save` wrote; an item encodes on `threads` threads and holds the tokens of
    one file in memory. Returns facts: `tokens`, `documents` and `bytes`, each by domain; all three by leaf under
    `leaves`; tokens by domain and source under `sources`, by language under `languages`. Raises ValueError for a dtype
    that is too small, a domain without files, and a document whose `source_index` is no source of the recipe.
    """
    encoder = Tokenizer.load(tokenizer)
    dtype = token_dtype(recipe, encoder.rows)
    leaves = leaves_of(recipe)
    domains = dict.fromkeys(leaf.domain for leaf in leaves)
    files = tuple(file for domain in domains for file in _files(documents, domain))
    job = TokenJob(recipe, files, tokenizer, folder, threads)
    runner(job, STEP, tokenise_file, [item for item in range(len(files)) if not job.done(item)])
    vocabulary = {"rows": encoder.rows, "begin": encoder.begin, "end": encoder.end, "tokenizer": encoder.digest}
    index = write_index(folder, {leaf.name: leaf.domain for leaf in leaves}, dtype.name, vocabulary)
    return _facts(index["leaves"], domains)


def tokenise_file(job: TokenJob, item: int) -> None:
    """Write the shards of one curated file."""
    encoder = _encoder(job.tokenizer)
    dtype = token_dtype(job.recipe, encoder.rows)
    leaves = job.leaves(item)
    parts: dict[str, list[_Part]] = {leaf.name: [] for leaf in leaves}
    for batch in _batches(job.files[item]):
        ids, offsets = encoder.encode_flat(batch["text"].combine_chunks(), threads=job.threads)
        for leaf, chosen in _by_leaf(batch, leaves):
            lengths = np.diff(offsets)[chosen] + 2
            tokens = np.empty(int(lengths.sum()), dtype)
            frame(ids, offsets, chosen, encoder.begin, encoder.end, tokens)
            parts[leaf.name].append(_Part(tokens, lengths, _columns(batch, chosen)))
    for name, written in parts.items():
        lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in written)])
        table = pa.concat_tables([_KEPT.empty_table(), *(part.documents for part in written)])
        tokens_of_parts = [part.tokens for part in written]
        write_shard(job.folder / name, _number(job.files[item]), tokens_of_parts, lengths, table)


def write_shard(folder: Path, number: int, tokens: Sequence[NDArray[Any]], lengths: Ints, documents: pa.Table) -> None:
    """Write shard `number` of the leaf whose folder is `folder`: the pair, then the table.

    `tokens` are the ids in pieces, of one element type, uint16 or int32; `lengths` the tokens of each document;
    `documents` has the columns of SCHEMA but for offset and length. Without documents there is a table and no pair.
    """
    if len(lengths):
        write_pair(folder / f"tokens-{number:05}", tokens, lengths)
    table = documents.append_column("offset", pa.array(np.cumsum(lengths) - lengths))
    table = table.append_column("length", pa.array(lengths)).select(SCHEMA.names).cast(SCHEMA)
    counts = {"tokens": int(lengths.sum()), "documents": len(lengths), "bytes": pc.sum(table["bytes"]).as_py() or 0}
    by = {column: _count(table, column) for column in COUNTED}
    table = table.replace_schema_metadata({"counts": json.dumps({**counts, "by": by})})
    write_table(table, _table(folder, number), ROW_GROUP)


def _count(table: pa.Table, column: str) -> dict[str, list[int]]:
    """Return tokens and documents by the values of `column`."""
    counted = table.group_by(column).aggregate([("length", "sum"), ("length", "count")]).sort_by(column)
    names, *values = (counted[name].to_pylist() for name in (column, "length_sum", "length_count"))
    return {name: [tokens, documents] for name, tokens, documents in zip(names, *values, strict=True)}


def _files(documents: Path, domain: Domain) -> list[Path]:
    files = sorted((documents / "documents").glob(f"{domain}-*.parquet"), key=_number)
    if not files:
        raise ValueError(
            f"sources.{domain}: {documents / 'documents'} holds no {domain}-*.parquet; curate the domain first"
        )
    return files


def _number(file: Path) -> int:
    return int(file.stem.rsplit("-", 1)[1])


def _domain(file: Path) -> str:
    return file.stem.rsplit("-", 1)[0]


def _table(folder: Path, number: int) -> Path:
    return folder / f"documents-{number:05}.parquet"


@lru_cache(maxsize=1)
def _encoder(folder: Path) -> Tokenizer:
    """Return the tokenizer of a job, which a worker reads once (half a second at 128,000 tokens)."""
    return Tokenizer.load(folder)


def _batches(file: Path) -> Iterator[pa.Table]:
    """Yield the training documents of a curated file, at most BATCH at a time."""
    for batch in pq.ParquetFile(file).iter_batches(batch_size=BATCH, columns=[*_CARRIED, "text", "split"]):
        chosen = batch.filter(pc.equal(batch.column("split"), "train"))
        if chosen.num_rows:
            yield pa.Table.from_batches([chosen])


def _by_leaf(batch: pa.Table, leaves: list[Leaf]) -> Iterator[tuple[Leaf, Ints]]:
    """Yield each leaf that has documents in the batch, with their places there."""
    own = {leaf.source: leaf for leaf in leaves if leaf.source is not None}
    pool = next((leaf for leaf in leaves if leaf.source is None), None)
    if not own:
        yield leaves[0], np.arange(len(batch))
        return
    sources = batch["source_index"].to_numpy()
    unknown = np.flatnonzero(~np.isin(sources, list(own))) if pool is None else np.zeros(0, np.int64)
    if len(unknown):
        row = int(unknown[0])
        raise ValueError(
            f"sources.{leaves[0].domain}: document {batch['id'][row]} is of source {sources[row]}, the recipe has "
            f"{len(leaves)}; curate again with this recipe"
        )
    for number in sorted(set(sources.tolist()) & set(own)):
        yield own[number], np.flatnonzero(sources == number)
    pooled = np.flatnonzero(~np.isin(sources, list(own)))
    if pool is not None and len(pooled):
        yield pool, pooled


def _columns(batch: pa.Table, chosen: Ints) -> pa.Table:
    sizes = pc.binary_length(batch["text"]).cast(pa.int64())
    return batch.select(_CARRIED).append_column("bytes", sizes).take(chosen).cast(_KEPT)


def _facts(leaves: dict[str, Any], domains: dict[Domain, None]) -> dict[str, Any]:
    counts = ("tokens", "documents", "bytes")

    def members(domain: Domain) -> list[dict[str, Any]]:
        return [leaf for leaf in leaves.values() if leaf["domain"] == domain]

    by_domain = {count: {domain: sum(m[count] for m in members(domain)) for domain in domains} for count in counts}
    return {
        **by_domain,
        "leaves": {name: {count: leaf[count] for count in counts} for name, leaf in leaves.items()},
        "sources": {domain: _summed(members(domain), "source") for domain in domains},
        "languages": _summed(list(leaves.values()), "language"),
    }


def _summed(leaves: list[dict[str, Any]], column: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for leaf in leaves:
        for name, (tokens, _) in leaf["by"][column].items():
            totals[name] = totals.get(name, 0) + tokens
    return dict(sorted(totals.items()))
