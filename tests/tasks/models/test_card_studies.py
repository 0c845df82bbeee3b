"""What studies found is shown with a model and decides nothing that is made."""

from __future__ import annotations

from pathlib import Path

import yaml

from herd.llama3.data.readers.sources import fingerprint
from herd.llama3.recipe.load import digest, parse_recipe, resolved
from herd.llama3.recipe.schema import Recipe
from herd.storage.artifact import flatten
from herd.storage.filesystem import write_atomic
from herd.tasks.models.card import data_mix_digest, make_card
from tests.tasks.trained_run import TrainedRun

FOUND = {"study": "judge-cpu", "digest": "1a2b3c4d5e6f", "says": "helps", "score": "eval/bpb/math"}
STUDIED = [{"study": "mix-cpu", "digest": "0123456789ab", "changed": ["mix.base.math"]}]


def annotated(recipe: Recipe) -> Recipe:
    """Return the recipe as two studies leave it."""
    plain = resolved(recipe) | {"studies": STUDIED, "require_annealing_verdict": "helps"}
    plain["sources"]["math"][0]["annealing_verdict"] = {**FOUND, "gain": 0.012, "low": 0.008, "high": 0.016}
    return parse_recipe(plain, "annotated")


def test_no_artifact_s_key_knows_it(tmp_path: Path) -> None:
    plain = TrainedRun(tmp_path / "root").recipe
    judged = annotated(plain)
    assert digest(resolved(judged)) != digest(resolved(plain))
    assert fingerprint(judged) == fingerprint(plain)
    assert data_mix_digest(judged, "k", 5120) == data_mix_digest(plain, "k", 5120)


def test_the_card_and_the_parameters_of_the_run_show_it(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "root")
    before = make_card(run.root, "tiny-1", run.model, tmp_path, "hf", "bf16", "").digests
    judged = annotated(run.recipe)
    write_atomic(run.runs.local_recipe("tiny-1"), yaml.safe_dump(resolved(judged)))
    card = make_card(run.root, "tiny-1", run.model, tmp_path, "hf", "bf16", "")
    assert {name: text for name, text in card.digests.items() if name not in before} == {
        "changed by study 1": "mix-cpu 0123456789ab: mix.base.math",
        "math: x": "helps +0.0120 on eval/bpb/math, 95 % 0.0080..0.0160 (study judge-cpu 1a2b3c4d5e6f)",
    }
    assert card.training is not None
    assert "study: judge-cpu" in card.training.recipe
    assert flatten(resolved(judged), depth=2)["studies"] == STUDIED
