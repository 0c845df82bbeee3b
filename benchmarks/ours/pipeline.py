"""Our whole pipeline: jsonl, Gopher repetition and quality, MinHash with verification, tokens on disk.

The steps of a real run, one after another in this process: collect, annotate, curate, tokenize. The rules are those of
the peer; what it has no counterpart for (versions of a URL, common lines, mojibake) is off, but exact copies go and
line hashes are made, as in any run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.meter import cpu_seconds
from benchmarks.ours.setup import MEMORY, bench_recipe, quality
from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.shards import tokenize


def work(source: Path, folder: Path, tokenizer: str, alphabetic: float) -> dict[str, Any]:
    """Write token shards of the documents that stay. Returns counts and CPU seconds by stage."""
    rules: dict[str, Any] = {
        "repair": False,
        "dedup": {"url": "all", "bands": 14, "rows": 8},
        "lines": {"max_copies": None},
        "quality": quality(["repetition", "gopher"], alphabetic),
    }
    return produce(bench_recipe({"general": [source]}, rules), folder, Path(tokenizer), MEMORY)


def produce(recipe: Recipe, folder: Path, tokenizer: Path, memory: str) -> dict[str, Any]:
    """Run the steps of `recipe` in `folder`."""
    collected, annotated, curated = (folder / name for name in ("collected", "annotated", "curated"))
    for place in (collected, annotated, curated):
        place.mkdir()
    marks = [cpu_seconds()]
    collect(recipe, collected)
    marks.append(cpu_seconds())
    annotate(recipe, collected, annotated, run_serial, memory=memory)
    marks.append(cpu_seconds())
    facts = curate(recipe, collected, annotated, curated, folder / "scratch", run_serial, memory=memory)
    marks.append(cpu_seconds())
    tokenized = tokenize(recipe, curated, tokenizer, folder / "tokens")
    marks.append(cpu_seconds())
    stages = ("collect_cpu_s", "annotate_cpu_s", "curate_cpu_s", "tokens_cpu_s")
    spent = {name: round(stop - start, 3) for name, start, stop in zip(stages, marks, marks[1:], strict=False)}
    return {"documents": facts["documents"], "tokens": tokenized["tokens"], **spent}
