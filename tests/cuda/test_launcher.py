"""Attempts on device `cuda` as a run makes them: the agent, its forked ranks, a kill, fewer processes, no memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cuda import null_device

null_device.require()

from herd.llama3.recipe.schedule import Schedule  # noqa: E402
from herd.llama3.train.job import AttemptResult  # noqa: E402
from herd.tasks.cluster import Cluster  # noqa: E402
from herd.tasks.launch.base import fitting  # noqa: E402
from herd.tasks.launch.local import Agents, LocalLauncher, rank_process  # noqa: E402
from tests.llama3.train.train_samples import job, recipe, records, stages, weights, work  # noqa: E402

WAIT_S = 240
ASKED = recipe(precision="bf16", stages=stages(200))
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent is started with: sound values, and no segments that the null device does not know."""
    paths = [str(CHECKOUT / "tests/cuda/site"), str(CHECKOUT), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    if null_device.NULL:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def outcome(launcher: LocalLauncher, path: Path, processes: int, logs: Path) -> AttemptResult:
    """Run one attempt to its end."""
    launch = launcher.start(path, processes, logs)
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    return ended


def test_after_a_kill_fewer_processes_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    null_device.require(2)
    path = job(tmp_path, ASKED, device="cuda")
    cluster = Cluster(processes=2, threads=2, device="cuda")
    with Agents(tmp_path / "agent.log") as agents:
        launcher = LocalLauncher(cluster, agents)
        launch = launcher.start(path, 2, tmp_path / "1")
        wait_for(lambda: len(records(path)) >= 20 or launch.poll() is not None)
        rank_process(1).kill()
        wait_for(lambda: launch.poll() is not None)
        ended = launch.poll()
        assert ended is not None
        assert "rank 1 was killed by SIGKILL" in ended.message
        left = fitting(Schedule(ASKED).span("main"), cluster, capacity=1)
        assert left == 1
        assert outcome(launcher, path, left, tmp_path / "2").status == 0
    log = (tmp_path / "2" / "rank-0.log").read_text()
    assert "1 x NVIDIA H" in log
    assert "from checkpoint" in log
    assert (work(path) / "result" / "environment.json").is_file()


def test_too_little_memory_ends_with_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    null_device.require(null=True)
    monkeypatch.setenv("NULLCUDA_GIB", "0.02")
    path = job(tmp_path, recipe(precision="bf16", stages=stages(4), model=LARGE), device="cuda")
    with Agents(tmp_path / "agent.log") as agents:
        ended = outcome(LocalLauncher(Cluster(device="cuda"), agents), path, 1, tmp_path / "1")
    assert ended.status == 1
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in ended.message
    assert not (work(path) / "result").exists()


LARGE = {"layers": 2, "dim": 512, "ffn": 2048, "heads": 8, "kv_heads": 4, "max_seq_len": 64}


def test_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    """Deterministic training, killed and continued, ends in the weights of an undisturbed one: on a real GPU."""
    if null_device.NULL:
        pytest.skip("the null device computes nothing")
    asked, ends = recipe(precision="bf16", stages=stages(60)), []
    for name, killed in (("calm", False), ("killed", True)):
        (tmp_path / name).mkdir()
        path = job(tmp_path / name, asked, device="cuda", deterministic=True)
        with Agents(tmp_path / f"{name}.log") as agents:
            launcher = LocalLauncher(Cluster(device="cuda"), agents)
            if killed:
                launch = launcher.start(path, 1, tmp_path / name / "0")
                wait_for(lambda path=path, launch=launch: len(records(path)) >= 25 or launch.poll() is not None)
                rank_process(0).kill()
                wait_for(lambda launch=launch: launch.poll() is not None)
            ended = outcome(launcher, path, 1, tmp_path / name / "1")
        assert ended.status == 0, ended.message
        ends.append(weights(path))
    assert "from checkpoint" in (tmp_path / "killed" / "1" / "rank-0.log").read_text()
    assert ends[0] == ends[1]
