"""`herd doctor`: what is wrong with a machine, a root or the nodes is a row that says what to do."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from herd.flows.cli.main import app
from herd.llama3.recipe.load import load_recipe
from herd.storage.root import Root
from herd.tasks.cluster import SCHEDULERS, Cluster
from herd.tasks.operate import doctor, environment
from herd.tasks.operate.doctor import (
    as_on_node,
    check_compiler,
    check_hub,
    check_limits,
    check_ports,
    check_root,
    check_run,
    diagnose,
    diagnose_as_node,
    diagnose_nodes,
)
from herd.tasks.operate.environment import CheckResult, Surroundings, check_devices, check_disk
from tests.flows.cli.test_main import documented

NODES = Cluster.model_validate({"launcher": "slurm", "processes": 8, "slurm": {"processes_per_node": 8}})


def herd(*words: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, words)], env={"COLUMNS": "160"})


def one(findings: Any, check: str) -> CheckResult:
    (found,) = [finding for finding in findings if finding.check == check]
    assert isinstance(found, CheckResult)
    return found


def test_a_machine_is_a_table_or_json_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOCAL_TRIAL", 1 << 20)
    root = tmp_path / "root"
    done = herd("--json", "--root", root)
    document = json.loads(done.stdout)
    assert list(document) == documented("herd doctor")
    checks = [finding["check"] for finding in document["findings"]]
    assert checks[:4] == ["gpu", "machine", "/dev/shm", "open files"]
    assert {"root", "clock", "locks", "disk", "port 4200", "port 5000"} <= set(checks)
    assert done.exit_code == (0 if document["ok"] else 1)
    assert list(root.iterdir()) == []


def test_what_fails_is_status_1_and_a_row_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOCAL_TRIAL", 1 << 20)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: H100 (UUID: 1)'\necho 'GPU 1: H100 (UUID: 2)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(environment, "torch_build", lambda: environment.TorchBuild("2.13.0+cpu", ""))
    monkeypatch.setattr(doctor, "torch_build", environment.torch_build)
    done = herd("--root", tmp_path / "root")
    assert done.exit_code == 1
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("gpu ")]
    assert "fail   2 here, and torch" in row
    assert "is a CPU build" in done.stdout
    assert "make install TORCH=cuda" in " ".join(done.stdout.split())


def test_gpus_that_a_cluster_promises_must_be_there() -> None:
    root = Root.parse("nowhere")
    assert one(check_devices(Surroundings(Cluster(), root)), "gpu").state == "ok"
    assert list(check_devices(Surroundings(NODES, root))) == [], "a machine that starts jobs needs no GPU"
    for cluster in (as_on_node(NODES), Cluster(device="cuda")):
        lacking = one(check_devices(Surroundings(cluster, root)), "gpu")
        assert (lacking.state, lacking.what) == ("fail", "none is visible here, and the cluster file promises GPUs")


def test_a_package_that_breaks_the_detection_of_languages_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.state for row in doctor.check_languages()] == ["ok"]
    monkeypatch.setitem(sys.modules, "fasttext", None)
    (row,) = doctor.check_languages()
    assert (row.check, row.state) == ("languages", "fail")
    assert row.what.startswith("the module fasttext cannot be imported (")
    assert row.todo.startswith("pip install --force-reinstall --no-deps fasttext-predict")


def test_the_c_compiler_that_triton_needs_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    lacking = check_compiler()
    assert (lacking.check, lacking.state, lacking.todo) == (
        "C compiler",
        "fail",
        "install gcc and libc6-dev, or set CC",
    )
    for name in ("clang", "mycc", "gcc"):
        (tmp_path / name).touch(mode=0o755)
        assert check_compiler().what == str(tmp_path / {"mycc": "clang"}.get(name, name))
    monkeypatch.setenv("CC", "mycc")
    assert check_compiler().what == str(tmp_path / "mycc")


@pytest.mark.parametrize(
    ("hard", "remedy"),
    [
        (resource.RLIM_INFINITY, "ulimit -n 65536 in the shell of herd"),
        (20_000, "ulimit -n 20000 in the shell of herd"),
        (1024, "docker run --ulimit nofile=65536, or limits.conf"),
    ],
)
def test_the_remedy_for_few_open_files_can_be_followed(hard: int, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1024, hard))
    assert one(check_limits(), "open files") == CheckResult("open files", "warn", "1,024 per process", remedy)


@pytest.mark.parametrize(
    ("flock", "what"),
    [
        (OSError(errno.ENOLCK, "No locks available"), "the file system has no flock (No locks available)"),
        (None, "the file system lets two holders lock one file"),
    ],
)
def test_a_root_without_locks_fails(
    flock: OSError | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flock(*_: object) -> None:
        if flock:
            raise flock

    monkeypatch.setattr(doctor, "LOCAL_TRIAL", 1 << 20)
    assert one(check_root(Root.parse(tmp_path)), "locks") == CheckResult("locks", "ok", "flock excludes others")
    monkeypatch.setattr(doctor.fcntl, "flock", no_flock)
    found = one(check_root(Root.parse(tmp_path)), "locks")
    assert (found.state, found.what) == ("fail", what)
    assert "choose another root" in found.todo


def test_slow_full_and_wrong_clocks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root.parse(tmp_path)
    monkeypatch.setattr(doctor, "LOCAL_TRIAL", 1 << 20)
    monkeypatch.setattr(doctor, "SLOW", {True: float("inf"), False: 0.0})
    monkeypatch.setattr(environment, "TOO_LITTLE", float("inf"))
    monkeypatch.setattr(doctor, "_rates", lambda *_: (1.0, 1.0, doctor.time.time() - 100))
    (tmp_path / "x").touch()
    monkeypatch.setattr(doctor, "_locks", lambda path: CheckResult("locks", "ok", ""))
    found = {finding.check: finding for finding in (*check_root(root), *check_disk(Surroundings(Cluster(), root)))}
    assert (found["root"].state, found["disk"].state) == ("warn", "fail")
    assert (found["clock"].state, found["clock"].what) == ("warn", "100 s from that of the file system")


def test_a_root_that_cannot_be_written_is_a_row_and_the_other_rows_come(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = diagnose(Root.parse("/proc/herd"), Cluster())
    assert one(findings, "root").state == "fail"
    assert "/proc/herd" in one(findings, "root").what
    assert one(findings, "port 4200")


def test_a_taken_port_comes_with_the_option_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {"--mlflow-port": port})
        (found,) = check_ports()
    assert (found.state, found.todo) == ("warn", f"herd up --mlflow-port {port + 1}")


def test_the_hub_is_looked_at_for_recipes_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_hub(load_recipe(Path("recipes/quickstart.yaml")))) == []
    recipe = load_recipe(Path("recipes/llama3-8b.yaml"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    known = list(check_hub(recipe))
    assert [finding.state for finding in known] == ["ok", "ok"]
    assert "canary" not in str(known)
    monkeypatch.setenv("HF_ENDPOINT", "https://no.such.host.invalid")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    assert one(check_hub(recipe), "hub").state == "fail"


def test_a_node_that_does_not_see_the_file_of_the_login_node_fails(tmp_path: Path) -> None:
    (found,) = diagnose_as_node(tmp_path / "doctor" / "1.json")
    assert (found.check, found.state) == ("shared path", "fail")
    assert f"{tmp_path} of the machine that starts jobs is not here" in found.what
    assert "on a disk of all nodes" in found.todo


@pytest.mark.parametrize("launcher", SCHEDULERS)
def test_nodes_that_a_launcher_cannot_look_at_are_a_row(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"herd.tasks.launch.{launcher}.run_on_nodes", None)
    (found,) = diagnose_nodes(Root.parse(tmp_path), NODES.model_copy(update={"launcher": launcher}))
    assert (found.state, found.what) == ("warn", f"{launcher}: nodes are not looked at from here")
    assert f"cluster.{launcher}" in found.todo


@pytest.mark.slow
def test_a_tiny_run_goes_from_raw_text_to_its_promotion() -> None:
    assert check_run().state == "ok"


def test_a_tiny_run_that_fails_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TINY_RUN", ("model.layers=0",))
    found = check_run()
    assert found.state == "fail"
    assert "status 2: " in found.what
    assert "model.layers" in found.what
