"""A script of failures for a training run on this machine: which rank is killed or stopped, and when.

It runs in a thread beside the supervisor, which knows nothing of it. First it lets the run train undisturbed and
measures what the planner needs: steps, saves, and restarts by request (every rank saves and leaves). From the first
step after those, it kills ranks (SIGKILL) and hangs them (SIGSTOP) at the times of a trace. At the end it has the run
save and leave, so that what was kept is a checkpoint. What this gives up: a strike that finds no rank waits for one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import psutil

from llama3.cluster.failures import Failure, Trace
from llama3.cluster.goodput import CheckpointCosts, Recovery
from llama3.train import metrics
from llama3.train.journal import Record, Tail
from llama3.train.launch import SETTLE_S
from tasks.launch import WATCH_S, Launch
from tasks.restart import rank_process
from tasks.standing import newest

WARM_UP = 3
"""First steps of an attempt, which import and allocate."""
STEADY_STEPS, STEADY_SAVES, STEADY_RESTARTS = 20, 2, 3
"""At least so many are measured; restarts, exactly."""
LONGEST_S = 300.0
"""As long as the script waits for what must come."""
LOOK_S = 0.02


@dataclass(frozen=True)
class Steady:
    """What a stretch without failures measured, in seconds."""

    step_s: float
    block_s: float
    save_s: float
    restart_s: float
    """From the end of an attempt that saved and left to the first step of the next, loading included; a mean."""

    @property
    def costs(self) -> CheckpointCosts:
        """Checkpoints as the planner takes them; loading is a part of the restart."""
        return CheckpointCosts(self.block_s, max(self.save_s, self.block_s), 0.0, "measured in this run")

    def recovery(self, timeout_s: float) -> Recovery:
        """Return what a failure costs: a killed rank's connections close at once, and the supervisor looks.

        Peers of one that hangs wait for `timeout_s`, and the launcher then for it.
        """
        return Recovery(WATCH_S, timeout_s + SETTLE_S + WATCH_S, self.restart_s)


@dataclass(frozen=True)
class Struck:
    """What came of the script."""

    useful_s: float
    """Steps of the span that the last checkpoint holds, each once."""
    position: int
    """Of that checkpoint, in tokens."""


class Script:
    """One performance, in a thread of its own; the supervisor sets `launch` at each attempt."""

    def __init__(self, work: Path) -> None:
        """Follow the journal in `work`."""
        self.work, self.processes = work, 1
        """The second: ranks that strikes are dealt over."""
        self.tail, self.records = Tail(work / "journal.jsonl"), list[Record]()
        self.launch: Launch | None = None
        self.over = threading.Event()
        """Set when the script has ended, or shall."""
        self.began, self.start = 0.0, 0
        """When the first step after the last restart began (seconds since 1970), and at which position."""

    def steady(self) -> Steady:
        """Measure until enough steps and saves were seen, then restarts. Raises RuntimeError if they do not come."""
        self._until(self._enough)
        records = self.records[WARM_UP:]
        step_s = mean(record.metrics[metrics.STEP_S] for record in records)
        block_s, save_s = (self._mean(key) for key in (metrics.CHECKPOINT_S, metrics.CHECKPOINT_WRITE_S))
        restarts = [self._restart(step_s) for _ in range(STEADY_RESTARTS)]
        return Steady(step_s, block_s, save_s, mean(restarts))

    def strike(self, trace: Trace, seconds: float) -> Struck:
        """Play `trace` on the ranks for `seconds` from the last restart on, then have the run leave."""
        for failure in trace:
            self._wait_until(self.began + failure.time_s)
            self._hit(failure)
        end = self.began + seconds
        self._wait_until(end)
        self.over.set()
        self.leave()
        self.look()
        saved = newest([str(self.work / "checkpoints")])
        kept = saved.position if saved else self.start
        mine = [r for r in self.records if self.start < r.position <= kept and r.time <= end]
        return Struck(sum(record.metrics[metrics.STEP_S] for record in mine), kept)

    def leave(self) -> float:
        """Have the running attempt save and leave; return when it was over, in seconds since 1970."""
        launch = self.launch
        while launch is not None and launch.poll() is None:
            with suppress(LookupError, psutil.Error):
                rank_process(0).terminate()
            time.sleep(LOOK_S)
        return time.time()

    def look(self) -> int:
        """Read what is new in the journal; return the last position."""
        self.records += [entry for entry in self.tail.new() if isinstance(entry, Record)]
        return self.records[-1].position if self.records else -1

    def _restart(self, step_s: float) -> float:
        """Have the run leave and wait for its first step after that; return the seconds between, without that step."""
        launch, ended = self.launch, self.leave()
        before = self.look()
        self._until(lambda: self.look() > before and self.launch is not launch)
        first = next(record for record in self.records if record.position > before)
        self.began, self.start = first.time - step_s, before
        return max(0.0, self.began - ended)

    def _enough(self) -> bool:
        self.look()
        saves = sum(metrics.CHECKPOINT_WRITE_S in record.metrics for record in self.records)
        return len(self.records) >= WARM_UP + STEADY_STEPS and saves >= STEADY_SAVES

    def _mean(self, key: str) -> float:
        return mean(record.metrics[key] for record in self.records if key in record.metrics)

    def _hit(self, failure: Failure) -> None:
        """Kill or stop the rank that stands for the host; if it is just being started, once it is there."""
        rank = failure.host % self.processes

        def hit() -> bool:
            with suppress(LookupError, psutil.Error):
                process = rank_process(rank)
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.suspend() if failure.hangs else process.kill()
                    return True
            return False

        self._until(hit)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not condition():
            if self.over.wait(LOOK_S) or time.monotonic() > deadline:
                raise RuntimeError(f"the run ended, or did not go on for {LONGEST_S:.0f} s; its logs say why")

    def _wait_until(self, moment: float) -> None:
        if self.over.wait(max(0.0, moment - time.time())):
            raise RuntimeError("the run ended before its failures did; its logs say why")
