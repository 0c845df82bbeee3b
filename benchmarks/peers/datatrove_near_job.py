"""datatrove's side of the job of the `scale/peers` rows: no step for exact copies, which its MinHash removes too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datatrove.pipeline.dedup import MinhashDedupFilter
from datatrove.pipeline.filters import GopherQualityFilter
from datatrove.pipeline.writers import JsonlWriter

from benchmarks.peers.datatrove_minhash import find_clusters
from benchmarks.peers.steps import reader, run_steps

OTHERS: dict[str, Any] = dict.fromkeys(
    ("max_symbol_word_ratio", "max_bullet_lines_ratio", "max_ellipsis_lines_ratio", "max_non_alpha_words_ratio",
     "min_stop_words", "stop_words")
)  # fmt: skip
"""Its other rules, off."""


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Write the documents that stay; return their URLs."""
    filtered, kept = folder / "filtered", folder / "kept"
    rule = GopherQualityFilter(50, 100_000, 3, 10, **OTHERS)
    run_steps([reader(source), rule, JsonlWriter(str(filtered), compression=None)], folder, "filters")
    remove = find_clusters(filtered / "00000.jsonl", folder)
    steps = [reader(filtered / "00000.jsonl"), MinhashDedupFilter(remove), JsonlWriter(str(kept), compression=None)]
    run_steps(steps, folder, "kept")
    with (kept / "00000.jsonl").open() as lines:
        return {"kept": [_url(json.loads(line)) for line in lines]}


def _url(record: dict[str, Any]) -> str:
    """Return the URL; each pass of reading and writing puts metadata one level deeper."""
    while "url" not in record:
        record = record["metadata"]
    return str(record["url"])
