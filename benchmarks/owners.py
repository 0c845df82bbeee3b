"""Deaths at the wrong second: `python -m benchmarks owners`. No state of Prefect may wait for what is dead.

Flow runs of four deployments of one `herd up`, two with a record and two without, die by state (while they are
submitted, Pending, imported, just Running) and by victim (the worker, their process, both, all of `herd up`), and so
does a plain `herd run`. Two passes of the reconciler later nothing is blocked and no slot is lost; at the end all that
was asked for is done, once, and the ledgers agree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple
from uuid import UUID

import psutil
from prefect.client.schemas.objects import FlowRun

from benchmarks.measure import NotMeasured
from benchmarks.rows import OWNERS_TARGETS, Row, measured, rows_of
from herd.flows.children import MOST as MOST_DEATHS
from herd.flows.local_server import POOL
from herd.storage.root import Root
from herd.tasks.operate.ledgers import ledger_differences
from herd.tasks.operate.owners import Owners, engines, unfinished_flow_runs
from herd.tasks.operate.queues import held_slots
from herd.tasks.operate.recovery import reconcile
from herd.tasks.runs.records import Runs
from tests.e2e.conftest import Herd, kill_all, write_recipe
from tests.e2e.up import Up, running_up

STATES = ("submitting", "Pending", "importing", "Running")
VICTIMS = ("worker", "engine", "both", "herd up", "herd run")
WITH_RECORD, WITHOUT = ("pipeline/pipeline", "rerun/rerun"), ("promote/promote", "verify/scrub")
LOOK_S = 0.02
CONFIRM_S = 3.0
REACH_S, END_S = 240.0, 600.0
"""Limits: until a flow run reaches its state, and until all have ended after the last death."""


class Kill(NamedTuple):
    """A victim of a flow run of `deployment` in `state`."""

    state: str
    victim: str
    deployment: str

    def __str__(self) -> str:
        return f"{self.state} x {self.victim} ({self.deployment})"


def possible_kills() -> list[Kill]:
    """Return each combination once: nothing is killed before it is there, and `herd run` has no worker."""
    deployed = [
        Kill(*kill)
        for kill in product(STATES, VICTIMS[:4], (*WITH_RECORD, *WITHOUT))
        if kill[0] != "submitting" or kill[1] in ("worker", "herd up")
    ]
    return [*deployed, *(Kill(state, "herd run", "") for state in ("submitting", "Running"))]


@dataclass(frozen=True)
class OwnersSettings:
    """What is measured."""

    folder: Path
    kills: int = 120
    seed: int = 1
    minutes: float = 40.0
    only: tuple[str, ...] = ()
    """Names of rows or of their groups; empty: all."""


@dataclass
class OwnersSession:
    """One root with a `herd up`, one for plain runs, and what the deaths left there."""

    settings: OwnersSettings
    log: Callable[[str], object]
    done: Counter[Kill] = field(default_factory=Counter)
    left_out: int = 0
    """Kills for which there was no time."""
    blocked: list[str] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    not_once: list[str] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """From each death to the end of the second pass."""
    asked: dict[UUID, Kill] = field(default_factory=dict)

    def __post_init__(self) -> None:
        home, recipe = self.settings.folder / "home", write_recipe(self.settings.folder / "corpus")
        self.herd, self.plain = (
            Herd(self.settings.folder / name, home, "", recipe, folder=self.settings.folder) for name in ("up", "plain")
        )
        self.stack = ExitStack()

    def kill_all(self, kills: list[Kill] | None = None) -> None:
        """Make the artifacts that the flow runs reuse, then kill; `kills` replaces the choice of the settings."""
        random, began = Random(self.settings.seed), time.monotonic()
        if kills is None:
            kills = possible_kills()
            random.shuffle(kills)
            kills = (kills * (1 + self.settings.kills // len(kills)))[: self.settings.kills]
        self.herd("run", self.herd.recipe, server=False)
        try:
            with self.stack:
                for number, kill in enumerate(kills):
                    if time.monotonic() - began > 60 * self.settings.minutes:
                        self.left_out = len(kills) - number
                        break
                    self.log(f"{number + 1} of {len(kills)}: {kill}")
                    (self._kill_plain if kill.victim == "herd run" else self._kill)(kill)
                    self.done[kill] += 1
                if self.asked:
                    self._end(self._running())
        finally:
            for herd in (self.herd, self.plain):
                herd.stop_all()

    def _running(self) -> Up:
        """Return the `herd up`, started if need be."""
        if not hasattr(self, "up"):
            self.up = self.stack.enter_context(running_up(self.herd))
            self.dead_workers = 0
            self.up.pause_evaluations()
        return self.up

    def _restart(self) -> None:
        kill_all(self.up.process.pid)
        self.up.process.wait(60)
        with suppress(Exception):  # it is dead: there is nothing to stop
            self.stack.close()
        del self.up
        self._running()

    def _kill(self, kill: Kill) -> None:
        if kill.victim in ("worker", "both"):
            self._running()
            if self.dead_workers == MOST_DEATHS - 1:  # it would end with the next one, as it promises
                self._restart()
            self.dead_workers += 1
        up = self._running()
        flow_run = up.start(kill.deployment, **self._parameters(kill.deployment))
        self.asked[flow_run.id] = kill
        self._reach(up, flow_run.id, kill.state)
        victims = self._worker(up) if kill.victim in ("worker", "both") else []
        if kill.victim in ("engine", "both") and (pid := engines()[0].get(str(flow_run.id))):
            victims += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        died = time.monotonic()
        if kill.victim == "herd up":
            self._restart()
        dying = [psutil.Process(pid) for pid in victims if psutil.pid_exists(pid)]
        for process in dying:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(dying, timeout=REACH_S)  # a worker that still dies would pass for the next one
        self._settle(died, str(kill))

    def _parameters(self, deployment: str) -> dict[str, object]:
        root = {"root": str(self.herd.root)}
        if deployment in WITH_RECORD:
            again = {"run": "tiny-1", "until": "curate"} if deployment == "rerun/rerun" else {}
            return {**root, **again, "cluster": {"threads": 1}}
        return {**root, **({"run": "tiny-1"} if deployment == "verify/scrub" else {"checkpoint": "tiny-1"})}

    def _reach(self, up: Up, flow_run: UUID, state: str) -> None:
        """Wait until a flow run is in `state`, or further."""
        deadline = time.monotonic() + REACH_S
        while time.monotonic() < deadline:
            now, pid = up.client.read_flow_run(flow_run).state, engines()[0].get(str(flow_run))
            assert now is not None
            imports = False
            with suppress(psutil.Error):
                imports = pid is not None and "_workspace_supervisor" not in psutil.Process(pid).cmdline()[2]
            reached = {
                "submitting": now.is_pending(),
                "Pending": pid is not None,
                "importing": imports,
                "Running": now.is_running(),
            }
            if reached[state] or now.is_final():
                return
            time.sleep(LOOK_S)
        raise NotMeasured(f"no flow run was {state} within {REACH_S:.0f} s")

    def _worker(self, up: Up) -> list[int]:
        return [each.pid for each in psutil.Process(up.process.pid).children() if "worker" in each.cmdline()]

    def _settle(self, died: float, what: str) -> None:
        """Make two passes once `herd up` has started another worker, and look at what waits for the dead."""
        up, deadline = self._running(), time.monotonic() + REACH_S
        while not Owners(up.client).any_worker(POOL) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        for _ in range(2):
            reconcile(up.root, up.client, cleanup=False)
        self.seconds.append(time.monotonic() - died)
        self.blocked += [f"{what}: {line}" for line in self._confirmed(lambda: self._blocked(up))]
        self.slots += [f"{what}: {line}" for line in self._confirmed(lambda: self._lost_slots(up))]

    @staticmethod
    def _confirmed(look: Callable[[], set[str]]) -> set[str]:
        """Return what two looks find: between two requests of one look a flow run may end."""
        found = look()
        if found:
            time.sleep(CONFIRM_S)
            found &= look()
        return found

    @staticmethod
    def _blocked(up: Up) -> set[str]:
        dead = (slot for slot in held_slots(up.client) if slot.verdict == "dead")
        return {f"{slot.where} by {slot.holder or slot.why}" for slot in dead}

    @staticmethod
    def _lost_slots(up: Up) -> set[str]:
        """Return the deployments with more slots in use than flow runs that hold one."""
        unfinished = [each for each in unfinished_flow_runs(up.client) if each.state and not each.state.is_paused()]
        holders = Counter(each.deployment_id for each in unfinished)
        limits = [(each, each.global_concurrency_limit) for each in up.client.read_deployments()]
        return {each.name for each, limit in limits if limit and limit.active_slots > holders[each.id]}

    def _kill_plain(self, kill: Kill) -> None:
        """Kill a `herd run` and give the command again; its servers end with it, so others look afterwards."""
        process = self.plain.start("run", self.plain.recipe, "--fresh", "--until", "curate", server=False)
        deadline = time.monotonic() + REACH_S
        before = {record.name for record in Runs(Root.parse(self.plain.root)).all()}
        while kill.state == "Running" and time.monotonic() < deadline and process.poll() is None:
            if {record.name for record in Runs(Root.parse(self.plain.root)).all()} - before:
                break
            time.sleep(LOOK_S)
        died = time.monotonic()
        kill_all(process.pid)
        self.plain("run", self.plain.recipe, "--until", "curate", server=False)
        self.seconds.append(time.monotonic() - died)

    def _end(self, up: Up) -> None:
        """Wait until all flow runs have ended, and compare what was asked for with what is there."""
        deadline = time.monotonic() + END_S
        while any(self._unfinished(each) for each in self._flow_runs(up)) and time.monotonic() < deadline:
            reconcile(up.root, up.client, cleanup=False)
            time.sleep(1.0)
        self._settle(time.monotonic(), "at the end")
        self.seconds.pop()
        found = Runs(up.root).all()
        records = Counter(record.prefect_run for record in found)
        # An equal request that began before the next attempt of a dead one continues its run: `its process is gone;
        # tiny-44 continues in another flow run`.
        continued = [f" {record.name} continues " for record in found if record.state == "finished"]
        for flow_run in self._flow_runs(up):
            kill, state = self.asked[flow_run.id], flow_run.state
            assert state is not None
            wanted = 1 if kill.deployment in WITH_RECORD else 0
            ended = state.is_completed() or (not wanted and state.is_crashed())
            if state.is_cancelled() and any(words in str(state.message) for words in continued):
                wanted, ended = 0, True
            if not ended or records[str(flow_run.id)] != wanted:
                count = records[str(flow_run.id)]
                self.not_once.append(f"{kill}: {flow_run.name} {state.name} ({state.message}), {count} records")
        self.lies += map(str, ledger_differences(up.root, up.client))
        if self.plain.started:
            self.lies += self._lies_of_plain_runs()

    def _flow_runs(self, up: Up) -> list[FlowRun]:
        return [up.client.read_flow_run(flow_run) for flow_run in self.asked]

    @staticmethod
    def _unfinished(flow_run: FlowRun) -> bool:
        return flow_run.state is None or not flow_run.state.is_final()

    def _lies_of_plain_runs(self) -> list[str]:
        """Return what a `herd up` on the root of the plain runs shows after two passes."""
        self.stack.close()
        with running_up(self.plain) as up:
            for _ in range(2):
                reconcile(up.root, up.client, cleanup=False)
            shown = [f"{each.name} {each.state and each.state.name}" for each in unfinished_flow_runs(up.client)]
            return [*shown, *map(str, ledger_differences(up.root, up.client))]


def owners_rows(session: OwnersSession) -> Iterator[Row]:
    """Yield the rows of `python -m benchmarks owners`. Raises ValueError as `rows_of`."""

    def count(found: list[str]) -> Callable[[OwnersSession, str], Row]:
        return lambda run, name: measured(name, len(found), "; ".join(found)[:600], found=found)

    def kills(run: OwnersSession, name: str) -> Row:
        states = Counter(kill.state for kill in run.done.elements())
        note = ", ".join(f"{state}: {number}" for state, number in sorted(states.items()))
        return measured(name, run.done.total(), note, kills={str(kill): n for kill, n in run.done.items()})

    measures: dict[str, Callable[[OwnersSession, str], Row]] = {
        "owners/kills": kills,
        "owners/not-run": lambda run, name: measured(name, run.left_out, "the time was over"),
        "owners/blocked": count(session.blocked),
        "owners/slots": count(session.slots),
        "owners/not-once": count(session.not_once),
        "owners/lies": count(session.lies),
        "owners/seconds": lambda run, name: measured(name, median(run.seconds) if run.seconds else 0.0),
    }
    yield from rows_of(session, OWNERS_TARGETS, measures)
