"""What a restart costs and whether it changed anything: attempts, tokens trained again, and the replay's difference.

Steps between the checkpoint and the end of the journal are trained a second time. They are compared with the journal
instead of being written again; equal losses and gradient norms show that the restart is the run that was interrupted.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from llama3.train import metrics
from llama3.train.journal import Record

COMPARED = (metrics.LOSS, metrics.GRAD_NORM)


class Replay:
    """The steps of the journal that lie after the position from which an attempt goes on."""

    def __init__(self, journal: list[Record], position: int) -> None:
        self.last = journal[-1].position if journal else position
        self.lost_tokens = max(0, self.last - position)
        self.largest: float | None = None
        """Largest difference so far, None before any step was compared."""
        self._records = {record.position: record for record in journal if record.position > position}

    def knows(self, record: Record) -> bool:
        """Return whether the journal has this step already; if so, compare the two."""
        if record.position > self.last:
            return False
        if before := self._records.get(record.position):
            pairs = [(before.metrics[key], record.metrics[key]) for key in COMPARED]
            self.largest = max(self.largest or 0.0, *(abs(first - second) for first, second in pairs))
        return True

    def metrics(self, restarts: int) -> dict[str, float]:
        """Return what the first new step of an attempt records about it; nothing for a first attempt."""
        if not restarts:
            return {}
        values = {metrics.RESTARTS: float(restarts), metrics.LOST_TOKENS: float(self.lost_tokens)}
        return values if self.largest is None else {**values, metrics.REPLAY_MAX_ABS_DIFF: self.largest}


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
