"""`herd logs` and `herd stop`: logs of living and ended runs, and a stop wherever the run works."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from herd.flows import run_control
from herd.flows.run_control import find_log, follow_log, stop_run
from herd.storage.lease import LeaseRecord, lease
from herd.storage.root import Root
from herd.tasks.runs.records import RunRecord, Runs
from herd.tasks.tracking.moved_root import ACCESS
from tests.tasks.standing_root import begun, tiny

WORKS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
from herd.storage.lease import lease
from herd.storage.root import Root
with lease(Root.parse(sys.argv[1]), f"runs/{sys.argv[2]}", sys.argv[3]):
    print("works", flush=True)
    signal.sigwait([signal.SIGTERM])
"""


@flow(name="stopped")
def stopped() -> None:
    """What the flow run of a deployment is a run of; it never runs."""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.parse(tmp_path / "root")


@pytest.fixture
def run(root: Root) -> RunRecord:
    return begun(root, tiny())


def log(root: Root, stage: str, attempt: int, text: str, rank: int = 0) -> Path:
    path = root.file("runs", "tiny-1", "logs", stage, f"attempt-{attempt}", f"rank-{rank}.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path


def test_the_log_is_that_of_the_newest_attempt_of_the_last_stage(root: Root, run: RunRecord) -> None:
    with pytest.raises(ValueError, match=r"run tiny-1 has no trainer logs in .*/runs/tiny-1/logs$"):
        find_log(root, run.name)
    first, _, newest = log(root, "ramp", 1, "a\n"), log(root, "main", 9, "b\n"), log(root, "main", 10, "c\n")
    second = log(root, "main", 10, "d\n", rank=1)
    assert find_log(root, run.name) == newest
    assert find_log(root, run.name, "ramp") == first
    assert find_log(root, run.name, rank=1) == second
    with pytest.raises(ValueError, match="--stage: 'anneal' has no logs in run tiny-1; stages: ramp, main"):
        find_log(root, run.name, "anneal")
    with pytest.raises(ValueError, match=r"--rank: 2 has no log in .*/attempt-10; ranks: 0 to 1"):
        find_log(root, run.name, rank=2)


def test_a_log_is_followed_into_the_next_attempt_until_the_run_ends(
    root: Root, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_control, "POLL_S", 0.01)
    monkeypatch.setattr(run_control, "LIVE_S", 0.0)
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(follow_log(root, run.name)))

    def await_text(text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in "".join(seen):
            assert time.monotonic() < deadline, seen
            time.sleep(0.01)

    with lease(root, f"runs/{run.name}", run.name):
        reader.start()  # before there is any log
        first = log(root, "main", 1, "one\n")
        await_text("one\n")
        log(root, "main", 1, "two\n")
        await_text("two\n")
        second = log(root, "main", 2, "three\n")
        await_text("three\n")
        assert reader.is_alive()
    reader.join(20)
    assert not reader.is_alive()
    assert "".join(seen) == f"==> {first} <==\none\ntwo\n==> {second} <==\nthree\n"


@pytest.fixture
def worker(root: Root, run: RunRecord) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's lease until it gets SIGTERM."""
    command = [sys.executable, "-c", WORKS, root.uri, run.name, run.name]
    run.until = "main"
    Runs(root).save(run)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "works\n"
        yield process
        process.kill()


def test_the_process_of_a_run_here_is_asked_and_awaited(
    root: Root, run: RunRecord, worker: subprocess.Popen[str]
) -> None:
    said: list[str] = []
    done = stop_run(root, run.name, said.append)
    again = f"herd rerun tiny-1 --until main --root {root.uri}"
    assert done == f"tiny-1 is stopped; the same command, or: {again}, continues it"
    assert said == [f"asked process {worker.pid} to save and end"]
    assert worker.wait(20) == 0
    assert stop_run(root, run.name, said.append) == "tiny-1 does not run; its record says running"


def test_a_run_of_another_machine_or_purpose_is_left_alone(
    root: Root, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        lease(root, f"runs/{run.name}", f"a command on {run.name}"),
        pytest.raises(
            ValueError, match=r"is used by a command on tiny-1 .*, which does not train it; wait until it ends"
        ),
    ):
        stop_run(root, run.name, print)
    with lease(root, f"runs/{run.name}", run.name):
        monkeypatch.setattr("herd.storage.lease.machine_id", lambda: "another boot")
        with pytest.raises(
            ValueError, match=r"works on another machine: .*; there, write: herd stop tiny-1, or: kill "
        ):
            stop_run(root, run.name, print)


@pytest.mark.parametrize("sourced", [True, False])
def test_a_flow_run_of_a_deployment_is_cancelled_and_its_process_left_to_the_worker(
    root: Root, run: RunRecord, prefect_server: dict[str, str], sourced: bool
) -> None:
    """Its worker would restart what only dies. The server is that of the shell, or of `herd up` on this root."""
    api = prefect_server["api"]
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(stopped), name=f"stopped-{uuid4().hex[:8]}")
        flow_run = client.create_flow_run_from_deployment(deployment)
        client.set_flow_run_state(flow_run.id, Running(), force=True)
    run.prefect_run = str(flow_run.id)
    Runs(root).save(run)
    (root.local / ACCESS).write_text(f"# a link\nexport PREFECT_API_URL={api}\n")
    said: list[str] = []
    with (
        temporary_settings({PREFECT_API_URL: api if sourced else None}),
        lease(root, f"runs/{run.name}", run.name),  # this process: it would not survive SIGTERM
    ):
        assert LeaseRecord.here("").alive()
        assert "still saves after 1 s" in stop_run(root, run.name, said.append, 1.0)
    assert said == ["asked Prefect to cancel tiny-1; its trainer saves a checkpoint first"]
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(run.prefect_run)).state
    assert state is not None
    assert state.type.value in ("CANCELLING", "CANCELLED")
