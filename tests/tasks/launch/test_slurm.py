"""The Slurm launcher against a real slurmctld with two emulated nodes; the script it writes against a golden one."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train.health import HealthTail
from herd.llama3.train.job import AttemptResult, read_outcomes
from herd.llama3.train.journal import read_attempts
from herd.storage.artifact import Store
from herd.storage.processes import PACKAGE_FOLDER
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, EvaluationCluster, load_cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.errors import SchedulerRefused
from herd.tasks.launch import base
from herd.tasks.launch.base import Launch, fitting, orphans, stopped_on_error, wait
from herd.tasks.launch.hosts import Hosts
from herd.tasks.launch.slurm import SlurmLaunch, SlurmLauncher, slurm_script
from herd.tasks.operate.doctor import diagnose_nodes
from herd.tasks.runs.records import Runs
from herd.tasks.stages.evaluate import run_evaluation
from herd.tasks.stages.train import StageAttempts
from herd.tasks.step import Context
from tests.agents import shared_agents
from tests.dist import run
from tests.llama3.evaluate.suite_samples import make
from tests.llama3.train.health_samples import library, write_state
from tests.llama3.train.train_samples import job, losses, recipe, records, stages, train, weights, work
from tests.tasks.slurm_daemons import slurm_for_children
from tests.test_tutorials import blocks

GOLDEN = Path("tests/golden/attempt.sbatch")
WAIT_S = 240
SETTINGS = {"processes_per_node": 1, "gpus": False, "cpus_per_process": 1, "poll_s": 0.2, "partition": "train"}
ASKED = recipe(stages=stages(200))


def test_script_is_the_golden_one() -> None:
    cluster = Cluster.model_validate({
        "processes": 16, "launcher": "slurm", "slurm": {
            "partition": "h100", "account": "llm", "time": "2-00:00:00", "cpus_per_process": 12,
            "lines": ["--exclusive", "--qos=high"], "setup": ["module load cuda"],
            "srun": ["--container-image=/shared/herd 1.sqsh"], "python": "/shared/venv/bin/python",
            "environment": {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "ib0"},
        },
    })  # fmt: skip
    work, logs = Path("/shared/herd data/work/main-1a2b"), Path("/shared/herd data/runs/tiny-1/logs/main/attempt-1")
    script = slurm_script(cluster, "herd-main-1a2b", work / "job.json", 16, logs)
    script = script.replace(f"--chdir={PACKAGE_FOLDER}", "--chdir=/shared/herd")
    assert script == GOLDEN.read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, "x\ntouch PWNED") for name in ("partition", "account", "time", "python")),
        *((name, ["--qos=high\n\rtouch PWNED"]) for name in ("lines", "srun")),
        ("environment", {"A; touch PWNED; B": "1"}),
        ("environment", {"A\n": "1"}),
    ],
)
def test_what_would_become_a_command_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    """But for `setup`, which is shell."""
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"launcher": "slurm", "slurm": {field: value}}))
    with pytest.raises(ValueError, match=rf"(?s)cluster\.slurm\.{field}.*(write one line|invalid name of a variable)"):
        load_cluster(tmp_path / "cluster.yaml")


TIMES = ("720", "30:00", "12:00:00", "2-00", "2-00:30", "2-00:00:00", "UNLIMITED")
"""As in the manual of sbatch."""


@pytest.mark.parametrize("time", TIMES)
def test_every_spelling_of_a_time_limit_is_accepted(time: str) -> None:
    assert Cluster.model_validate({"slurm": {"time": time}}).slurm.time == time


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time: tomorrow", r"slurm\.time: invalid time 'tomorrow'; use days-hours:minutes:seconds"),
        ("time: 1:2:3:4", r"slurm\.time: "),
        ("time: 12:00:00", r'slurm\.time: 43200 is a number.*write it in quotes: "12:00:00"'),
        ("lines: ['#SBATCH --exclusive']", r"slurm\.lines\.0: invalid option '#SBATCH --exclusive'; leave out #SBATCH"),
        ("lines: [--exclusive, exclusive]", r"slurm\.lines\.1: invalid option 'exclusive'; .*begin with '-'"),
        ("lines: [--mem 0]", r"slurm\.lines\.0: invalid option '--mem 0'; .*write '='"),
        ("environment: {NCCL_DEBUG: true}", r'slurm\.environment\.NCCL_DEBUG: true is not text.*in quotes: "true"'),
    ],
)
def test_what_sbatch_would_refuse_is_refused_before_any_work(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cluster.yaml").write_text(f"launcher: slurm\nslurm:\n  {text}\n")
    with pytest.raises(ValueError, match=f"cluster\\.{message}"):
        load_cluster(tmp_path / "cluster.yaml")


def test_a_whole_number_is_the_value_of_a_variable(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("slurm: {environment: {NCCL_IB_DISABLE: 1}}")
    assert load_cluster(tmp_path / "cluster.yaml").slurm.environment == {"NCCL_IB_DISABLE": "1"}


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
@pytest.mark.parametrize(("name", "value"), [("HF_TOKEN", "x1y2z3"), ("HTTPS_PROXY", "http://me:x1y2z3@proxy:3128")])
def test_a_secret_is_refused_because_scripts_and_manifests_are_kept(
    tmp_path: Path, launcher: str, name: str, value: str
) -> None:
    settings = {"environment": {"NCCL_IB_PKEY": "1", name: value}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"launcher": launcher, launcher: settings}))
    message = rf"cluster\.{launcher}\.environment: {name} holds a secret.*slurm\.setup.*kubernetes\.secrets"
    with pytest.raises(ValueError, match=message) as refused:
        load_cluster(tmp_path / "cluster.yaml")
    assert "x1y2z3" not in str(refused.value)


def test_a_folder_with_a_line_break_in_its_name_is_refused(tmp_path: Path) -> None:
    cluster = Cluster.model_validate({"launcher": "slurm"})
    with pytest.raises(ValueError, match=r"root: .*choose another folder"):
        slurm_script(cluster, "herd-main", tmp_path / "job.json", 1, tmp_path / "x\ntouch PWNED")


def test_values_of_variables_are_only_values(tmp_path: Path) -> None:
    value = "$(touch PWNED)\n'\"; touch PWNED"
    cluster = Cluster.model_validate({"launcher": "slurm", "slurm": {"environment": {"GIVEN": value}}})
    script = slurm_script(cluster, "herd-main", tmp_path / "job.json", 1, tmp_path)
    head = script.split("# The ranks meet")[0] + '\nprintf %s "$GIVEN"'
    done = subprocess.run(["bash"], input=head, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == value
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("listed", "order"),
    [
        ("n3\nn9\nn1\n", "n3 n1 n2"),
        ("n3.example.org\nn3\nn9\n\nn1\r\nn3\n", "n3 n1 n2"),
        ("n10\nn\n", "n1 n2 n3"),
    ],
    ids=["two of three", "full names, twice", "others"],
)
def test_nodes_are_numbered_in_the_order_of_the_host_file(tmp_path: Path, listed: str, order: str) -> None:
    """The script in bash with three nodes' Slurm commands."""
    hosts, tools = tmp_path / "my hosts", tmp_path / "tools"
    hosts.write_text(listed)
    tools.mkdir()
    (tools / "scontrol").write_text('[ "$2" = hostnames ] && printf "n1\\nn2\\nn3\\n" || echo "NodeAddr=ip-$4 x=1"')
    (tools / "srun").write_text(
        'while [ "$1" != bash ]; do shift; done\nfor n in n1 n2 n3; do SLURMD_NODENAME=$n "$@"; done'
    )
    (tools / "agent").write_text('echo "$SLURMD_NODENAME $*"')
    for tool in tools.iterdir():
        tool.write_text("#!/bin/bash\n" + tool.read_text())
        tool.chmod(0o755)
    settings = {**SETTINGS, "host_file": str(hosts), "python": str(tools / "agent")}
    cluster = Cluster.model_validate({"processes": 3, "launcher": "slurm", "slurm": settings})
    script = slurm_script(cluster, "herd-main", tmp_path / "job.json", 3, tmp_path)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, env=environment)
    unnamed = f"herd: {hosts} names no host of this job; the order is that of Slurm\n"
    assert done.stderr == (unnamed if order == "n1 n2 n3" else "")
    said = {line.split()[0]: line.split()[line.split().index("--node") :] for line in done.stdout.splitlines()}
    assert {host: words[1] for host, words in said.items()} == {host: str(at) for at, host in enumerate(order.split())}
    assert {words[3] for words in said.values()} == {f"ip-{order.split()[0]}"}


def test_a_missing_host_file_is_an_error_before_any_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: f"/usr/bin/{command}")
    cluster = Cluster.model_validate({"launcher": "slurm", "slurm": {"host_file": str(tmp_path / "none")}})
    with pytest.raises(
        ValueError, match=r"cluster\.slurm\.host_file: .*none does not exist; write it \(herd plan --hosts"
    ):
        SlurmLauncher(cluster, "x")


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """A Slurm of this module's own, in the environment of its commands."""
    with slurm_for_children():
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = job(tmp_path_factory.mktemp("undisturbed"), ASKED)
    assert run(1, train, path) == [0]
    return path


def cluster_of(processes: int) -> Cluster:
    return Cluster.model_validate({"processes": processes, "launcher": "slurm", "slurm": SETTINGS})


@pytest.mark.slow
def test_a_model_split_over_two_nodes_is_evaluated_as_on_one_process(
    running: None, checkout: Path, tmp_path: Path
) -> None:
    asked = make(tmp_path, checkout)
    alone = Cluster(threads=1, device="cpu")
    apart = cluster_of(2).model_copy(update={"evaluate": EvaluationCluster(layout=Layout(tp=2))})
    one, two = (
        run_evaluation(
            asked,
            tmp_path / "model",
            tmp_path / "curated",
            tmp_path / name,
            tmp_path / f"work-{name}",
            at,
            shared_agents(),
        )
        for name, at in (("alone", alone), ("apart", apart))
    )
    logs = tmp_path / "work-apart" / "logs" / "attempt-1"
    assert "--nodes=2" in (logs / "job.sbatch").read_text()
    assert {outcome.status for outcome in read_outcomes(logs)} == {0}
    scores = [key for key, value in one.items() if isinstance(value, float)]
    assert [two[key] for key in scores] == pytest.approx([one[key] for key in scores], rel=1e-5)


@pytest.mark.slow
def test_the_file_of_the_tutorial_trains(running: None, tmp_path: Path) -> None:
    """As printed, but for partition, account, GPUs and size: two nodes of one process, between which tp 2 splits."""
    (printed,) = (yaml.safe_load(text) for text in blocks(Path("docs/tutorials/slurm.md")))
    variables = {**printed["slurm"]["environment"], "GLOO_SOCKET_IFNAME": "lo"}  # this machine has no ib0
    settings = {**printed["slurm"], **SETTINGS, "account": "", "environment": variables}
    cluster = Cluster.model_validate({**printed, "processes": 2, "slurm": settings})
    short = recipe(stages=stages(12))
    path, alone = job(tmp_path, short, layout=cluster.layout), job(tmp_path, short, name="alone")
    assert run(1, train, alone) == [0]
    logs = tmp_path / "logs" / "attempt-1"
    launch = SlurmLauncher(cluster, "tutorial").start(path, 2, logs)
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    assert ended.status == 0, (logs / "slurm.log").read_text()
    assert losses(path) == {at: pytest.approx(pair, rel=1e-9) for at, pair in losses(alone).items()}
    script = (logs / "job.sbatch").read_text()
    assert "#SBATCH --exclusive" in script
    assert "export NCCL_SOCKET_IFNAME=ib0" in script
    (attempt,) = read_attempts(work(path))
    assert (attempt["environment"]["layout"], attempt["environment"]["devices"]) == ("tp 2 dp 1", "2")
    assert attempt["ended"] > attempt["time"]


@pytest.mark.slow
def test_killed_rank_and_lost_node(running: None, undisturbed: Path, tmp_path: Path) -> None:
    """Two nodes; a rank is killed and a node goes down; the next attempt takes what is left, and the same data."""
    tmp_path = tmp_path / "with a blank"
    path, cluster = job(tmp_path, ASKED), cluster_of(2)
    launcher = SlurmLauncher(cluster, "lost-node")
    assert launcher.capacity() == 2
    launch = launcher.start(path, 2, tmp_path / "logs" / "attempt-1")
    assert [one.label for one in orphans([launch.logs, tmp_path])] == [launch.label]  # as `herd stop` finds it
    wait_for(lambda: len(records(path)) >= 5, launch)
    rank_of(path, 1).kill()
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    assert ended.status == -9
    assert ended.message.startswith("rank 1 was killed by SIGKILL; see ")
    with node_down("n2"):
        assert launcher.capacity() == 1
        left = fitting(Schedule(ASKED).span("main"), cluster, launcher.capacity())
        again = launcher.start(path, left, tmp_path / "logs" / "attempt-2")
        wait_for(lambda: again.poll() is not None)
    assert again.poll() == AttemptResult(status=0)
    assert [log.name for log in (tmp_path / "logs" / "attempt-2").glob("rank-*")] == ["rank-0.log"]
    one, other = losses(undisturbed), losses(path)
    assert one.keys() == other.keys()
    for position, values in one.items():
        assert other[position] == pytest.approx(values, rel=1e-9)


@pytest.mark.slow
def test_a_node_on_which_attempts_die_twice_is_not_used_again(
    running: None, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, cluster = Runs(Root.parse(tmp_path)), cluster_of(2)
    path = job(tmp_path, ASKED, health_s=5.0, preflight=True)
    record = runs.begin(ASKED, "code")
    context = Context(ASKED, cluster, Store(tmp_path), runs, record, None, TerminalConsole(), [])  # type: ignore[arg-type]
    hosts = Hosts(context.root)
    launcher = SlurmLauncher(cluster, "offender", hosts.excluded)
    attempts = StageAttempts(context, Schedule(ASKED).span("main"), launcher, hosts)
    wait_for(lambda: launcher.capacity() == 2)  # also after a test that takes a node away
    for _ in range(2):
        attempts.ended(killed_on("n2", attempts.start(path), path), progress=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "main: host n2 is excluded: 2 attempts died there: killed, killed" in printed
    last = attempts.start(path)
    assert "#SBATCH --exclude=n2\n" in (last.logs / "job.sbatch").read_text()
    wait_for(lambda: last.poll() is not None)
    assert last.poll() == AttemptResult(status=0)
    assert "starts on 1 processes instead of 2" in capsys.readouterr().out
    assert {sample.host for sample in HealthTail(attempts.logs / "attempt-1").new()} == {"n1", "n2"}
    assert {sample.host for sample in HealthTail(last.logs).new()} == {"n1"}
    one, other = losses(undisturbed), losses(path)
    assert one.keys() == other.keys()
    for position, values in one.items():
        assert other[position] == pytest.approx(values, rel=1e-9)
    hosts.decide("n2", "cleared")
    assert launcher.capacity() == 2


@pytest.mark.slow
def test_a_node_with_a_broken_gpu_fails_its_attempt_by_name(running: None, tmp_path: Path) -> None:
    """The agents of both nodes sample a stand-in of NVML, whose event 79 comes with the first sample."""
    pytest.importorskip("pynvml", reason="NOT TESTED: nvidia-ml-py is not installed (pip install 'herd-llm[health]')")
    library(tmp_path)
    write_state(tmp_path / "state", xid=79)
    variables = {"LD_LIBRARY_PATH": str(tmp_path), "NVML_STATE": str(tmp_path / "state")}
    cluster = Cluster.model_validate(
        {"processes": 2, "launcher": "slurm", "slurm": {**SETTINGS, "environment": variables}}
    )
    path = job(tmp_path, ASKED, health_s=0.5)
    launch = SlurmLauncher(cluster, "gpu").start(path, 2, tmp_path / "logs" / "attempt-1")
    ended = killed_on("n1", launch, path)
    assert (ended.status, ended.host, ended.cause) == (-9, "n1", "bad node")
    assert ended.message.startswith("hardware error: GPU 1: Xid 79, the GPU fell off the bus; rank ")


@pytest.mark.slow
def test_a_new_supervisor_finds_the_job_and_cancelling_saves(running: None, undisturbed: Path, tmp_path: Path) -> None:
    tmp_path = tmp_path / "with a blank"
    path, cluster = job(tmp_path, ASKED), cluster_of(1)
    assert SlurmLauncher(cluster, "orphan").live(path) is None
    launch = SlurmLauncher(cluster, "orphan").start(path, 1, tmp_path / "logs" / "attempt-1")
    wait_for(lambda: len(records(path)) >= 2, launch)
    assert SlurmLauncher(cluster, "orpha").live(path) is None
    found = SlurmLauncher(cluster, "orphan").live(path)
    assert found is not None
    assert (found.job_id, found.logs, found.label) == (launch.job_id, launch.logs, f"Slurm job {launch.job_id}")
    assert found.poll() is None
    assert not found.waits()
    found.stop()
    assert found.poll() is not None
    assert [told.status for told in read_outcomes(launch.logs)] == [143]
    newest = max(int(folder.name) for folder in (work(path) / "checkpoints").iterdir())
    assert newest == records(path)[-1].position  # not a step is lost
    assert SlurmLauncher(cluster, "orphan").live(path) is None
    last = SlurmLauncher(cluster, "orphan").start(path, 1, tmp_path / "logs" / "attempt-3")
    assert last.job_id != launch.job_id
    wait_for(lambda: last.poll() is not None)
    assert last.poll() == AttemptResult(status=0)
    assert weights(path) == weights(undisturbed)


@pytest.mark.slow
def test_a_job_that_cannot_start_says_why(running: None, tmp_path: Path) -> None:
    cluster = Cluster.model_validate(
        {"launcher": "slurm", "slurm": {**SETTINGS, "setup": ["echo no module cuda; exit 3"]}}
    )
    launch = SlurmLauncher(cluster, "broken").start(job(tmp_path, ASKED), 1, tmp_path / "logs" / "attempt-1")
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    assert f"Slurm job {launch.job_id} ended (FAILED)" in ended.message
    assert "no module cuda" in ended.message


SBATCH = """\
#!/bin/bash
{real} "$@"
{then}
"""


def in_the_way(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """Put an sbatch before the real one that submits and then does what a busy controller or a person may do."""
    real = shutil.which("sbatch")
    (folder / "sbatch").write_text(SBATCH.format(real=real, then=then))
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.slow
def test_a_job_is_followed_although_sbatch_gave_up_waiting(
    running: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way(tmp_path, monkeypatch, 'echo "Socket timed out on send/recv operation" >&2; exit 1')
    path, launcher = job(tmp_path, ASKED), SlurmLauncher(cluster_of(1), "late")
    launch = launcher.start(path, 1, tmp_path / "logs" / "attempt-1")
    live = launcher.live(path)
    assert live is not None
    assert launch.job_id == live.job_id
    launch.stop()
    assert launcher.live(path) is None


@pytest.mark.slow
def test_a_job_with_another_task_is_not_followed(running: None, tmp_path: Path) -> None:
    path, launcher = job(tmp_path, ASKED), SlurmLauncher(cluster_of(1), "before")
    launch = launcher.start(path, 1, tmp_path / "logs" / "attempt-1")
    path.write_text(path.read_text() + "\n")
    assert launcher.live(path) is None
    assert launch.poll() is not None


@pytest.mark.slow
def test_a_stop_while_the_job_is_submitted_leaves_none(
    running: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way(tmp_path, monkeypatch, f"kill -INT {os.getpid()}; sleep 5")
    path, launcher = job(tmp_path, ASKED), SlurmLauncher(cluster_of(1), "regretted")
    with pytest.raises(KeyboardInterrupt):
        launcher.start(path, 1, tmp_path / "logs" / "attempt-1")
    wait_for(lambda: launcher.live(path) is None)


@contextmanager
def node_down(name: str) -> Iterator[None]:
    subprocess.run(["scontrol", "update", f"nodename={name}", "state=down", "reason=test"], check=True)
    try:
        yield
    finally:
        subprocess.run(["scontrol", "update", f"nodename={name}", "state=resume"], check=True)


def ranks_of(path: Path) -> list[psutil.Process]:
    """Return the ranks of the job file `path`; slurmd's children are not ours."""
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"].startswith("herd-rank-") and str(path) in (process.info["cmdline"] or ())
    ]


def rank_of(path: Path, rank: int) -> psutil.Process:
    """Return the process of `rank` of the job file `path`."""
    (process,) = [process for process in ranks_of(path) if process.info["name"] == f"herd-rank-{rank}"]
    return process


def killed_on(node: str, launch: Launch, path: Path) -> AttemptResult:
    """Kill the rank on `node` after some steps of the attempt, and return how it ended."""
    before = len(records(path))
    wait_for(lambda: len(records(path)) >= before + 5, launch)
    (victim,) = [rank for rank in ranks_of(path) if rank.environ()["SLURMD_NODENAME"] == node]
    victim.kill()
    wait_for(lambda: launch.poll() is not None)
    ended = launch.poll()
    assert ended is not None
    return ended


def wait_for(condition: Callable[[], bool], launch: Launch | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        ended = launch.poll() if launch is not None else None
        assert ended is None, ended
        time.sleep(0.02)


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put commands before Slurm's that do what `scripts` say, or nothing."""
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol"):
        (folder / name).write_text(f"#!/bin/sh\n{scripts.get(name, '')}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_capacity_is_what_is_up_and_no_more_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, sinfo="echo n1; echo n2; echo n2; echo n3")
    assert [SlurmLauncher(cluster_of(asked), "up").capacity() for asked in (1, 3, 8)] == [1, 3, 3]


def test_excluded_nodes_are_not_counted_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm would refuse the name of a node that it does not know."""
    stand_ins(tmp_path, monkeypatch, sinfo="echo n1; echo n2; echo n3", sbatch="echo 7")
    launcher = SlurmLauncher(cluster_of(3), "up", lambda: {"n3": "Xid 79", "n1": "a person", "pod-7": "Xid 48"})
    assert launcher.capacity() == 1
    launcher.start(job(tmp_path, ASKED), 1, tmp_path / "logs")
    assert "#SBATCH --exclude=n1,n3\n" in (tmp_path / "logs" / "job.sbatch").read_text()


def test_a_job_outlives_a_controller_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue fails once, then knows the job until it is canceled."""
    away, canceled = tmp_path / "away", tmp_path / "canceled"
    squeue = f"rm {away} 2> /dev/null && echo Unable to contact slurm controller >&2 && exit 1\n[ -e {canceled} ]"
    stand_ins(tmp_path, monkeypatch, squeue=f"{squeue} || echo PENDING", scancel=f"touch {canceled}")
    launch = SlurmLaunch("7", tmp_path, 0.0)
    away.touch()
    assert launch.poll() is None
    assert not away.exists()
    monkeypatch.setattr(base, "LOST_S", 0.0)
    away.touch()
    remedy = r"(?s)squeue .*Unable to contact.*Slurm job 7 was not stopped.*the same command .*follows it"
    with pytest.raises(SchedulerRefused, match=remedy):
        wait(launch)
    assert not canceled.exists()
    with pytest.raises(KeyboardInterrupt), stopped_on_error(launch):
        raise KeyboardInterrupt
    assert canceled.exists()


def test_a_job_is_complete_when_every_node_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, scontrol="echo JobId=7 JobState=NODE_FAIL")
    (tmp_path / "job.sbatch").write_text("#SBATCH --nodes=2\n")
    launch, done = SlurmLaunch("7", tmp_path, 0.0), AttemptResult(status=0)
    (tmp_path / "node-0.json").write_text(done.model_dump_json())
    ended = launch.poll()
    assert ended is not None
    assert ended.status == -9
    assert "ended (NODE_FAIL) and not every node said how" in ended.message
    (tmp_path / "node-1.json").write_text(done.model_dump_json())
    assert launch.poll() == done
    (tmp_path / "node-0.json").unlink()
    (tmp_path / "node-1.json").write_text(AttemptResult(status=1, message="rank 1").model_dump_json())
    assert launch.poll() == AttemptResult(status=1, message="rank 1")


@pytest.mark.slow
def test_the_doctor_looks_at_every_node(running: None, tmp_path: Path) -> None:
    root, cluster = Root.parse(tmp_path / "a root"), cluster_of(2)
    findings = diagnose_nodes(root, cluster)
    assert {finding.node for finding in findings} == {"n1", "n2"}
    for node in ("n1", "n2"):
        found = {finding.check: finding.state for finding in findings if finding.node == node}
        assert {name: found[name] for name in ("shared path", "python", "gpu", "locks")} == {
            "shared path": "ok", "python": "ok", "gpu": "ok", "locks": "ok"
        }  # fmt: skip
    assert list(root.local.iterdir()) == []
    elsewhere = cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update={"python": "/nowhere/python"})})
    with pytest.raises(SchedulerRefused, match=r"(?s)srun: .*No such file or directory"):
        diagnose_nodes(root, elsewhere)
