"""Watch a stage while it trains and alert people: each incident once, when it begins.

The records are those of the trainer's journal. An incident is open until it has been over for a while, so that a value
near its limit gives one alert. Alerts go to the console, to `alerts.jsonl` in the run's folder, and to Prefect as the
event `herd.alert.<kind>`. Dead supervisors are alerted by Prefect's automation for silent flow runs.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from rich.markup import escape

from llama3.recipe.sections import Spikes
from llama3.recipe.units import tokens
from llama3.train import metrics
from llama3.train.journal import Record, Rewind
from storage.root import Root
from tasks.console import Console
from tasks.format import clock, format_bytes
from tasks.tracking.events import emit, resource_id

Kind = Literal["loss-spike", "no-progress", "straggler", "disk", "gate"]

CALM_STEPS = 50
"""Good steps after which a spike is over."""
START_S = 900.0
"""Without a first step: processes start, load a checkpoint, and compile."""
STALL_S = 120.0
"""Without a further step, at least; saving a checkpoint may take that long."""
STALL_STEPS = 30
"""Without a further step, in usual steps."""
SLOW = 1.1
"""Work of the slowest rank over the median of its peers above which it counts as slow, as in the trainer."""
SLOW_WINDOWS = 3
"""Slow measurements in a row that make a straggler."""
DISK_EVERY_S = 30.0
DISK_LEAST = 2 * 10**9
"""Bytes that should be free, at least, and CHECKPOINTS times what the newest checkpoint takes."""
CHECKPOINTS = 3
RECOVERED = 1.5
"""A disk has room again when so many times the limit is free."""
FILE = "alerts.jsonl"
FROM_JOURNAL = ("loss-spike", "straggler")
"""Alerts that the same records raise again when a stage is followed anew."""


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
        """Incidents that have been told of and are not over."""
        self.position = 0
        self._calm = self._slow = 0
        self._step_s = 0.0
        self._disk_at = -math.inf
        self._told = {alert.kind: alert.position for alert in read_alerts(root, run) if alert.stage == stage}
        """Of each kind the last position that an earlier process told of: the journal is read from its start again."""

    def see(self, entry: Record | Rewind) -> None:
        """Take note of the next line of the journal."""
        if isinstance(entry, Rewind):
            self._raise("loss-spike", f"went back to {tokens(entry.position)} because of a spike", entry.position)
            self._calm = 0
            return
        self.position = entry.position
        self.open.discard("no-progress")
        values = entry.metrics
        self._step_s = max(values.get(metrics.STEP_S, 0.0), 0.9 * self._step_s)
        self._spike(values)
        self._straggler(values)
        self._disk()

    def idle(self, seconds: float) -> None:
        """Take note that nothing came for so long: since the last record, or since this attempt was started."""
        limit = max(STALL_S, STALL_STEPS * self._step_s) if self._step_s else START_S
        if seconds > limit:
            since = f"after {tokens(self.position)}" if self.position else "since the start"
            self._raise("no-progress", f"no step for {clock(seconds)}, {since}")
        self._disk()

    def restarted(self) -> None:
        """Take note that the trainer was started again: it may take as long as the first time."""
        self._step_s = 0.0
        self.open.discard("no-progress")

    def _spike(self, values: Mapping[str, float]) -> None:
        score, loss = values.get(metrics.SPIKE_SCORE, 0.0), values.get(metrics.LOSS)
        if metrics.SKIPPED in values and metrics.SPIKE_SCORE in values and loss is None:
            self._raise("loss-spike", "the loss is not finite; the step was left out")
        elif score > self.sigma:
            what = f"loss {loss:.4g}, " if loss is not None else ""
            text = (
                f"{what}gradient norm {values.get(metrics.GRAD_NORM, math.nan):.4g}: {score:.1f} times the usual spread"
            )
            self._raise("loss-spike", f"{text} above the mean before")
        elif metrics.SKIPPED not in values:
            self._calm += 1
            if self._calm >= CALM_STEPS:
                self.open.discard("loss-spike")
            return
        self._calm = 0

    def _straggler(self, values: Mapping[str, float]) -> None:
        slowest, median = values.get(metrics.SLOWEST_RANK_S), values.get(metrics.MEDIAN_RANK_S)
        if slowest is None or not median:
            return
        if slowest <= SLOW * median:
            self._slow = 0
            self.open.discard("straggler")
            return
        self._slow += 1
        if self._slow >= SLOW_WINDOWS:
            ratio = slowest / median
            self._raise("straggler", f"one process takes {ratio:.2f}x the time of its peers; its rank is in rank-0.log")

    def _disk(self) -> None:
        """Look at the free space of the working folder, now and then."""
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
        tell(self.root, self.console, Alert(
            time=time.time(), kind=kind, run=self.run, stage=self.stage, text=text, position=at
        ))  # fmt: skip


def gate_failed(root: Root, console: Console, run: str, stage: str, text: str, position: int) -> None:
    """Tell of a gate that a model did not pass."""
    tell(root, console, Alert(time=time.time(), kind="gate", run=run, stage=stage, text=text, position=position))


def tell(root: Root, console: Console, alert: Alert) -> None:
    """Say an alert, keep it in the run's folder, and send it as an event; what cannot be kept is still said."""
    console.say(f"  [yellow]alert {alert.kind}: {escape(alert.text)}[/]")
    with suppress(Exception):  # a full disk is one of the things that are told of
        _keep(root, alert)
    payload = {"run": alert.run, "stage": alert.stage, "text": alert.text, "position": alert.position, "root": root.uri}
    emit(f"herd.alert.{alert.kind}", resource_id(f"run/{alert.run}"), alert.run, payload)


def read_alerts(root: Root, run: str) -> list[Alert]:
    """Return the alerts of a run, oldest first."""
    lines = (root.read("runs", run, FILE) or b"").splitlines()
    return [alert for line in lines if (alert := _parsed(line))]


def _keep(root: Root, alert: Alert) -> None:
    """Add a line; an object store has no appending, so there the few lines are written anew."""
    line = alert.model_dump_json().encode() + b"\n"
    if root.is_local:
        path = root.file("runs", alert.run, FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(line)
    else:
        root.write((root.read("runs", alert.run, FILE) or b"") + line, "runs", alert.run, FILE)


def _parsed(line: bytes) -> Alert | None:
    with suppress(ValidationError):  # the end of a line that was cut off
        return Alert.model_validate_json(line)
    return None


def _newest_bytes(work: Path | None) -> int:
    """Return what the newest checkpoint of a stage takes on this disk."""
    folders = sorted((path for path in (work / "checkpoints").glob("[0-9]*")), reverse=True) if work else []
    for folder in folders[:1]:
        with suppress(OSError):
            return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return 0
