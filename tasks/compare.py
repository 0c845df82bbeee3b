"""Runs side by side: what differs in their recipes, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.table import Table

from llama3.recipe.load import resolved
from llama3.recipe.schema import Recipe
from storage.artifact import flatten
from tasks.runs import RunRecord, Runs
from tasks.tracking import CONFIGURED, Tracker

HEADLINES = ("train/loss", "eval/", "throughput/tokens_per_s", "time/goodput", "data/epochs/")


def comparison_tables(root: Path, names: list[str]) -> list[Table]:
    """Return two tables: recipe fields that differ, and headline metrics, a column per run.

    Raises ValueError for fewer than two runs or an unknown one.
    """
    records = _records(root, names)
    runs = Runs(root)
    recipes = [_fields(runs.recipe(record.name)) for record in records]
    metrics = [_metrics(root, record) for record in records]
    fields = _differing(recipes)
    keys = sorted({key for values in metrics for key in values})
    return [
        _table("recipe", names, [(key, [_text(recipe.get(key)) for recipe in recipes]) for key in fields]),
        _table("result", names, [(key, [_number(values.get(key)) for values in metrics]) for key in keys]),
    ]


def comparison_page(root: Path, names: list[str]) -> str:
    """Return the address of MLflow's comparison of the runs, or what to start to get one."""
    records = _records(root, names)
    server = CONFIGURED if CONFIGURED.startswith("http") else "http://127.0.0.1:5000"
    ids = quote(json.dumps([record.mlflow_run for record in records], separators=(",", ":")))
    experiments = quote(json.dumps(sorted({record.mlflow_experiment for record in records}), separators=(",", ":")))
    return f"{server}/#/compare-runs?runs={ids}&experiments={experiments} (start the server with: herd up)"


def _records(root: Path, names: list[str]) -> list[RunRecord]:
    if len(names) < 2:
        raise ValueError(f"compare: {len(names)} run given; name at least two")
    return [Runs(root).find(name) for name in names]


def _metrics(root: Path, record: RunRecord) -> dict[str, float]:
    """Return the last value of each headline metric of a run."""
    data = Tracker(root, record.family).client.get_run(record.mlflow_run).data
    return {key: value for key, value in data.metrics.items() if key.startswith(HEADLINES)}


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Return every field of the recipe under one dotted name, stages by theirs (`stages.main.until`)."""
    plain = resolved(recipe)
    return flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}})


def _differing(recipes: list[dict[str, Any]]) -> list[str]:
    keys = sorted({key for recipe in recipes for key in recipe})
    return [key for key in keys if len({_text(recipe.get(key)) for recipe in recipes}) > 1]


def _table(title: str, names: list[str], rows: list[tuple[str, list[str]]]) -> Table:
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
