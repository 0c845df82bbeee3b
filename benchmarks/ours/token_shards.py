"""Token shards made up for the mix and the stream: four domains, documents of about a thousand tokens.

Not measured. For the mix only the lengths matter, so its bins are files with nothing in them (10 million documents
would fill 40 GB); for the stream they are real, in the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.ours.setup import bench_recipe
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.kernels import Ints
from herd.llama3.tokens.shards import write_index, write_shard

MEAN_TOKENS = 1_040
PER_SHARD = 100_000
SOURCES = 4
"""Sources in each domain, pooled; the realized mix is counted by source."""
VOCABULARY = 128_000


def stream_recipe(tokens: int, seq_len: int) -> Recipe:
    """Return a recipe over all domains with the published mix (arXiv 2407.21783, section 3.1.2).

    `tokens` is a multiple of `seq_len`, or the run would end at the last whole sequence.
    """
    shares = {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"}
    sources = {domain: [Path("unused")] for domain in DOMAINS}
    plain = bench_recipe(sources, {}, tokens, seq_len).model_dump(mode="json", by_alias=True, exclude_none=True)
    return Recipe.model_validate({**plain, "mix": {"bench": shares}})


def make_shards(folder: Path, documents: int, empty: bool, vocabulary: int = VOCABULARY) -> None:
    """Write the shards of `documents` documents, spread over the domains, and their index into `folder`.

    With `empty`, the tokens are holes in sparse files.
    """
    chance = np.random.Generator(np.random.PCG64(7))
    for domain in DOMAINS:
        for number, count in enumerate(_cut(documents // len(DOMAINS))):
            lengths = 2 + chance.geometric(1 / (MEAN_TOKENS - 2), count)
            tokens = _tokens(0 if empty else int(lengths.sum()), vocabulary, chance)
            write_shard(folder / domain, number, [tokens], lengths, _table(domain, number, lengths))
            os.truncate(folder / domain / f"tokens-{number:05}.bin", int(lengths.sum()) * tokens.itemsize)
    special = {"vocab_size": vocabulary + 256, "begin": vocabulary, "end": vocabulary + 1, "tokenizer": "made up"}
    write_index(folder, {domain: domain for domain in DOMAINS}, "int32", special)


def _cut(documents: int) -> Iterator[int]:
    for start in range(0, documents, PER_SHARD):
        yield min(PER_SHARD, documents - start)


def _tokens(count: int, vocabulary: int, chance: np.random.Generator) -> NDArray[np.int32]:
    return chance.integers(0, vocabulary, count, np.int32)


def _table(domain: str, number: int, lengths: Ints) -> pa.Table:
    """Return the rows of a shard's table, but for what `write_shard` adds."""
    count = len(lengths)
    places = np.arange(count) % SOURCES
    repeated: dict[str, Any] = {
        "domain": pa.array([domain] * count),
        "source": pa.array([f"source-{place}" for place in places]),
        "source_index": pa.array(places, pa.int32()),
        "language": pa.array(["en"] * count),
        "license": pa.array(["unknown"] * count),
        "quality": pa.array(np.zeros(count)),
        "bytes": pa.array(lengths * 4),
    }
    return pa.table({"id": [f"{number:08x}{place:024x}" for place in range(count)], **repeated})
