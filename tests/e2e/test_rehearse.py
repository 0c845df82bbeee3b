"""`herd rehearse` on the 8B and 405B recipes: the whole chain in small, and mistakes that only a run finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Herd, NewHerd

DOMAINS = ("general", "math", "code", "multilingual")
CLUSTER = """
fabric: roce-24k
processes: 256
micro_batch: 1
layout: {zero: 3}
stages: {long: {layout: {cp: 8, zero: 3}}, anneal: {layout: {cp: 8, zero: 3}}}
"""


@pytest.fixture(scope="module")
def rehearsing(new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Herd:
    return new_herd(tmp_path_factory.mktemp("rehearsals"))


def rehearse(herd: Herd, name: str, *overrides: str, cluster: str = "", status: int = 1) -> list[str]:
    """Return the faults of the recipe on the session's text, whose repetitions are not limited."""
    folder = Path(herd.recipe).parent
    changes = [
        *(f"sources.{domain}.0.uri={folder}/{domain}.jsonl" for domain in DOMAINS),
        *("evaluate.suite=quick", "evaluate.final=quick", "evaluate.data=null", "tokens.max_epochs=1e12"),
        # installed documents are manuals: rules for web text keep few of them
        *("curate.quality={rules: [], max_divergence: null}", "curate.quality_for={}"),
        *overrides,
    ]
    words = [word for change in changes for word in ("--set", change)]
    file = folder / "cluster.yaml"
    file.write_text(cluster or CLUSTER)
    herd("rehearse", f"recipes/llama3-{name}.yaml", "--cluster", str(file), *words, status=status)
    page = herd.root / "rehearsals" / f"llama3-{name}" / "rehearsal.json"
    found = json.loads(page.read_text())
    assert isinstance(found["faults"], list)
    return [text for text in found["faults"] if not text.startswith("root: ")]  # this disk is too small for an 8B


def proven(herd: Herd, name: str) -> dict[str, str]:
    page = herd.root / "rehearsals" / f"llama3-{name}" / "rehearsal.json"
    return dict(json.loads(page.read_text())["proven"])


@pytest.mark.slow
def test_the_8b_recipe_is_run_in_small_to_a_promoted_and_exported_model(rehearsing: Herd) -> None:
    assert rehearse(rehearsing, "8b") == []
    found = proven(rehearsing, "8b")
    assert found["layouts"].startswith("built at full size: ramp-4k 32 layers, ")
    assert list(found) == ["layouts", "data", "training", "recovery", "evaluation", "promotion", "export"]
    assert "ramp-4k, main, long, anneal" in found["training"]
    assert found["recovery"].endswith("attempt 2 went on from a checkpoint")
    assert found["promotion"] == "the gate decided: promoted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tokens.max_epochs=4", "more than tokens.max_epochs 4 allows"),
        ("curate.languages=[sw]", "step curate: sources.multilingual: nothing is left to train on"),
        ("sources.code.0.text=content", "sources.code.0.text: "),
        ("curate.quality.min_words=100000", "nothing is left to train on"),
    ],
)
def test_mistakes_in_the_data_are_found(rehearsing: Herd, override: str, says: str) -> None:
    assert any(says in text for text in rehearse(rehearsing, "8b", override))


@pytest.mark.slow
def test_a_checkpoint_folder_that_cannot_be_written_fails_the_first_stage(rehearsing: Herd) -> None:
    faults = rehearse(rehearsing, "8b", cluster=f"{CLUSTER}checkpoints: /proc/herd\n")
    assert any(text.startswith("step ramp-4k: ") for text in faults)


@pytest.mark.slow
def test_the_405b_recipe_runs_every_axis_and_both_gates_and_is_evaluated_in_parts(rehearsing: Herd) -> None:
    cluster = """
fabric: roce-24k
processes: 16384
micro_batch: 1
layout: {tp: 8, pp: 16}
stages:
  long: {layout: {tp: 8, cp: 16, pp: 16}}
  anneal: {layout: {tp: 8, cp: 16, pp: 16}}
"""
    faults = rehearse(rehearsing, "405b", "stages.long.seq_len=[16384, 131072]", cluster=cluster)
    assert faults == []
    found = proven(rehearsing, "405b")
    assert "layout axes: tp, cp, pp, dp" in found["training"]
    assert "gate-long-" in found["evaluation"]
