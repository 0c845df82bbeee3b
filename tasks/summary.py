"""The last lines of a run: what came of it, where it is, and what to try next."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from rich.markup import escape

from llama3.recipe.schedule import Schedule
from storage.artifact import Store
from tasks.runs import RunRecord, Runs
from tasks.tracking import tracking_uri

SAMPLE_CHARACTERS = 200


def summary_lines(root: Path, name: str) -> list[str]:
    """Return the summary of a finished run, one line each, with rich markup."""
    runs, store = Runs(root), Store(root)
    record, recipe = runs.find(name), runs.recipe(name)
    last = recipe.stages[-1].name
    trained = [span.name for span in Schedule(recipe).trained]
    checkpoint = store.at(record.steps[trained[-1]].artifact)
    evaluation = store.at(record.steps[f"evaluate-{last}"].artifact)
    scores = {key: value for key, value in evaluation.facts.items() if key.startswith("eval/")}
    colour = "green" if record.verdict == "promoted" else "red"
    minutes = (datetime.fromisoformat(record.ended) - datetime.fromisoformat(record.started)).total_seconds() / 60
    return [
        "",
        f"[bold]{name}[/] [{colour}]{record.verdict}[/] after {minutes:.1f} min, peak {record.peak_memory_gib} GiB",
        "  loss      " + " -> ".join(f"{loss:.3f}" for loss in _losses(store, record, trained)),
        "  scores    " + "  ".join(f"{key.removeprefix('eval/')} {value:.3f}" for key, value in sorted(scores.items())),
        f"  sample    [dim]{escape(_sample(evaluation.path))}[/]",
        f"  report    {runs.place(name) / 'report.html'}",
        f"  model     {checkpoint.path / 'model'}",
        f"  MLflow    {tracking_uri(root)}, run {name} ({record.mlflow_run})",
        "next:",
        "  herd up                                see it in Prefect and MLflow",
        f"  herd rerun {name} --from {trained[-1]} --set stages.{last}.average=2",
        f"  herd compare {name} {record.family}-{int(name.rsplit('-', 1)[1]) + 1}",
    ]


def _losses(store: Store, record: RunRecord, stages: list[str]) -> list[float]:
    """Return the first loss of the run and the last of every stage."""
    facts = [store.at(record.steps[stage].artifact).facts for stage in stages]
    return [facts[0]["first_loss"], *(fact["last_loss"] for fact in facts)]


def _sample(evaluation: Path) -> str:
    generations = json.loads((evaluation / "generations.json").read_text())
    first = generations[0]
    text = " ".join(f"{first['prompt']}{first['text']}".split())
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + " ..."
