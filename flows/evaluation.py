"""The command `herd eval`: any model on any task, without a recipe, a server or a record in MLflow."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from flows.terminal import RootOption, mistakes, out, problems
from storage.filesystem import write_atomic
from storage.root import DEFAULT_ROOT, Root

if TYPE_CHECKING:
    from llama3.evaluate.evaluate import Evaluated
    from llama3.evaluate.scores import Score


def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A run, FAMILY@ALIAS, or a model folder of ours, Hugging Face's or Meta's format."),
    ],
    tasks: Annotated[
        list[str],
        typer.Argument(metavar="TASK...", help="Tasks and suites: names (mmlu, core, ...), YAML files, or folders."),
    ],
    data: Annotated[str | None, typer.Option(help="Folder of published sets.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions a task.", show_default=False)] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question.", show_default="the task's")
    ] = None,
    missing: Annotated[
        Literal["refuse", "skip"], typer.Option(help="What to do about a task without its files or its sandbox.")
    ] = "refuse",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    output: Annotated[Path | None, typer.Option(help="File for the JSON.", show_default=False)] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Folder for scores, samples and answers as Parquet.", show_default=False)
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model is.")] = "auto",
    threads: Annotated[int, typer.Option(envvar="HERD_THREADS", help="Processor threads; 0: all.")] = 0,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Score any model on any tasks, here and now: no recipe, no server, nothing recorded."""
    from llama3.evaluate.suites import asked_for
    from tasks.models import evaluate_folder, model_folder

    with mistakes():
        folder = model_folder(Root.of(root), model)
        asked = asked_for(tasks, data, limit, shots, missing)
        for name, why in asked.skipped.items():
            problems.print(f"[yellow]left out[/]  {escape(f'{name}: {why}')}")
        if not asked.tasks:
            raise ValueError(f"{', '.join(tasks)}: no task is left; give the folder of the files with --data")
        found = evaluate_folder(folder, asked, tables, threads or os.cpu_count() or 1, device)
        content = json.dumps(_content(model, found), indent=1, ensure_ascii=False)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(output, f"{content}\n")
    if json_:
        print(content)
    else:
        _show(found)


def _content(model: str, found: Evaluated) -> dict[str, Any]:
    """Return the results; numbers that are not known are null."""
    return {
        "model": model,
        "suite": found.asked.suite.name or None,
        "scores": {key: _numbers(score) for key, score in sorted(found.scores.items())},
        "skipped": found.asked.skipped,
        "too_long": found.too_long,
    }


def _numbers(score: Score) -> dict[str, Any]:
    names = ("value", "stderr", "low", "high", "n", "unjudged", "chance", "unit", "shots", "version", "requests")
    values = {name: getattr(score, name) for name in names}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def _show(found: Evaluated) -> None:
    from rich.table import Table

    table = Table("task", "score", "95 %", "n", "chance", "shots", "unit", "digest", box=None, pad_edge=False)
    for key, score in sorted(found.scores.items()):
        table.add_row(
            key.removeprefix("eval/"),
            f"{score.value:.4g}",
            score.interval(),
            f"{score.n:,}",
            "" if score.chance is None else f"{score.chance:.3g}",
            str(score.shots),
            score.unit,
            score.requests[:12],
        )
    out.print(table)
    for key, score in sorted(found.scores.items()):
        if score.unjudged:
            problems.print(f"[yellow]not judged[/]  {key}: {score.unjudged} questions; --tables shows why")
    for key, count in found.too_long.items():
        problems.print(f"[yellow]too long[/]  {key}: {count} questions do not fit the window, and count as wrong")
