"""A small comparison by `herd study run`, and its runs each by `herd run`: what the study adds to the sum of its
variants.

All begin from copies of one root in which text is curated and tokenized, so both sides train and score and nothing
else, which their records are asked to confirm. Costs are CPU time of whole trees of processes. What this gives up:
each run alone starts Python, Prefect and MLflow anew, as a user's would, so the study may cost less than its variants;
what it spends outside its variants once it runs is the figure of its record, which is wall time, and the cost of the
same command given again, which finds every run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.process_tree import tree_cost
from herd.llama3.recipe.load import load_recipe, resolved, to_yaml
from herd.llama3.studies.expand import ExpandedStudy, load_study

NAME = "bench-study"
VARIANT_FIELDS: Mapping[str, list[str]] = {"steady": [], "short": ["lr.warmup=10 steps"]}
DATA = ("collect", "annotate", "curate", "tokenizer", "tokenize")
"""Steps that are done before anything is measured."""


@dataclass(frozen=True)
class StudyCost:
    """What a study and its runs cost."""

    cpu_s: float
    """Of the study, with all its runs."""
    again_cpu_s: float
    """Of the same command once more, when every run is there: all that the study itself does, and starting."""
    variants: Mapping[str, float]
    """CPU seconds of each run alone, by its name."""
    seconds: float
    """Wall time of the study by its record: from its first run to its verdict."""
    variant_seconds: float
    """Of that, inside its runs."""


def study_cost(herd: Sequence[str], recipe: Path, tokens: str, folder: Path) -> StudyCost:
    """Run a study of two variants and two seeds of `recipe`, and its runs alone, below the empty `folder`.

    Raises ValueError for a recipe that cannot be studied, RuntimeError for a command that fails or work that differs.
    """
    file = study_file(recipe, tokens, folder)
    expanded = load_study(file)
    recipes = variant_recipes(expanded, folder)
    environment = run_environment(folder)
    data = folder / "data"
    first = next(iter(recipes.values()))
    tree_cost(_run(herd, first, data, DATA[-1]), folder / "data.log", environment)
    of_study = _copy(data, folder / "study")
    command = [*herd, "study", "run", str(file), "--root", str(of_study)]
    cost = tree_cost(command, folder / "study.log", environment)
    record = json.loads((of_study / "studies" / NAME / "study.json").read_text())
    again = tree_cost(command, folder / "again.log", environment)
    alone = {name: _alone(herd, one, data, folder, environment) for name, one in recipes.items()}
    confirm(of_study, len(recipes))
    return StudyCost(cost.cpu_s, again.cpu_s, alone, record["seconds"], record["variant_seconds"])


def study_file(recipe: Path, tokens: str, folder: Path) -> Path:
    """Write the study: the recipe's first stage, `tokens` long, as it is and with a shorter warm-up."""
    stage = {**resolved(load_recipe(recipe))["stages"][0], "until": tokens, "for": None}
    study = {
        "name": NAME,
        "recipe": str(recipe.absolute()),
        "set": [f"stages={json.dumps([stage])}", f"lr.cosine.over={tokens}", "evaluate.after=[]"],
        "seeds": [1, 2],
        "compare": {
            "control": "steady",
            "varies": ["lr.warmup"],
            "variants": {"steady": [], "short": ["lr.warmup=10 steps"]},
        },
    }
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(study))
    return file


def variant_recipes(expanded: ExpandedStudy, folder: Path) -> dict[str, Path]:
    """Write the recipe of each run and return it by the run's name."""
    written = {}
    for run in expanded.runs:
        path = folder / f"{run.variant.name}-{run.repeat}.yaml"
        path.write_text(to_yaml(run.recipe))
        written[run.name] = path
    return written


def run_environment(folder: Path) -> dict[str, str]:
    """Return the environment of both sides: one thread, and a Prefect of its own that the data's run has set up."""
    prefect = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HERD_", "MLFLOW_"))}
    return {**kept, **prefect, "OMP_NUM_THREADS": "1", "HERD_THREADS": "1"}


def _run(herd: Sequence[str], recipe: Path, root: Path, until: str) -> list[str]:
    return [*herd, "run", str(recipe), "--root", str(root), "--until", until]


def _copy(data: Path, root: Path) -> Path:
    return Path(shutil.copytree(data, root, symlinks=True))


def _alone(herd: Sequence[str], recipe: Path, data: Path, folder: Path, environment: Mapping[str, str]) -> float:
    """Return the CPU time of one run by itself, in a root where its data lie."""
    root = _copy(data, folder / f"alone-{recipe.stem}")
    cost = tree_cost(_run(herd, recipe, root, "evaluate"), folder / f"{recipe.stem}.log", environment)
    confirm(root, 1)
    return cost.cpu_s


def confirm(root: Path, runs: int) -> None:
    """Raise RuntimeError unless so many runs under `root` trained and scored a model, and took their data as found."""
    trained = [record for record in _records(root) if set(record["steps"]) - set(DATA)]
    if len(trained) != runs:
        raise RuntimeError(f"{root.name}: {len(trained)} runs trained, not {runs}; the costs cannot be compared")
    for record in trained:
        odd = [name for name, step in record["steps"].items() if step["outcome"] != _expected(name)]
        if odd:
            raise RuntimeError(f"{record['name']} in {root.name}: {', '.join(odd)} not as expected; nothing to compare")


def _expected(step: str) -> str:
    return "reused" if step in DATA else "created"


def _records(root: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(root.glob("runs/*/run.json"))]
