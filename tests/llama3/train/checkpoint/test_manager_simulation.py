"""Checkpoints, rollbacks and the uploaded journal of a stage in the simulation of the storage protocol.

Machines train one stage in turns, each under the stage's lease, with the store's faults; they die or are paused at any
request. The content of a state tells the rollbacks that it knows of: a position is a multiple of LINES and a line, and
each rollback begins a new line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from herd.llama3.recipe.sections import Keep
from herd.llama3.train.checkpoint import dcp, manager, storage
from herd.llama3.train.checkpoint.manager import Checkpoints, NoGoodCheckpoint
from herd.llama3.train.journal import Journal, Record, Rewind, discard_after, read_journal
from herd.storage import lease
from herd.storage.lease import LeaseHeld, LeaseLost
from herd.storage.root import Root
from tests.llama3.train.checkpoint_samples import ALONE, State, assert_holds
from tests.storage.simulation import (
    DISTURBED_S,
    ROOT,
    START,
    TIMING,
    Actor,
    Simulation,
    Violation,
    begin,
    play_seeds,
)

LINES, WINDOW = 64, 2
"""Positions of a step; steps of the skip window."""


@dataclass
class Stage:
    """What was promised about the checkpoints of the stage."""

    oldest: int = 0
    """A position that can be loaded, or a later one."""
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    """Position that each rollback went back to at most, and the line that it began."""
    spike: int = -WINDOW * LINES
    """Position of the last one; the batches after it are skipped, so that the next comes WINDOW steps later."""
    holder: str = ""
    """Who resumed last: what others save after that is not promised."""
    journals: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Attempt and position of each save that was begun -> positions of the journal's records."""


def trainer(simulation: Simulation, actor: Actor, stage: Stage) -> None:
    """Train while things happen; then load once in peace."""
    root, peaceful = Root(ROOT, actor.local), False
    while not peaceful:
        peaceful = simulation.now > DISTURBED_S + 61
        with (
            suppress(OSError, RuntimeError, LeaseHeld, LeaseLost, ValueError),  # a flipped bit in the root's format
            lease.lease(root, "work/stage", actor.name, lambda _: None, timing=TIMING),
        ):
            train(simulation, actor, stage)
        simulation.sleep(simulation.random.uniform(5, 60))


def train(simulation: Simulation, actor: Actor, stage: Stage) -> None:
    """Resume and train until an error, or until nothing happens any more."""
    work, state = actor.local / "work", State()
    work.mkdir(exist_ok=True)
    checkpoints = Checkpoints(
        actor.local / "checkpoints", Keep(last=1), ALONE, uri=f"{ROOT}/in-progress/stage", work=work, threads=1,
        rollback=WINDOW * LINES, log=lambda _: None,
    )  # fmt: skip
    path = work / "journal.jsonl"
    resume(simulation, checkpoints, state, stage)
    discard_after(path, state.position)
    if not checkpoints.positions():
        stage.journals[checkpoints.attempt, state.position] = []
        path.touch()
        checkpoints.save(state, "main")
    while simulation.now < DISTURBED_S:
        line = max([state.position % LINES, *(line for _, line in stage.rollbacks)])
        position = (state.position // LINES + 1) * LINES + line
        with Journal(path) as journal:
            journal.add(Record(0.0, position, {"train/loss": 1.0}))
        simulation.sleep(simulation.random.uniform(1, 30))
        state.train_to(position)
        stage.journals[checkpoints.attempt, position] = [record.position for record in read_journal(path)]
        checkpoints.save(state, "main")
        simulation.counts["saved"] += 1
        if stage.holder != actor.name:
            continue
        stage.oldest = position
        if position >= stage.spike + 2 * WINDOW * LINES and simulation.random.random() < 0.4:
            roll_back(simulation, checkpoints, state, stage, position)
            with Journal(path) as journal:
                journal.add(Rewind(0.0, state.position, position))


def resume(simulation: Simulation, checkpoints: Checkpoints, state: State, stage: Stage) -> None:
    """Load the newest checkpoint, and check it against what was promised."""
    stage.holder = simulation.current().name
    try:
        point = checkpoints.resume(state)
        checkpoints.restore(point)
    except NoGoodCheckpoint as error:
        raise Violation(str(error)) from error
    if stage.holder != simulation.current().name:  # another has resumed since, and maybe saved
        raise LeaseLost("work/stage")
    assert_holds(state.arrays(), state.position)
    simulation.note(f"resumes at {state.position}")
    simulation.counts["resumed"] += 1
    if point.skipped:
        raise Violation(f"good checkpoints are called damaged: {point.skipped}")
    if state.position < stage.oldest:
        raise Violation(f"{state.position} is loaded, {stage.oldest} was saved")
    for before, line in stage.rollbacks:
        if state.position > before and state.position % LINES < line:
            raise Violation(f"{state.position} is loaded, which does not know of the rollback to {before}")
    if point.manifest is not None:
        records = [record.position for record in read_journal(checkpoints.store.journal.work / "journal.jsonl")]  # type: ignore[union-attr]
        if [each for each in records if each <= state.position] != stage.journals[
            point.manifest.attempt, state.position
        ]:
            raise Violation(f"the journal at {state.position} has {records}")


def roll_back(simulation: Simulation, checkpoints: Checkpoints, state: State, stage: Stage, spike: int) -> None:
    """Go back to before the window around `spike`."""
    before, stage.oldest, stage.spike = spike - WINDOW * LINES, 0, spike  # until it is done, any may be the newest
    try:
        checkpoints.resume(state, before=before)
    except NoGoodCheckpoint as error:
        raise Violation(str(error)) from error
    if stage.holder != simulation.current().name:  # superseded meanwhile: it may have been done or not
        raise LeaseLost("work/stage")
    simulation.counts["rolled back"] += 1
    stage.rollbacks.append((before, len(stage.rollbacks) + 1))
    stage.oldest = state.position
    if state.position < before - 3 * WINDOW * LINES:
        raise Violation(f"back to {before} loads {state.position}")


class InlinePool:
    """ThreadPoolExecutor that does the work at once."""

    def __init__(self, threads: int, **_: Any) -> None: ...

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [work(item) for item in items]

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None: ...


def play(simulation: Simulation) -> None:
    """Two or three machines train the stage."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.fromtimestamp(START + simulation.now + simulation.current().skew_s, tz)

    stage = Stage()
    with ExitStack() as stack:
        for module in (manager, dcp):
            stack.enter_context(patch.object(module, "ThreadPoolExecutor", InlinePool))
        stack.enter_context(patch.object(storage, "parallel_map", lambda work, items: [work(item) for item in items]))
        stack.enter_context(patch.object(manager, "datetime", Clock))
        for number in range(simulation.random.randint(2, 3)):
            begin(simulation, f"trainer-{number}", partial(trainer, stage=stage))
        simulation.run()


HAPPENED = ("saved", "resumed", "rolled back", "crash", "pause", "late")


@pytest.mark.fault("F5", "F8", "F12")
def test_no_schedule_breaks_a_promise_about_checkpoints() -> None:
    play_seeds(0, 25, HAPPENED, play)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_schedule_of_a_thousand_does(record_property: Callable[[str, object], None]) -> None:
    record_property("summary", play_seeds(0, 1000, HAPPENED, play))
