"""Commands that use a model: `herd generate | serve | export | merge | eval`."""

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

from herd.flows.cli.errors import DefaultGroup, RootOption, at_work, mistakes, out, problems
from herd.llama3.export.formats import Form
from herd.storage.filesystem import write_atomic
from herd.storage.root import DEFAULT_ROOT, Root
from herd.storage.secrets import PAGE_KEY

if TYPE_CHECKING:
    from herd.llama3.evaluate.evaluate import EvaluationResult
    from herd.llama3.evaluate.scores import Score


evaluation = typer.Typer(
    cls=DefaultGroup, help="Evaluate any model on any task: `herd eval MODEL TASK...`.", no_args_is_help=True
)
DataOption = Annotated[str | None, typer.Option(help="Folder of published data sets.", show_default=False)]
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of questions per task.", show_default=False)
]
TpOption = Annotated[
    int | None, typer.Option(min=1, help="Processes that share each matrix.", show_default="as few as the model fits")
]
PpOption = Annotated[
    int | None, typer.Option(min=1, help="Processes that share the layers.", show_default="as few as the model fits")
]
DtypeOption = Annotated[
    Literal["bf16", "fp32"] | None, typer.Option(help="Number format of the weights.", show_default="as stored")
]
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
"""Control characters -> visible symbols."""


def generate(
    model: Annotated[str, typer.Argument(help="A run, FAMILY@ALIAS such as quickstart@champion, or a model folder.")],
    prompt: Annotated[
        str, typer.Option(help="Text to continue; - reads standard input, without the newline at its end.")
    ] = "The",
    tokens: Annotated[
        int, typer.Option("--tokens", "--max-tokens", min=1, help="Maximum number of tokens to generate.")
    ] = 80,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Sample from the most probable tokens with this total, up to 1.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many of the most probable tokens; 0: all.")] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: make tokens of prompt and text less probable (CTRL).")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed samples the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer the text as a message, by the chat template.")] = False,
    tp: TpOption = None,
    pp: PpOption = None,
    dtype: DtypeOption = None,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Continue a text with a model, or answer it as a message of a user.

    The text goes to standard output, the speed to standard error.
    """
    from herd.storage.processes import peak_rss
    from herd.tasks.models.lookup import generate_text, load_runner, model_folder

    with mistakes():
        from herd.llama3.evaluate.generation_settings import check_sampling
        from herd.llama3.tokens.chat import encode_chat
        from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer

        try:
            check_sampling(temperature, top_p, top_k, repetition_penalty)
        except ValueError as error:
            field, _, fault = str(error).partition(" ")
            raise ValueError(f"--{field.replace('_', '-')}: {fault}") from None
        if stop and "" in stop:
            raise ValueError("--stop: '' is at the start of every text; write the text to stop before")
        given = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        folder = model_folder(Root.parse(root), model)
        tokenizer = Tokenizer.load(folder)
        if chat and tokenizer.chat is None and not (folder / TEMPLATE_FILE).is_file():
            raise ValueError(f"--chat: {model} was not trained on conversations; leave --chat out")
        asked = encode_chat(tokenizer, [{"role": "user", "content": given}], True) if chat else given
        ends = (tokenizer.turn_end,) if chat else ()
        with load_runner(folder, tp, pp, dtype) as runner:
            pieces, written = generate_text(
                runner, tokenizer, asked, tokens, temperature, top_p, seed, stop or (), top_k, repetition_penalty, ends
            )
            _write_text(given + "\n" * chat, dim=True)
            with suppress(KeyboardInterrupt):  # keep and count the text so far
                for piece in pieces:
                    _write_text(piece)
            _write_text("\n")
    speed = f", {written.tokens_per_s:.1f} tokens/s" if written.tokens > 1 else ""
    memory = f"peak memory {peak_rss() / 2**30:.2f} GiB" if runner.processes == 1 else f"{runner.processes} processes"
    problems.print(f"[dim]{written.tokens} tokens{speed}, first after {written.first_s:.2f} s, {memory}[/]")


def _write_text(text: str, dim: bool = False) -> None:
    """Write `text` unchanged; to a terminal without control characters, which could change its state."""
    if out.is_terminal:
        shown = text.translate(_VISIBLE)
        text = typer.style(shown, dim=True) if dim else shown
    out.file.write(text)
    out.file.flush()


def serve(
    model: Annotated[str, typer.Argument(help="A run, FAMILY@ALIAS such as quickstart@champion, or a model folder.")],
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    token: Annotated[
        str,
        typer.Option(
            envvar="HERD_SERVE_TOKEN",
            help="Bearer token (api_key) that requests must send; by default one that the root keeps.",
            show_default=False,
        ),
    ] = "",
    max_batch: Annotated[int, typer.Option(min=1, help="Texts that are decoded together.")] = 16,
    queue: Annotated[int, typer.Option(min=0, help="Texts that may wait; more get status 429.")] = 64,
    threads: Annotated[int, typer.Option(envvar="HERD_THREADS", help="Processor threads; 0: all.")] = 0,
    tp: TpOption = None,
    pp: PpOption = None,
    dtype: DtypeOption = None,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, with a page to try it; Ctrl-C stops it."""
    with mistakes():
        problems.print("[dim]loading the model[/]")
        from herd.tasks.models import serve as server  # imports torch and FastAPI

        if threads:
            import torch

            torch.set_num_threads(threads)

        def ready(address: str, key: str, processes: int) -> None:
            by = f" by {processes} processes" if processes > 1 else ""
            file = Root.parse(root).local / PAGE_KEY
            kept = os.access(file, os.R_OK)  # not in the root of another user, or without one
            hidden = token or (kept and not out.is_terminal)  # a log must not contain it
            out.print(f"{escape(model)} is served{by}; Ctrl-C stops it")
            out.print(f"page     {address}{'' if hidden else f'?key={key}'}", markup=False)
            out.print(f"API      {address}v1", markup=False)
            if not token:
                out.print(f"api_key  {f'the text of {file}' if kept else key}", markup=False)

        with suppress(KeyboardInterrupt):
            server.serve(Root.parse(root), model, host, port, token, max_batch, queue, ready, tp, pp, dtype, threads)


def export(
    model: Annotated[str, typer.Argument(help="A run, FAMILY@ALIAS, or a model folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    format_: Annotated[Form, typer.Option("--format", help="Output format.")] = "hf",
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Number format of the weights.")] = "bf16",
    parts: Annotated[int, typer.Option(min=1, help="Model-parallel files; format meta only.")] = 1,
    license: Annotated[str, typer.Option(help="License of the weights, for the model card, such as apache-2.0.")] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Write a model and its card in the format of Hugging Face, Meta, GGUF or MLflow (to serve it)."""
    from herd.storage.processes import peak_rss
    from herd.tasks.models.export import export_model

    with mistakes():
        with at_work("export"):
            export_model(Root.parse(root), model, target, format_, dtype, parts, license)
        out.print(f"wrote {target}, peak memory {peak_rss() / 2**30:.2f} GiB")


def merge(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL MODEL...", help="Runs, checkpoints' labels, or FAMILY@ALIAS.")
    ],
    weights: Annotated[
        str, typer.Option(help="A weight for each model, with commas: 2,1.", show_default="all alike")
    ] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Make a checkpoint of the mean of the weights of others; `herd promote` judges it."""
    from herd.flows.run_lifecycle import existing_run, find_checkpoint
    from herd.tasks.cluster import Cluster
    from herd.tasks.console import TerminalConsole, console_as
    from herd.tasks.models.merge import merge_checkpoints

    with mistakes():
        try:
            shares = [float(weight) for weight in weights.split(",")] if weights else [1.0] * len(models)
        except ValueError:
            raise ValueError(f"--weights {weights}: write numbers with commas, such as 2,1") from None
        found = [find_checkpoint(Root.parse(root), model) for model in models]
        name = found[0].record.name
        with console_as(TerminalConsole(out)), existing_run(Root.parse(root), name, Cluster()) as context:
            merged = merge_checkpoints(context, [each.checkpoint for each in found], shares)
        out.print(f"herd promote {merged.label}    judges it")


@evaluation.command("model")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A run, FAMILY@ALIAS, or a model folder in herd's, Hugging Face's or Meta's format."),
    ],
    tasks: Annotated[
        list[str],
        typer.Argument(metavar="TASK...", help="Tasks and suites: names (mmlu, core, ...), YAML files, or folders."),
    ],
    data: DataOption = None,
    limit: LimitOption = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question.", show_default="the task's")
    ] = None,
    missing: Annotated[
        Literal["refuse", "skip"], typer.Option(help="For a task without its files or its sandbox: fail or skip it.")
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
    """Evaluate any model on any tasks, without a recipe, a server or a record in MLflow."""
    from herd.llama3.evaluate.suite import render_suites
    from herd.tasks.models.lookup import evaluate_folder, model_folder

    with mistakes():
        folder = model_folder(Root.parse(root), model)
        suites = render_suites(tasks, data, limit, shots, missing)
        for name, reason in suites.skipped.items():
            problems.print(f"[yellow]left out[/]  {escape(f'{name}: {reason}')}")
        if not suites.tasks:
            raise ValueError(f"{', '.join(tasks)}: no task is left; give the folder of the files with --data")
        with at_work("scoring"):
            result = evaluate_folder(folder, suites, tables, threads or os.cpu_count() or 1, device)
        document = {
            "model": model,
            "suite": result.suite.suite.name or None,
            "scores": {key: _numbers(score) for key, score in sorted(result.scores.items())},
            "skipped": result.suite.skipped,
            "too_long": result.too_long,
        }
        content = json.dumps(document, indent=1, ensure_ascii=False)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(output, f"{content}\n")
    if json_:
        print(content)
    else:
        _show_scores(result)


def _numbers(score: Score) -> dict[str, Any]:
    """Return a score's fields for JSON; unknown numbers are null."""
    names = ("value", "stderr", "low", "high", "n", "unjudged", "chance", "unit", "shots", "version", "requests")
    values = {name: getattr(score, name) for name in names}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def _show_scores(result: EvaluationResult) -> None:
    from rich.table import Table

    table = Table("task", "score", "95 %", "n", "chance", "shots", "unit", "digest", box=None, pad_edge=False)
    for key, score in sorted(result.scores.items()):
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
    for key, score in sorted(result.scores.items()):
        if score.unjudged:
            problems.print(f"[yellow]not judged[/]  {key}: {score.unjudged} questions; --tables shows why")
    for key, count in result.too_long.items():
        problems.print(f"[yellow]too long[/]  {key}: {count} questions exceed the window and count as wrong")


@evaluation.command()
def waiting(
    run: Annotated[str, typer.Argument(help="A run, or latest.")] = "latest",
    cluster: Annotated[Path | None, typer.Option(help="YAML file of the place.", show_default=False)] = None,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Score the checkpoints of a running stage that wait (evaluate.every), here and without a deployment."""
    from herd.flows.local_server import quiet_prefect, start_temporary_server
    from herd.tasks.cluster import Cluster, load_cluster

    with mistakes():
        chosen_cluster = load_cluster(cluster) if cluster else Cluster()
        quiet_prefect()
        ready = start_temporary_server(Root.parse(root))
        from herd.flows.checkpoint import score_waiting
        from herd.flows.recipe_form import StageInProgressParameters

        ready()
        result = score_waiting(StageInProgressParameters(run=run, root=root, cluster=chosen_cluster))
        out.print(escape(result.message))


@evaluation.command()
def render(
    suite: Annotated[str, typer.Argument(help="A suite or task: a name (core, full, mmlu, ...) or a YAML file.")],
    target: Annotated[Path, typer.Argument(help="Folder to write, with one folder per task.")],
    data: DataOption = None,
    limit: LimitOption = None,
) -> None:
    """Write the questions of a suite as text, one folder per task; a recipe's evaluate.tasks can name the folders."""
    from rich.table import Table

    from herd.llama3.evaluate.requests import write_requests
    from herd.llama3.evaluate.suite import render_task, suite_tasks
    from herd.llama3.evaluate.task_yaml import MissingFile

    with mistakes():
        planned = suite_tasks(suite, data)
        if not planned:
            raise ValueError(f"suite: {suite} needs no data files, only artifacts of a run; name another")
        table = Table("task", "kind", "n", "shots", "chance", "digest", box=None, pad_edge=False)
        left_out = []
        for planned_task in planned:
            name = planned_task.name
            try:
                rendered = render_task(planned_task, limit)
            except MissingFile as error:
                left_out.append(f"{name}: {error}")
                continue
            write_requests(rendered, target / name)
            task = rendered.task
            chance = "" if task.chance is None else f"{task.chance:.3g}"
            table.add_row(name, task.kind, f"{task.questions:,}", str(task.shots), chance, task.digest[:12])
        out.print(table)
        for line in left_out:
            out.print(f"[yellow]left out[/]  {escape(line)}")
        if len(left_out) == len(planned):
            raise ValueError("nothing was rendered; give the folder of the files with --data")
