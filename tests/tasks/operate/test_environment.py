"""What a run will need later is asked before its first step, in the words of `herd doctor`."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from herd.flows.cli.main import app
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, load_cluster, unused_launchers
from herd.tasks.errors import TrainingFailed
from herd.tasks.launch.base import fitting
from herd.tasks.operate import environment
from herd.tasks.operate.environment import Surroundings, TorchBuild, check_devices, check_launcher, torch_build
from herd.tasks.operate.preflight import CheckedRun, check_run, run_checks

QUICKSTART = load_recipe(Path("recipes/quickstart.yaml"))
Program = Callable[[str, str], None]
CUDA = Cluster(device="cuda")
SLURM = {"launcher": "slurm", "processes": 4, "slurm": {"partition": "gpu", "account": "mine"}}
KUBERNETES = {"launcher": "kubernetes", "processes": 4, "kubernetes": {"namespace": "ml", "queue": "fast"}}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Writes a program of the PATH, a shell script."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def write(name: str, script: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return write


def checked(cluster: Cluster, folder: Path, until: str = "") -> tuple[str, list[str]]:
    """Return the errors and the warnings of preflight."""
    run = CheckedRun(QUICKSTART, cluster, Root.parse(folder / "root"), thorough=False, until=until)
    try:
        run_checks(run)
    except RecipeError as error:
        return str(error), run.warnings
    return "", run.warnings


def test_a_promised_gpu_is_missed_before_the_data_work_and_not_where_nothing_trains(tmp_path: Path) -> None:
    lacking = "gpu: none is visible here, and the cluster file promises GPUs; check the driver (nvidia-smi)"
    assert checked(CUDA, tmp_path)[0].startswith(lacking)
    assert checked(Cluster(backend="nccl"), tmp_path)[0].startswith(lacking)
    assert checked(CUDA, tmp_path, until="tokenize") == ("", [])
    assert checked(Cluster(), tmp_path) == ("", [])


def test_the_command_says_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "gpu.yaml").write_text("{device: cuda}")
    words = ["run", "quickstart", "--cluster", str(tmp_path / "gpu.yaml"), "--root", str(tmp_path / "root")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "gpu: none is visible here" in " ".join(done.output.split())
    rows = json.loads(CliRunner().invoke(app, ["doctor", "--json", *words[2:]]).stdout)["findings"]
    (row,) = [row for row in rows if row["check"] == "gpu"]
    assert f"{row['check']}: {row['what']}; {row['todo']}" in " ".join(done.output.split())


def test_torchs_build_and_the_driver_are_read_without_torch(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    assert torch_build() == TorchBuild(torch.__version__, torch.version.cuda or torch.version.hip or "")
    program("nvidia-smi", "echo 'GPU 0: H100'; echo 'GPU 1: H100'")
    monkeypatch.setattr(environment, "torch_build", lambda: TorchBuild("2.13.0+cpu", ""))
    error, warnings = checked(CUDA, tmp_path)
    assert "gpu: 2 here, and torch 2.13.0+cpu is a CPU build; install torch's CUDA build" in error
    error, warnings = checked(Cluster(), tmp_path)
    assert not error, "on the processor it trains, only slower"
    assert "gpu: 2 here, and torch 2.13.0+cpu is a CPU build" in warnings[0]
    monkeypatch.setattr(environment, "torch_build", lambda: TorchBuild("2.13.0", "13.0"))
    monkeypatch.setattr(environment, "_driver_cuda", lambda: 12)
    assert (
        "is for CUDA 12; torch 2.13.0 (CUDA 13.0) cannot use the 2 GPUs; update the NVIDIA driver"
        in checked(CUDA, tmp_path)[0]
    )
    monkeypatch.setattr(environment, "_driver_cuda", lambda: 13)
    assert not checked(CUDA, tmp_path)[0]
    root = Root.parse(tmp_path)
    states = {
        layout: [row.state for row in check_devices(Surroundings(Cluster.model_validate(given), root))][-1]
        for layout, given in {
            "as many": {"processes": 2, "device": "cuda"},
            "dp shrinks": {"processes": 4, "device": "cuda"},
            "too few": {"processes": 4, "device": "cuda", "layout": {"tp": 4}},
        }.items()
    }
    assert states == {"as many": "ok", "dp shrinks": "warn", "too few": "fail"}


def test_ncclx_needs_its_package(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("nvidia-smi", "echo 'GPU 0: H100'")
    monkeypatch.setattr(environment, "torch_build", lambda: TorchBuild("2.13.0", "13.0"))
    cluster = Cluster(device="cuda", backend="ncclx")
    assert "backend: cluster.backend: ncclx needs torchcomms with NCCLX" in checked(cluster, tmp_path)[0]
    (tmp_path / "torchcomms.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not checked(cluster, tmp_path)[0]


def rows(given: dict[str, Any]) -> list[str]:
    found = check_launcher(Surroundings(Cluster.model_validate(given), Root.parse("nowhere")))
    return [f"{row.state} {row.what}; {row.todo}" for row in found]


def test_slurm_is_asked_for_what_a_job_needs(program: Program, tmp_path: Path) -> None:
    (lacking,) = rows(SLURM)
    assert lacking.startswith(
        "fail cluster.launcher: slurm needs sbatch, squeue, scancel, sinfo on the PATH; start herd"
    )
    error, warnings = checked(Cluster.model_validate(SLURM), tmp_path)
    assert not error, "the jobs run elsewhere"
    assert warnings == [f"slurm: {lacking.removeprefix('fail ')}"]
    for name in ("sbatch", "squeue", "scancel"):
        program(name, "exit 1")
    program("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    assert rows(SLURM)[0].startswith("fail sinfo: slurm_load_partitions: Unable to contact slurm controller; check")
    program("sinfo", "case $* in *%R*) printf 'cpu\\nlong\\n';; *) echo node1;; esac")
    assert rows(SLURM) == ["fail cluster.slurm.partition: gpu is not one of Slurm's; there are cpu, long"]
    program("sinfo", "case $* in *%R*) printf 'cpu\\ngpu\\n';; esac")
    assert rows(SLURM)[0].startswith("fail no node of partition gpu is up; ")
    program("sinfo", "case $* in *%R*) printf 'cpu\\ngpu\\n';; *) echo node1;; esac")
    assert rows(SLURM) == ["ok answers, and has what the cluster file names; "]
    program("sacctmgr", "printf 'yours\\nother\\n'")
    assert rows(SLURM) == ["fail cluster.slurm.account: mine is not an account of yours; yours are other, yours"]


def test_kubernetes_is_asked_for_what_a_job_needs(program: Program) -> None:
    assert rows(KUBERNETES)[0].startswith("fail cluster.launcher: kubernetes needs kubectl on the PATH; install it")
    program("kubectl", "echo 'The connection to the server was refused' >&2; exit 1")
    assert rows(KUBERNETES)[0].startswith("fail kubectl auth can-i: The connection to the server was refused; ")
    program("kubectl", "echo no; echo \"Warning: the server doesn't have a resource type 'jobsets'\" >&2; exit 1")
    assert rows(KUBERNETES) == [
        "fail the cluster does not know jobsets.jobset.x-k8s.io; install the controller of JobSet"
    ]
    answers = "case $* in *can-i*) echo {allowed};; *) echo 'Error from server (NotFound): it' >&2; exit 1;; esac"
    program("kubectl", answers.format(allowed="no"))
    assert [row.partition(";")[0] for row in rows(KUBERNETES)] == [
        "fail you may not create jobsets.jobset.x-k8s.io in the namespace ml",
        "fail cluster.kubernetes.namespace: ml is not there",
        "fail cluster.kubernetes.claim: herd is not there",
        "fail cluster.kubernetes.queue: fast is not there",
    ]
    program("kubectl", answers.format(allowed="yes").replace("NotFound", "Forbidden"))
    assert rows(KUBERNETES) == ["ok answers, and has what the cluster file names; "], "a right to look may be missing"


def test_a_database_of_another_mlflow_a_proxy_without_its_package_and_a_small_disk_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with closing(sqlite3.connect(root / "mlflow.db")) as database, database:
        database.execute("create table alembic_version (version_num varchar)")
        database.execute("insert into alembic_version values ('a3b9c7d2e5f1')")
    before = set(sys.modules)
    assert "mlflow: " in (error := checked(Cluster(), tmp_path)[0])
    assert "its schema a3b9c7d2e5f1 is of another MLflow than" in error
    assert not {"mlflow", "alembic"} & (set(sys.modules) - before)
    assert checked(Cluster(), tmp_path, until="pretrain") == ("", []), "the promotion needs it"
    (root / "mlflow.db").unlink()
    monkeypatch.setenv("all_proxy", "socks5h://127.0.0.1:9")
    assert checked(Cluster(), tmp_path)[0] == (
        "proxy: all_proxy: socks5h:// needs the package socksio; pip install socksio, or unset all_proxy"
    )
    monkeypatch.delenv("all_proxy")
    monkeypatch.setattr(environment, "checkpoint_bytes", lambda _: 1e18)
    assert "3 checkpoints take" in checked(Cluster(), tmp_path)[0]


def test_a_capacity_of_nothing_names_the_device() -> None:
    (span, *_) = Schedule(QUICKSTART).trained
    with pytest.raises(TrainingFailed, match=r"this machine has no GPU, and cluster.processes is 1; look with herd"):
        fitting(span, CUDA, 0)
    with pytest.raises(TrainingFailed, match="slurm, on its nodes that are up, has no GPU"):
        fitting(span, Cluster.model_validate(SLURM), 0)
    with pytest.raises(RecipeError, match="gpu: none is visible here"):
        check_run(QUICKSTART, CUDA, Root.parse("nowhere"))


def test_settings_of_a_launcher_that_is_not_chosen_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "place.yaml").write_text("{slurm: {partition: gpu}, kubernetes: {queue: fast}}")
    warning = "cluster.slurm, cluster.kubernetes: have settings, and launcher is local: the trainer would run on this"
    ((line,),) = [checked(load_cluster(tmp_path / "place.yaml"), tmp_path)[1]]
    assert line.startswith(warning)
    done = CliRunner().invoke(app, ["plan", "quickstart", "--cluster", str(tmp_path / "place.yaml")])
    assert warning in " ".join(done.output.split())
    (tmp_path / "place.yaml").write_text("{launcher: slurm, slurm: {partition: gpu}, kubernetes: {queue: fast}}")
    assert unused_launchers(load_cluster(tmp_path / "place.yaml")) == []
