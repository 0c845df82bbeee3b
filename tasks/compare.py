"""Runs side by side: what differs in their recipes, what came of it, and where that is drawn.

Tables and a page of our own are made from records and artifacts and need no server; the page in MLflow is prepared
(`tasks.compare_view`) on the server that runs are tracked by, or that `herd up` starts.
"""

from __future__ import annotations

import json
import urllib.request
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from urllib.parse import quote

from rich.table import Table

from llama3.recipe.load import resolved
from llama3.recipe.schema import Recipe
from llama3.train import metrics
from storage.artifact import flatten
from storage.filesystem import write_atomic
from storage.remote_store import open_store
from storage.root import Root
from tasks.compare_page import Compared, Series, comparison_html, series_of
from tasks.compare_view import TAG, view_key, view_tag
from tasks.runs import RunRecord, Runs
from tasks.scores import scores_of
from tasks.tracking import Tracker
from tasks.tracking_uri import server_uri

LOCAL_SERVER = "http://127.0.0.1:5000"
FOLDER = "comparisons"
SHOWN = ("train/loss", "throughput/tokens_per_s", "time/goodput")
"""Series of whose last tenth the mean is in the table of results: the last batch alone says which domains it drew."""
Rows = list[tuple[str, list[str]]]
"""Names, each with its value in each run."""


class Comparison(NamedTuple):
    """Runs side by side."""

    names: list[str]
    runs: list[Compared]
    differences: Rows
    """Recipe fields that differ."""
    results: Rows
    """Headline results."""


def comparison(root: Root, names: list[str]) -> Comparison:
    """Return the comparison of runs. Raises ValueError for fewer than two runs or an unknown one."""
    compared = _compared(root, names)
    return Comparison(names, compared, differences(compared), results(compared))


def comparison_tables(made: Comparison) -> list[Table]:
    """Return two tables: recipe fields that differ, and headline results, a column per run."""
    return [_table("recipe", made.names, made.differences), _table("result", made.names, made.results)]


def write_comparison(root: Root, made: Comparison) -> Path:
    """Write the comparison as one HTML file that needs nothing else, and return it."""
    page = root.file(FOLDER, "-".join(made.names)[:200] + ".html")
    text = comparison_html(made.runs, made.differences, made.results)
    write_atomic(page, text)
    if not root.is_local:
        root.write(text, FOLDER, page.name)
    return page


def comparison_url(root: Root, made: Comparison) -> str:
    """Return the address of the comparison: in MLflow if a server answers, else of the page of our own.

    The page of our own is written in any case.
    """
    page = write_comparison(root, made)
    return mlflow_url(root, [run.record for run in made.runs]) or page.as_uri()


def mlflow_url(root: Root, records: list[RunRecord]) -> str:
    """Return the address of MLflow's prepared charts of the runs, or "" if no MLflow server answers.

    Runs of one family are shown with charts over tokens, those of several with MLflow's plain comparison.
    """
    server = server_uri() or LOCAL_SERVER
    tracker = Tracker(root, records[0].family)
    if not _answers(server) or not all(record.mlflow_experiment for record in records):
        return ""
    experiments = {record.mlflow_experiment for record in records}
    if len(experiments) > 1:
        return _plain(server, records)
    key = tracker.reach.attempt(lambda: _prepare(tracker, records), "")
    shown = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={key}"
    return f"{server}/#/experiments/{experiments.pop()}/runs?{shown}" if key else _plain(server, records)


def differences(compared: list[Compared]) -> Rows:
    """Return the recipe fields that differ, with their value in each run."""
    recipes = [_fields(run.recipe) for run in compared]
    keys = sorted({key for recipe in recipes for key in recipe})
    rows = [(key, [_text(recipe.get(key)) for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def results(compared: list[Compared]) -> Rows:
    """Return headline results, with their value in each run."""
    last = [
        {**{key: _last_tenth(run.series[key]) for key in SHOWN if run.series.get(key)}, **run.scores}
        for run in compared
    ]
    keys = sorted({key for values in last for key in values})
    rows = [(key, [_number(values.get(key)) for values in last]) for key in keys]
    verdicts = [("verdict", [run.record.verdict or run.record.state for run in compared])]
    return [*verdicts, ("tokens", [f"{run.position:,}" for run in compared]), *rows]


def _last_tenth(series: Series) -> float:
    return fmean(value for _, value in series[-metrics.window(len(series)) :])


def _prepare(tracker: Tracker, records: list[RunRecord]) -> str:
    """Write the view of the runs into their experiment and return its key; raises MlflowException."""
    run_ids = [record.mlflow_run for record in records]
    keys = {key for run_id in run_ids for key in tracker.client.get_run(run_id).data.metrics}
    created = round(max(datetime.fromisoformat(record.started).timestamp() for record in records) * 1000)
    key, names = view_key(run_ids), [record.name for record in records]
    tracker.client.set_experiment_tag(records[0].mlflow_experiment, TAG + key, view_tag(names, run_ids, keys, created))
    return key


def _plain(server: str, records: list[RunRecord]) -> str:
    ids = quote(json.dumps([record.mlflow_run for record in records], separators=(",", ":")))
    experiments = quote(json.dumps(sorted({record.mlflow_experiment for record in records}), separators=(",", ":")))
    return f"{server}/#/compare-runs?runs={ids}&experiments={experiments}&workflowType=machine_learning"


def _answers(server: str) -> bool:
    try:
        with urllib.request.urlopen(f"{server}/health", timeout=2):
            return True
    except (OSError, ValueError):
        return False


def _records(root: Root, names: list[str]) -> list[RunRecord]:
    if len(names) < 2:
        raise ValueError(f"compare: {len(names)} run given; name at least two")
    return [Runs(root).find(name) for name in names]


def _compared(root: Root, names: list[str]) -> list[Compared]:
    runs, store = Runs(root), open_store(root)
    found = []
    for record in _records(root, names):
        made = [store.at(step.artifact) for name, step in record.steps.items() if name != "evaluate-champion"]
        stages = [artifact for artifact in made if artifact.manifest.kind == "checkpoint"]
        scores: dict[str, float] = {}
        for artifact in made:
            if artifact.manifest.kind in ("evaluation", "advance"):
                scores |= scores_of(artifact)
        found.append(Compared(record, runs.recipe(record.name), stages, series_of(stages), scores))
    return found


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Return every field of the recipe under one dotted name, stages by theirs (`stages.main.until`)."""
    plain = resolved(recipe)
    return flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}})


def _table(title: str, names: list[str], rows: Rows) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)
    for name in names:
        table.add_column(name, justify="right")
    for key, values in rows or [("(no difference)", [""] * len(names))]:
        table.add_row(key, *values)
    return table


def _text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
