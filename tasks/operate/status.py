"""Terminal output about runs: `herd status` (all runs, or one in detail), and the last lines of `herd run`.

Made from files alone, so it works without any server and on a root that other machines use.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from statistics import harmonic_mean
from typing import Any

from rich.markup import escape

from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.units import tokens
from herd.llama3.train import metrics
from herd.llama3.train.job import TERMINATED, AttemptResult, first_failure, read_outcomes
from herd.storage.artifact import Artifact, Store
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.format import (
    FactTable,
    FittedTable,
    command,
    format_bits_per_byte,
    format_bytes,
    format_costs,
    format_duration,
    format_losses,
)
from herd.tasks.operate.slots import slots_table
from herd.tasks.promotion.log import CHALLENGER, compared_run
from herd.tasks.report.progress import RunProgress, artifact_of, log_folders, run_progress
from herd.tasks.runs.records import PENDING_APPROVAL, RunRecord, Runs, example_change, trained_stages
from herd.tasks.stages.alerts import read_alerts
from herd.tasks.tracking.mlflow_store import run_page, running_server, tracking_uri

COLORS = {
    "running": "green",
    "finished": "default",
    "failed": "red",
    "no live process": "red",
    "interrupted": "yellow",
    "cancelled": "yellow",
    "waiting": "cyan",
    "pending_approval": "cyan",
    "challenger": "cyan",
    "silent": "yellow",
    "promoted": "green",
    "rejected": "red",
}
MOST = 40
"""Runs in the table of all."""
NUMBERS = ("position", "done", "loss", "tokens/s", "goodput", "restarts", "left", "tokens", "time", "size", "bits/byte")
"""Right-aligned columns."""
LEFT_OUT = ("checkpoint", "goodput", "position", "restarts", "left", "tokens/s", "at", "loss")
"""Columns of all runs that a narrow terminal leaves out, in this order."""
SILENT_S = 120.0
"""Without a step for this long, a running run is shown as silent."""
SAMPLE_CHARACTERS = 200
SCORES_A_LINE = 3


def status_tables(root: Root, run: str | None) -> list[FittedTable | FactTable]:
    """Return the table of all runs of `root`, newest last, and of queues; or the tables of one run, for rich's print.

    Raises ValueError if the run does not exist.
    """
    runs, now = Runs(root), time.time()
    if run is None:
        progress, queues = run_progress(root, runs.all()[-MOST:]), slots_table(root)
        shown = _all(progress, now) if progress else FactTable({"runs": f"none in {escape(root.uri)}"})
        return [shown, queues] if queues.rows else [shown]
    progress_of_run = run_progress(root, [runs.find(run)])[0]
    alerts = FittedTable("alerts", ("time", "stage", "alert", "what"), ("time",))
    for alert in read_alerts(root, run):
        when = datetime.fromtimestamp(alert.time).strftime("%m-%d %H:%M:%S")
        alerts.add_row(when, alert.stage, f"[yellow]{alert.kind}[/]", escape(alert.text))
    tables: list[FittedTable | FactTable] = [
        _facts(root, progress_of_run, now),
        _steps(open_store(root), progress_of_run),
        _attempts(root, progress_of_run),
        alerts,
    ]
    return [table for table in tables if table.rows]


def runs_document(root: Root) -> dict[str, Any]:
    """Return the newest MOST runs of `root` as plain values, newest last: `herd status --json`."""
    progress = run_progress(root, Runs(root).all()[-MOST:])
    return {"root": root.uri, "runs": [_document(root, run) for run in progress]}


def run_document(root: Root, name: str) -> dict[str, Any]:
    """Return one run with its steps, trainers, alerts and scores: `herd status RUN --json` and `herd run --json`.

    Raises ValueError if the run does not exist.
    """
    (run,) = run_progress(root, [Runs(root).find(name)])
    record, store = run.record, open_store(root)
    spans = trained_stages(run.recipe, record)
    model = artifact_of(store, record, spans[-1].name) if spans else None
    scored = [step for span in spans if (step := f"evaluate-{span.stage.name}") in record.steps]
    evaluation = artifact_of(store, record, scored[-1]) if scored else None
    scores: dict[str, Any] = {}
    if evaluation is not None:
        from herd.llama3.evaluate.scores import read_scores  # imports pyarrow

        for key, score in sorted(read_scores(evaluation.path).items()):
            scores[key] = {"value": score.value, "low": score.low, "high": score.high, "n": score.n}
    report = root.join("runs", name, "report.html")
    return {
        **_document(root, run),
        "report": report if root.read("runs", name, "report.html") is not None else None,
        "model": f"{model.uri.removeprefix('file://')}/model" if model else None,
        "scores": scores,
        "steps": [{"step": step, **taken.model_dump()} for step, taken in record.steps.items()],
        "trainers": [
            {"stage": stage, "attempt": number, "ended": how, "cause": cause, "host": host, "why": why}
            for stage, number, how, cause, host, why in _endings(root, run)
        ],
        "alerts": [alert.model_dump() for alert in read_alerts(root, name)],
    }


def _document(root: Root, run: RunProgress) -> dict[str, Any]:
    """Return the fields of a run in both JSON documents; absent values are null."""
    kept = ("family", "started", "ended", "attempts", "code", "recipe_digest", "rerun_of", "until", "verdict", "error")
    return {
        "run": run.record.name,
        "state": run.state,
        **{name: getattr(run.record, name) or None for name in kept},
        "process": run.holder or None,
        "step": run.step or None,
        "position": run.position,
        "tokens": run.total,
        "loss": run.loss,
        "tokens_per_s": _mean_rate(run),
        "goodput": run.last(metrics.GOODPUT),
        "remaining_s": run.remaining_s if run.holder else None,
        "last_step_time": run.recent[-1].time if run.recent else None,
        "checkpoint": run.saved._asdict() if run.saved else None,
        "restarts": run.restarts,
        "peak_memory_gib": run.record.peak_memory_gib,
        "mlflow_run": run.record.mlflow_run or None,
        "prefect_run": run.record.prefect_run or None,
        "folder": root.join("runs", run.record.name),
    }


def _all(progress: list[RunProgress], now: float) -> FittedTable:
    headers = ("run", "state", "at", "position", "done", "loss", "tokens/s", "goodput", "checkpoint", "restarts")
    table = FittedTable("", (*headers, "left", "verdict"), LEFT_OUT, NUMBERS)
    for run in progress:
        record = run.record
        table.add_row(
            f"[bold]{record.name}[/]",
            _colored(f"silent {format_duration(run.silent_s)}" if run.silent_s > SILENT_S else run.state),
            run.step if record.state != "finished" else "",
            tokens(run.position),
            _percent(run.position / run.total),
            _number(run.loss),
            _rate(run),
            _percent(run.last(metrics.GOODPUT)),
            _saved(run, now),
            str(run.restarts or ""),
            _left(run),
            _colored(CHALLENGER if record.verdict == PENDING_APPROVAL else record.verdict),
        )
    return table


def _facts(root: Root, run: RunProgress, now: float) -> FactTable:
    """Return the facts of one run, one per line; empty ones are left out."""
    record = run.record
    done = f"{tokens(run.position)} of {tokens(run.total)} tokens"
    last = f"; last step {format_duration(now - run.recent[-1].time)} ago" if run.recent else ""
    process = ""
    if run.holder:
        process = f"{escape(run.holder)}{last}"
    elif record.state == "running":
        at = f" at {tokens(run.position)}" if run.recent or run.saved else ""
        process = f"[red]none; it was in {run.step}{at}[/]{last}; the same command continues it"
    speed, left = "", f", {_left(run)} left" if _left(run) else ""
    if rate := _rate(run):
        speed = f"{rate} tokens/s, goodput {_percent(run.last(metrics.GOODPUT))}{left}"
    began = datetime.fromisoformat(record.started)
    ended = datetime.fromisoformat(record.ended).timestamp() if record.ended and record.state != "running" else now
    origin = f"rerun of {record.rerun_of}" + (f" from {record.redo_from}" if record.redo_from else "")
    facts = {
        "run": f"[bold]{record.name}[/] {_colored(run.state)} {_colored(record.verdict)}".rstrip(),
        "process": process,
        "position": f"{done} ({_percent(run.position / run.total)})",
        "loss": _number(run.loss),
        "speed": speed,
        "checkpoint": _saved(run, now),
        "restarts": f"{run.restarts}, attempt {record.attempts} of the run" if run.restarts else "",
        "time": f"{began.astimezone():%Y-%m-%d %H:%M:%S}, {format_duration(ended - began.timestamp())}",
        "error": f"[red]{escape(record.error)}[/]" if record.error else "",
        "from": escape(origin) if record.rerun_of else "",
        "code": f"{record.code}, recipe {record.recipe_digest[:12]}",
        "by": escape(f"{record.provenance.user}, {record.provenance.command}") if record.provenance else "",
        "on": _devices(record),
        "cost": format_costs(record.cost),
        "MLflow": escape(_mlflow(root, record)),
        "Prefect": escape(_prefect(record)),
        "folder": escape(root.join("runs", record.name)),
    }
    return FactTable({name: text for name, text in facts.items() if text})


def _devices(record: RunRecord) -> str:
    """Return devices, layout and hosts of the last stage that the run trained, or ""."""
    ran = [step.environment for step in record.steps.values() if step.environment]
    if not ran:
        return ""
    environment = ran[-1]
    software = ", ".join(
        f"{name} {environment[name]}" for name in ("torch", "cuda", "nccl", "driver") if environment.get(name)
    )
    on = f"{environment['devices']} x {environment['device']} on {environment['hosts']}, {environment['layout']}"
    return escape(f"{on}, micro-batch {environment['micro_batch']}; {software}")


def _steps(store: Store, run: RunProgress) -> FittedTable:
    headers = ("step", "outcome", "tokens", "mean loss", "bits/byte", "time", "size", "artifact")
    record, left_out = run.record, ("size", "tokens", "time", "bits/byte", "mean loss")
    table = FittedTable("steps", headers, left_out, NUMBERS)
    spans = {span.name: span for span in run.recipe.schedule.trained}
    for name, step in record.steps.items():
        artifact, span = artifact_of(store, record, name), spans.get(name)
        metadata = artifact.metadata if artifact else {}
        table.add_row(
            name,
            step.outcome if step.outcome != "reused" else "[dim]reused[/]",
            tokens(span.tokens) if span else "",
            format_losses(metadata) if span and metadata else "",
            format_bits_per_byte(metadata) if span else "",
            format_duration(step.seconds) if step.outcome != "reused" else "",
            format_bytes(artifact.bytes) if artifact else "[red]gone[/]",
            step.artifact,
        )
    if run.step and record.state != "finished":
        span = spans.get(run.step)
        so_far = f"{tokens(run.position - span.start)} of {tokens(span.tokens)}" if span else ""
        loss = _number(run.loss) if run.recent else ""
        table.add_row(f"[bold]{run.step}[/]", _colored(run.state), so_far, loss)
    return table


def _attempts(root: Root, run: RunProgress) -> FittedTable:
    """Return how each attempt of a trainer ended, by the local logs; a single one without a fault is left out."""
    table = FittedTable("trainers", ("stage", "attempt", "ended", "cause", "host", "why"), ("host",))
    for stage, endings in groupby(_endings(root, run), key=lambda ending: ending[0]):
        ended = list(endings)
        if len(ended) > 1 or any(how not in ("complete", "running") for _, _, how, *_ in ended):
            for _, number, how, cause, host, why in ended:
                table.add_row(stage, str(number), how, cause, host, escape(why))
    return table


def _endings(root: Root, run: RunProgress) -> Iterator[tuple[str, int, str, str, str, str]]:
    """Yield stage, number, end, cause, host and reason of each attempt of a trainer, by the logs on this machine."""
    for stage, attempts in log_folders(root, run.record.name).items():
        for number, attempt in enumerate(attempts, start=1):
            outcomes = read_outcomes(attempt)
            if not outcomes and run.holder and attempt == attempts[-1] and stage not in run.record.steps:
                yield stage, number, "running", "", "", ""
            else:
                yield stage, number, *_ending(outcomes)


def _ending(outcomes: list[AttemptResult]) -> tuple[str, str, str, str]:
    """Return how an attempt ended, its cause, on which host, and the first line of the reason."""
    if not outcomes:
        return "", "", "", "it did not say"
    first = first_failure(outcomes)
    why = (first.message.splitlines() or [""])[0]
    how = {0: "complete", TERMINATED: "stopped"}.get(first.status, f"status {first.status}")
    if first.status < 0:
        how = signal.Signals(-first.status).name
    return how, first.cause, first.host, "" if first.status == 0 else why[:70]


def _colored(text: str) -> str:
    color = next((color for name, color in COLORS.items() if text.startswith(name)), "")
    return f"[{color}]{text}[/]" if color and text else text


def _saved(run: RunProgress, now: float) -> str:
    return f"{tokens(run.saved.position)} {format_duration(now - run.saved.time)} ago" if run.saved else ""


def _left(run: RunProgress) -> str:
    return format_duration(run.remaining_s) if run.holder and run.remaining_s is not None else ""


def _rate(run: RunProgress) -> str:
    return "" if (rate := _mean_rate(run)) is None else tokens(rate)


def _mean_rate(run: RunProgress) -> float | None:
    """Return the tokens per second of the last steps; None if no process works on the run."""
    rates = [record.metrics[metrics.TOKENS_PER_S] for record in run.recent if metrics.TOKENS_PER_S in record.metrics]
    return harmonic_mean(rates) if rates and run.holder else None  # steps have equal tokens, not equal time


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    """Return a share in whole percent, rounded down, so that 100% means complete."""
    return "" if share is None else f"{math.floor(100 * share + 1e-9)}%"


def _mlflow(root: Root, record: RunRecord) -> str:
    """Return the address of the run in MLflow, or the file of the database."""
    if not record.mlflow_run:
        return ""
    server = running_server(root)
    again = command(root, "mlflow", "sync", record.name)
    stale = f" (out of date: {again} sends everything again)" if record.mlflow_stale else ""
    if not server:
        return f"run {record.mlflow_run} in {tracking_uri(root)}{stale}"
    return f"{run_page(server, record.mlflow_experiment, record.mlflow_run)}{stale}"


def _prefect(record: RunRecord) -> str:
    """Return the address of the flow run, or its id if no server is known."""
    api = os.environ.get("PREFECT_UI_URL") or os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
    if not record.prefect_run:
        return ""
    return f"{api}/runs/flow-run/{record.prefect_run}" if api else f"flow run {record.prefect_run}"


def summary_lines(root: Root, name: str, options: Sequence[str] = ()) -> list[str]:
    """Return the summary of a run that ended, one line each, with rich markup.

    `options` are those of the command that a rerun needs again, such as the cluster.
    """
    runs, store = Runs(root), open_store(root)
    record, recipe = runs.find(name), runs.recipe(name)
    spans = trained_stages(recipe, record)
    color = {"promoted": "green", "rejected": "red"}.get(record.verdict, "yellow")
    verdict = record.verdict or f"stopped after {record.until or 'its last step'}"
    minutes = (datetime.fromisoformat(record.ended) - datetime.fromisoformat(record.started)).total_seconds() / 60
    peak = f", peak {record.peak_memory_gib} GiB" if record.peak_memory_gib else ""
    lines = [
        "",
        f"[bold]{name}[/] [{color}]{verdict}[/] after {minutes:.1f} min{peak}",
        *_results(store, record, spans),
        f"  report    {runs.folder(name) / 'report.html'}",
    ]
    if spans:
        model = store.load(record.steps[spans[-1].name].artifact).uri.removeprefix("file://")
        lines.append(f"  model     {model}/model")
    lines += [
        *([f"  MLflow    {escape(mlflow)}"] if (mlflow := _mlflow(root, record)) else []),
        "next:",
        f"  {escape(command(root, 'up')):<38} see it in Prefect and MLflow",
    ]
    if spans and spans[-1].stage.kind == "sft":
        lines.append(f"  {escape(command(root, 'serve', name)):<38} ask it questions over HTTP, or on its page")
    if spans:
        change = example_change(spans[-1].stage)
        rerun = command(root, "rerun", name, "--from", spans[-1].name, "--set", change, *options)
        lines.append(f"  {escape(rerun)}")
    if other := compared_run(root, record):
        lines.append(f"  {escape(command(root, 'compare', other, name))}")
    return lines


def _results(store: Store, record: RunRecord, spans: list[StageSpan]) -> list[str]:
    """Return losses, and the scores and a sample of the newest model that was scored."""
    if not spans:
        return []
    stages = [store.load(record.steps[span.name].artifact).metadata for span in spans]
    means = [stages[0]["first_loss"], *(stage["last_loss"] for stage in stages)]
    lines = [f"  loss      {' -> '.join(f'{loss:.3f}' for loss in means)}, means over a tenth or more of each stage"]
    if held_out := " -> ".join(filter(None, map(format_bits_per_byte, stages))):
        lines.append(f"  held out  {held_out} bits per byte, at the end of each stage")
    scored = [step for span in spans if (step := f"evaluate-{span.stage.name}") in record.steps]  # not the champion's
    if scored:
        from herd.llama3.evaluate.held_out import NGRAM_BPB  # imports pyarrow

        evaluation = store.load(record.steps[scored[-1]].artifact)
        first = json.loads(evaluation.path_of("generations.json").read_text())[0]
        sample = " ".join(f"{first['prompt']}{first['text']}".split())
        sample = sample if len(sample) <= SAMPLE_CHARACTERS else sample[:SAMPLE_CHARACTERS] + " ..."
        lines += _scores(evaluation)
        if counted := evaluation.metadata.get(NGRAM_BPB):
            lines.append(f"  5-gram    bpb {counted:.4g}: what counting five bytes in the training text gives")
        lines.append(f"  sample    [dim]{escape(sample)}[/]")
    return lines


def _scores(evaluation: Artifact) -> list[str]:
    """Return the scores with their 95 % intervals, a few per line; of parts of a score only `bpb` and `sft`."""
    from herd.llama3.evaluate.scores import PREFIX, read_scores  # imports pyarrow

    texts = []
    for key, score in sorted(read_scores(evaluation.path).items()):
        name = key.removeprefix(PREFIX)
        if "/" not in name or name.startswith(("bpb/", "sft/")):
            interval = f" ({bounds})" if (bounds := score.interval(".3f")) else ""
            unjudged = f" [yellow]{score.unjudged} questions not judged[/]" if score.unjudged else ""
            few = f" [yellow]only {score.n} documents, {score.bytes / 1000:.1f} kB[/]" if score.scarce else ""
            texts.append(f"{name} {score.value:.3f}{interval}{unjudged}{few}")
    lines = [texts[start : start + SCORES_A_LINE] for start in range(0, len(texts), SCORES_A_LINE)]
    return [f"  {'' if number else 'scores':<10}{'  '.join(line)}" for number, line in enumerate(lines)]
