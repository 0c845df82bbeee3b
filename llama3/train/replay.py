"""What a restart costs and whether it changed anything: attempts, tokens trained again, and the replay's difference.

Steps between the checkpoint and the end of the journal are trained a second time. They are compared with the journal
instead of being written again; equal losses and gradient norms show that the restart is the run that was interrupted.
Records that a rollback made void are no part of the comparison: they stand for batches that are passed over now.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from llama3.train import metrics
from llama3.train.journal import Record

COMPARED = (metrics.LOSS, metrics.GRAD_NORM, metrics.SKIPPED)


class Replay:
    """The steps of the journal that lie after the position from which an attempt goes on."""

    def __init__(self, journal: Sequence[Record], position: int, trained_to: int | None = None) -> None:
        """Compare with the records of `journal` that hold; `trained_to` is where a rollback went back from."""
        self.last = journal[-1].position if journal else position
        self.lost_tokens = max(0, (self.last if trained_to is None else trained_to) - position)
        self.largest: float | None = None
        """Largest difference so far, None before any step was compared."""
        self._records = {record.position: record for record in journal if record.position > position}

    def knows(self, record: Record) -> bool:
        """Return whether the journal has this step already; if so, compare the two."""
        if record.position > self.last:
            return False
        if before := self._records.get(record.position):
            self.largest = max(self.largest or 0.0, _difference(before, record))
        return True

    def metrics(self, restarts: int, rollbacks: int = 0) -> dict[str, float]:
        """Return what the first new step after a restart or rollback records about it; nothing if there was none."""
        if not restarts and not rollbacks:
            return {}
        values = {metrics.LOST_TOKENS: float(self.lost_tokens)}
        if restarts:
            values[metrics.RESTARTS] = float(restarts)
        if rollbacks:
            values[metrics.ROLLBACKS] = float(rollbacks)
        return values if self.largest is None else {**values, metrics.REPLAY_MAX_ABS_DIFF: self.largest}


def _difference(first: Record, second: Record) -> float:
    """Return the largest difference of two records of one step; a number that only one of them has counts whole."""
    return max(abs(first.metrics.get(key, 0.0) - second.metrics.get(key, 0.0)) for key in COMPARED)


class Attempts:
    """`attempts.jsonl` of a stage: one line per start of its trainer."""

    def __init__(self, path: Path, processes: int) -> None:
        """Record one more attempt."""
        fields = {"time": time.time(), "pid": os.getpid(), "processes": processes}
        with path.open("ab+") as file:
            file.seek(0)
            earlier = file.read()
            torn = b"" if earlier.endswith(b"\n") or not earlier else b"\n"
            file.write(torn + json.dumps(fields).encode() + b"\n")
        whole = [line for line in earlier.split(b"\n") if line.endswith(b"}")]
        self.restarts = len(whole)
        self.started: float = json.loads(whole[0])["time"] if whole else fields["time"]
        """When the stage was first started, in seconds since 1970."""
