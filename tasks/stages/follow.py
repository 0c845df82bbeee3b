"""Follow a trainer's journal: show it, and hand it to a thread that sends it to MLflow in batches.

Training does not depend on MLflow: what could not be sent is sent later. Points carry the time of their record, so none
counts twice. A file beside the journal names its MLflow run, for `herd.tasks.stages.backfill`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rich.markup import escape

from herd.llama3.train import metrics
from herd.llama3.train.health import HealthTail
from herd.llama3.train.job import GRACE_S, HUNG, AttemptResult, StopEstimate
from herd.llama3.train.journal import HEALTH, Journal, Record, Tail, end_attempt, read_attempts, valid_records
from herd.storage.filesystem import write_atomic
from herd.tasks.console import ProgressLine
from herd.tasks.format import format_duration
from herd.tasks.launch.base import WATCH_S, Launch, stopped_on_error
from herd.tasks.launch.hosts import Hosts
from herd.tasks.stages.alerts import Alerts
from herd.tasks.stages.backfill import FOLLOWED, Sender, catch_up, watch_outages
from herd.tasks.stages.evaluate import CheckpointOffers
from herd.tasks.stages.hang_detector import HangDetector
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MetricPoint
from herd.tasks.tracking.prefect_artifacts import StagePage
from herd.tasks.tracking.steps import Thinning, environment_tags

POLL_S = 0.5
SEND_INTERVAL_S = 5.0
HEALTH_CHECK_S = 5.0
"""Between two looks at the samples of the nodes, of which there may be thousands."""
INTERRUPTED_S = 5.0
"""How long an interrupted run waits for points that are being sent."""


class JournalReader(Protocol):
    """A monitoring system that shows a stage while it trains; it never raises."""

    def update(self, records: Sequence[Record], loss: float | None) -> None:
        """Take new records of the journal, oldest first, and the mean loss of the last steps."""
        ...


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
        readers: Sequence[JournalReader] = (),
        hosts: Hosts | None = None,
    ) -> None:
        """`runs` are the MLflow runs, that of the stage last; `steps` and `end` are the stage's."""
        watch_outages(context)
        self.alerts, self.page, self.offers, self.readers = alerts, page, offers, readers
        self.hosts = hosts or Hosts(context.root)
        scheduler = getattr(context.cluster, context.cluster.launcher, None)  # None: launcher local, which waits
        self.grace_s: float = getattr(scheduler, "grace_s", math.inf)
        self.health: HealthTail | None = None
        self.faults: set[tuple[str, str]] = set()
        """Host and fault of the attempt, as recorded."""
        self.context, self.runs, self.tail, self.line, self.end = context, runs, Tail(journal), line, end
        self.thinning = Thinning(steps, end)
        self.sender = Sender(context.tracker, runs, lambda: catch_up(context))
        self.position = self.attempt_start = -1
        self.last_record_rank0_time = 0.0
        """When the last record was made, by the clock of rank 0."""
        self.last_record_at = self.last_sent = self.health_checked_at = time.monotonic()
        self.hang_detector = HangDetector(self.last_record_at, math.inf)
        self.unsent: list[MetricPoint] = []
        self.losses: dict[int, float] = {}
        """Of each step of the stage so far, by position."""
        self.held_out: dict[str, float] = {}
        opened = context.tracker.opening(runs[-1])
        if opened is not None and "stage" in opened.tags:
            path = journal.parent / FOLLOWED
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(
                path,
                json.dumps({"run": context.record.name, "tags": opened.tags, "steps": self.thinning.steps, "end": end}),
            )

    def follow(
        self, launch: Launch, start: int, step_timeout_s: float, startup_s: float = float("inf")
    ) -> AttemptResult:
        """Follow until the trainer ends and return how; stops the trainer if interrupted or if it hangs.

        `start` is the stage's first position; `step_timeout_s` and `startup_s` are those of HangDetector. Raises
        SchedulerRefused as `stopped_on_error` does.
        """
        self.attempt_start, self.last_record_at = self.position, time.monotonic()
        self.hang_detector = HangDetector(self.last_record_at, step_timeout_s, startup_s)
        self.health, self.faults, self.follow_start_time = HealthTail(launch.logs), set(), time.time()
        if self.alerts:
            self.alerts.restarted()
        try:
            with stopped_on_error(launch):
                while (outcome := launch.poll()) is None:
                    self._process_entries(start)
                    if reason := self._hang(launch):
                        launch.stop()
                        outcome = AttemptResult(status=HUNG, message=f"{reason}; it was stopped")
                        break
                    until = time.monotonic() + POLL_S
                    while time.monotonic() < until and launch.poll() is None:
                        time.sleep(WATCH_S)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.context.tracker.reach.hurry()
            self.sender.drain(INTERRUPTED_S)
            raise
        self.health_checked_at = -math.inf
        self._process_entries(start)
        if self.position > self.attempt_start:  # it is the last attempt that wrote its start
            with suppress(OSError):
                end_attempt(self.tail.path.parent)  # its agent may have been killed too
        self.send()
        if self.sender.drain() and outcome.status == 0:  # the artifact's points need not be sent a second time
            self.context.tracker.complete.add(self.runs[-1])
        return outcome

    def _hang(self, launch: Launch) -> str:
        """Return why the trainer hangs; "" if it does not."""
        detector, now = self.hang_detector, time.monotonic()
        if detector.starting:
            detector.observe_processor_time(now, launch.used_s())
        if detector.log_size_due(now):
            size = sum(log.stat().st_size for log in launch.logs.glob("rank-*.log"))
            detector.observe_log_size(now, size)
        if not detector.verdict(now):
            return ""
        # A save waits for the one before it, and the end of a stage for the last. Both times are those of rank 0.
        saving_since = StopEstimate.read(self.tail.path.parent).saving_since
        saving = saving_since > self.last_record_rank0_time or (saving_since > 0 and 0 <= self.end <= self.position)
        reason = detector.verdict(now, saving)
        if reason and launch.waits():  # last: it may query a scheduler
            detector.observe_queued(now)
            return ""
        return reason

    def _process_entries(self, start: int) -> None:
        """Read the new entries of the journal: show, judge and queue them."""
        entries = self.tail.new()
        for entry in entries:
            self.last_record_at = time.monotonic()
            if isinstance(entry, Record):
                self.hang_detector.observe_record(self.last_record_at)
            else:  # a rollback: no record is written while the steps up to it are trained again
                self.hang_detector.observe_rollback(self.last_record_at)
                self.position = self.attempt_start = entry.position
                self.losses = {at: loss for at, loss in self.losses.items() if at <= entry.position}
                self.context.console.log(f"  [yellow]went back to before {entry.position:,} because of a spike[/]")
        if self.alerts:
            for entry in entries:
                self.alerts.observe(entry)
            if not entries:
                self.alerts.observe_silence(time.monotonic() - self.last_record_at)
        records = valid_records(entries)
        health = self._process_health(records)
        self.unsent += self.thinning.points([*health, *records])
        for record in records:
            if metrics.LOSS in record.metrics:
                self.losses[record.position] = record.metrics[metrics.LOSS]
            if metrics.HELD_OUT in record.metrics:
                self.held_out = {metrics.HELD_OUT: record.metrics[metrics.HELD_OUT]}
            if metrics.CHECKPOINT_WRITE_S in record.metrics:
                self._check_grace(record)
        if self.offers:
            self.offers.observe(records)
        if records:
            if self.position == self.attempt_start and (attempts := read_attempts(self.tail.path.parent)):
                self.sender.tag(environment_tags(attempts[-1].get("environment") or {}))
            self.position, self.last_record_rank0_time = records[-1].position, records[-1].time
            mean = {metrics.LOSS: metrics.mean_loss(self.losses.values())} if self.losses else {}
            values = {**records[-1].metrics, **mean, **self.held_out}
            self.line.update(
                self.position - start,
                values.get(metrics.LOSS),
                values.get(metrics.TOKENS_PER_S),
                values.get(metrics.HELD_OUT),
            )
            if self.page:
                self.page.update(replace(records[-1], metrics=values))
            for reader in self.readers:
                reader.update([*health, *records], mean.get(metrics.LOSS))
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

    def _process_health(self, records: list[Record]) -> list[Record]:
        """Read the health of the nodes: record new faults; return the values, at the last of `records` that is sent."""
        if self.health is None:
            return []
        if time.monotonic() - self.health_checked_at > HEALTH_CHECK_S:
            self.health_checked_at = time.monotonic()
            faults = {(sample.host, fault) for sample in self.health.new() for fault in sample.faults}
            for host, fault in sorted(faults - self.faults):
                self._record_fault(host, fault)
        sent = [record for record in records if record.time > self.follow_start_time and self.thinning.sends(record)]
        if not sent or not (values := self.health.metrics()):
            return []
        record = Record(sent[-1].time, sent[-1].position, values)
        with suppress(OSError), Journal(self.tail.path.with_name(HEALTH)) as journal:
            journal.add(record)
        return [record]

    def _record_fault(self, host: str, fault: str) -> None:
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
