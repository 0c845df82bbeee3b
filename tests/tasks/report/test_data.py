from __future__ import annotations

import json
import random
import re
from pathlib import Path

import yaml

from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.data.mapreduce import run_serial
from herd.llama3.recipe.load import parse_recipe
from herd.llama3.recipe.schema import Recipe
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.tasks.report.data import data_page
from herd.tasks.report.run import render_data


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
        "menus and the like, which many documents share",
    ):
        assert text in html
    assert html.count("<svg") == 1
    assert not re.search(r"\bNone\b|\bnan\b", html)
