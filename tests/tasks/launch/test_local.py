"""The launcher of this machine: what happens to a rank is told by name, and the next attempt ends in the same bits."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import get_args

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.restart import measure_restart
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train.job import GRACE_S, OUT_OF_MEMORY, AttemptResult, StopEstimate, first_failure
from herd.llama3.train.journal import read_attempts
from herd.llama3.train.main import REFUSED
from herd.storage.processes import memory_kills
from herd.tasks.cluster import SCHEDULERS, Cluster, load_cluster
from herd.tasks.errors import TrainingFailed
from herd.tasks.launch.base import LAUNCHERS, fitting, launch_key, launcher_of
from herd.tasks.launch.local import Agents, LocalLauncher, rank_process, slow_precision
from tests.agents import ForkedAgents
from tests.llama3.train.train_samples import STEP, job, losses, recipe, records, stages, weights, work

WAIT_S = 240
ASKED = recipe(precision="fp32", stages=stages(40))


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    """One agent for all tests, as for all stages of a run."""
    with ForkedAgents(Path("/dev/null")) as agents:
        yield LocalLauncher(Cluster(processes=4, threads=4), agents)


@pytest.fixture(scope="module")
def undisturbed(launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    path = job(folder, ASKED, threads=2)
    assert outcome(launcher, path, 2).status == 0
    return path


def outcome(launcher: LocalLauncher, path: Path, processes: int, number: int = 1) -> AttemptResult:
    """Run one attempt to its end."""
    launch = launcher.start(path, processes, path.parent / "logs" / str(number))
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    return ended


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def started_rank(rank: int) -> psutil.Process:
    """Return the process of `rank` once there is one."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            return rank_process(rank)
        except LookupError:
            time.sleep(0.005)
    raise AssertionError(f"rank {rank} did not start")


@pytest.mark.slow
@pytest.mark.fault("F1")
def test_killed_rank_is_named_and_the_next_attempt_ends_in_the_same_bits(
    launcher: LocalLauncher, undisturbed: Path, tmp_path: Path
) -> None:
    path = job(tmp_path, ASKED, threads=2)
    launch = launcher.start(path, 2, tmp_path / "logs" / "1")
    wait_for(lambda: len(records(path)) >= 5)
    rank_process(1).kill()
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    assert ended.status == -9
    assert ended.message.startswith("rank 1 was killed by SIGKILL; see ")
    assert "trainer: " in (tmp_path / "logs" / "1" / "rank-0.log").read_text()  # it complained of its peer, in vain
    assert outcome(launcher, path, 2, 2).status == 0
    assert "from checkpoint" in (tmp_path / "logs" / "2" / "rank-0.log").read_text()
    assert weights(path) == weights(undisturbed)
    assert losses(path) == losses(undisturbed)
    killed, whole = read_attempts(work(path))
    assert killed["time"] < killed["ended"] < whole["time"] < whole["ended"]
    environment = whole["environment"]
    assert (environment["devices"], environment["layout"], environment["hosts"]) == ("2", "dp 2", socket.gethostname())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.fault("F9")
def test_hung_rank_is_noticed_by_the_timeout(
    steps: int, launcher: LocalLauncher, undisturbed: Path, tmp_path: Path
) -> None:
    """Stopped as it starts, and in the middle: its peer's wait ends, and what is left is killed."""
    path = job(tmp_path, ASKED, timeout_s=3, threads=2)
    launch = launcher.start(path, 2, tmp_path / "logs" / "1")
    hung = started_rank(1)
    wait_for(lambda: len(records(path)) >= steps)
    hung.suspend()
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    assert ended.status == 1
    assert ended.message.startswith("ranks [1] did not end by themselves and were killed\nrank 0 ended with status 1")
    assert not psutil.pid_exists(hung.pid)
    assert outcome(launcher, path, 2, 2).status == 0
    assert weights(path) == weights(undisturbed)


@pytest.mark.slow
@pytest.mark.fault("F9")
def test_a_rank_that_hangs_inside_a_tensor_parallel_group_is_noticed_too(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    """Groups of a mesh have a time-out of their own, half an hour, unless it is set."""
    path = job(tmp_path, ASKED, timeout_s=4, layout={"tp": 2})
    launch = launcher.start(path, 4, tmp_path / "logs" / "1")
    hung = started_rank(3)
    wait_for(lambda: len(records(path)) >= 2)
    hung.suspend()
    began = time.monotonic()
    wait_for(lambda: launch.poll() is not None)
    assert time.monotonic() - began < 60
    assert "ranks [3] did not end by themselves and were killed" in str(launch.poll())


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_process_that_was_promised_a_gpu_and_sees_none_is_refused(
    kind: str, launcher: LocalLauncher, tmp_path: Path
) -> None:
    """Where the scheduler is asked for GPUs, `device: auto` is no leave to train on processors."""
    promised = Cluster.model_validate({"launcher": kind, kind: {"gpus": True}})
    assert promised.trainer_device == "cuda"
    assert promised.model_copy(update={"device": "cpu"}).trainer_device == "cpu"
    assert Cluster.model_validate({"launcher": kind, kind: {"gpus": False}}).trainer_device == "auto"
    assert Cluster().trainer_device == "auto"
    ended = outcome(launcher, job(tmp_path, ASKED, device=promised.trainer_device), 2)
    assert ended.status == REFUSED
    assert re.search(r"trainer: device: cuda, but process [01] of node \S+ sees 0 CUDA devices", ended.message)
    assert "Traceback" not in ended.message


def test_bf16_has_a_warning_where_the_processor_lacks_it() -> None:
    found = torch.cpu.get_capabilities()
    lacks = not any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    bf16 = ASKED.model_copy(update={"precision": "bf16"})
    assert bool(slow_precision(bf16, Cluster(device="cpu"))) == lacks
    assert slow_precision(ASKED, Cluster(device="cpu")) == slow_precision(bf16, Cluster(device="cuda")) == []


@pytest.mark.slow
def test_fewer_processes_take_the_same_data(launcher: LocalLauncher, undisturbed: Path, tmp_path: Path) -> None:
    """Four ranks; after a death only three processes are there, of which two can split the batch."""
    path, cluster = job(tmp_path, ASKED), Cluster(processes=4, threads=4)
    launch = launcher.start(path, 4, tmp_path / "logs" / "1")
    wait_for(lambda: len(records(path)) >= 5)
    rank_process(3).kill()
    wait_for(lambda: launch.poll() is not None)
    smaller = LocalLauncher(cluster, launcher.agents, lambda: 3)
    left = fitting(Schedule(ASKED).span("main"), cluster, smaller.capacity())
    assert outcome(launcher, path, left, 2).status == 0
    assert [log.name for log in sorted((tmp_path / "logs" / "2").glob("rank-*"))] == ["rank-0.log", "rank-1.log"]
    one, other = losses(undisturbed), losses(path)
    assert one.keys() == other.keys()
    for position, values in one.items():
        assert other[position] == pytest.approx(values, rel=1e-4)


@pytest.mark.slow
def test_stop_saves_and_the_next_attempt_goes_on(launcher: LocalLauncher, undisturbed: Path, tmp_path: Path) -> None:
    """With two threads each: a fork must not hang them."""
    path = job(tmp_path, ASKED, threads=2)
    launch = launcher.start(path, 2, path.parent / "logs" / "1")
    wait_for(lambda: len(records(path)) >= 2)
    launch.stop()
    assert launch.poll() == AttemptResult(status=143)
    newest = max(int(folder.name) for folder in (work(path) / "checkpoints").iterdir())
    assert newest == records(path)[-1].position  # not a step is lost
    assert outcome(launcher, path, 2, 2).status == 0  # by a new agent
    assert weights(path) == weights(undisturbed)


@pytest.mark.parametrize("stopped", [True, False])
def test_ranks_that_were_asked_to_stop_may_take_their_time(stopped: bool, tmp_path: Path) -> None:
    """They are given the grace of a save; the peers of a rank that failed by itself are not."""
    program = f"""
import os, signal, sys, time
from pathlib import Path
from herd.llama3.train import launch
from herd.llama3.train.job import Attempt
launch.SETTLE_S = 0.2
signal.pthread_sigmask(signal.SIG_BLOCK, launch.WATCHED)
pids = {{}}
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        asked = signal.sigtimedwait([signal.SIGTERM], 0 if rank == 0 and not {stopped} else 30)
        time.sleep(1)
        os._exit(143 if asked else 3)
    pids[pid] = rank
if {stopped}:
    os.kill(os.getpid(), signal.SIGTERM)
attempt = Attempt(job=Path({str(tmp_path / "job.json")!r}), logs=Path({str(tmp_path)!r}), processes=2)
print(launch._watch(attempt, pids).model_dump_json())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    result = AttemptResult.model_validate_json(ran.stdout.strip() or ran.stderr)
    if stopped:
        assert result == AttemptResult(status=143)
    else:
        assert result.status == 3
        assert result.message.startswith("ranks [1] did not end by themselves and were killed\nrank 0 ended")


SLOW_DISK = """
import os, runpy, sys, threading, time
runpy.run_path({guard!r})
fsync = os.fsync
def slow(handle):
    if threading.current_thread().name == "checkpoint_0" and os.path.exists({slow!r}):
        time.sleep({seconds})
    fsync(handle)
os.fsync = slow
"""


@pytest.mark.slow
@pytest.mark.parametrize("saves", [0, 1])
def test_a_save_on_a_slow_disk_may_end(saves: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first save takes longer than the usual grace, or a second one does that comes after one as slow."""
    mark, folder = tmp_path / "slow", tmp_path / "path"
    folder.mkdir()
    mark.touch()
    guard = str(Path(__file__).parents[2] / "guard" / "sitecustomize.py")
    text = SLOW_DISK.format(guard=guard, slow=str(mark), seconds=0.7 * GRACE_S)
    (folder / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    path = job(tmp_path, recipe(stages=stages(40_000)))
    with Agents(Path("/dev/null")) as agents:
        launch = LocalLauncher(Cluster(), agents).start(path, 1, tmp_path / "logs" / "1")
        wait_for(
            lambda: (
                StopEstimate.read(work(path)).saving_since > 0
                and bool(StopEstimate.read(work(path)).save_s) == bool(saves)
            )
        )
        began = time.monotonic()
        launch.stop()
        assert time.monotonic() - began > GRACE_S
        assert launch.poll() == AttemptResult(status=143)
    kept = {int(folder.name) for folder in (work(path) / "checkpoints").iterdir()}
    assert max(kept) == records(path)[-1].position
    if saves:
        assert StopEstimate.read(work(path)).save_s > GRACE_S


@pytest.mark.slow
def test_no_rank_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    path = job(tmp_path, recipe(stages=stages(4000)))
    supervisor = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from herd.tasks.cluster import Cluster
        from herd.tasks.launch.local import Agents, LocalLauncher
        launcher = LocalLauncher(Cluster(processes=2), Agents(Path("/dev/null")))
        launcher.start(Path({str(path)!r}), 2, Path({str(tmp_path / "logs")!r}) / "1")
        time.sleep(600)
    """)
    process = subprocess.Popen([sys.executable, "-c", supervisor])
    wait_for(lambda: len(records(path)) >= 1)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == 3
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(started, 30)
    assert not alive
    assert list((work(path) / "checkpoints").iterdir())  # they were asked to save, not shot


def test_words_of_a_rank_that_fails(launcher: LocalLauncher, tmp_path: Path) -> None:
    path = job(tmp_path, ASKED, stage="middle")
    ended = outcome(launcher, path, 2)
    assert ended.status == 2
    assert "trainer: stage: 'middle' is not in the recipe" in ended.message


@pytest.mark.fault("F25")
def test_a_rank_without_memory_is_named(launcher: LocalLauncher, tmp_path: Path) -> None:
    large = {"layers": 2, "dim": 4096, "ffn": 16384, "heads": 8, "kv_heads": 4, "max_seq_len": 64}
    launch = launcher.start(job(tmp_path, recipe(model=large)), 1, tmp_path / "logs" / "1")
    rank = started_rank(0)
    resource.prlimit(rank.pid, resource.RLIMIT_AS, (rank.memory_info().vms + 2**26,) * 2)
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    assert ended.status > 0
    assert ended.cause == "out of memory", ended.message


@pytest.mark.parametrize(
    ("status", "message", "cause"),
    [
        (0, "", ""),
        (143, "", "stopped"),
        (143, "slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO PREEMPTION ***", "preemption"),
        (124, "no step for 240 s; it was stopped", "hang"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "out of memory"),
        (-9, f"{OUT_OF_MEMORY}; rank 1 was killed by SIGKILL", "out of memory"),
        (-9, "Slurm job 7 ended (OUT_OF_MEMORY) and not every node said how", "out of memory"),
        (1, "OSError: [Errno 28] No space left on device: 'x'", "disk full"),
        (-9, "Slurm job 7 ended (NODE_FAIL) and not every node said how", "bad node"),
        (1, "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384", "network"),
        (1, "RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:3456", "network"),
        (-9, "rank 1 was killed by SIGKILL", "killed"),
        (-11, "rank 0 was killed by SIGSEGV", "bug"),
        (2, "trainer: stage: 'middle' is not in the recipe", "bug"),
    ],
)
def test_each_ending_has_a_cause(status: int, message: str, cause: str) -> None:
    assert AttemptResult(status=status, message=message).cause == cause


@pytest.mark.fault("F25")
def test_an_agent_counts_the_kernels_kills(tmp_path: Path) -> None:
    """Of version 2 of control groups, and of 1; without either it counts none."""
    groups = tmp_path / "cgroup"
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 1\n")
    groups.write_text("0::/job\n")
    assert memory_kills(groups, tmp_path) == 2
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    groups.write_text("9:memory:/job\n4:cpu,cpuacct:/job\n")
    assert memory_kills(groups, tmp_path) == 4
    assert memory_kills(tmp_path / "none", tmp_path) == 0


@pytest.mark.slow
def test_killed_agent_takes_its_ranks_along(launcher: LocalLauncher, tmp_path: Path) -> None:
    path = job(tmp_path, recipe(stages=stages(4000)))
    launch = launcher.start(path, 2, tmp_path / "logs" / "1")
    ranks = [started_rank(0), started_rank(1)]
    launch.agent.process.kill()
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    assert "the agent ended with status -9" in ended.message
    _, alive = psutil.wait_procs(ranks, 10)
    assert not alive


@pytest.mark.slow
def test_restart_is_measured(tmp_path: Path) -> None:
    path = job(tmp_path, recipe(stages=stages(4000)))
    restart = measure_restart(path, 2, tmp_path / "logs")
    assert 0 < restart.noticed < restart.total
    assert (tmp_path / "logs" / "second" / "rank-1.log").exists()


def test_a_killed_rank_comes_before_earlier_complaints() -> None:
    reset = AttemptResult(status=1, message="rank 0 ended with status 1: connection reset", time=10.0)
    killed = AttemptResult(status=-9, message="rank 3 was killed by SIGKILL", time=10.5)
    asked = AttemptResult(status=143)
    assert first_failure([reset, asked, killed]) == killed
    assert first_failure([asked, reset]) == reset
    assert first_failure([AttemptResult(status=0), asked]) == asked
    assert first_failure([AttemptResult(status=0)] * 2).status == 0


@given(
    copy=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 3]), st.sampled_from([1, 2])),
    dp=st.sampled_from([1, 2, 4, 8, 16]),
    lost=st.integers(0, 8),
)
def test_what_is_left_keeps_the_layout_and_splits_the_batch(copy: tuple[int, int, int], dp: int, lost: int) -> None:
    tp, cp, pp = copy
    size = tp * cp * pp
    cluster = Cluster(processes=size * dp, layout={"tp": tp, "cp": cp, "pp": pp})
    capacity = max(size, size * dp - lost)
    got = fitting(Schedule(ASKED).span("main"), cluster, capacity)
    assert got <= capacity
    assert got % size == 0
    assert STEP % (got // size * 16) == 0
    assert not any(STEP % (more * 16) == 0 for more in range(got // size + 1, capacity // size + 1))


def test_too_few_processes_are_refused() -> None:
    cluster = Cluster(processes=8, layout={"tp": 4})
    with pytest.raises(TrainingFailed, match="stage main: 3 of 8 processes are there, and the layout needs 4 "):
        fitting(Schedule(ASKED).span("main"), cluster, 3)


def test_a_cluster_is_a_file_of_yaml(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("processes: 16\nlauncher: slurm\nlayout: {tp: 2}\nslurm: {partition: gpu, processes_per_node: 8}\n")
    cluster = load_cluster(file, timeout_s=30)
    assert (cluster.slurm.nodes(cluster.processes), cluster.data_parallel, cluster.process_threads) == (2, 8, 8)
    assert cluster.timeout_s == 30
    file.write_text("processes: 6\nlayout: {tp: 4}\n")
    with pytest.raises(ValueError, match=r"cluster\.layout: tp 4 x cp 1 x pp 1 = 4 does not divide 6 processes"):
        load_cluster(file)
    for text, told in (
        ("slurm: {partion: gpu}\n", r"slurm\.partion: unknown key; did you mean 'partition'\?"),
        ("processes: 0\n", "processes: 0: input should be greater than or equal to 1"),
        ("'':\n", ": unknown key; the keys here are processes, threads"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"/cluster\.yaml: cluster\.{told}"):
            load_cluster(file)


def test_the_key_tells_roots_apart_and_not_their_spellings(tmp_path: Path) -> None:
    one, other = (tmp_path / root / "work" / "main-1a2b" / "job.json" for root in ("one", "other"))
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert launch_key(one).startswith("main-1a2b-")
    assert launch_key(one) != launch_key(other)
    assert launch_key(one) == launch_key(tmp_path / "link" / "work" / "main-1a2b" / "job.json")


def test_nothing_is_left_behind_on_this_machine(launcher: LocalLauncher, tmp_path: Path) -> None:
    assert launcher.live(tmp_path) is None


def test_every_launcher_of_a_cluster_is_registered() -> None:
    assert set(LAUNCHERS) == set(get_args(Cluster.model_fields["launcher"].annotation)) == {"local", *SCHEDULERS}
    modules = [import_module(LAUNCHERS[name]) for name in SCHEDULERS]
    assert all(callable(module.running_job) for module in modules), "orphans asks each"
    assert all(hasattr(module, "run_on_nodes") for module in modules), "herd doctor asks each"


@pytest.mark.parametrize(("launcher", "command"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_missing_commands_are_named(launcher: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    asked = Cluster.model_validate({"launcher": launcher})
    with pytest.raises(ValueError, match=rf"cluster\.launcher: {launcher} needs {command}"):
        launcher_of(asked, "x", Agents(Path("/dev/null")))


def test_whole_replicas_are_started() -> None:
    cluster = Cluster.model_validate({"processes": 4, "layout": {"dp_replicate": 4}})
    assert fitting(Schedule(ASKED).span("main"), cluster, 4) == 4
    with pytest.raises(TrainingFailed, match="3 of 4 processes are there, and the layout needs 4 "):
        fitting(Schedule(ASKED).span("main"), cluster, 3)
