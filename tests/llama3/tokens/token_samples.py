"""Recipes, curated documents and shards for the tests of this package."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.mix import MixDataset, mix_datasets
from herd.llama3.tokens.shards import write_index, write_shard
from herd.llama3.tokens.stream import TokenStream

BASE = {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"}
ANNEAL = {"general": "30%", "math": "40%", "code": "22%", "multilingual": "8%"}
BEGIN, END = 300_000_000, 300_000_001


def stage(name: str, tokens: int, seq_len: int = 8, batch: int | None = None, mix: str = "base") -> dict[str, Any]:
    return {
        "name": name,
        "for": f"{tokens} tokens",
        "seq_len": seq_len,
        "batch": f"{batch or seq_len} tokens",
        "mix": mix,
    }


def recipe(
    stages: list[dict[str, Any]],
    mixes: dict[str, dict[str, str]] | None = None,
    unit: int | None = None,
    weights: dict[str, list[float]] | None = None,
    **more: Any,
) -> Recipe:
    sources = {
        domain: [{"uri": "x", "weight": weight} for weight in (weights or {}).get(domain, [])] or [{"uri": "x"}]
        for domain in DOMAINS
    }
    tokens = {"max_epochs": 1e6, **({"chunk_tokens": f"{unit} tokens"} if unit else {}), **more.pop("tokens", {})}
    return Recipe.model_validate(
        {
            "name": "sample",
            "sources": sources,
            "tokenizer": {"train": {"vocab": 300}},
            "tokens": tokens,
            "mix": mixes or {"base": BASE, "anneal": ANNEAL},
            "model": {"preset": "8b"},
            "lr": {"peak": 1e-3, "warmup": "1 steps", "cosine": {"to": 1e-4, "over": "1M"}},
            "stages": stages,
            **more,
        }
    )


def write_shards(
    folder: Path,
    asked: Recipe,
    lengths: list[list[int]],
    cuts: int = 3,
    sources: Sequence[str] = ("s",),
    dtype: str = "int32",
) -> Path:
    """Write shards whose token says where it comes from: dataset x 1,000,000 + place in the dataset's bins.

    Dataset n has documents of `lengths[n % len(lengths)]` tokens, `cuts` of them in a shard; sources, languages and
    licenses take turns.
    """
    for number, dataset in enumerate(mix_datasets(asked)):
        sizes = np.array(lengths[number % len(lengths)], np.int64)
        tokens = (number * 1_000_000 + np.arange(sizes.sum())).astype(dtype)
        ends = np.cumsum(sizes)
        for shard, first in enumerate(range(0, len(sizes), cuts)):
            rows = range(first, min(first + cuts, len(sizes)))
            part = tokens[ends[rows[0]] - sizes[rows[0]] : ends[rows[-1]]]
            write_shard(
                folder / dataset.name, shard, [part], sizes[rows.start : rows.stop], documents(dataset, rows, sources)
            )
    return index(folder, asked, dtype)


def index(folder: Path, asked: Recipe, dtype: str = "int32") -> Path:
    """Write the index of the shards in `folder` and return it."""
    vocabulary = {"vocab_size": END + 1, "begin": BEGIN, "end": END, "tokenizer": "none"}
    write_index(folder, {dataset.name: dataset.domain for dataset in mix_datasets(asked)}, dtype, vocabulary)
    return folder


def documents(dataset: MixDataset, rows: range, sources: Sequence[str] = ("s",)) -> pa.Table:
    """Return the tables' rows of the documents `rows` of a dataset."""
    numbers = np.array(rows)
    repeated = {
        "source": np.array(sources)[numbers % len(sources)],
        "language": np.array(["en", "de", "fr"])[numbers % 3],
        "license": np.array(["CC0", "MIT"])[numbers // 2 % 2],
    }
    return pa.table(
        {
            "id": [f"{dataset.name}:{row}" for row in rows],
            "domain": [dataset.domain] * len(rows),
            **{name: pa.array(values.tolist()) for name, values in repeated.items()},
            "source_index": pa.array(numbers % len(sources), pa.int32()),
            "quality": np.zeros(len(rows)),
            "bytes": np.full(len(rows), 4),
        }
    )


def synthetic_shards(
    folder: Path,
    asked: Recipe,
    counts: Sequence[int],
    mean: int,
    shards: int = 4,
    sources: Sequence[str] = ("s",),
    hollow: bool = False,
    dtype: str = "int32",
) -> Path:
    """Write shards of random tokens for measurements: `counts[n]` documents in dataset n, about `mean` tokens each.

    Lengths are exponential, at least 2. With `hollow` the bins are holes of the right size: any number of documents
    without the disk, and all tokens are 0. 100 Mtok/s.
    """
    random = np.random.default_rng(0)
    for dataset, count in zip(mix_datasets(asked), counts, strict=True):
        for shard in range(shards):
            rows = range(shard * count // shards, (shard + 1) * count // shards)
            sizes = 2 + random.exponential(mean - 2, len(rows)).astype(np.int64)
            tokens = [] if hollow else [random.integers(0, 2**15, sizes.sum(), dtype)]
            write_shard(folder / dataset.name, shard, tokens, sizes, documents(dataset, rows, sources))
            if hollow:
                with (folder / dataset.name / f"tokens-{shard:05}.bin").open("r+b") as file:
                    file.truncate(int(sizes.sum()) * np.dtype(dtype).itemsize)
    return index(folder, asked, dtype)


def stream(folder: Path, asked: Recipe, lengths: list[list[int]] | None = None) -> TokenStream:
    if not (folder / "tokens.json").exists():
        write_shards(folder, asked, lengths or LENGTHS)
    return TokenStream(folder, asked)


LENGTHS = [[3, 11, 2, 40, 7, 5], [9, 2, 2, 13, 4, 4, 6], [30], [2] * 15]
"""Documents of each dataset: short ones, one longer than a unit, a dataset of a single document."""


def write_documents(folder: Path, documents: dict[str, list[dict[str, Any]]], files: int = 1) -> Path:
    """Write curated documents: by domain, `text` and optionally `split` and `source_index`; so many files each."""
    (folder / "documents").mkdir(parents=True)
    for domain, rows in documents.items():
        table = [
            {
                "id": hashlib.sha256(row["text"].encode()).hexdigest()[:16],
                "domain": domain,
                "source": f"{domain}/{row.get('source_index', 0)}",
                "source_index": 0,
                "language": ("en", "de")[len(row["text"]) % 2],
                "url": "",
                "license": "unknown",
                "quality": 0.5,
                "split": "train",
                **row,
            }
            for row in rows
        ]
        table.sort(key=lambda row: str(row["id"]))
        for file in range(files):
            part = table[file * len(table) // files : (file + 1) * len(table) // files]
            schema = pa.Table.from_pylist(table).schema
            pq.write_table(pa.Table.from_pylist(part, schema), folder / "documents" / f"{domain}-{file:05}.parquet")
    return folder
