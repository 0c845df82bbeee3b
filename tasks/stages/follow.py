"""Follow a trainer's journal: show it, and hand it to a thread that sends it to MLflow in batches.

The journal is the truth, so an MLflow that is away neither stalls nor fails training; what could not be sent is sent
later. Points carry the time they were recorded with, so none counts twice. A file beside the journal names the MLflow
run that shows it, for `tasks.tracking.backfill`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llama3.train import metrics
from llama3.train.job import AttemptResult
from llama3.train.journal import Entry, Record, Rewind, Tail, holding
from storage.filesystem import write_atomic
from tasks.console import ProgressLine
from tasks.launch.base import WATCH_S, Launch
from tasks.stages.alerts import Alerts
from tasks.step import Context
from tasks.tracking.backfill import FOLLOWED, catch_up, watch
from tasks.tracking.mlflow import MetricPoint
from tasks.tracking.prefect_artifacts import StagePage
from tasks.tracking.sender import Sender
from tasks.tracking.steps import Thinning

POLL_S = 0.5
IDLE = 0.01
"""Processor seconds a second up to which a trainer that starts does nothing: its threads wake now and then."""
HUNG = 124
"""Status of an attempt that was stopped because nothing came any more."""
SEND_INTERVAL_S = 5.0
SMOOTHED = 32
"""Steps whose mean loss is shown: of a mix of domains, the loss of one batch says which domains it drew."""
INTERRUPTED_S = 5.0
"""As long as an interrupted run still waits for what is being sent."""


class Follower:
    """Reads the journal of one stage as it grows."""

    def __init__(
        self,
        context: Context,
        runs: list[str],
        journal: Path,
        steps: int,
        line: ProgressLine,
        end: int = -1,
        alerts: Alerts | None = None,
        page: StagePage | None = None,
    ) -> None:
        """`runs` are the MLflow runs, that of the stage last; `steps` and `end` are the stage's."""
        watch(context)
        self.alerts, self.page = alerts, page
        self.context, self.runs, self.tail, self.line = context, runs, Tail(journal), line
        self.thinning = Thinning(steps, end)
        self.sender = Sender(context.tracker, runs, lambda: catch_up(context))
        self.position = self.began = -1
        self.heard = self.last_sent = time.monotonic()
        self.unsent: list[MetricPoint] = []
        self.losses: deque[float] = deque(maxlen=SMOOTHED)
        self.held_out: dict[str, float] = {}
        self._leave_word(journal.parent / FOLLOWED)

    def follow(self, launch: Launch, start: int, silence_s: float, startup_s: float = float("inf")) -> AttemptResult:
        """Follow until the trainer ends and return how; stops the trainer if interrupted.

        `start` is the stage's first position. An attempt that has recorded a step and then none for `silence_s` is
        stopped: one process alone has no peer to time out. So is one that uses no processor for as long before its
        first step, which may come late (a large checkpoint is read, a model compiled, steps are trained again), and one
        that does not even log a line for `startup_s`.
        """
        self.began, self.heard = self.position, time.monotonic()
        self.launched = self.logged = self.heard
        self.used_s, self.log_bytes = 0.0, 0
        if self.alerts:
            self.alerts.restarted()
        try:
            while (outcome := launch.poll()) is None:
                self._take(start)
                if why := self._silent(silence_s, startup_s, launch):
                    launch.stop()
                    outcome = AttemptResult(status=HUNG, words=f"{why}; it was stopped")
                    break
                self._await(launch)
        except BaseException:
            launch.stop()
            self.sender.drain(INTERRUPTED_S)
            raise
        self._take(start)
        self._finish(outcome)
        return outcome

    def _finish(self, outcome: AttemptResult) -> None:
        """Have everything sent; the points of a whole stage need not be sent a second time with its artifact."""
        self.send()
        if self.sender.drain() and outcome.status == 0:
            self.context.tracker.whole.add(self.runs[-1])

    def _leave_word(self, path: Path) -> None:
        opening = self.context.tracker.opening(self.runs[-1])
        if opening is None or "stage" not in opening.tags:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        word = {
            "run": self.context.record.name,
            "tags": opening.tags,
            "steps": self.thinning.steps,
            "end": self.thinning.end,
        }
        write_atomic(path, json.dumps(word))

    def _await(self, launch: Launch) -> None:
        """Sleep until the next look at the journal, or until the trainer has ended."""
        until = time.monotonic() + POLL_S
        while time.monotonic() < until and launch.poll() is None:
            time.sleep(WATCH_S)

    def _silent(self, silence_s: float, startup_s: float, launch: Launch) -> str:
        """Return why the trainer is believed to hang; nothing if it is not."""
        now, starting = time.monotonic(), self.position == self.began
        if starting and self._works(launch, now):
            self.heard = now
        if (size := sum(log.stat().st_size for log in launch.logs.glob("rank-*.log"))) != self.log_bytes:
            self.logged, self.log_bytes = now, size
        why = ""
        if now - self.heard > silence_s:
            why = f"it did nothing for {silence_s:,.0f} s before its first step" if starting else ""
            why = why or f"no step for {silence_s:,.0f} s"
        elif starting and now - self.logged > startup_s:
            why = f"no step and no line of log for {startup_s:,.0f} s"
        if why and launch.waits():  # asked last: it may be a question to a scheduler
            self.heard = self.logged = now
            return ""
        return why

    def _works(self, launch: Launch, now: float) -> bool:
        """Return whether processors worked for the trainer since it was last heard of, or nobody can tell."""
        used_s = launch.used_s()
        if used_s is not None and used_s - self.used_s <= IDLE * (now - self.heard):
            return False
        self.used_s = used_s or 0.0
        return True

    def _take(self, start: int) -> None:
        entries = self.tail.new()
        for entry in entries:
            if isinstance(entry, Rewind):  # nothing is written while the steps up to it are trained again
                self.position = self.began = entry.position
                self.losses.clear()
                self.context.console.say(f"  [yellow]went back to before {entry.position:,} because of a spike[/]")
        records = holding(entries)
        self._watch(entries)
        for record in records:
            self.unsent += self.thinning.points(record)
        if records:
            self.position, self.heard = records[-1].position, time.monotonic()
            shown = self._smoothed(records)
            values = shown.metrics
            self.line.update(
                shown.position - start,
                values.get(metrics.LOSS),
                values.get(metrics.TOKENS_PER_S),
                values.get(metrics.HELD_OUT),
            )
            if self.page:
                self.page.see(shown)
        if time.monotonic() - self.last_sent > SEND_INTERVAL_S:
            self.send()

    def _smoothed(self, records: Sequence[Record]) -> Record:
        """Return the newest record with the mean loss of the last steps and the last bits per byte held out."""
        for record in records:
            values = record.metrics
            self.losses += [values[metrics.LOSS]] if metrics.LOSS in values else []
            self.held_out |= {key: values[key] for key in (metrics.HELD_OUT,) if key in values}
        mean = {metrics.LOSS: sum(self.losses) / len(self.losses)} if self.losses else {}
        return replace(records[-1], metrics={**records[-1].metrics, **mean, **self.held_out})

    def _watch(self, entries: list[Entry]) -> None:
        """Let alerts see what is new, or how long nothing has been."""
        if self.alerts:
            for entry in entries:
                self.alerts.see(entry)
            if not entries:
                since = self.launched if self.position == self.began else self.heard
                self.alerts.idle(time.monotonic() - since)

    def send(self) -> None:
        """Hand over what has come in; returns at once."""
        self.last_sent = time.monotonic()
        if self.unsent:
            self.sender.put(self.unsent)
        self.unsent = []
