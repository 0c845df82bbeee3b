"""Commands for those who use a model: `herd generate | export`."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from flows.cli.errors import RootOption, mistakes, out, problems
from storage.filesystem import write_atomic
from storage.root import DEFAULT_ROOT, Root

if TYPE_CHECKING:
    from llama3.evaluate.evaluate import EvaluationResult
    from llama3.evaluate.scores import Score
    from tasks.models.lookup import Written


_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
"""Control characters -> pictures of them."""


def add_uses(app: typer.Typer) -> None:
    """Give `app` the commands of this file."""
    for command in (generate, export):
        app.command()(command)


def generate(
    model: Annotated[str, typer.Argument(help="A run, FAMILY@ALIAS such as quickstart@champion, or a model folder.")],
    prompt: Annotated[
        str, typer.Option(help="Text to continue; - takes standard input, without the newline at its end.")
    ] = "The",
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 80,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share, up to 1.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text to end before; may be given several times.")] = None,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Continue a text with a model, as it is written.

    A model that was only pretrained continues text and knows no chat: there is no template. The text goes to
    standard output, how fast it came to standard error.
    """
    from tasks.models.lookup import generate_text, model_folder

    with mistakes():
        given = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        folder = model_folder(Root.of(root), model)
        pieces, written = generate_text(folder, given, tokens, temperature, top_p, seed, stop or ())
        _show_export(given, dim=True)
        with suppress(KeyboardInterrupt):  # what was written stays, and counts
            for piece in pieces:
                _show_export(piece)
        _show_export("\n")
    problems.print(f"[dim]{_told(written)}[/]")


def _show_export(text: str, dim: bool = False) -> None:
    """Print `text` as it is, tabs too; on a terminal without the characters by which it could steer that."""
    if out.is_terminal:
        shown = text.translate(_VISIBLE)
        text = typer.style(shown, dim=True) if dim else shown
    out.file.write(text)
    out.file.flush()


def _told(written: Written) -> str:
    from storage.processes import peak_rss

    speed = f", {written.tokens_per_s:.1f} tokens/s" if written.tokens > 1 else ""
    size = peak_rss() / 2**30
    return f"{written.tokens} tokens{speed}, first after {written.first_s:.2f} s, peak memory {size:.2f} GiB"


def export(
    model: Annotated[str, typer.Argument(help="A run, FAMILY@ALIAS, or a model folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    format_: Annotated[
        Literal["hf", "meta", "meta-safetensors", "gguf", "mlflow"], typer.Option("--format", help="Who is to read it.")
    ] = "hf",
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Number format of the weights.")] = "bf16",
    parts: Annotated[int, typer.Option(min=1, help="Model-parallel files; format meta only.")] = 1,
    licence: Annotated[str, typer.Option(help="Of the weights, for the card, such as apache-2.0.")] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Write a model, with its card, as others read it: Hugging Face, Meta, GGUF, or MLflow to serve."""
    from tasks.models.export import export_model

    with mistakes():
        export_model(Root.of(root), model, target, format_, dtype, parts, licence)
        out.print(f"wrote {target}")


# The command `herd eval`: any model on any task, without a recipe, a server or a record in MLflow.


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
    from llama3.evaluate.suite import asked_for
    from tasks.models.lookup import evaluate_folder, model_folder

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
        _show_scores(found)


def _content(model: str, found: EvaluationResult) -> dict[str, Any]:
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


def _show_scores(found: EvaluationResult) -> None:
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


# The command for those who measure: `herd requests`, which writes down what a suite would ask.


def add_requests(app: typer.Typer) -> None:
    """Give `app` the command of this file."""
    app.command()(requests)


def requests(
    suite: Annotated[str, typer.Argument(help="A suite or task: a name (core, full, mmlu, ...) or a YAML file.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; gets one folder a task.")],
    data: Annotated[str | None, typer.Option(help="Folder of published sets.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions a task.", show_default=False)] = None,
) -> None:
    """Render what a suite asks, as text: one folder a task, which a recipe's evaluate.tasks may name."""
    from rich.table import Table

    from llama3.evaluate.requests import write_requests
    from llama3.evaluate.suite import planned_of, rendered_task
    from llama3.evaluate.task_yaml import MissingFile

    with mistakes():
        planned = planned_of(suite, data)
        if not planned:
            raise ValueError(f"suite: {suite} asks for no data file, only for what a run makes; name another")
        table = Table("task", "kind", "n", "shots", "chance", "digest", box=None, pad_edge=False)
        left_out = []
        for one in planned:
            try:
                rendered = rendered_task(one, limit)
            except MissingFile as error:
                left_out.append(f"{one.name}: {error}")
                continue
            write_requests(rendered, target / one.name)
            task = rendered.task
            chance = "" if task.chance is None else f"{task.chance:.3g}"
            table.add_row(one.name, task.kind, f"{task.questions:,}", str(task.shots), chance, task.digest[:12])
        out.print(table)
        for line in left_out:
            out.print(f"[yellow]left out[/]  {escape(line)}")
        if len(left_out) == len(planned):
            raise ValueError("nothing was rendered; give the folder of the files with --data")
