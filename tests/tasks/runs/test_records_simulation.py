"""A run's record in the simulation of the storage protocol: what was written and acknowledged is never lost.

Attempts, the reconciler and `herd mlflow sync` write it in turns; they die or are paused at any request.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

import pytest

from herd.storage import lease
from herd.storage.fenced import DamagedRecord
from herd.storage.lease import LeaseHeld, LeaseLost
from herd.storage.root import Root
from herd.tasks.operate.recovery import DeadRun
from herd.tasks.runs.records import RunRecord, Runs, StepRecord
from tests.storage.simulation import (
    DISTURBED_S,
    ROOT,
    TIMING,
    Actor,
    Simulation,
    Violation,
    begin,
    play_seeds,
)

NAME = "tiny-1"
MANY_SCHEDULES = int(os.environ.get("HERD_SCHEDULES", "1000"))


@dataclass
class Promised:
    """What a writer was told that it has written."""

    attempts: int = 0
    steps: set[str] = field(default_factory=set)
    syncs: int = 0

    def check(self, found: RunRecord) -> None:
        syncs = int(found.mlflow_run or 0)
        if found.attempts < self.attempts or syncs < self.syncs or not self.steps <= found.steps.keys():
            lost = f"steps {sorted(self.steps - found.steps.keys())}"
            raise Violation(f"attempt {self.attempts}, sync {self.syncs} and {lost} were written: {found!r}")


def read(simulation: Simulation, runs: Runs, promised: Promised) -> RunRecord:
    """Read the record, its lease held, and check it against what was promised before."""
    before = deepcopy(promised)
    new = RunRecord(name=NAME, family="tiny", recipe_digest="d", started="", code="c", attempts=0)
    record = runs.known(NAME) or new
    runs.check(NAME)  # what a former holder reads is not promised
    before.check(record)
    simulation.counts["read"] += 1
    return record


def attempt(simulation: Simulation, actor: Actor, promised: Promised) -> None:
    """Work on the run, attempt after attempt; each makes a few steps."""
    root, runs, peaceful = Root(ROOT, actor.local), Runs(Root(ROOT, actor.local)), False
    while not peaceful:
        peaceful = simulation.now > DISTURBED_S + 61
        with (
            suppress(OSError, LeaseLost, DamagedRecord, ValueError),  # a flipped bit
            lease.lease(root, f"runs/{NAME}", actor.name, lambda _: None, timing=TIMING) as held,
        ):
            runs.hold(NAME, held)
            record = read(simulation, runs, promised)
            record.attempts, record.state = record.attempts + 1, "running"
            runs.save(record)
            promised.attempts = record.attempts
            for _ in range(simulation.random.randint(0, 3)):
                simulation.sleep(simulation.random.uniform(1, 30))
                step = f"{actor.name} {simulation.now:.2f}"
                record.steps[step] = StepRecord(artifact="a", outcome="created")
                with suppress(OSError):  # as a step whose report fails: the next save writes it
                    runs.save(record)
                    promised.steps |= record.steps.keys()
                    simulation.counts["saved"] += 1
            record.state = simulation.random.choice(["finished", "failed", "running"])
            runs.save(record)
        simulation.sleep(simulation.random.uniform(5, 60))


def reconciler(simulation: Simulation, actor: Actor) -> None:
    """End the record of attempts that died, over and over."""
    while simulation.now < DISTURBED_S:
        simulation.sleep(simulation.random.uniform(5, 60))
        with suppress(OSError, LeaseHeld, LeaseLost, DamagedRecord, ValueError):
            simulation.counts["ended"] += len(DeadRun(Root(ROOT, actor.local), NAME).end_record("interrupted"))


def sync(simulation: Simulation, actor: Actor, promised: Promised) -> None:
    """Write an id of MLflow into the record of a run that is over."""
    runs = Runs(Root(ROOT, actor.local))

    def edit(record: RunRecord) -> None:
        record.mlflow_run = str(int(record.mlflow_run or 0) + 1)

    while simulation.now < DISTURBED_S:
        simulation.sleep(simulation.random.uniform(5, 60))
        with suppress(OSError, LeaseHeld, LeaseLost, DamagedRecord, ValueError):
            promised.syncs = max(promised.syncs, int(runs.change(NAME, edit).mlflow_run))
            simulation.counts["synced"] += 1


def play(simulation: Simulation) -> None:
    promised = Promised()
    for number in range(simulation.random.randint(1, 3)):
        begin(simulation, f"attempt-{number}", partial(attempt, promised=promised))
    begin(simulation, "reconciler", reconciler)
    begin(simulation, "sync", partial(sync, promised=promised))
    simulation.run()


HAPPENED = ("read", "saved", "ended", "synced", "crash", "pause", "late", "lost", "flip")


@pytest.mark.fault("F2", "F5", "F12")
def test_no_schedule_loses_what_a_writer_was_told_is_written(record_property: Callable[[str, object], None]) -> None:
    record_property("summary", play_seeds(0, 60, HAPPENED, play))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_schedule_of_thousands_does(record_property: Callable[[str, object], None]) -> None:
    record_property("summary", play_seeds(0, MANY_SCHEDULES, HAPPENED, play))
