"""Curation with and without the ledger of drops, in turns in one process, so that a busy machine slows both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from benchmarks.meter import cpu_seconds
from benchmarks.ours.setup import MEMORY, bench_recipe
from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.data.work_items import run_serial
from herd.llama3.data.write_shards import SPANS

ROUNDS = 5
RULES = {"quality": {"rules": ["gopher", "repetition"]}, "redact": ["email", "ip"]}


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Return the least CPU seconds of collect, annotate and curate with the ledger and without, and its bytes."""
    recipe = bench_recipe({"general": [source]}, RULES)
    spent: dict[str, list[float]] = {"with": [], "without": []}
    size = 0
    for _ in range(ROUNDS):
        for side, seconds in spent.items():
            place = folder / side
            for step in ("collected", "annotated", "curated"):
                (place / step).mkdir(parents=True)
            begun = cpu_seconds()
            collect(recipe, place / "collected")
            annotate(recipe, place / "collected", place / "annotated", run_serial, memory=MEMORY)
            folders = (place / "collected", place / "annotated", place / "curated", place / "scratch")
            if side == "with":
                curate(recipe, *folders, run_serial, memory=MEMORY)
                size = sum(path.stat().st_size for path in (place / "curated" / "drops").iterdir())
            else:
                with (
                    patch("herd.llama3.data.accounting.write_drops", lambda *_: None),
                    patch("herd.llama3.data.write_shards.document_spans", _no_spans),
                    patch("herd.llama3.data.dedup.lines.removed_spans", lambda *_: 0),
                ):
                    curate(recipe, *folders, run_serial, memory=MEMORY)
            seconds.append(cpu_seconds() - begun)
            shutil.rmtree(place)
    return {**{side: min(seconds) for side, seconds in spent.items()}, "bytes": size}


def _no_spans(texts: Any, *_: Any) -> Any:
    return pa.nulls(len(texts), SPANS)
