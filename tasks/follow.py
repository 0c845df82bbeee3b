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
from llama3.train.journal import Record, read_journal
from tasks.console import ProgressLine
from tasks.launch import Launch
from tasks.step import Context
from tasks.tracking import Point

POLL_S = 0.5
SEND_INTERVAL_S = 5.0
POINTS_PER_SERIES = 2000


class Follower:
    """Reads the journal of one stage as it grows."""

    def __init__(self, context: Context, runs: list[str], journal: Path, steps: int, line: ProgressLine) -> None:
        self.context, self.runs, self.journal, self.line = context, runs, journal, line
        self.stride = max(1, steps // POINTS_PER_SERIES)
        self.position = -1
        self.steps_seen = 0
        self.unsent: list[Point] = []
        self.last_sent = time.monotonic()
        self.warned = False

    def follow(self, launch: Launch, start: int, report: Callable[[float], None]) -> int:
        """Follow until the trainer ends and return its exit status; stops the trainer if interrupted.

        `start` is the stage's first position; `report` is told the position from time to time.
        """
        try:
            while (status := launch.poll()) is None:
                self._take(start, report)
                time.sleep(POLL_S)
        except BaseException:
            launch.stop()
            raise
        self._take(start, report)
        self.send()
        return status

    def _take(self, start: int, report: Callable[[float], None]) -> None:
        records = read_journal(self.journal, after=self.position)
        for record in records:
            self.steps_seen += 1
            if self.steps_seen % self.stride == 0:
                self.unsent += points_of(record)
        if records:
            last = records[-1]
            self.position = last.position
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
