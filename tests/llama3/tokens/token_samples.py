"""Recipes, curated documents and shards for the tests of this room."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS
from llama3.tokens.mix import leaves_of
from llama3.tokens.shards import LeafWriter
from llama3.tokens.stream import TokenStream

BASE = {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"}
ANNEAL = {"general": "30%", "math": "40%", "code": "22%", "multilingual": "8%"}
BEGIN, END = 300_000_000, 300_000_001


def stage(name: str, tokens: int, seq: int = 8, batch: int | None = None, mix: str = "base") -> dict[str, Any]:
    return {"name": name, "for": f"{tokens} tokens", "seq": seq, "batch": f"{batch or seq} tokens", "mix": mix}


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
    tokens = {"max_epochs": 1e6, **({"unit": f"{unit} tokens"} if unit else {}), **more.pop("tokens", {})}
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


def write_shards(folder: Path, asked: Recipe, lengths: list[list[int]], shard_tokens: int = 97) -> Path:
    """Write shards whose token says where it comes from: leaf x 1,000,000 + place in the leaf's bins."""
    index: dict[str, Any] = {"dtype": "uint32", "end": END, "leaves": {}}
    for number, leaf in enumerate(leaves_of(asked)):
        documents = lengths[number % len(lengths)]
        with LeafWriter(leaf, folder / leaf.name, np.dtype("<u4"), shard_tokens) as writer:
            for row, length in enumerate(documents):
                ids = [number * 1_000_000 + writer.tokens + place for place in range(length)]
                writer.add({"id": f"{leaf.name}:{row}", "text": "", "source": "s", "language": "en"}, ids)
        index["leaves"][leaf.name] = {"shards": writer.shards}
    (folder / "tokens.json").write_text(json.dumps(index))
    return folder


def stream(folder: Path, asked: Recipe, lengths: list[list[int]] | None = None) -> TokenStream:
    if not (folder / "tokens.json").exists():
        write_shards(folder, asked, lengths or LENGTHS)
    return TokenStream(folder, asked)


LENGTHS = [[3, 11, 2, 40, 7, 5], [9, 2, 2, 13, 4, 4, 6], [30], [2] * 15]
"""Documents of each leaf: short ones, one longer than a unit, a leaf of a single document."""


def write_documents(folder: Path, documents: dict[str, list[dict[str, Any]]]) -> Path:
    """Write curated documents: by domain, `text` and optionally `split` and `source_index`."""
    (folder / "documents").mkdir(parents=True)
    for domain, rows in documents.items():
        table = [
            {
                "id": hashlib.sha256(row["text"].encode()).hexdigest()[:16],
                "domain": domain,
                "source": f"{domain}/{row.get('source_index', 0)}",
                "source_index": 0,
                "language": "en",
                "url": "",
                "licence": "unknown",
                "split": "train",
                **row,
            }
            for row in rows
        ]
        table.sort(key=lambda row: str(row["id"]))
        pq.write_table(pa.Table.from_pylist(table), folder / "documents" / f"{domain}-00000.parquet")
    return folder
