"""datatrove's whole pipeline: jsonl, Gopher repetition and quality, MinHash in four stages, tokens on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.pipeline.dedup import MinhashDedupFilter
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter

from benchmarks.meter import cpu_seconds
from benchmarks.peers.datatrove_minhash import find_clusters
from benchmarks.peers.steps import reader, run_steps


def work(source: Path, folder: Path, tokenizer: str, alphabetic: float) -> dict[str, Any]:
    """Write tokens, with their index, of the documents that stay. Returns counts and CPU seconds by stage."""
    marks = [cpu_seconds()]
    filtered = folder / "filtered"
    filters = [GopherRepetitionFilter(), GopherQualityFilter(max_non_alpha_words_ratio=alphabetic)]
    run_steps([reader(source), *filters, JsonlWriter(str(filtered), compression=None)], folder, "filters")
    marks.append(cpu_seconds())
    remove = find_clusters(filtered / "00000.jsonl", folder)
    marks.append(cpu_seconds())
    tokens = DocumentTokenizer(
        str(folder / "tokens"), tokenizer, eos_token="<|end_of_text|>", shuffle_documents=False, save_filename="bench"
    )
    run_steps([reader(filtered / "00000.jsonl"), MinhashDedupFilter(remove), tokens], folder, "tokens")
    marks.append(cpu_seconds())
    with (filtered / "00000.jsonl").open("rb") as lines:
        after_filters = sum(1 for _ in lines)
    index = next((folder / "tokens").glob("*.index"))
    stages = ("filters_cpu_s", "minhash_cpu_s", "tokens_cpu_s")
    spent = {name: round(stop - start, 2) for name, start, stop in zip(stages, marks, marks[1:], strict=False)}
    return {"after_filters": after_filters, "after_near": index.stat().st_size // 8, **spent}
