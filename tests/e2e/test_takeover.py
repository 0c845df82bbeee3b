"""Whatever is killed, in whatever order: no orphan trainer, true states, and in the end the bytes of a quiet run.

A real Prefect server with its automations, a real worker, the real flow. One run dies several deaths in a row, because
every beginning costs seconds; each death is waited for until the run trains again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling

from herd.flows.local_server import POOL, await_answer, child, prefect_command, worker_command
from herd.flows.setup import setup
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.operate.ledgers import ledger_differences
from herd.tasks.operate.owners import TAG
from herd.tasks.operate.recovery import AUTO_RESUME, reconcile
from herd.tasks.runs.records import RunRecord, Runs
from herd.tasks.study.records import Studies
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.dist import Forked
from tests.e2e.conftest import Herd, NewHerd, bytes_made, copy_artifacts, journal_lines, trainers, wait_for
from tests.e2e.test_study import WARM, write_study

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_S = 120
"""The figure: kill -9 of engine, trainer and worker together, until training resumes."""


class Place:
    """One root, the worker that serves it, and one flow run."""

    deployment = "pipeline/takeover"
    lease = ("runs", "tiny-1")
    """Of what the flow run works on."""

    def __init__(self, herd: Herd, client: SyncPrefectClient) -> None:
        self.herd, self.client, self.root = herd, client, Root.parse(herd.root)
        self.tracker = MLflowTracker(self.root, "tiny")
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> subprocess.Popen[bytes]:
        words = [*worker_command(), "--work-queue", "default"]
        timing = {"PREFECT_WORKER_QUERY_SECONDS": "3", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
        with (self.herd.root / "worker.log").open("ab") as log:
            self.workers.append(
                subprocess.Popen(
                    words,
                    stdout=log,
                    stderr=log,
                    env={**self.herd.environment, **timing, "PREFECT_API_URL": self.herd.api},
                    start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` ignores it
                )
            )
        return self.workers[-1]

    def begin(self) -> None:
        """Create the flow run."""
        deployment = self.client.read_deployment_by_name(self.deployment)
        config = {**self.asked(), "root": self.root.uri, "cluster": {"threads": 1}}
        made = self.client.create_flow_run_from_deployment(deployment.id, parameters={"config": config})
        self.id: UUID = made.id

    def asked(self) -> dict[str, Any]:
        return {"recipe": self.herd.recipe}

    def record(self) -> RunRecord:
        return Runs(self.root).find("tiny-1")

    def engine(self) -> int:
        """Return the process that is at work, or 0; a lease names us last once we have settled it."""
        text = self.root.read("leases", *self.lease)
        pid = int(json.loads(text)["pid"]) if text else 0
        return pid if pid not in (0, os.getpid()) and psutil.pid_exists(pid) else 0

    def trains(self, attempt: int, steps: int) -> None:
        """Wait until attempt `attempt` has recorded a step and the stage `main` has `steps`."""
        began = journal_lines(self.herd.root, "main")
        wait_for(lambda: self._attempt() >= attempt and bool(self._trainers()), f"attempt {attempt}", PATIENCE_S)
        wanted = max(steps, began + 1)
        wait_for(lambda: journal_lines(self.herd.root, "main") >= wanted, f"{wanted} steps", 60)

    def _attempt(self) -> int:
        try:
            return self.record().attempts
        except ValueError:
            return 0

    def _trainers(self) -> list[psutil.Process]:
        try:
            return trainers(self.engine()) if self.engine() else []
        except psutil.Error:
            return []

    def dies(self, *deaths: tuple[int, signal.Signals]) -> list[psutil.Process]:
        """Send the signals; return the trainers that there were."""
        there = self._trainers()
        assert len(there) == 1
        for pid, number in deaths:
            os.kill(pid, number)
        return there

    def state(self) -> str:
        state = self.client.read_flow_run(self.id).state
        assert state is not None
        return state.name or ""

    def mlflow(self) -> set[str]:
        """Return the statuses of the run in MLflow and of its steps."""
        found = self.tracker.client.search_runs([self.tracker.experiment], "tags.`herd.run` = 'tiny-1'")
        return {each.info.status for each in found}

    def stop(self) -> None:
        for worker in self.workers:
            engine = self.engine()
            worker.kill()  # nothing if it has been waited for: its number may be another's
            if engine:
                with suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
            worker.wait()


class StudyPlace(Place):
    """The same for a study of two variants and two seeds."""

    deployment = "study/takeover"
    lease = ("studies", "warm")

    def asked(self) -> dict[str, Any]:
        return {"study": str(write_study(self.herd.root.parent, self.herd.recipe, WARM))}

    def runs(self) -> dict[str, str]:
        return {run.name: run.state for run in Runs(self.root).all()}


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=40)[1]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Home and address of a Prefect server of this module's own: its automations would act on the runs of others."""
    home, port = tmp_path_factory.mktemp("prefect"), free_port()
    with child("prefect", prefect_command(port), home, {**os.environ, "PREFECT_HOME": str(home)}) as server:
        await_answer(f"http://127.0.0.1:{port}/api/health", server)
        yield home, f"http://127.0.0.1:{port}/api"


@pytest.fixture(scope="module")
def client(own: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncPrefectClient]:
    """The server with work pool, automations, and the pipeline and the study as deployments."""
    home, api = own
    setup(Root.parse(tmp_path_factory.mktemp("results")), api)
    environment = {**os.environ, "PREFECT_API_URL": api, "PREFECT_HOME": str(home)}
    for entrypoint in ("herd.flows.pipeline.pipeline", "herd.flows.study.study"):
        words = ["deploy", entrypoint, "-n", "takeover", "--pool", POOL, "--work-queue", "default"]
        words += ["--tag", TAG, "--tag", AUTO_RESUME]
        process = Forked("prefect", "--no-prompt", *words, environment=environment)
        printed, _ = process.communicate(timeout=400)
        assert process.returncode == 0, printed
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def here(new_herd: NewHerd, own: tuple[Path, str], tmp_path: Path) -> Herd:
    """A root of the test's own, served by this module's server."""
    made = new_herd(tmp_path / "root")
    made.home, made.api = own
    return made


@pytest.fixture
def place(herd: Herd, here: Herd, client: SyncPrefectClient) -> Iterator[Place]:
    made = Place(here, client)
    copy_artifacts(herd, made.herd.root, "checkpoint/tiny-ramp-*")
    try:
        yield made
    finally:
        made.stop()


def test_deaths_in_a_row(place: Place, undisturbed: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    worker = place.start_worker()
    place.begin()

    place.trains(attempt=1, steps=3)
    left = place.dies((place.engine(), signal.SIGKILL))  # the worker sees it and says Crashed; the watchdog restarts it
    assert gone(left)

    place.trains(attempt=2, steps=7)
    left = place.dies((worker.pid, signal.SIGTERM))  # which kills the engine; nobody but the watchdog can say so
    assert gone(left)
    wait_for(lambda: place.state() in ("Crashed", "AwaitingRetry"), "Prefect to know", PATIENCE_S)
    wait_for(lambda: place.record().state == "interrupted", "the watchdog", 60)
    wait_for(lambda: "RUNNING" not in place.mlflow(), "MLflow to know", 60)
    worker.wait(60)
    worker = place.start_worker()

    place.trains(attempt=3, steps=11)
    (trainer,) = place._trainers()
    left = place.dies(*((pid, signal.SIGKILL) for pid in (place.engine(), trainer.pid, worker.pid)))
    began = time.monotonic()
    assert gone(left)
    worker.wait(60)
    worker = place.start_worker()
    place.trains(attempt=4, steps=0)
    with capsys.disabled():
        print(f"\nkill -9 of engine, trainer and worker together: trains again after {time.monotonic() - began:.0f} s")

    place.trains(attempt=4, steps=15)
    place.dies((worker.pid, signal.SIGKILL))  # the engine's next line of log finds a broken pipe, and rich ends it
    worker.wait(60)
    place.start_worker()
    wait_for(lambda: place.state() == "Completed", "the end", 200)
    ends(place, undisturbed)


def test_the_machine_dies(place: Place, undisturbed: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is killed at once, the watchdog too: the expired lease is all that is left to tell."""
    worker = place.start_worker()
    place.begin()
    place.trains(attempt=1, steps=3)
    (trainer,) = place._trainers()
    (watchdog,) = [
        child for child in psutil.Process(place.engine()).children() if "herd.flows.watchdog" in child.cmdline()
    ]
    left = place.dies(*((pid, signal.SIGKILL) for pid in (watchdog.pid, place.engine(), trainer.pid, worker.pid)))
    began = time.monotonic()
    assert gone(left)
    worker.wait(60)
    place.start_worker()
    reconcile(place.root, place.client, grace_s=0)  # as the loop of `herd up` does
    place.trains(attempt=2, steps=0)
    with capsys.disabled():
        print(f"\nkill -9 of the watchdog too: trains again after {time.monotonic() - began:.0f} s")
    wait_for(lambda: place.state() == "Completed", "the end", 200)
    ends(place, undisturbed)


def test_cancel_and_retry(place: Place, undisturbed: dict[str, str]) -> None:
    place.start_worker()
    place.begin()
    place.trains(attempt=1, steps=4)
    (trainer,) = left = place.dies()
    trainer.kill()  # a trainer's death alone is the supervisor's business
    wait_for(lambda: gone(left) and bool(place._trainers()), "the next trainer", 60)

    left = place.dies()
    place.client.set_flow_run_state(place.id, Cancelling())
    wait_for(lambda: place.state() == "Cancelled", "the cancellation", PATIENCE_S)
    assert gone(left)
    wait_for(lambda: place.record().state == "cancelled", "the watchdog", 60)
    wait_for(lambda: "RUNNING" not in place.mlflow(), "MLflow to know", 60)

    place.client.set_flow_run_state(place.id, AwaitingRetry(), force=True)
    wait_for(lambda: place.state() == "Completed", "the end", 200)
    ends(place, undisturbed)


def test_the_engine_of_a_study_dies(herd: Herd, here: Herd, client: SyncPrefectClient) -> None:
    """In its second run: that one goes on from its checkpoint, the first is reused, and the verdict comes by itself."""
    place = StudyPlace(here, client)
    copy_artifacts(herd, place.herd.root)
    place.start_worker()
    try:
        place.begin()
        wait_for(lambda: place.runs().get("warm-2") and journal_lines(place.herd.root, "main") >= 3, "run 2", 200)
        left = place.dies((place.engine(), signal.SIGKILL))
        assert gone(left)
        wait_for(lambda: Studies(place.root).find("warm").state == "interrupted", "the watchdog", 60)
        wait_for(lambda: place.state() == "Completed", "the end", 300)
        assert place.runs() == dict.fromkeys(("warm-1", "warm-2", "warm-3", "warm-4"), "finished")
        assert [Runs(place.root).find(name).attempts for name in ("warm-1", "warm-2", "warm-3")] == [1, 2, 1]
        study = Studies(place.root).find("warm")
        assert study.state == "finished"
        assert study.verdict is not None
        assert [line for line in reconcile(place.root, client, grace_s=0) if line.where != "storage"] == []
        assert ledger_differences(place.root, client) == []
    finally:
        place.stop()


def ends(place: Place, undisturbed: dict[str, str]) -> None:
    """Check that all states are true without more ado, and that the bytes are those of the undisturbed run."""
    found: list[Any] = reconcile(place.root, place.client, grace_s=0)
    assert [line for line in found if line.where != "storage"] == []
    assert ledger_differences(place.root, place.client) == []
    record = place.record()
    assert (record.state, record.verdict) == ("finished", "promoted")
    assert place.mlflow() == {"FINISHED", "KILLED"} or place.mlflow() == {"FINISHED"}
    assert place.tracker.client.get_run(record.mlflow_run).info.status == "FINISHED"
    assert record.steps["main"].outcome.startswith("resumed at ")
    assert [run.name for run in Runs(place.root).all()] == ["tiny-1"]
    assert not place._trainers()
    assert bytes_made(place.root, "tiny-1") == undisturbed
