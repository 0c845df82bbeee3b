"""Follow a trainer's journal: show it, and send it to MLflow in batches.

The journal is the truth and MLflow a projection, so an unreachable MLflow neither stalls nor fails training: what
could not be sent is sent at the next poll, and points carry the time they were recorded with, so none counts twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet

from llama3.train import metrics
from llama3.train.attempt import Outcome
from llama3.train.journal import Record, Rewind, Tail, holding
from tasks.console import ProgressLine
from tasks.launch import Launch
from tasks.step import Context
from tasks.tracking import Point

POLL_S = 0.5
WATCH_S = 0.05
"""Between two looks at the launcher: part of every restart."""
HUNG = 124
"""Status of an attempt that was stopped because nothing came any more."""
SEND_INTERVAL_S = 5.0
POINTS_PER_SERIES = 2000


class Follower:
    """Reads the journal of one stage as it grows."""

    def __init__(self, context: Context, runs: list[str], journal: Path, steps: int, line: ProgressLine) -> None:
        self.context, self.runs, self.tail, self.line = context, runs, Tail(journal), line
        self.stride = max(1, steps // POINTS_PER_SERIES)
        self.position = self.began = -1
        self.heard = time.monotonic()
        self.steps_seen = 0
        self.unsent: list[Point] = []
        self.last_sent = time.monotonic()
        self.warned = False

    def follow(self, launch: Launch, start: int, silence_s: float, report: Callable[[float], None]) -> Outcome:
        """Follow until the trainer ends and return how; stops the trainer if interrupted.

        `start` is the stage's first position; `report` is told the position from time to time. An attempt that has
        recorded a step and then none for `silence_s` is stopped: one process alone has no peer to time out.
        """
        self.began, self.heard = self.position, time.monotonic()
        try:
            while (outcome := launch.poll()) is None:
                self._take(start, report)
                if self._silent(silence_s, launch):
                    launch.stop()
                    outcome = Outcome(status=HUNG, words=f"no step for {silence_s:,.0f} s; it was stopped")
                    break
                self._await(launch)
        except BaseException:
            launch.stop()
            raise
        self._take(start, report)
        self.send()
        return outcome

    def _await(self, launch: Launch) -> None:
        """Sleep until the next look at the journal, or until the trainer has ended."""
        until = time.monotonic() + POLL_S
        while time.monotonic() < until and launch.poll() is None:
            time.sleep(WATCH_S)

    def _silent(self, silence_s: float, launch: Launch) -> bool:
        """Return whether steps came and then stopped; the start-up is watched by the processes themselves."""
        now = time.monotonic()
        if self.position == self.began:
            self.heard = now
        if now - self.heard <= silence_s:
            return False
        if launch.waits():  # asked last: it may be a question to a scheduler
            self.heard = now
            return False
        return True

    def _take(self, start: int, report: Callable[[float], None]) -> None:
        entries = self.tail.new()
        for entry in entries:
            if isinstance(entry, Rewind):  # nothing is written while the steps up to it are trained again
                self.position = self.began = entry.position
                self.context.console.say(f"  [yellow]went back to before {entry.position:,} because of a spike[/]")
        records = holding(entries)
        for record in records:
            self.steps_seen += 1
            if self.steps_seen % self.stride == 0:
                self.unsent += points_of(record)
        if records:
            last = records[-1]
            self.position, self.heard = last.position, time.monotonic()
            values = last.metrics
            self.line.update(last.position - start, values.get(metrics.LOSS), values.get(metrics.TOKENS_PER_S))
        if time.monotonic() - self.last_sent > SEND_INTERVAL_S:
            self.send()
            report(max(0, self.position - start))

    def send(self) -> None:
        """Send what has come in; on failure keep it for the next time and say so once."""
        self.last_sent = time.monotonic()
        try:
            self.context.tracker.log_points(self.runs, self.unsent)
        except Exception as error:
            if not self.warned:
                self.context.console.say(f"  [yellow]MLflow cannot be reached ({error!r}); kept for later[/]")
            self.warned = True
            return
        self.unsent = []


def points_of(record: Record) -> list[Point]:
    """Return the points of one journal record."""
    return [Point(key, value, record.time, record.position) for key, value in record.metrics.items()]


def send_series(context: Context, runs: list[str], table: Path) -> None:
    """Send the metrics of a finished stage (`metrics.parquet`) to the MLflow runs; points already there stay single."""
    rows = parquet.read_table(table).to_pylist()
    positions = sorted({row["position"] for row in rows})
    kept = set(positions[:: max(1, len(positions) // POINTS_PER_SERIES)])
    points = [Point(r["key"], r["value"], r["time"], r["position"]) for r in rows if r["position"] in kept]
    context.tracker.log_points(runs, points)
