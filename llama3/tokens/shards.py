"""Tokenize curated documents into shards: a Megatron pair and a table per curated file and dataset of the mix.

A shard is `<dataset>/tokens-NNNNN.bin` and `.idx` (see `megatron.py`) with `<dataset>/documents-NNNNN.parquet`, one row
per document in the order of the bin; `tokens.json` indexes all shards. A document is begin + text + end. Datasets do
not depend on the shares of the mix, so a new mix needs no new shards. A curated file is one work item whose table is
written last, so an interrupted job resumes at the first file without a table.
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

from herd.llama3.data.work_items import run_serial, write_table
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.kernels import Ints, add_begin_end
from herd.llama3.tokens.megatron import NARROW_VOCAB_SIZE, read_lengths, write_pair
from herd.llama3.tokens.mix import MixDataset, mix_datasets
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.storage.files import atomic_file, file_names, local_folder, open_file
from herd.storage.page_cache import ensure_local
from herd.storage.processes import parallel_map

Counts = dict[str, list[int]]
"""Value -> tokens and documents."""
ROW_GROUP = 8192
"""Documents in a row group of a shard's table; a reader reads single groups by number."""
NAME = "tokens.json"
GROUPS = "groups.npy"
"""Beside the shards of a dataset: the tokens of each group, int64[groups]."""
GROUP = 256
"""Neighboring documents of a group; a stream shuffles groups (see `source_stream`)."""
COUNTED = ("source", "language", "license")
"""Columns of the tables for whose values tokens and documents are counted."""
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
        "license": pa.string(),
        "quality": pa.float64(),
        "bytes": pa.int64(),
    }
)
"""Of a document: `offset` and `length` in tokens of its bin, begin and end included; `bytes` of UTF-8 text."""
_CARRIED = ("id", "domain", "source", "source_index", "language", "license", "quality")
_KEPT = pa.schema([SCHEMA.field(name) for name in (*_CARRIED, "bytes")])
Work = Callable[[Any, int], None]
Runner = Callable[[Any, str, Work, Sequence[int]], None]
"""As in `llama3/data/mapreduce.py`: runs the items of a step, in any order."""


# The index: a stream is opened from `tokens.json` and one GROUPS file a dataset, whatever the number of shards.


def write_index(
    folder: str | Path, datasets: Mapping[str, str], dtype: str, vocabulary: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the index of the shards in `folder`; return what `tokens.json` holds.

    `datasets` gives each dataset's domain; `vocabulary` has vocab_size, begin, end and the tokenizer's digest, stored
    as is. The index holds per dataset: domain, tokens, documents, bytes, `shards` (columns number, documents and
    tokens; no empty shards) and `by` (column -> value -> [tokens, documents]). Counts come from Parquet footers.
    """
    entries: dict[str, Any] = {}
    for dataset, domain in datasets.items():
        shards: dict[str, list[int]] = {"number": [], "documents": [], "tokens": []}
        totals = {"tokens": 0, "documents": 0, "bytes": 0}
        by: dict[str, Counts] = {column: {} for column in COUNTED}
        tables = sorted(_tables(folder, dataset), key=_number)
        for number, schema in zip(map(_number, tables), parallel_map(_schema, tables), strict=True):
            counts = json.loads(schema.metadata[b"counts"])
            for total in totals:
                totals[total] += counts[total]
            for column in COUNTED:
                for value, value_counts in counts["by"][column].items():
                    add_counts(by[column], value, value_counts)
            if counts["documents"]:
                shards["number"].append(number)
                shards["documents"].append(counts["documents"])
                shards["tokens"].append(counts["tokens"])
        indexes = [f"{folder}/{dataset}/tokens-{number:05}.idx" for number in shards["number"]]
        with atomic_file(f"{folder}/{dataset}/{GROUPS}") as temporary, temporary.open("wb") as file:
            np.save(file, group_tokens(indexes, np.cumsum([0, *shards["documents"]])))
        sorted_by = {column: dict(sorted(values.items())) for column, values in by.items()}
        entries[dataset] = {"domain": domain, **totals, "shards": shards, "by": sorted_by}
    index = {"dtype": dtype, **vocabulary, "datasets": entries}
    with atomic_file(f"{folder}/{NAME}") as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n")
    return index


def group_tokens(indexes: Sequence[str], first_documents: Ints) -> Ints:
    """Return the tokens of each group of a dataset: int64[groups].

    `indexes` are the .idx of its shards, by path or URI; `first_documents` the first of each, and the number of all.
    """
    totals = np.zeros(-(-int(first_documents[-1]) // GROUP), np.int64)

    def of_shard(shard: int) -> Ints:
        first, stop = first_documents[shard : shard + 2].tolist()
        count = stop - first
        tokens = read_lengths(indexes[shard], count)
        return np.add.reduceat(tokens, np.arange(-(first % GROUP), count, GROUP).clip(0))

    for first, tokens in zip(first_documents.tolist(), parallel_map(of_shard, range(len(indexes))), strict=False):
        totals[first // GROUP : first // GROUP + len(tokens)] += tokens
    return totals


def _schema(uri: str) -> pa.Schema:
    return pq.read_schema(open_file(uri))


def read_index(folder: Path, datasets: list[str]) -> dict[str, Any]:
    """Return the index of the shards in `folder`. Raises ValueError unless it lists all of `datasets`."""
    try:
        index: dict[str, Any] = json.loads(ensure_local(folder / NAME).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder}: {NAME} cannot be read ({error}); tokenize first") from error
    if not isinstance(index, dict) or not isinstance(index.get("datasets"), dict):
        raise ValueError(f"{folder}: {NAME} has no datasets; tokenize again")
    missing = [name for name in datasets if name not in index["datasets"]]
    if missing:
        known = ", ".join(index["datasets"])
        raise ValueError(f"sources: {folder} holds {known}, not {', '.join(missing)}; tokenize with this recipe")
    return index


def add_counts(totals: Counts, value: str, counts: list[int]) -> None:
    """Add tokens and documents of `value` to `totals`."""
    totals[value] = [total + count for total, count in zip(totals.get(value, [0, 0]), counts, strict=True)]


# Tokenization of curated files.


@dataclass(frozen=True)
class TokenJob:
    """The parameters of all work items; pickled to workers."""

    recipe: Recipe
    files: tuple[str, ...]
    """Curated files, `<domain>-NNNNN.parquet`, by path or URI; the items."""
    tokenizer: str
    folder: str
    threads: int

    def datasets(self, item: int) -> list[MixDataset]:
        """Return the datasets of the file's domain."""
        domain = self.files[item].rpartition("/")[2].rsplit("-", 1)[0]
        return [dataset for dataset in mix_datasets(self.recipe) if dataset.domain == domain]


class _DatasetBatch(NamedTuple):
    """The documents of one batch that belong to one dataset."""

    tokens: NDArray[Any]
    lengths: Ints
    documents: pa.Table


def token_dtype(recipe: Recipe, vocab_size: int) -> np.dtype[Any]:
    """Return the integer type for ids below `vocab_size`: uint16 or int32 (Megatron has no uint32).

    Raises ValueError if the recipe's type is too small.
    """
    dtype = recipe.tokens.dtype
    if dtype == "uint16" and vocab_size > 2**16:
        raise ValueError(
            f"tokens.dtype: uint16 holds 65,536 ids, the tokenizer has {vocab_size:,}; write uint32 or auto"
        )
    narrow = dtype == "uint16" or (dtype == "auto" and vocab_size < NARROW_VOCAB_SIZE)
    return np.dtype(np.uint16 if narrow else np.int32)


def tokenize(
    recipe: Recipe,
    documents: str | Path,
    tokenizer: str | Path,
    folder: str | Path,
    *,
    runner: Runner = run_serial,
    threads: int = 1,
) -> dict[str, Any]:
    """Write the training documents under `documents` as token shards into `folder`; skip shards that exist.

    All three are paths or URIs. `tokenizer` is a folder that `Tokenizer.save` wrote; an item encodes on `threads`
    threads and holds the tokens of one file in memory. Returns `tokens`, `documents` and `bytes`, each by domain; all
    three by dataset under `datasets`; tokens by domain and source under `sources`, by language under `languages`.
    Raises ValueError for a dtype that is too small, a domain without files, and a document whose `source_index` is not
    a source of the recipe.
    """
    encoder = Tokenizer.load(local_folder(str(tokenizer)))
    dtype = token_dtype(recipe, encoder.vocab_size)
    datasets = mix_datasets(recipe)
    domains = dict.fromkeys(dataset.domain for dataset in datasets)
    curated = f"{documents}/documents"
    names = [name for name in file_names(curated) if name.endswith(".parquet")]
    files: list[str] = []
    for domain in domains:
        domain_names = sorted((name for name in names if name.startswith(f"{domain}-")), key=_number)
        if not domain_names:
            raise ValueError(f"sources.{domain}: {curated} holds no {domain}-*.parquet; curate the domain first")
        files += [f"{curated}/{name}" for name in domain_names]
    job = TokenJob(recipe, tuple(files), str(tokenizer), str(folder), threads)
    done = {dataset.name: set(map(_number, _tables(folder, dataset.name))) for dataset in datasets}
    left = [
        item
        for item, file in enumerate(files)
        if not all(_number(file) in done[dataset.name] for dataset in job.datasets(item))
    ]
    runner(job, STEP, tokenize_file, left)
    vocabulary = {
        "vocab_size": encoder.vocab_size,
        "begin": encoder.start,
        "end": encoder.end,
        "tokenizer": encoder.digest,
    }
    index = write_index(folder, {dataset.name: dataset.domain for dataset in datasets}, dtype.name, vocabulary)
    return _metadata(index["datasets"], domains)


def tokenize_file(job: TokenJob, item: int) -> None:
    """Write the shards of one curated file."""
    encoder = _load_tokenizer(local_folder(job.tokenizer))
    dtype = token_dtype(job.recipe, encoder.vocab_size)
    datasets = job.datasets(item)
    batches_by_dataset: dict[str, list[_DatasetBatch]] = {dataset.name: [] for dataset in datasets}
    reader = pq.ParquetFile(open_file(job.files[item]))
    for record_batch in reader.iter_batches(batch_size=BATCH, columns=[*_CARRIED, "text", "split"]):
        train = record_batch.filter(pc.equal(record_batch.column("split"), "train"))
        if not train.num_rows:
            continue
        batch = pa.Table.from_batches([train])
        ids, offsets = encoder.encode_flat(batch["text"].combine_chunks(), threads=job.threads)
        sizes = pc.binary_length(batch["text"]).cast(pa.int64())
        columns = batch.select(_CARRIED).append_column("bytes", sizes)
        for dataset, chosen in _by_dataset(batch, datasets):
            lengths = np.diff(offsets)[chosen] + 2
            tokens = np.empty(int(lengths.sum()), dtype)
            add_begin_end(ids, offsets, chosen, encoder.start, encoder.end, tokens)
            batches_by_dataset[dataset.name].append(_DatasetBatch(tokens, lengths, columns.take(chosen).cast(_KEPT)))
    for name, batches in batches_by_dataset.items():
        lengths = np.concatenate([np.zeros(0, np.int64), *(batch.lengths for batch in batches)])
        table = pa.concat_tables([_KEPT.empty_table(), *(batch.documents for batch in batches)])
        write_shard(
            f"{job.folder}/{name}", _number(job.files[item]), [batch.tokens for batch in batches], lengths, table
        )


def write_shard(
    folder: str | Path, number: int, tokens: Sequence[NDArray[Any]], lengths: Ints, documents: pa.Table
) -> None:
    """Write shard `number` of the dataset in `folder`: the pair, then the table.

    `tokens` are arrays of ids, all uint16 or all int32; `lengths` the tokens of each document; `documents` has the
    columns of SCHEMA without offset and length. A shard without documents has a table and no pair.
    """
    if len(lengths):
        write_pair(f"{folder}/tokens-{number:05}", tokens, lengths)
    table = documents.append_column("offset", pa.array(np.cumsum(lengths) - lengths))
    table = table.append_column("length", pa.array(lengths)).select(SCHEMA.names).cast(SCHEMA)
    counts = {"tokens": int(lengths.sum()), "documents": len(lengths), "bytes": pc.sum(table["bytes"]).as_py() or 0}
    by: dict[str, Counts] = {}
    for column in COUNTED:
        groups = table.group_by(column).aggregate([("length", "sum"), ("length", "count")]).sort_by(column)
        columns = (groups[name].to_pylist() for name in (column, "length_sum", "length_count"))
        by[column] = {value: [total, count] for value, total, count in zip(*columns, strict=True)}
    table = table.replace_schema_metadata({"counts": json.dumps({**counts, "by": by})})
    write_table(table, f"{folder}/documents-{number:05}.parquet", ROW_GROUP)


def _tables(folder: str | Path, dataset: str) -> list[str]:
    """Return the tables of the shards of a dataset."""
    base = f"{folder}/{dataset}"
    return [f"{base}/{name}" for name in file_names(base) if name.startswith("documents-")]


def _number(file: str) -> int:
    return int(file.rpartition("-")[2].removesuffix(".parquet"))


_load_tokenizer = lru_cache(maxsize=1)(Tokenizer.load)  # a worker loads it once: 0.5 s for 128,000 tokens


def _by_dataset(batch: pa.Table, datasets: list[MixDataset]) -> Iterator[tuple[MixDataset, Ints]]:
    """Yield each dataset that has documents in the batch, with their row numbers."""
    own = {dataset.source_index: dataset for dataset in datasets if dataset.source_index is not None}
    pool = next((dataset for dataset in datasets if dataset.source_index is None), None)
    if not own:
        yield datasets[0], np.arange(len(batch))
        return
    sources = batch["source_index"].to_numpy()
    unknown = np.flatnonzero(~np.isin(sources, list(own))) if pool is None else np.zeros(0, np.int64)
    if len(unknown):
        row = int(unknown[0])
        raise ValueError(
            f"sources.{datasets[0].domain}: document {batch['id'][row]} comes from source {sources[row]}, the recipe "
            f"has {len(datasets)} sources; curate again with this recipe"
        )
    for number in sorted(set(sources.tolist()) & set(own)):
        yield own[number], np.flatnonzero(sources == number)
    pooled = np.flatnonzero(~np.isin(sources, list(own)))
    if pool is not None and len(pooled):
        yield pool, pooled


def _metadata(datasets: dict[str, Any], domains: dict[Domain, None]) -> dict[str, Any]:
    counts = ("tokens", "documents", "bytes")

    def tokens_by(column: str, of_datasets: list[dict[str, Any]]) -> dict[str, int]:
        totals: dict[str, int] = {}
        for dataset in of_datasets:
            for name, (tokens, _) in dataset["by"][column].items():
                totals[name] = totals.get(name, 0) + tokens
        return dict(sorted(totals.items()))

    members = {domain: [dataset for dataset in datasets.values() if dataset["domain"] == domain] for domain in domains}
    return {
        **{
            count: {domain: sum(dataset[count] for dataset in members[domain]) for domain in domains}
            for count in counts
        },
        "datasets": {name: {count: dataset[count] for count in counts} for name, dataset in datasets.items()},
        "sources": {domain: tokens_by("source", members[domain]) for domain in domains},
        "languages": tokens_by("language", list(datasets.values())),
    }
