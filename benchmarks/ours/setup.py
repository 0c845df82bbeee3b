"""The recipe, the job and the readers that our measured sides share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from herd.llama3.data.mapreduce import CurationJob, CurationStage, Shard
from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.schema import Recipe

MEMORY = "1GiB"
_REPEATING = ["domain", "source", "language", "license", "date"]
_OFF: dict[str, Any] = {
    "min_chars": None, "max_chars": None, "max_symbol_chars": None, "max_duplicate_lines": None, "max_top_ngram": {},
}  # fmt: skip
"""Our defaults that no peer has."""


def quality(rules: Sequence[str], alphabetic: float | None) -> dict[str, Any]:
    """Return the `quality` section with the published bounds of `rules` and nothing else."""
    return {**_unnamed(rules), "rules": list(rules), "min_alphabetic_words": alphabetic}


def _unnamed(rules: Sequence[str]) -> dict[str, Any]:
    """Return our own defaults, switched off, but for what the rule sets fill in."""
    ours = dict(_OFF)
    if "repetition" in rules:
        del ours["max_duplicate_lines"], ours["max_top_ngram"]
    return ours


def bench_recipe(
    sources: Mapping[Domain, Sequence[Path | str]],
    curate: Mapping[str, Any],
    tokens: int = 1_000_000,
    seq_len: int = 8192,
) -> Recipe:
    """Return a recipe of one stage over `sources` (domain -> files or patterns), shared evenly by the domains."""
    named = [domain for domain in DOMAINS if domain in sources]
    shares = [100 - 100 // len(named) * (len(named) - 1)] + [100 // len(named)] * (len(named) - 1)
    stage = {
        "name": "bench",
        "for": f"{tokens} tokens",
        "seq_len": seq_len,
        "batch": f"{seq_len} tokens",
        "mix": "bench",
    }
    return Recipe.model_validate(
        {
            "name": "bench",
            "sources": {domain: [{"uri": str(file), "language": "en"} for file in sources[domain]] for domain in named},
            "curate": {"validation_fraction": "0%", **curate},
            "tokenizer": {"use": "tokenizer.model"},
            "tokens": {"max_epochs": 1e9},
            "mix": {"bench": {domain: f"{share}%" for domain, share in zip(named, shares, strict=True)}},
            "model": {"preset": "8b"},
            "lr": {"peak": 1e-3, "warmup": "1 steps", "cosine": {"to": 1e-4, "over": "1M"}},
            "stages": [stage],
        }
    )


def one_shard(source: Path, folder: Path, curate: Mapping[str, Any], *stages: CurationStage) -> CurationJob:
    """Return the job of `stages` over the text shard `source`; its attributes, not written yet, are under `folder`."""
    recipe = bench_recipe({"general": [source]}, curate)
    size = pq.read_metadata(source).num_rows
    shard = Shard(0, "general", str(source), f"{folder}/attributes.parquet", size, source.stat().st_size)
    return CurationJob(recipe, (shard,), f"{folder}/steps", memory=MEMORY, stages=stages)


def write_attributes(job: CurationJob, documents: pa.Table, **columns: Any) -> None:
    """Write the attributes of the job's only shard: the columns of `documents` but the text, then `columns`."""
    table = documents.drop_columns(["text"])
    for name, values in columns.items():
        table = table.append_column(name, values if isinstance(values, pa.Array) else pa.array(values))
    write_kept(table, Path(job.shards[0].attributes))


def write_kept(documents: pa.Table, path: Path) -> None:
    """Write documents without compression, as the peers do."""
    pq.write_table(documents, path, compression="none", use_dictionary=_REPEATING)
