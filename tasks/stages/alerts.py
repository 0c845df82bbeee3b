"""Watch a stage while it trains and alert people: each incident once, when it begins.

An incident stays open until it has been over for a while, so that a value near its limit gives one alert. Alerts go to
the console, to `alerts.jsonl` in the run's folder, and to Prefect as the event `herd.alert.<kind>`.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from rich.markup import escape

from herd.llama3.recipe.sections import Spikes
from herd.llama3.recipe.units import tokens
from herd.llama3.train import metrics
from herd.llama3.train.job import Cause
from herd.llama3.train.journal import Record, Rewind
from herd.storage.root import Root
from herd.tasks.console import Console
from herd.tasks.format import format_bytes, format_duration
from herd.tasks.tracking.events import emit, resource_id

Kind = Literal["loss-spike", "no-progress", "straggler", "disk", "gate", "bad-node", "attempt"]

CALM_STEPS = 50
"""Good steps after which a spike is over."""
START_S = 900.0
"""Limit before the first step: processes start, load a checkpoint, and compile."""
STALL_S = 120.0
"""Least limit between steps; saving a checkpoint may take that long."""
STALL_STEPS = 30
"""Limit between steps, in usual steps."""
SLOW = 1.1
"""Work of the slowest rank over the median of its peers above which it counts as slow, as in the trainer."""
SLOW_WINDOWS = 3
"""Slow measurements in a row that make a straggler."""
DISK_EVERY_S = 30.0
DISK_LEAST = 2 * 10**9
"""Least bytes that should be free; also CHECKPOINTS times the size of the newest checkpoint."""
CHECKPOINTS = 3
RECOVERED = 1.5
"""A disk incident is over when this many times the limit is free."""
FILE = "alerts.jsonl"
FROM_JOURNAL = ("loss-spike", "straggler")
"""Alerts that the same records raise again when a stage is followed again."""


class Alert(BaseModel):
    """One line of `alerts.jsonl`."""

    time: float
    """Seconds since 1970."""
    kind: Kind
    run: str
    stage: str
    text: str
    position: int


class Alerts:
    """The alerts of one stage of one run."""

    def __init__(
        self,
        root: Root,
        run: str,
        stage: str,
        console: Console,
        spikes: Spikes | None = None,
        work: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`spikes` has the limit for the loss; `work` has the checkpoints, which must fit the disk."""
        self.root, self.run, self.stage, self.console = root, run, stage, console
        self.sigma = (spikes or Spikes()).sigma
        self.work, self.clock = work, clock
        self.open: set[Kind] = set()
        """Incidents that were alerted and are not over."""
        self.position = 0
        self._calm = self._slow = 0
        self._step_s = 0.0
        self._disk_at = -math.inf
        self._told = {alert.kind: alert.position for alert in read_alerts(root, run) if alert.stage == stage}
        """Kind -> last position alerted by an earlier process: the journal is read from its start again."""

    def observe(self, entry: Record | Rewind) -> None:
        """Examine the next entry of the journal."""
        if isinstance(entry, Rewind):
            self._raise("loss-spike", f"went back to {tokens(entry.position)} because of a spike", entry.position)
            self._calm = 0
            return
        self.position = entry.position
        self.open.discard("no-progress")
        values = entry.metrics
        self._step_s = max(values.get(metrics.STEP_S, 0.0), 0.9 * self._step_s)

        score, loss = values.get(metrics.SPIKE_SCORE, 0.0), values.get(metrics.LOSS)
        spike = score > self.sigma
        if metrics.SKIPPED in values and metrics.SPIKE_SCORE in values and loss is None:
            spike = True
            self._raise("loss-spike", "the loss is not finite; the step was skipped")
        elif spike:
            numbers = f"gradient norm {values.get(metrics.GRAD_NORM, math.nan):.4g}: {score:.1f}"
            numbers = numbers if loss is None else f"loss {loss:.4g}, {numbers}"
            self._raise("loss-spike", f"{numbers} times the usual spread above the mean before")
        self._calm = self._calm + 1 if not spike and metrics.SKIPPED not in values else 0
        if self._calm >= CALM_STEPS:
            self.open.discard("loss-spike")

        slowest, median = values.get(metrics.SLOWEST_RANK_S), values.get(metrics.MEDIAN_RANK_S)
        if slowest is not None and median:
            self._slow = self._slow + 1 if slowest > SLOW * median else 0
            if not self._slow:
                self.open.discard("straggler")
            if self._slow >= SLOW_WINDOWS:
                ratio = f"{slowest / median:.2f}x"
                self._raise("straggler", f"one process takes {ratio} the time of its peers; its rank is in rank-0.log")
        self._disk()

    def observe_silence(self, seconds: float) -> None:
        """Examine the `seconds` without a record, since the last one or the start of this attempt."""
        limit = max(STALL_S, STALL_STEPS * self._step_s) if self._step_s else START_S
        if seconds > limit:
            since = f"after {tokens(self.position)}" if self.position else "since the start"
            self._raise("no-progress", f"no step for {format_duration(seconds)}, {since}")
        self._disk()

    def attempt_failed(self, cause: Cause, message: str) -> None:
        """Alert that an attempt ended of `cause`, with the first line of its message, which the console has already."""
        line = "".join(message.splitlines()[:1])
        text = f"{cause}: {line or 'the trainer ended'}"
        emit_alert(self.root, None, Alert(
            time=time.time(), kind="attempt", run=self.run, stage=self.stage, text=text, position=self.position
        ))  # fmt: skip

    def restarted(self) -> None:
        """The trainer was started again: the limit for the first step applies."""
        self._step_s = 0.0
        self.open.discard("no-progress")

    def bad_host(self, host: str, fault: str) -> None:
        """A fault excludes a host from the next attempt on."""
        self.open.discard("bad-node")  # each fault is an incident
        self._raise("bad-node", f"{host}: {fault}; it is excluded until herd hosts --clear {host}")

    def _disk(self) -> None:
        """Examine the free space of the working folder every DISK_EVERY_S."""
        if self.clock() - self._disk_at < DISK_EVERY_S:
            return
        self._disk_at = self.clock()
        least = max(DISK_LEAST, CHECKPOINTS * _newest_bytes(self.work))
        try:
            free = shutil.disk_usage(self.root.local).free
        except OSError:
            return
        if free < least:
            self._raise(
                "disk",
                f"{format_bytes(free)} free in {self.root.local}; {format_bytes(least)} are needed for checkpoints",
            )
        elif free > RECOVERED * least:
            self.open.discard("disk")

    def _raise(self, kind: Kind, text: str, position: int | None = None) -> None:
        if kind in self.open:
            return
        self.open.add(kind)
        at = self.position if position is None else position
        if kind in FROM_JOURNAL and at <= self._told.get(kind, -1):
            return
        emit_alert(self.root, self.console, Alert(
            time=time.time(), kind=kind, run=self.run, stage=self.stage, text=text, position=at
        ))  # fmt: skip


def alert_gate_failed(root: Root, console: Console, run: str, stage: str, text: str, position: int) -> None:
    """Alert once that a model did not pass a gate: a retry of the run finds the same decision."""
    alert = Alert(time=time.time(), kind="gate", run=run, stage=stage, text=text, position=position)
    with suppress(OSError):  # better twice than never
        if alert in [known.model_copy(update={"time": alert.time}) for known in read_alerts(root, run)]:
            return
    emit_alert(root, console, alert)


def emit_alert(root: Root, console: Console | None, alert: Alert) -> None:
    """Print an alert, append it to the run's file, and send it as an event."""
    if console:
        console.log(f"  [yellow]alert {alert.kind}: {escape(alert.text)}[/]")
    line = alert.model_dump_json().encode() + b"\n"
    with suppress(Exception):  # a full disk is itself an alert
        if root.is_local:
            path = root.file("runs", alert.run, FILE)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(line)
        else:  # an object store cannot append
            root.write((root.read("runs", alert.run, FILE) or b"") + line, "runs", alert.run, FILE)
    payload = {"run": alert.run, "stage": alert.stage, "text": alert.text, "position": alert.position, "root": root.uri}
    emit(f"herd.alert.{alert.kind}", resource_id(f"run/{alert.run}"), alert.run, payload)


def read_alerts(root: Root, run: str) -> list[Alert]:
    """Return the alerts of a run, oldest first."""
    alerts = []
    for line in (root.read("runs", run, FILE) or b"").splitlines():
        with suppress(ValidationError):  # the last line may be torn
            alerts.append(Alert.model_validate_json(line))
    return alerts


def _newest_bytes(work: Path | None) -> int:
    """Return the size of the newest checkpoint of a stage on this disk."""
    folders = [*(work / "checkpoints").glob("[0-9]*")] if work else []
    with suppress(OSError):
        return sum(path.stat().st_size for path in max(folders).rglob("*") if path.is_file()) if folders else 0
    return 0
