"""A root in an object store: killed on one machine, the run goes on on another and ends in the same bytes.

Machines are folders here: what a machine knows besides the store is its scratch folder. The store is a real S3 server
that forgets nothing (OpenStack Swift).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from tests.e2e.conftest import Herd, NewHerd, bytes_made, kill_all, wait_for
from tests.e2e.test_study import write_study
from tests.storage.s3 import BUCKET, environment, moto_server, pointed_at

pytestmark = pytest.mark.slow
URI = f"s3://{BUCKET}/team"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which the store is found, for this process and for those it starts."""
    with moto_server(tmp_path_factory.mktemp("s3")) as endpoint:
        variables = environment(endpoint)
        with pointed_at(variables):
            yield variables


@pytest.fixture
def machine(new_herd: NewHerd, server: dict[str, str], tmp_path: Path) -> Callable[[str], Herd]:
    """Makes a command line on a machine of its own; all share the store."""

    def make(name: str) -> Herd:
        herd = new_herd(tmp_path / name)
        herd.variables = {**server, "HERD_ROOT": URI, "HERD_SCRATCH": str(tmp_path / name)}
        return herd

    return make


def test_killed_here_it_goes_on_there(undisturbed: dict[str, str], machine: Callable[[str], Herd]) -> None:
    one, other = machine("one"), machine("other")
    with tempfile.TemporaryDirectory() as scratch:
        root = Root.parse(URI, scratch)
        process = one.start("run", one.recipe, "--set", "checkpoint.every=4Ki")
        wait_for(lambda: checkpoints(root, "main") > 1, "a checkpoint of main", 280)
        kill_all(process.pid)
        printed = other("run", other.recipe, "--set", "checkpoint.every=4Ki")
        assert "continuing tiny-1, which did not finish" in printed
        assert "resumed at" in printed
        assert bytes_made(root, "tiny-1") == undisturbed
        assert root.names("in-progress") == []
        for step in ("collect", "curate", "tokenize", "ramp"):
            assert f"{step:<17} reused " in printed
            assert Runs(root).find("tiny-1").steps[step].outcome == "created", "by the first attempt of this run"
    third = machine("third")
    assert third("generate", "tiny-1", "--prompt", "The", "--tokens", "3").startswith("The")
    assert "general" in third("inspect", "tiny-1", "--tokens", "20K:24K")
    assert third("report", "tiny-1").strip().endswith("report.html")
    again = third("run", third.recipe, "--set", "stages.anneal.weight_averaging=3")
    assert 'anneal            new: average "last 2" -> "last 3"' in again
    assert "reused checkpoint/tiny-main" in again


def checkpoints(root: Root, stage: str) -> int:
    """Return how many checkpoints of `stage` are committed in the store."""
    found = 0
    for work in (name for name in root.names("in-progress") if name.startswith(f"{stage}-")):
        for position in filter(str.isdigit, root.names("in-progress", work)):
            for attempt in root.names("in-progress", work, position):
                found += "manifest.json" in root.names("in-progress", work, position, attempt)
    return found


def test_a_store_that_cannot_be_reached_is_refused(machine: Callable[[str], Herd]) -> None:
    herd = machine("lost")
    herd.variables |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "HERD_S3_DEADLINE_S": "20"}
    began = time.monotonic()
    printed = herd("run", herd.recipe, status=2)
    assert f"root: {URI} cannot be written" in printed
    assert "AWS_ENDPOINT_URL" in printed
    assert time.monotonic() - began < 120


def test_a_study_that_was_killed_here_goes_on_there(machine: Callable[[str], Herd], tmp_path: Path) -> None:
    one, other, third = machine("one"), machine("other"), machine("third")
    study = write_study(tmp_path, one.recipe, "seeds: [1]\ncompare: {control: five, varies: [lr.warmup], variants: "
                        "{five: [], ten: [lr.warmup=10 steps]}}")  # fmt: skip
    root = Root.parse(URI, str(tmp_path / "here"))
    process = one.start("study", "run", str(study))
    wait_for(lambda: len(Runs(root).family("warm")) > 1, "the second run's record", 280, every_s=1)
    kill_all(process.pid)
    printed = other("study", "run", str(study), "--at-once", "2")
    assert "reused: warm-1" in printed
    assert {run.name: run.state for run in Runs(root).family("warm")} == {"warm-1": "finished", "warm-2": "finished"}
    assert "finished" in third("study", "list")
    page = third("study", "report", "warm").split()[-1]
    assert Path(page).is_file()
    assert Root.parse(URI, str(tmp_path / "here")).read("studies", "warm", "report.html")
