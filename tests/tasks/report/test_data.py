from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.load import parse_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train import metrics
from herd.llama3.train.journal import Series
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.tasks.report.data import MixRow, _mix, _stage_row, data_page
from herd.tasks.report.run import render_data
from tests.tasks.standing_root import tiny


def a_recipe(folder: Path, checkout: Path) -> Recipe:
    """Write documents with copies, a menu line, mail addresses and an evaluation set of which one example leaked."""
    rng = random.Random(5)
    vocabulary = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000)]
    texts = [" ".join(rng.choices(vocabulary, k=80)) for _ in range(120)]
    examples = [" ".join(rng.choices(vocabulary, k=30)) for _ in range(20)]
    texts += [f"{text} more" for text in texts[:6]] + [f"{texts[9]} {examples[3]}"]
    texts += [f"{text}\nHome | About | Contact us" for text in texts[20:40]] + ["short"] * 3
    lines = [{"text": text, "url": f"https://h.org/{n}", "license": "CC0-1.0"} for n, text in enumerate(texts)]
    (folder / "web.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n")
    (folder / "exam.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in examples))
    share = {"general": "100%"}
    data = yaml.safe_load((checkout / "recipes" / "quickstart.yaml").read_text()) | {
        "sources": {"general": [{"uri": str(folder / "web.jsonl"), "language": "en"}]},
        "mix": {"base": share, "annealing": share},
        "curate": {
            "on_error": "skip",
            "decontaminate": [{"name": "exam", "uri": str(folder / "exam.jsonl"), "fields": ["question"]}],
        },
    }
    return parse_recipe(data, "test recipe")


def curated(folder: Path, recipe: Recipe) -> Artifact:
    """Return the curated documents of `recipe`, committed to a store in `folder`."""
    collected, annotated, scratch = (folder / name for name in ("collected", "annotated", "scratch"))
    for path in (collected, annotated, scratch):
        path.mkdir()
    collect(recipe, collected)
    annotate(recipe, collected, annotated, run_serial)
    store = Store(folder / "root")
    with store.staging() as staged:
        facts = curate(recipe, collected, annotated, staged, scratch)
        return store.commit(ArtifactSpec("curated", "page", 1, {}, {}), staged, facts, "page-1", "test", 1.0)


def test_the_page_shows_every_finding(tmp_path: Path, checkout: Path) -> None:
    page = data_page("page-1", curated(tmp_path, a_recipe(tmp_path, checkout)), None)
    read = sum(documents for outcome in page.outcomes for documents, _ in outcome.domains.values())
    assert read == 120 + 6 + 1 + 20 + 3 + 1
    dropped = {step.title: step.dropped for step in page.funnel}
    assert dropped["not read"] == 1
    assert dropped["rules"] == 3
    assert dropped["evaluation sets"] == 1
    assert dropped["near duplicates"] >= 6
    (exam,) = page.contamination
    assert (exam["examples"], exam["flagged"], exam["confirmed"], exam["precision"]) == (20, 1, 1, 1.0)
    kept, held_out = (
        sum(outcome.domains["general"][0] for outcome in page.outcomes if outcome.name == name)
        for name in ("kept", "held_out")
    )
    assert held_out > 0
    assert [(row["kept"], row["held_out"]) for row in page.sources] == [(kept, held_out)], "one word, one number"
    assert sum(row["documents"] for row in page.languages) == kept
    assert sum(row["documents"] for row in page.lengths if row["kept"]) == kept
    html = render_data(page)
    for text in (
        "bad json",
        "A line that is not a JSON object.",
        "home | about | contact us",
        "exam",
        "https://h.org/9",
        "that many documents share, or that repeat themselves",
    ):
        assert text in html
    assert html.count("<svg") == 1
    assert not re.search(r"\bNone\b|\bnan\b", html)


def test_the_figures_of_a_stage_are_of_its_own_positions() -> None:
    span = Schedule(tiny()).span("main")
    facts = {"start": span.start, "end": span.end, "steps": span.steps, "first_loss": 5.0, "last_loss": 4.0}
    artifact: Any = SimpleNamespace(metadata=facts, manifest=SimpleNamespace(seconds=60.0))

    def curve(before: float, *own: float, after: float) -> Series:
        positions = [span.start + 1, span.start + 2, span.end][-len(own) :]
        return [(span.start, before), *zip(positions, own, strict=True), (span.end + 1, after)]

    series = {
        metrics.TOKENS_PER_S: curve(1.0, 30.0, 90.0, 20.0, after=500.0),
        metrics.GOODPUT: curve(0.1, 0.7, 0.9, after=0.2),
        metrics.HELD_OUT: curve(9.0, 3.0, 2.5, after=8.0),
        metrics.fraction("math"): curve(0.9, 0.5, 0.25, after=0.8),
        metrics.target_fraction("math"): curve(0.9, 0.2, 0.3, after=0.8),
    }
    row = _stage_row(span, artifact, series, "created")
    assert (row.tokens_per_s, row.goodput, row.bits_per_byte) == (30.0, 0.9, 2.5)
    assert (row.tokens, row.steps, row.first_loss, row.last_loss) == (span.tokens, span.steps, 5.0, 4.0)
    assert _mix("main", artifact, series) == [MixRow("main", "math", 0.3, 0.25, span.tokens // 4)]
