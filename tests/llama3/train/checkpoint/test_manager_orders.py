"""Checkpoints after a fault at any call to the disk or the store: the next attempt finds the newest whole one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.train.checkpoint.manager import Checkpoints, SaveFailed
from herd.llama3.train.checkpoint.storage import LATE_S
from herd.llama3.train.journal import Journal, Record
from tests.llama3.train.checkpoint_samples import State, assert_holds, opened
from tests.orders import Boundary, Fault, cut_short, walk
from tests.storage.memory_store import MemoryStore
from tests.storage.simulation import PREFIX, ROOT


def save(checkpoints: Checkpoints, position: int, work: Path) -> None:
    """Train to `position` and save there, as a trainer does."""
    work.mkdir(parents=True, exist_ok=True)
    with Journal(work / "journal.jsonl") as journal:
        journal.add(Record(0.0, position, {"train/loss": float(position)}))
    checkpoints.save(State(position=position), "main")
    checkpoints.finish()


def resume(checkpoints: Checkpoints, position: int, work: Path) -> None:
    checkpoints.restore(checkpoints.resume(State()))


def roll_back(checkpoints: Checkpoints, position: int, work: Path) -> None:
    checkpoints.resume(State(), before=3)


@pytest.mark.fault("F2", "F4", "F5", "F6")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 41])
@pytest.mark.parametrize("where", ["disk", "object store"])
@pytest.mark.parametrize("operation", [save, resume, roll_back])
def test_the_newest_whole_checkpoint_is_loaded_after_a_fault_at_any_call(
    operation: Callable[[Checkpoints, int, Path], None],
    where: str,
    every: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("herd.storage.objects.PAUSE_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the power stays on
    numbers = count()

    def play(fault: Fault) -> int:
        """Save twice, the second time with a fault, and continue: on another machine if a store has the checkpoints."""
        folder, boundary = tmp_path / str(next(numbers)), Boundary(fault)
        memory = MemoryStore() if where == "object store" else None

        def machine(name: str) -> tuple[Checkpoints, Path]:
            work = folder / (name if memory else "one")
            more: dict[str, Any] = {"uri": f"{ROOT}/stage", "work": work} if memory else {}
            more |= {"rollback": 2 if operation is roll_back else 0}
            return opened(work / "checkpoints", last=1, threads=1, log=lambda _: None, **more), work

        with memory.in_place() if memory else nullcontext():
            first, work = machine("one")
            first.resume(State())
            save(first, 3, work)
            if operation is roll_back:
                save(first, 5, work)
            ended = False
            store = memory.watched(boundary) if memory else nullcontext()
            with boundary.watch_disk(folder), store, cut_short(SaveFailed, RuntimeError):
                operation(first, 6, work)
                ended = True
            if memory:
                memory.simulation.now += 2 * LATE_S
            second, other = machine("two")
            state = State()
            point = second.resume(state)
            assert point.skipped == ()
            after = {save: [6], resume: [3], roll_back: [3]}[operation]
            assert state.position in (after if ended else [3, 5, 6])
            assert_holds(state.arrays(), state.position)
            for ref in second.store.refs():
                second._load(ref, State())
            second.restore(point)
            lines = (other / "journal.jsonl").read_text().splitlines()
            expected = {3: 1, 5: 2, 6: 2}[state.position]
            assert len(lines) >= expected, "ahead of its journal"
            assert not memory or len(lines) == expected
            save(second, 9, other)
            positions = second.positions()
            assert positions[-1] == 9
            assert (
                set(positions[:-1])
                <= {
                    save: set[int](),
                    resume: {3} if fault.number > 0 else set(),  # who died while it loaded cannot take its pin back
                    roll_back: {3} if ended else {3, 5},  # the newest that is old enough for the next rollback
                }[operation]
            )
            third, _ = machine("three")
            third.resume(state)
            assert_holds(state.arrays(), 9)
            if memory:
                kept = {key.removeprefix(f"{PREFIX}stage/").split("/")[0] for key in memory.objects}
                assert {int(name) for name in kept if name.isdigit()} == set(positions)
            else:
                left = [path.name for path in (work / "checkpoints").iterdir()]
                assert sorted(left) == [f"{position:018}" for position in positions]
        return len(boundary.calls)

    walk(play, every)
