"""Follow a trainer's journal: show it, and hand it to a thread that sends it to MLflow in batches.

Training does not depend on MLflow: what could not be sent is sent later. Points carry the time of their record, so none
counts twice. A file beside the journal names its MLflow run, for `herd.tasks.tracking.backfill`.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from herd.llama3.train import metrics
from herd.llama3.train.health import HealthTail
from herd.llama3.train.job import GRACE_S, HUNG, AttemptResult, StopEstimate
from herd.llama3.train.journal import HEALTH, Journal, Record, Rewind, Tail, end_attempt, read_attempts, valid_records
from herd.storage.filesystem import write_atomic
from herd.tasks.console import ProgressLine
from herd.tasks.format import format_duration
from herd.tasks.launch.base import WATCH_S, Launch, stopped_on_error
from herd.tasks.launch.hosts import Hosts
from herd.tasks.stages.alerts import Alerts
from herd.tasks.stages.evaluate import CheckpointOffers
from herd.tasks.step import Context
from herd.tasks.tracking.backfill import FOLLOWED, Sender, catch_up, watch_outages
from herd.tasks.tracking.mlflow import mlflow_of
from herd.tasks.tracking.prefect_artifacts import StagePage
from herd.tasks.tracking.prometheus import Gauges
from herd.tasks.tracking.steps import Thinning, environment_tags
from herd.tasks.tracking.tracker import MetricPoint

POLL_S = 0.5
IDLE = 0.01
"""Processor seconds per second up to which a starting trainer counts as idle: its threads wake now and then."""
SEND_INTERVAL_S = 5.0
EXAMINE_S = 5.0
"""Between two looks at the samples of the nodes, of which there may be thousands."""
SMOOTHED = 32
"""Steps whose mean loss is shown: the loss of one batch depends on its domains."""
INTERRUPTED_S = 5.0
"""How long an interrupted run waits for points that are being sent."""


class JournalTailer:
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
        offers: CheckpointOffers | None = None,
        gauges: Gauges | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """`runs` are the MLflow runs, that of the stage last; `steps` and `end` are the stage's."""
        watch_outages(context)
        self.alerts, self.page, self.offers, self.gauges = alerts, page, offers, gauges
        self.hosts = hosts or Hosts(context.root)
        scheduler = getattr(context.cluster, context.cluster.launcher, None)  # None: launcher local, which waits
        self.grace_s: float = getattr(scheduler, "grace_s", math.inf)
        self.health: HealthTail | None = None
        self.faults: set[tuple[str, str]] = set()
        """Host and fault of the attempt, as recorded."""
        self.context, self.runs, self.tail, self.line, self.end = context, runs, Tail(journal), line, end
        self.thinning = Thinning(steps, end)
        self.sender = Sender(context.tracker, runs, lambda: catch_up(context))
        self.position = self.began = -1
        self.recorded = 0.0
        """When the last record was made, by the clock of rank 0."""
        self.heard = self.last_sent = self.examined = time.monotonic()
        self.unsent: list[MetricPoint] = []
        self.losses: deque[float] = deque(maxlen=SMOOTHED)
        self.held_out: dict[str, float] = {}
        opening = mlflow_of(context.tracker).opening(runs[-1])
        if opening is not None and "stage" in opening.tags:
            path = journal.parent / FOLLOWED
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(
                path,
                json.dumps(
                    {"run": context.record.name, "tags": opening.tags, "steps": self.thinning.steps, "end": end}
                ),
            )

    def follow(
        self, launch: Launch, start: int, step_timeout_s: float, startup_s: float = float("inf")
    ) -> AttemptResult:
        """Follow until the trainer ends and return how; stops the trainer if interrupted or if it hangs.

        `start` is the stage's first position. A trainer hangs if it records no step for `step_timeout_s`; before its
        first step, if it uses no processor for as long, or logs no line for `startup_s`. While it waits for a save, it
        may take the time limit of one. Raises SchedulerRefused as `stopped_on_error` does.
        """
        self.began, self.heard = self.position, time.monotonic()
        self.launched = self.logged = self.sized = self.heard
        self.used_s, self.log_bytes = 0.0, 0
        self.health, self.faults, self.followed = HealthTail(launch.logs), set(), time.time()
        if self.alerts:
            self.alerts.restarted()
        try:
            with stopped_on_error(launch):
                while (outcome := launch.poll()) is None:
                    self._take(start)
                    if why := self._silent(step_timeout_s, startup_s, launch):
                        launch.stop()
                        outcome = AttemptResult(status=HUNG, message=f"{why}; it was stopped")
                        break
                    until = time.monotonic() + POLL_S
                    while time.monotonic() < until and launch.poll() is None:
                        time.sleep(WATCH_S)
        except BaseException:
            self.sender.drain(INTERRUPTED_S)
            raise
        self.examined = -math.inf
        self._take(start)
        if self.position > self.began:  # it is the last attempt that wrote its start
            with suppress(OSError):
                end_attempt(self.tail.path.parent)  # its agent may have been killed too
        self.send()
        if self.sender.drain() and outcome.status == 0:  # the artifact's points need not be sent a second time
            self.context.tracker.complete.add(self.runs[-1])
        return outcome

    def _silent(self, step_timeout_s: float, startup_s: float, launch: Launch) -> str:
        """Return why the trainer hangs; "" if it does not."""
        now, starting = time.monotonic(), self.position == self.began
        if starting:  # it may read a large checkpoint, compile, or train steps again
            used_s = launch.used_s()
            if used_s is None or used_s - self.used_s > IDLE * (now - self.heard):
                self.used_s, self.heard = used_s or 0.0, now
            if now - self.sized > startup_s / 100:  # there may be thousands of logs
                size = sum(log.stat().st_size for log in launch.logs.glob("rank-*.log"))
                if size != self.log_bytes:
                    self.logged = now
                self.sized, self.log_bytes = now, size
        else:
            self.logged = now
        why, silent_s = "", now - self.heard
        if silent_s > step_timeout_s:
            why = f"it did nothing for {step_timeout_s:,.0f} s before its first step" if starting else ""
            why = why or f"no step for {step_timeout_s:,.0f} s"
        elif starting and (silent_s := now - self.logged) > startup_s:
            why = f"no step and no line of log for {startup_s:,.0f} s"
        saving_since = StopEstimate.read(self.tail.path.parent).saving_since if why else 0.0
        # A save waits for the one before it, and the end of a stage for the last. Both times are those of rank 0.
        if saving_since > self.recorded or (saving_since and 0 <= self.end <= self.position):
            from herd.llama3.train.checkpoint.manager import TIMEOUT_S  # imports torch

            why = f"no step for {TIMEOUT_S:,.0f} s while it saves a checkpoint" if silent_s > TIMEOUT_S else ""
        if why and launch.waits():  # last: it may query a scheduler
            self.heard = self.logged = now
            return ""
        return why

    def _take(self, start: int) -> None:
        """Read the new entries of the journal: show, judge and queue them."""
        entries = self.tail.new()
        for entry in entries:
            if isinstance(entry, Rewind):  # no record is written while the steps up to it are trained again
                self.position = self.began = entry.position
                self.losses.clear()
                self.context.console.log(f"  [yellow]went back to before {entry.position:,} because of a spike[/]")
        if self.alerts:
            for entry in entries:
                self.alerts.observe(entry)
            if not entries:
                since = self.launched if self.position == self.began else self.heard
                self.alerts.observe_silence(time.monotonic() - since)
        records = valid_records(entries)
        self._take_health(records)
        for record in records:
            self.unsent += self.thinning.points(record)
            if metrics.LOSS in record.metrics:
                self.losses.append(record.metrics[metrics.LOSS])
            if metrics.HELD_OUT in record.metrics:
                self.held_out = {metrics.HELD_OUT: record.metrics[metrics.HELD_OUT]}
            if metrics.CHECKPOINT_WRITE_S in record.metrics:
                self._check_grace(record)
        if self.offers:
            self.offers.observe(records)
        if records:
            if self.position == self.began and (attempts := read_attempts(self.tail.path.parent)):
                self.sender.tag(environment_tags(attempts[-1].get("environment") or {}))
            self.position, self.recorded, self.heard = records[-1].position, records[-1].time, time.monotonic()
            mean = {metrics.LOSS: sum(self.losses) / len(self.losses)} if self.losses else {}
            values = {**records[-1].metrics, **mean, **self.held_out}
            self.line.update(
                self.position - start,
                values.get(metrics.LOSS),
                values.get(metrics.TOKENS_PER_S),
                values.get(metrics.HELD_OUT),
            )
            if self.page:
                self.page.update(replace(records[-1], metrics=values))
            if self.gauges:
                self.gauges.update(records, mean.get(metrics.LOSS))
        if time.monotonic() - self.last_sent > SEND_INTERVAL_S:
            self.send()

    def _check_grace(self, saved: Record) -> None:
        """Warn once if the scheduler gives a trainer less time to leave than two steps and a save take."""
        step_s, save_s = saved.metrics.get(metrics.STEP_S, 0.0), saved.metrics[metrics.CHECKPOINT_WRITE_S]
        if (leaves_s := math.ceil(GRACE_S + 2 * step_s + save_s)) > self.grace_s:
            field = f"cluster.{self.context.cluster.launcher}.grace_s: {self.grace_s}"
            why = f"is less than a stop takes here: {leaves_s} s with a save of {format_duration(save_s)}"
            self.context.console.log(f"  [yellow]{field} {why}; write at least {leaves_s}, or stops lose steps[/]")
            self.grace_s = math.inf

    def _take_health(self, records: list[Record]) -> None:
        """Read the health of the nodes: record new faults, and add the values to the last of `records` that is sent."""
        if self.health is None:
            return
        if time.monotonic() - self.examined > EXAMINE_S:
            self.examined = time.monotonic()
            found = {(sample.host, fault) for sample in self.health.new() for fault in sample.faults}
            for host, fault in sorted(found - self.faults):
                self._found(host, fault)
        sent = [record for record in records if record.time > self.followed and self.thinning.sends(record)]
        if sent and (values := self.health.metrics()):
            record = Record(sent[-1].time, sent[-1].position, values)
            self.unsent += self.thinning.points(record)
            with suppress(OSError), Journal(self.tail.path.with_name(HEALTH)) as journal:
                journal.add(record)

    def _found(self, host: str, fault: str) -> None:
        """Record a fault, which excludes the host, and alert once."""
        try:
            new = self.hosts.record(host, "fault", fault, self.context.record.name)
        except (OSError, ValueError) as error:
            self.context.console.log(f"  [yellow]{escape(f'{host}: {fault} ({error})')}[/]")
            return
        self.faults.add((host, fault))
        if new and self.alerts:
            self.alerts.bad_host(host, fault)

    def send(self) -> None:
        """Queue the points that were read since the previous call."""
        self.last_sent = time.monotonic()
        if self.unsent:
            self.sender.put(self.unsent)
        self.unsent = []
