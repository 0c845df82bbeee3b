"""Rows about growth: what curation costs on corpora of four sizes, as work items of a corpus 64 times as large.

Text per shard, documents per reducer and DuckDB's memory are a 64th of the engine's, so a few hundred megabytes have as
many shards and hash ranges as tens of gigabytes. Text per shard is the same at all sizes, so shards grow with the
corpus: whatever reads every shard in every work item shows as an exponent above 1.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.corpus import SEED, Page, cut, plant, read_texts, write_jsonl
from benchmarks.inputs import letters
from benchmarks.measure import Cost
from benchmarks.meter import cpu_seconds
from benchmarks.ours.setup import bench_recipe
from benchmarks.rows import Row, measured
from benchmarks.session import Session
from llama3.data.mapreduce import Runner, run_serial
from llama3.data.text.normalize import normalize
from storage.processes import peak_rss

SMALLEST = {"small": 5_000_000, "full": 20_000_000}
"""Bytes of text of the smallest corpus; the others have 2, 4 and 8 times as much."""
GROWTH = (1, 2, 4, 8)
SCALE = 64
"""Of the engine's constants, what the benchmark sets is so much smaller."""
CONSTANTS = {
    "llama3.data.write_shards": ("SHARD_BYTES",),
    "llama3.data.collect": ("ITEM_BYTES", "MOST_TEXT"),
    "llama3.data.curate": ("PART_DOCUMENTS",),
}
"""Module -> its constants that say how much text or how many documents one work item has."""
MEMORY = "256MiB"
FILE_BYTES = 900_000
"""Text of an input file: below a scaled shard, so that each file is one work item and one shard."""
GROWN_BYTES = 1.53
"""Bytes of a corpus for each byte of different text, see `corpus.plant`."""
QUESTIONS, QUESTION_WORDS, LEAKS = 200, 25, 0.005
"""Evaluation questions, their words, and the share of documents that end with one."""
MOJIBAKE = "The mus\u00c3\u00a9e was clos\u00c3\u00a9 when the visitors came.\n\n"
"""For the warm-up: the repair of such text compiles functions that few documents need."""


# The corpus: different text at any size, with copies, near copies, versions, common lines and questions across files.


def write_corpus(folder: Path, texts: Sequence[str], size: int) -> int:
    """Write jsonl files with about `size` bytes of text into `folder`/text, and `questions.jsonl`; return the bytes.

    `texts` repeat with their letters exchanged by another permutation in each round, so that no shingle, word or line
    is in two rounds. What is planted lies in files of chance.
    """
    chance = random.Random(SEED)
    pieces = [piece for text in texts for piece in cut(text, chance)]
    questions = [" ".join(piece.split()[:QUESTION_WORDS]).translate(letters(chance)) for piece in pieces[:QUESTIONS]]
    (folder / "text").mkdir(parents=True)
    (folder / "questions.jsonl").write_text("".join(json.dumps({"question": line}) + "\n" for line in questions))
    originals: list[Page] = []
    total = 0
    while total < size / GROWN_BYTES:
        table = letters(chance)
        for piece in pieces:
            originals.append(Page(piece.translate(table), f"https://bench.example/{len(originals)}"))
            total += originals[-1].size
            if total >= size / GROWN_BYTES:
                break
    pages = plant(originals, chance)
    chance.shuffle(pages)
    written, files, batch, filled = 0, 0, list[Page](), 0
    for place, planted in enumerate(pages):
        leak = f"\n{chance.choice(questions)}" if chance.random() < LEAKS else ""
        page = Page(planted.text + leak, planted.url, planted.date)
        batch.append(page)
        filled += page.size
        if filled >= FILE_BYTES or place + 1 == len(pages):
            write_jsonl(batch, folder / "text" / f"{files:05}.jsonl")
            written, files, batch, filled = written + filled, files + 1, [], 0
    return written


# One process that curates a corpus, and counts.


def scale_down() -> None:
    """Give this process work items of a 64th of the size. Raises AttributeError if a constant has another name now."""
    for name, constants in CONSTANTS.items():
        module = import_module(name)
        for constant in constants:
            setattr(module, constant, getattr(module, constant) // SCALE)


@dataclass
class Counts:
    """What a process did so far, by step of curation."""

    opened: int = 0
    """Files that Python opened; DuckDB and Arrow open theirs without telling it."""
    steps: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step -> items, CPU seconds, peak MB of the process, read calls and MB read."""

    def listen(self) -> None:
        """Count files opened from now on, to the end of the process."""

        def heard(event: str, _: tuple[Any, ...]) -> None:
            self.opened += event == "open"

        sys.addaudithook(heard)

    @contextmanager
    def step(self, name: str, items: int = 0) -> Iterator[None]:
        """Add to step `name` what the block costs."""
        _forget_peak()
        cpu, before = cpu_seconds(), _io()
        yield
        after, line = _io(), self.steps.setdefault(name, {"items": 0, "cpu_s": 0, "peak_mb": 0, "reads": 0, "mb": 0})
        line["items"] += items
        line["cpu_s"] = round(line["cpu_s"] + cpu_seconds() - cpu, 4)
        line["peak_mb"] = max(line["peak_mb"], round(peak_rss() / 1e6, 1))
        line["reads"] += after["syscr"] - before["syscr"]
        line["mb"] = round(line["mb"] + (after["rchar"] - before["rchar"]) / 1e6, 1)

    def runner(self, job: Any, step: str, work: Any, items: Sequence[int]) -> None:
        """Do the items here, one after another."""
        with self.step(step, len(items)):
            run_serial(job, step, work, items)


def _forget_peak() -> None:
    """Let the peak of this process' memory begin again, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _io() -> dict[str, int]:
    """Return the counters of this process' input and output: of reads `syscr` (calls) and `rchar` (bytes)."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return {"syscr": 0, "rchar": 0}
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Collect, annotate and curate the corpus `source` in `folder`, in this process. Returns costs and counts."""
    from llama3.data.annotate import annotate
    from llama3.data.collect import collect
    from llama3.data.curate import curate

    global _counts
    if _counts is None:  # this process repeats: the constants are divided and the hook is added once
        _counts = Counts()
        _counts.listen()
        scale_down()
    counts, opened = _counts, _counts.opened
    counts.steps = {}
    recipe = corpus_recipe(str(source))
    runner: Runner = counts.runner
    collected, annotated, curated, scratch = (folder / name for name in ("collected", "annotated", "curated", "work"))
    for place in (collected, annotated, curated, scratch):
        place.mkdir()
    marks = [cpu_seconds()]
    collect(recipe, collected, runner)
    marks.append(cpu_seconds())
    annotate(recipe, collected, annotated, runner, memory=MEMORY)
    marks.append(cpu_seconds())
    facts = curate(recipe, collected, annotated, curated, scratch, runner, memory=MEMORY)
    marks.append(cpu_seconds())
    stages = ("collect_cpu_s", "annotate_cpu_s", "curate_cpu_s")
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {
        "documents": sum(facts["documents"].values()),
        **{name: round(stop - start, 3) for name, start, stop in zip(stages, marks, marks[1:], strict=False)},
        "items": sum(int(line["items"]) for line in counts.steps.values()),
        "written": len({(stat.st_dev, stat.st_ino) for stat in files}),
        "written_mb": round(sum({stat.st_ino: stat.st_size for stat in files}.values()) / 1e6, 1),
        "opened": counts.opened - opened,
        "reads": sum(int(line["reads"]) for line in counts.steps.values()),
        "read_mb": round(sum(line["mb"] for line in counts.steps.values()), 1),
        "peak_mb": max(line["peak_mb"] for line in counts.steps.values()),
        "steps": counts.steps,
    }


_counts: Counts | None = None


def corpus_recipe(corpus: str) -> Any:
    """Return the recipe of the default rules over `corpus`, and its questions to decontaminate from."""
    questions = {"name": "questions", "uri": f"{corpus}/questions.jsonl", "fields": ["question"]}
    return bench_recipe({"general": [f"{corpus}/text/*.jsonl"]}, {"decontaminate": [questions]})


# The rows.


@dataclass(frozen=True)
class Size:
    """One corpus, and what it cost."""

    bytes: int
    files: int
    cost: Cost


def sizes_of(run: Session) -> list[Size]:
    """Return the four corpora with their costs, made and measured when a row first asks."""

    def measure() -> list[Size]:
        given = run.settings
        texts = [normalize(text) for text in read_texts(given.corpus)]
        sizes = []
        warm_up = given.folder / "scale" / "warm-up"
        write_corpus(warm_up, [MOJIBAKE * 60, *texts], 2 * FILE_BYTES)
        run.bench.cost("curation_scale", warm_up, warm_up)  # what numba compiles is on disk from here on
        for growth in GROWTH:
            folder = given.folder / "scale" / f"x{growth}"
            size = write_corpus(folder, texts, growth * SMALLEST[given.size])
            cost = run.bench.cost("curation_scale", folder, warm_up)
            sizes.append(Size(size, len(os.listdir(folder / "text")), cost))
        return sizes

    found: list[Size] = run.once("scale", measure)
    return found


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return k of value = c * size^k, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def grows(fact: str) -> Callable[[Session, str], Row]:
    """Return the measure of how `fact` grows with the bytes of the corpus, as an exponent."""

    def measure(run: Session, name: str) -> Row:
        sizes = sizes_of(run)
        values = [size.cost.cpu_s if fact == "cpu_s" else float(size.cost.facts[fact]) for size in sizes]
        note = f"{fact} " + ", ".join(f"{value:,.1f}" if fact == "cpu_s" else f"{value:,.0f}" for value in values)
        note += " at " + ", ".join(f"{size.bytes / 1e6:,.0f}" for size in sizes)
        note += f" MB in {', '.join(str(size.files) for size in sizes)} files"
        return measured(name, exponent([size.bytes for size in sizes], values), note, **_detail(sizes))

    return measure


def memory(run: Session, name: str) -> Row:
    """Peak memory of the process with the largest corpus over that with the second smallest."""
    sizes = sizes_of(run)
    peaks = [size.cost.facts["peak_mb"] for size in sizes]
    return measured(name, peaks[-1] / peaks[1], f"{', '.join(f'{peak:,.0f}' for peak in peaks)} MB", peaks=peaks)


def _detail(sizes: Sequence[Size]) -> dict[str, Any]:
    return {
        "sizes": [
            {
                "mb": round(size.bytes / 1e6, 1),
                "files": size.files,
                "cpu_s": round(size.cost.cpu_s, 3),
                **size.cost.facts,
            }
            for size in sizes
        ]
    }
