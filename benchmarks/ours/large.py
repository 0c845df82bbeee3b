"""Our whole pipeline over a folder of jsonl files, with all default steps: what the memory row runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.ours.pipeline import produce
from benchmarks.ours.setup import bench_recipe


def work(source: Path, folder: Path, tokenizer: str, memory: str) -> dict[str, Any]:
    """Write token shards of the documents that stay; DuckDB has `memory`. Returns counts and CPU seconds by stage."""
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    return produce(bench_recipe({"general": files}, {}), folder, Path(tokenizer), memory)
