"""What holds for all commands: help, JSON as documented, and plain lines for all that people and machines cause."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.main import get_command
from typer.testing import CliRunner, Result

from herd.flows.cli import ops
from herd.flows.cli.errors import mistakes
from herd.flows.cli.main import PANELS, app
from herd.llama3.export.formats import EXPORT_FORMATS
from herd.llama3.recipe.load import to_yaml
from herd.llama3.tokens.inspect import Inspection, TokenCount
from herd.llama3.tokens.stream import DocumentUse
from herd.storage.processes import PACKAGE_FOLDER as CHECKOUT
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.launch.slurm import SlurmLauncher
from tests.llama3.planner.plan_samples import recipe
from tests.tasks.promotion_samples import FAMILY, add
from tests.tasks.standing_root import begun, log_attempt, tiny, train

NOBODY = 65534


def herd(*words: object, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300", **environment})


def contexts(command: Any, name: str, parent: Any = None) -> Iterator[Any]:
    """Yield the context of every command and group."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield context
    for below, one in getattr(command, "commands", {}).items():
        yield from contexts(one, below, context)


def test_the_help_begins_with_five_commands_and_loses_none() -> None:
    help_ = herd("-h").output
    listed = re.findall(r"^│ ([a-z][a-z-]*) ", help_, re.MULTILINE)
    assert tuple(listed[:5]) == PANELS["Start here"] == ("run", "plan", "status", "rerun", "up")
    assert sorted(listed) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert "─ Other" not in help_


def test_every_command_has_both_options_of_help() -> None:
    found = {context.command_path: context for context in contexts(get_command(app), "herd")}
    assert {"herd", "herd plan network", "herd study run", "herd eval render"} < set(found)
    for path, context in found.items():
        assert sorted(context.command.get_help_option(context).opts) == ["--help", "-h"], path
    assert "Usage:" in herd("plan", "-h").output  # a group whose first command is the default
    assert "calibrate" in herd("plan", "-h").output
    assert re.search(r"--open +--no-open +Open the page", herd("watch", "-h").output), "a flag takes no value"


def test_a_shell_gets_its_completion() -> None:
    words = {"COMP_WORDS": "herd prom", "COMP_CWORD": "1", "_HERD_COMPLETE": "complete_bash"}
    program = "import sys; sys.argv[0] = 'herd'; from herd.flows.cli.main import app; app()"
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == ["promote", "promotion-log"]


# JSON: the keys that docs/reference/commands.md promises.


def documented(command: str) -> list[str]:
    text = (CHECKOUT / "docs/reference/commands.md").read_text()
    (row,) = re.findall(rf"^\| `{re.escape(command)}` \| (.*) \|$", text.partition("## JSON")[2], re.MULTILINE)
    return re.findall(r"`([^`]+)`", row)


def test_the_reference_of_commands_lists_every_format_of_an_export() -> None:
    formats = r"\|".join(EXPORT_FORMATS)
    assert f"| `herd export MODEL FOLDER [--format {formats}] " in (CHECKOUT / "docs/reference/commands.md").read_text()


def keys(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(document, dict)
    return document


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A root with a run whose second attempt at its second stage trains."""
    root, asked = Root.parse(tmp_path / "root"), tiny()
    record = begun(root, asked)
    train(root, asked, record, steps=10, saved=8)
    log_attempt(root, record.name, "main", 1, -9, "rank 0 was killed")
    return root


def test_status_is_json_of_all_runs_and_of_one(root: Root) -> None:
    everything = keys(herd("status", "--json", "--root", root.uri))
    one = keys(herd("status", "tiny-1", "--json", "--root", root.uri))
    assert list(everything) == documented("herd status")
    (row,) = everything["runs"]
    assert list(row) == documented("runs")
    assert [*row, *documented("herd status RUN")] == list(one)
    assert (one["position"], one["tokens"], one["state"]) == (36864, 98304, "no live process")
    assert one["checkpoint"]["position"] == 32768
    assert one["trainers"] == [
        {"stage": "main", "attempt": 1, "ended": "SIGKILL", "cause": "killed", "host": "", "why": "rank 0 was killed"}
    ]
    assert [step["step"] for step in one["steps"]][:2] == ["collect", "annotate"]


def test_a_promotion_log_is_json(root: Root) -> None:
    for number in (1, 2):
        add(root, number)
    log = keys(herd("promotion-log", FAMILY, "--json", "--root", root.uri))
    assert list(log) == documented("herd promotion-log")
    assert log["aliases"]["champion"] == log["records"][-1]["artifact"]
    assert [record["n"] for record in log["records"]] == [1, 2]


def test_a_plan_is_json_without_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe()))
    plan = keys(herd("plan", tmp_path / "recipe.yaml", "--json", "--root", tmp_path / "root"))
    assert list(plan) == documented("herd plan RECIPE")
    assert plan["tokens"] == sum(stage["tokens"] for stage in plan["schedule"])


def test_an_inspection_is_json() -> None:
    use = DocumentUse("d" * 32, "math", "gsm", "en", "MIT", 0, 0, 9, 20)
    counts = {"math": TokenCount(10, 1)}
    found = Inspection(20, 30, counts, counts, counts, counts, [use], ["two plus two"], True)
    assert ["run", *found.as_dict()] == documented("herd inspect")


def test_every_variable_is_on_the_page_of_variables() -> None:
    folders = ("flows", "tasks", "llama3", "storage", "deploy", "benchmarks")
    files = [CHECKOUT / "Makefile", *(file for folder in folders for file in (CHECKOUT / folder).rglob("*.py"))]
    read = {name for file in files for name in re.findall(r"\bHERD_[A-Z][A-Z0-9_]*", file.read_text())}
    page = (CHECKOUT / "docs/reference/environment.md").read_text()
    assert "HERD_SCRATCH" in read
    assert set(re.findall(r"`(HERD_[A-Z0-9_]+)`", page)) == read


# What a person, a disk, a scheduler or a pipe causes is a line with a status, never a traceback.


def lines(result: Result, status: int) -> str:
    assert result.exit_code == status, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run nix.yaml", "nix.yaml: cannot be read (No such file or directory)"),
        ("run {recipe} --cluster nix.yaml", "cluster: nix.yaml: cannot be read (No such file or directory)"),
        ("run {recipe} --root /proc/herd", "root: /proc/herd cannot be written"),
        ("run {recipe} --root {recipe}", "cannot be written (File exists); choose another with --root"),
        ("run {recipe} --root ftp://x/y", "root: 'ftp://x/y' is neither a folder nor in an object store"),
        ("rerun tiny-9", "run 'tiny-9' does not exist under"),
        ("status tiny-9", "run 'tiny-9' does not exist under"),
        ("status tiny-1 --json --watch", "--watch: refreshes a terminal"),
        ("status ../x", "run '../x' does not exist under"),
        ("status --root /nope", "--root: /nope is not a folder; name the one with the runs, or begin: herd run"),
        ("logs tiny-9", "run 'tiny-9' does not exist under"),
        ("stop tiny-9", "run 'tiny-9' does not exist under"),
        ("inspect tiny-1 --tokens 5", "--tokens: '5' is not a span"),
        ("inspect tiny-1 --tokens 1G:2G", "--tokens: '1G' is not a number of tokens"),
        (
            "run {recipe} --until tokenise",
            "--until: 'tokenise' is not a step of tiny; did you mean tokenize?",
        ),
        ("rerun tiny-1 --from xy", "--from: 'xy' is not a step of tiny; steps: collect, annotate, curate, tokenizer,"),
        ("rerun tiny-1 --set lr.peek=1", "lr.peek: unknown key; did you mean 'peak'?"),
        ("run {recipe} --threads -1", "Invalid value for '--threads'"),
        ("run {recipe} --processes -2", "Invalid value for '--processes'"),
        ("run .", "recipe .: is a folder; name a YAML file in it, or a shipped recipe"),
        ("status --root foo://bar", "root: 'foo://bar' is neither a folder nor in an object store"),
        ("fetch {recipe} --rate abc", "--rate: 'abc' is not a size in bytes"),
        ("gc --older-than abc", "--older-than: 'abc' is not a time"),
        ("gc --databases abc", "--databases: 'abc' is not a time"),
        ("data try {recipe} --rule to_short", "--rule: 'to_short' is not a rule; did you mean too_short? rules: bl"),
        ("promotion-log nix", "family 'nix' has no promotions"),
    ],
)
def test_wrong_input_is_a_line(words: str, said: str, root: Root, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny()))
    monkeypatch.chdir(tmp_path)
    given = words.format(recipe=tmp_path / "recipe.yaml").split()
    printed = lines(herd(*given, HERD_ROOT=root.uri), 2)
    assert said in printed
    assert "starting Prefect" not in printed


def test_a_root_without_studies_says_how_to_start_one(root: Root) -> None:
    listed = lines(herd("study", "list", "--root", root.uri), 0)
    assert listed == f"no study in {root.uri}; start one with: herd study run ramp-cpu"


def test_processes_that_do_not_fit_a_preset_are_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny()))
    preset = Cluster.model_validate({"processes": 2, "layout": {"tp": 2}})
    monkeypatch.setattr("herd.tasks.plan.presets.cluster_of", lambda *_: preset)
    words = ("run", tmp_path / "recipe.yaml", "--root", tmp_path / "root", "--cluster", "p5", "--processes", "3")
    printed = lines(herd(*words), 2)
    assert printed == "error cluster.layout: tp 2 x cp 1 x pp 1 = 2 does not divide 3 processes; start 4"


def test_an_address_where_no_server_answers_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    address = "http://127.0.0.1:9/api"
    with temporary_settings({PREFECT_API_URL: address}), pytest.raises(typer.Exit) as ended, mistakes():
        raise RuntimeError(f"Failed to reach API at {address}/") from httpx.ConnectError("refused")
    assert ended.value.exit_code == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert f"PREFECT_API_URL: no server answers at {address}; start it, or unset the variable" in printed


@pytest.mark.parametrize(
    ("again", "said"), [((), "the same command continues"), (("it without --fresh",), "it without --fresh continues")]
)
def test_ctrl_c_says_what_goes_on(again: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, mistakes(*again):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert said in capsys.readouterr().err


def test_a_root_that_may_not_be_read_or_written_is_a_line(root: Root, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny()))
    herd("status", "--root", root.uri)
    herd("run", tmp_path / "recipe.yaml", "--root", "/proc/herd")  # imports, which may need another user's rights
    root.local.chmod(0)
    was = os.geteuid()
    if was == 0:
        tmp_path.chmod(0o755)
        for parent in [*tmp_path.parents][:-2]:  # below /tmp
            parent.chmod(0o755)
        os.seteuid(NOBODY)
    try:
        listed, run = herd("status", "--root", root.uri), herd("run", tmp_path / "recipe.yaml", "--root", root.uri)
    finally:
        os.seteuid(was)
        root.local.chmod(0o755)
    assert "Permission denied ask the owner for the permission" in lines(listed, 1)
    assert "cannot be written (Permission denied); choose another with --root" in lines(run, 2)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), "/data/x: Permission denied ask the owner"),
        (OSError(errno.EROFS, "Read-only file system", "/data/x"), "mounted read-only: choose another folder"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files too many files are open: raise the limit"),
        (OSError(errno.EIO, "Input/output error", "/data/x"), "/data/x: Input/output error the same command continues"),
        (OSError("s3://b/x: holds other bytes than were sent"), "s3://b/x: holds other bytes than were sent"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused the same command"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe the same command continues"),
        (MemoryError(), "memory: none is left (out of memory) end other processes"),
    ],
)
def test_what_a_machine_does_is_a_line_and_status_1(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(typer.Exit) as ended, mistakes():
        raise error
    assert ended.value.exit_code == 1
    assert said in " ".join(capsys.readouterr().err.split())
    monkeypatch.setenv("HERD_TRACEBACK", "1")
    with pytest.raises(type(error)), mistakes():
        raise error


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), mistakes():
        raise KeyError("a field")


def test_what_a_scheduler_says_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "squeue", "scancel", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\n[ $0 = */squeue ] || echo 'Invalid account' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "job.json").write_text("{}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cluster = Cluster.model_validate({"launcher": "slurm", "processes": 8, "slurm": {"processes_per_node": 8}})
    with pytest.raises(typer.Exit) as ended, mistakes():
        SlurmLauncher(cluster, "x").start(tmp_path / "job.json", 8, tmp_path / "logs")
    assert ended.value.exit_code == 1
    assert re.search(r"error +sbatch --parsable .*job.sbatch: Invalid account", capsys.readouterr().err)


def test_a_reader_that_leaves_a_pipe_ends_the_command_in_silence(root: Root) -> None:
    command = f"{sys.executable} -m herd.flows.cli.main status --json --root {root.uri}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"],
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


def test_watching_shows_a_run_again_until_ctrl_c(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    really_sleep = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # of servers that other tests started
            really_sleep(seconds)
            return
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ops.time, "sleep", sleep)
    done = herd("status", "--watch", "--root", root.uri)
    assert done.exit_code == 0
    assert "tiny-1" in done.output
    assert "Ctrl-C leaves" in done.output
    assert "stopped" not in done.output
