"""`tokens.json`: what a folder of token shards holds, so that opening a stream reads one small file.

Made from what each shard's table says of itself in its Parquet footer, never counted again from tokens. What this
gives up: a shard that is added later is not seen until the index is written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from storage.filesystem import write_atomic
from storage.lazy import brought

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
