"""Our side of the job of the `scale/peers` rows: jsonl, two bounds of words, exact copies, near copies, Parquet.

The steps of a real run, with their ledger; every rule but these is off. Candidates of MinHash are verified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.ours.setup import MEMORY, bench_recipe, quality
from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.data.work_items import run_serial

WORDS, MEAN_WORD = (50, 100_000), (3, 10)
"""Least and most words of a document, and characters of its mean word."""
BANDS, ROWS, SHINGLE = 14, 8, 5


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Write the documents that stay; return their URLs."""
    bounds = dict(zip(("min_words", "max_words", "min_mean_word", "max_mean_word"), (*WORDS, *MEAN_WORD), strict=True))
    rules: dict[str, Any] = {
        "repair": False,
        "dedup": {"url": "all", "bands": BANDS, "rows": ROWS, "shingle": SHINGLE},
        "lines": {"max_copies": None},
        "quality": {**quality([], None), **bounds},
    }
    recipe = bench_recipe({"general": [source]}, rules)
    collected, annotated, curated = (folder / name for name in ("collected", "annotated", "curated"))
    for place in (collected, annotated, curated):
        place.mkdir()
    collect(recipe, collected)
    annotate(recipe, collected, annotated, run_serial, memory=MEMORY)
    curate(recipe, collected, annotated, curated, folder / "scratch", run_serial, memory=MEMORY)
    return {"kept": pq.read_table(curated / "documents", columns=["url"])["url"].to_pylist()}
