"""Runs side by side: recipe fields and provenance that differ, results, and the address of MLflow's charts of them.

The tables are made from records and artifacts and need no server. Each run is compared with the first; whether a score
is better is judged like a candidate, on the documents and questions that both models answered.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean, harmonic_mean
from typing import Any
from urllib.parse import quote

from rich.table import Table

from herd.llama3.evaluate.compare import compare as paired_differences
from herd.llama3.evaluate.gate import number
from herd.llama3.evaluate.scores import LANGUAGE, MACRO, PREFIX, SCORES_FILE, Score, read_scores
from herd.llama3.recipe.load import resolved
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.significance import Difference
from herd.llama3.train import metrics
from herd.llama3.train.journal import read_series
from herd.storage.artifact import Artifact, Store, flatten
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.format import NO_CHANGE, format_change
from herd.tasks.runs.provenance import differences_line, provenance_facts
from herd.tasks.runs.records import RunRecord, Runs, is_merge
from herd.tasks.tracking.chart_views import TAG, chart_page, chart_view_key, chart_view_tag
from herd.tasks.tracking.mlflow_store import call_server, running_server
from herd.tasks.tracking.moved_root import read_access
from herd.tasks.tracking.steps import scores_of

AVERAGED = (metrics.TOKENS_PER_S, metrics.GOODPUT)
"""Series in the results, as the mean of their last tenth."""
LAST_TENTH = """
SELECT key, position, value FROM (
    SELECT key, position, value, count(*) OVER (PARTITION BY key) AS steps,
        row_number() OVER (PARTITION BY key ORDER BY position DESC) AS age
    FROM read_parquet($tables) WHERE list_contains($keys, key)
) WHERE age <= greatest(1, least(steps // 2, greatest(16, steps // 10)))
"""
"""The last points of each series, as many as `metrics.window` says."""
LOSS = "mean loss"
ORDER = (f"{PREFIX}bpb", LOSS, f"{PREFIX}bpb/", PREFIX, "throughput/", "time/", "")
"""Results in the order of a table: names, and beginnings of names."""
ARROWS = {"lower": "↓", "higher": "↑", "": ""}
WORDS = {True: "[green]better[/]", False: "[red]worse[/]", None: "[dim]unclear[/]"}
LOCAL_SERVER = "http://127.0.0.1:5000"
Values = dict[str, list[str]]
"""A value for each run, by name."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    record: RunRecord
    recipe: dict[str, str]
    """Fields by path."""
    made_with: dict[str, str]
    """Code, software, devices, layout and cluster."""
    results: dict[str, float]
    """Tokens trained on, mean loss of the last stage, means of AVERAGED, scores, costs."""
    evaluation: Artifact | None = None
    """The last one of its model."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """Of that evaluation."""

    @classmethod
    def read(cls, runs: Runs, store: Store, name: str) -> ComparedRun:
        """Read the run `name`. Raises ValueError if it does not exist or one of its artifacts was deleted."""
        record = runs.find(name)
        artifacts = [store.load(step.artifact) for name, step in record.steps.items() if name != "evaluate-champion"]
        merges = {artifact.key for artifact in artifacts if is_merge(artifact)}  # other models than that of the run
        artifacts = [a for a in artifacts if not merges & {a.key, a.manifest.inputs.get("checkpoint")}]
        stages = [artifact for artifact in artifacts if artifact.manifest.kind == "checkpoint"]
        results: dict[str, float] = {"tokens": 0}
        if stages:
            last = max(stages, key=lambda stage: int(stage.metadata["end"])).metadata
            results = {"tokens": int(last["end"]), LOSS: last["last_loss"]}
        tails = read_series([stage.path_of("metrics.parquet") for stage in stages], LAST_TENTH, keys=[*AVERAGED])
        for key, tail in tails.items():  # steps have equal tokens, not equal time
            values = [value for _, value in tail]
            results[key] = harmonic_mean(values) if key == metrics.TOKENS_PER_S else fmean(values)
        scored = [artifact for artifact in artifacts if artifact.manifest.kind in ("evaluation", "gate")]
        for artifact in scored:
            results |= scores_of(artifact)
        evaluation = next((artifact for artifact in reversed(scored) if SCORES_FILE in artifact.manifest.files), None)
        scores = read_scores(evaluation.path_of(SCORES_FILE).parent) if evaluation else {}
        results |= {f"cost/{name}": amount for name, amount in record.cost.items()}
        environments = [stage.metadata.get("environment", {}) for stage in stages]
        made_with = provenance_facts(record.code, record.provenance, environments)
        return cls(record, recipe_fields(runs.recipe(record.name)), made_with, results, evaluation, scores)

    def direction(self, key: str) -> str:
        """Return which values of a result are better, `lower` or `higher`; empty if neither is."""
        if key in self.scores:
            return self.scores[key].better
        if key.startswith((PREFIX, *AVERAGED)):
            return "lower" if key.startswith(f"{PREFIX}bpb") else "higher"
        return "lower" if key == LOSS else ""


def recipe_fields(recipe: Recipe) -> dict[str, str]:
    """Return the fields of a resolved recipe as text by path; a stage's path has its name."""
    plain = resolved(recipe)
    fields = flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}})
    return {
        path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for path, value in fields.items()
        if value is not None
    }


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    root: Root
    runs: list[ComparedRun]
    recipe: Values
    """Recipe fields that differ."""
    made_with: Values
    """Code, software, devices, layout and cluster that differ."""
    summary: str
    """`made_with` in a line; empty if nothing differs."""
    differences: list[Mapping[str, Difference]]
    """By run, its scores minus those of the first run, as far as both answered the same."""

    def results(self) -> Values:
        """Return verdict, tokens and results as text, without single languages and the macro means of domains."""
        keys = {key for run in self.runs for key in run.results if LANGUAGE not in key and f"{MACRO}/" not in key}
        return {
            "verdict": [run.record.verdict or run.record.state for run in self.runs],
            "tokens": [f"{run.results['tokens']:,}" for run in self.runs],
            **{
                key: [number(run.results[key]) if key in run.results else "" for run in self.runs]
                for key in sorted(keys - {"tokens"}, key=_place)
            },
        }

    def change(self, key: str, place: int) -> str:
        """Return the change of a result from the first run's in rich markup: `-2.0 % better`; empty if one lacks it."""
        first, run, difference = self.runs[0], self.runs[place], self.differences[place].get(key)
        if key not in run.results or key not in first.results:
            return ""
        direction = first.direction(key)
        points = key.startswith(PREFIX) and direction == "higher"
        text, word = format_change(run.results[key], first.results[key], points), ""
        if difference is not None and text != NO_CHANGE:
            worse, low, high = difference.worse
            word = WORDS[worse < 0 if low > 0 or high < 0 else None]
        elif key in first.scores and key in run.scores and first.scores[key].requests != run.scores[key].requests:
            word = "[yellow]other questions[/]"
        return f"{text} {word}".rstrip()

    def best(self, key: str) -> set[int]:
        """Return the places of the runs with the best value; none for a result without direction or if all agree."""
        values = {place: run.results[key] for place, run in enumerate(self.runs) if key in run.results}
        direction = self.runs[0].direction(key)
        if not direction or len({number(value) for value in values.values()}) < 2:
            return set()
        best = (min if direction == "lower" else max)(values.values())
        return {place for place, value in values.items() if value == best}

    def as_dict(self) -> dict[str, Any]:
        """Return the differences, a text for each run in the order of `runs`, and each run's results as numbers."""
        return {
            "runs": [run.record.name for run in self.runs],
            "recipe": self.recipe,
            "made_with": self.made_with,
            "results": [
                {"state": run.record.state, "verdict": run.record.verdict or None, **run.results} for run in self.runs
            ],
        }


def compare_runs(root: Root, names: Sequence[str]) -> Comparison:
    """Return the comparison of runs. Raises ValueError for fewer than two runs or an unknown one."""
    if len(names) < 2:
        raise ValueError(f"compare: {len(names)} run given; name at least two")
    runs, store = Runs(root), open_store(root)
    compared = [ComparedRun.read(runs, store, name) for name in names]
    recipe = side_by_side([run.recipe for run in compared])
    made_with = side_by_side([run.made_with for run in compared])
    differences = [_differences(runs, run, compared[0]) for run in compared]
    return Comparison(root, compared, dict(sorted(recipe.items())), made_with, differences_line(made_with), differences)


def _differences(runs: Runs, run: ComparedRun, first: ComparedRun) -> Mapping[str, Difference]:
    """Return the scores of `run` minus those of `first`; none for the same evaluation, or where samples are gone."""
    if run.evaluation is None or first.evaluation is None or run.evaluation.key == first.evaluation.key:
        return {}
    try:
        return paired_differences(runs.recipe(run.record.name), run.evaluation.path, first.evaluation.path)
    except (ValueError, OSError):
        return {}


def _place(key: str) -> tuple[int, str]:
    """Return the place of a result in a table: bits per byte and loss first."""
    beginnings = ("", "/")
    places = (i for i, name in enumerate(ORDER) if key == name or (name[-1:] in beginnings and key.startswith(name)))
    return next(places), key


def side_by_side(runs: Sequence[Mapping[str, str]]) -> Values:
    """Return the values that differ between runs; empty where a run has none."""
    values = {key: [run.get(key, "") for run in runs] for run in runs for key in run}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def comparison_tables(compared: Comparison) -> list[Table]:
    """Return three tables, a column per run: recipe fields that differ, with what else they were made, the results.

    Beside each result is its change from the first run; the best is bold, an arrow says which way is better.
    """
    names, results = [run.record.name for run in compared.runs], compared.results()
    tables = [Table(box=None, pad_edge=False, header_style="bold") for _ in range(3)]
    for table, title in zip(tables, ("recipe", "made with", "result"), strict=True):
        table.add_column(title, no_wrap=True)
    for table, values in zip(tables, (compared.recipe, compared.made_with), strict=False):
        for name in names:
            table.add_column(name, justify="right")
        for key, texts in (values or {"(no difference)": [""] * len(names)}).items():
            table.add_row(key, *texts)
    for place, name in enumerate(names):
        tables[2].add_column(name, justify="right")
        if place:
            tables[2].add_column("change")
    for key, texts in results.items():
        best, cells = compared.best(key), [f"{key} {ARROWS[compared.runs[0].direction(key)]}".rstrip()]
        for place, text in enumerate(texts):
            cells.append(f"[bold]{text}[/]" if place in best else text)
            cells += [compared.change(key, place)] if place else []
        tables[2].add_row(*cells)
    return tables


def comparison_url(compared: Comparison) -> str | None:
    """Prepare MLflow's charts of the runs and return their address; None if no MLflow server has all of the runs.

    Runs of one family get charts over tokens, those of several MLflow's plain comparison.
    """
    records = [run.record for run in compared.runs]
    # The password of a `herd up` is not in the environment of every shell.
    server, access = running_server(compared.root) or LOCAL_SERVER, {**read_access(compared.root), **os.environ}
    if not all(record.mlflow_experiment for record in records):
        return None
    run_ids, experiments = [record.mlflow_run for record in records], {record.mlflow_experiment for record in records}
    try:
        urllib.request.urlopen(f"{server}/health", timeout=2).close()
        known = [call_server(server, f"runs/get?run_id={run_id}", access=access)["run"]["data"] for run_id in run_ids]
    except (OSError, ValueError, KeyError):  # no MLflow, or one that does not have these runs
        return None
    if len(experiments) == 1:
        keys = {metric["key"] for data in known for metric in data.get("metrics", [])}
        created = round(max(datetime.fromisoformat(record.started).timestamp() for record in records) * 1000)
        key, experiment = chart_view_key(run_ids), records[0].mlflow_experiment
        tag = chart_view_tag(" and ".join(record.name for record in records), keys, created, run_ids)
        view = {"experiment_id": experiment, "key": TAG + key, "value": tag}
        with suppress(OSError):  # an account that may only read
            call_server(server, "experiments/set-experiment-tag", view, access)
            return chart_page(server, experiment, key)
    ids, spaces = (quote(json.dumps(value, separators=(",", ":"))) for value in (run_ids, sorted(experiments)))
    return f"{server}/#/compare-runs?runs={ids}&experiments={spaces}&workflowType=machine_learning"
