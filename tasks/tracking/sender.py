"""One thread that sends points to MLflow while a trainer is followed, so that the follower never waits for it.

A follower that waits notices a dead trainer late, and each late notice is part of a restart. The queue is bounded; what
does not fit, and what comes while MLflow is away, is let go, because the journal has it: when MLflow answers again,
this thread has the whole run published again. Threads and MLflow's own asynchronous logging differ in exactly that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from tasks.tracking.mlflow import MetricPoint, Tracker

MOST_WAITING = 200_000
"""Points: about 40 MB."""
IDLE_S = 5.0
DRAIN_S = 60.0
CATCH_UP_INTERVAL_S = 30.0


class Sender:
    """Sends to some runs; `catch_up` makes good what MLflow lacks, and may take its time."""

    def __init__(self, tracker: Tracker, runs: list[str], catch_up: Callable[[], object]) -> None:
        self.tracker, self.runs, self._catch_up = tracker, runs, catch_up
        self._queue: queue.Queue[list[MetricPoint] | None] = queue.Queue()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._caught_up_at = 0.0

    def put(self, points: list[MetricPoint]) -> None:
        """Take points to send; returns at once."""
        if self._waiting + len(points) > MOST_WAITING:
            self.tracker.reach.stale = True
            return
        self._waiting += len(points)
        self._queue.put(points)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mlflow-sender", daemon=True)
            self._thread.start()

    def drain(self, seconds: float = DRAIN_S) -> bool:
        """Return whether MLflow has everything that was put; waits while it takes it, and not if it is away."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(seconds)
            if thread.is_alive():
                self.tracker.reach.stale = True
        return not self.tracker.stale

    def _run(self) -> None:
        while True:
            try:
                points = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                points = []
            if points is None:
                return
            if points:
                self._waiting -= len(points)
                self.tracker.log_points(self.runs, points)
            self._make_good()

    def _make_good(self) -> None:
        tracker, now = self.tracker, time.monotonic()
        if tracker.stale and tracker.available() and now - self._caught_up_at > CATCH_UP_INTERVAL_S:
            self._caught_up_at = now
            self._catch_up()
