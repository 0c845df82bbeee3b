"""`herd status`: every run of a root in one table, or one run in detail, in as many columns as the terminal has.

Made from files alone, so it works without any server and on a root that other machines work in.
What this gives up: it is a look at one moment; live curves are in MLflow. 0.4 s for a root of a few runs.
"""

from __future__ import annotations

import math
import os
import signal
import time
from datetime import datetime

from rich.markup import escape

from llama3.recipe.schedule import Schedule
from llama3.recipe.units import tokens
from llama3.train import metrics
from llama3.train.job import TERMINATED, AttemptResult, outcomes_in
from storage.artifact import Store
from storage.object_artifact import open_store
from storage.root import Root
from tasks.format import FactTable, FittedTable, bits_per_byte, clock, command, format_bytes, losses
from tasks.promotion.log import CHALLENGER, WAITS
from tasks.runs.progress import RunProgress, artifact_of, standings
from tasks.runs.records import RunRecord, Runs
from tasks.stages.alerts import read_alerts
from tasks.tracking.mlflow_store import run_page, server_uri, tracking_uri

COLOURS = {
    "running": "green",
    "finished": "default",
    "failed": "red",
    "no live process": "red",
    "interrupted": "yellow",
    "cancelled": "yellow",
    "waiting": "cyan",
    "waits for approval": "cyan",
    "challenger": "cyan",
    "silent": "yellow",
    "promoted": "green",
    "refused": "red",
}


MOST = 40
"""Runs in the table of all."""


NUMBERS = ("position", "done", "loss", "tokens/s", "goodput", "restarts", "left", "tokens", "time", "size", "bits/byte")
"""Columns that are set to the right."""


LEFT_OUT = ("checkpoint", "goodput", "position", "restarts", "left", "tokens/s", "at", "loss")
"""Columns of all runs that a narrow terminal does without, the first one first."""


def status_tables(root: Root, run: str | None) -> list[FittedTable | FactTable]:
    """Return the table of all runs of `root`, newest last, or the tables of one, to be printed by rich.

    Raises ValueError if there is no such run.
    """
    runs, now = Runs(root), time.time()
    if run is None:
        found = standings(root, runs.all()[-MOST:])
        return [_all(found, now) if found else FactTable({"runs": f"none in {escape(root.uri)}"})]
    standing = standings(root, [runs.find(run)])[0]
    store = open_store(root)
    tables: list[FittedTable | FactTable] = [
        _facts(root, standing, now),
        _steps(store, standing),
        _attempts(root, standing),
        _alerts(root, run),
    ]
    return [table for table in tables if table.rows]


def _all(found: list[RunProgress], now: float) -> FittedTable:
    headers = ("run", "state", "at", "position", "done", "loss", "tokens/s", "goodput", "checkpoint", "restarts")
    table = FittedTable("", (*headers, "left", "verdict"), LEFT_OUT, NUMBERS)
    for standing in found:
        record = standing.record
        table.add_row(
            f"[bold]{record.name}[/]",
            _coloured(_state(standing, now)),
            standing.step if record.state != "finished" else "",
            tokens(standing.position),
            _percent(standing.position / standing.total),
            _number(standing.loss),
            _rate(standing),
            _percent(standing.last(metrics.GOODPUT)),
            _saved(standing, now),
            str(standing.restarts or ""),
            _left(standing),
            _coloured(CHALLENGER if record.verdict == WAITS else record.verdict),
        )
    return table


def _facts(root: Root, standing: RunProgress, now: float) -> FactTable:
    """Return what is to be said of one run, one fact a line."""
    record = standing.record
    done = f"{tokens(standing.position)} of {tokens(standing.total)} tokens"
    facts = {
        "run": f"[bold]{record.name}[/] {_coloured(standing.state)} {_coloured(record.verdict)}".rstrip(),
        "process": _process(standing, now),
        "position": f"{done} ({_percent(standing.position / standing.total)})",
        "loss": _number(standing.loss),
        "speed": _speed(standing),
        "checkpoint": _saved(standing, now),
        "restarts": f"{standing.restarts}, attempt {record.attempts} of the run" if standing.restarts else "",
        "time": _time(record, now),
        "error": f"[red]{escape(record.error)}[/]" if record.error else "",
        "from": escape(_origin(record)),
        "code": f"{record.code}, recipe {record.recipe_digest[:12]}",
        "MLflow": escape(_mlflow(root, record)),
        "Prefect": escape(_prefect(record)),
        "folder": escape(root.join("runs", record.name)),
    }
    return FactTable({name: text for name, text in facts.items() if text})


def _steps(store: Store, standing: RunProgress) -> FittedTable:
    headers = ("step", "outcome", "tokens", "mean loss", "bits/byte", "time", "size", "artifact")
    record, left_out = standing.record, ("size", "tokens", "time", "bits/byte", "mean loss")
    table = FittedTable("steps", headers, left_out, NUMBERS)
    spans = {span.name: span for span in Schedule(standing.recipe).trained}
    for name, step in record.steps.items():
        artifact, span = artifact_of(store, record, name), spans.get(name)
        facts = artifact.facts if artifact else {}
        table.add_row(
            name,
            step.outcome if step.outcome != "reused" else "[dim]reused[/]",
            tokens(span.tokens) if span else "",
            losses(facts) if span and facts else "",
            bits_per_byte(facts) if span else "",
            clock(step.seconds) if step.outcome != "reused" else "",
            format_bytes(artifact.bytes) if artifact else "[red]gone[/]",
            step.artifact,
        )
    if standing.step and standing.record.state != "finished":
        span = spans.get(standing.step)
        so_far = f"{tokens(standing.position - span.start)} of {tokens(span.tokens)}" if span else ""
        loss = _number(standing.loss) if standing.recent else ""
        table.add_row(f"[bold]{standing.step}[/]", _coloured(standing.state), so_far, loss)
    return table


def _attempts(root: Root, standing: RunProgress) -> FittedTable:
    """Return how each start of a trainer ended, as this machine's logs tell; single ones that went well are not."""
    table = FittedTable("trainers", ("stage", "attempt", "ended", "why"))
    logs = root.file("runs", standing.record.name, "logs")
    for stage in sorted((path for path in logs.glob("*") if path.is_dir()), key=lambda path: path.stat().st_ctime):
        attempts = sorted(stage.glob("attempt-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        endings = [_ending(outcomes_in(attempt)) for attempt in attempts]
        if len(endings) > 1 or any(how != "complete" for how, _ in endings):
            for number, (how, why) in enumerate(endings, start=1):
                table.add_row(stage.name, str(number), how, escape(why))
    return table


def _ending(outcomes: list[AttemptResult]) -> tuple[str, str]:
    worst = max(outcomes, key=lambda outcome: abs(outcome.status), default=None)
    if worst is None:
        return "", "it did not say"
    why = (worst.words.splitlines() or [""])[0]
    named = {0: "complete", TERMINATED: "told to stop"}.get(worst.status, f"status {worst.status}")
    if worst.status < 0:
        named = signal.Signals(-worst.status).name
    return named, "" if worst.status == 0 else why[:70]


def _alerts(root: Root, run: str) -> FittedTable:
    table = FittedTable("alerts", ("time", "stage", "alert", "what"), ("time",))
    for alert in read_alerts(root, run):
        when = datetime.fromtimestamp(alert.time).strftime("%m-%d %H:%M:%S")
        table.add_row(when, alert.stage, f"[yellow]{alert.kind}[/]", escape(alert.text))
    return table


def _coloured(text: str) -> str:
    colour = next((colour for name, colour in COLOURS.items() if text.startswith(name)), "")
    return f"[{colour}]{text}[/]" if colour and text else text


SILENT_S = 120.0
"""Without a step, after which it is said how long ago the last one was."""


def _state(standing: RunProgress, now: float) -> str:
    silent = now - standing.recent[-1].time if standing.recent and standing.holder else 0.0
    return f"silent {clock(silent)}" if silent > SILENT_S else standing.state


def _process(standing: RunProgress, now: float) -> str:
    """Say who works on the run, or where it was left."""
    last = f"; last step {clock(now - standing.recent[-1].time)} ago" if standing.recent else ""
    if standing.holder:
        return f"{escape(standing.holder)}{last}"
    if standing.record.state != "running":
        return ""
    where = f" at {tokens(standing.position)}" if standing.recent or standing.saved else ""
    return f"[red]none; it was in {standing.step}{where}[/]{last}; the same command goes on with it"


def _time(record: RunRecord, now: float) -> str:
    began = datetime.fromisoformat(record.started)
    ended = datetime.fromisoformat(record.ended).timestamp() if record.ended and record.state != "running" else now
    return f"{began.astimezone():%Y-%m-%d %H:%M:%S}, {clock(ended - began.timestamp())}"


def _origin(record: RunRecord) -> str:
    if not record.rerun_of:
        return ""
    return f"rerun of {record.rerun_of}" + (f" from {record.redo_from}" if record.redo_from else "")


def _speed(standing: RunProgress) -> str:
    rate, goodput = _rate(standing), standing.last(metrics.GOODPUT)
    if not rate:
        return ""
    left = f", {_left(standing)} left" if _left(standing) else ""
    return f"{rate} tokens/s, goodput {_percent(goodput)}{left}"


def _saved(standing: RunProgress, now: float) -> str:
    return f"{tokens(standing.saved.position)} {clock(now - standing.saved.time)} ago" if standing.saved else ""


def _left(standing: RunProgress) -> str:
    return clock(standing.remaining_s) if standing.holder and standing.remaining_s is not None else ""


def _rate(standing: RunProgress) -> str:
    found = [
        record.metrics[metrics.TOKENS_PER_S] for record in standing.recent if metrics.TOKENS_PER_S in record.metrics
    ]
    return tokens(sum(found) / len(found)) if found and standing.holder else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    """Return a share in whole percent, rounded down: what is not complete is not 100%."""
    return "" if share is None else f"{math.floor(100 * share + 1e-9)}%"


def _mlflow(root: Root, record: RunRecord) -> str:
    """Return the address of the run in MLflow, or the file that holds it."""
    server = server_uri()
    if not record.mlflow_run:
        return ""
    again = command(root, "republish", record.name)
    stale = f" (out of date: {again} sends everything again)" if record.mlflow_stale else ""
    if not server:
        return f"run {record.mlflow_run} in {tracking_uri(root)}{stale}"
    return f"{run_page(server, record.mlflow_experiment, record.mlflow_run)}{stale}"


def _prefect(record: RunRecord) -> str:
    """Return the address of the flow run, if a server is known, or its id."""
    api = os.environ.get("PREFECT_UI_URL") or os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
    if not record.prefect_run:
        return ""
    return f"{api}/runs/flow-run/{record.prefect_run}" if api else f"flow run {record.prefect_run}"
