"""The last lines of a run: what came of it, where it is, and what to try next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.markup import escape

from llama3.evaluate.scores import Score, read_scores
from llama3.recipe.schedule import StageSpan
from storage.artifact import Artifact, Store
from storage.object_artifact import open_store
from storage.root import Root
from tasks.format import bits_per_byte, command
from tasks.runs.records import RunRecord, Runs, trained_stages
from tasks.tracking.mlflow_store import tracking_uri
from tasks.tracking.steps import SCORE

SAMPLE_CHARACTERS = 200
SCORES_A_LINE = 3


def summary_lines(root: Root, name: str, options: Sequence[str] = ()) -> list[str]:
    """Return the summary of a run that ended, one line each, with rich markup; what it has not come to is left out.

    `options` are those of the command that a rerun needs again, such as the cluster.
    """
    runs, store = Runs(root), open_store(root)
    record, recipe = runs.find(name), runs.recipe(name)
    spans = trained_stages(recipe, record)
    trained = [span.name for span in spans]
    colour = {"promoted": "green", "refused": "red"}.get(record.verdict, "yellow")
    verdict = record.verdict or f"stopped after {record.until or 'its last step'}"
    minutes = (datetime.fromisoformat(record.ended) - datetime.fromisoformat(record.started)).total_seconds() / 60
    peak = f", peak {record.peak_memory_gib} GiB" if record.peak_memory_gib else ""
    return [
        "",
        f"[bold]{name}[/] [{colour}]{verdict}[/] after {minutes:.1f} min{peak}",
        *_results(store, record, spans),
        f"  report    {runs.place(name) / 'report.html'}",
        *(f"  model     {_place(store, record, stage)}/model" for stage in trained[-1:]),
        f"  MLflow    {tracking_uri(root)}, run {name} ({record.mlflow_run})",
        "next:",
        f"  {escape(command(root, 'up')):<38} see it in Prefect and MLflow",
        *(f"  {escape(line)}" for line in _rerun(root, record, spans, options)),
    ]


def _results(store: Store, record: RunRecord, spans: list[StageSpan]) -> list[str]:
    """Return losses, scores and a sample of the newest model that was scored."""
    lines = []
    if spans:
        facts = [store.at(record.steps[span.name].artifact).facts for span in spans]
        means = [facts[0]["first_loss"], *(fact["last_loss"] for fact in facts)]
        lines.append(f"  loss      {' -> '.join(f'{loss:.3f}' for loss in means)}, means over a tenth of each stage")
        held_out = " -> ".join(filter(None, map(bits_per_byte, facts)))
        lines += [f"  held out  {held_out} bits per byte, at the end of each stage"] if held_out else []
    scored = [step for span in spans if (step := f"evaluate-{span.stage.name}") in record.steps]  # not the champion's
    if scored:
        evaluation = store.at(record.steps[scored[-1]].artifact)
        lines += _scores(evaluation)
        lines.append(f"  sample    [dim]{escape(_sample(evaluation.part('generations.json')))}[/]")
    return lines


def _scores(evaluation: Artifact) -> list[str]:
    """Return the scores with their 95 % intervals, a few a line; of parts of a score only those of `bpb`."""
    found = [(key.removeprefix(SCORE), score) for key, score in sorted(read_scores(evaluation.path).items())]
    shown = [(key, score) for key, score in found if "/" not in key or key.startswith("bpb/")]
    words = [f"{key} {score.value:.3f}{_interval(score)}{_unjudged(score)}" for key, score in shown]
    lines = [words[place : place + SCORES_A_LINE] for place in range(0, len(words), SCORES_A_LINE)]
    return [f"  {'' if place else 'scores':<10}{'  '.join(line)}" for place, line in enumerate(lines)]


def _interval(score: Score) -> str:
    return f" ({told})" if (told := score.interval(".3f")) else ""


def _unjudged(score: Score) -> str:
    return f" [yellow]{score.unjudged} questions not judged[/]" if score.unjudged else ""


def _place(store: Store, record: RunRecord, stage: str) -> str:
    return store.at(record.steps[stage].artifact).uri.removeprefix("file://")


def _rerun(root: Root, record: RunRecord, spans: list[StageSpan], options: Sequence[str]) -> list[str]:
    """Return a rerun of the last stage, and what compares it with this run."""
    if not spans:
        return []
    last = spans[-1]
    change = f"stages.{last.stage.name}.average=2"
    numbers = [int(one.name.rsplit("-", 1)[1]) for one in Runs(root).all() if one.family == record.family]
    return [
        command(root, "rerun", record.name, "--from", last.name, "--set", change, *options),
        command(root, "compare", record.name, f"{record.family}-{max(numbers) + 1}"),
    ]


def _sample(file: Path) -> str:
    generations = json.loads(file.read_text())
    first = generations[0]
    text = " ".join(f"{first['prompt']}{first['text']}".split())
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + " ..."
