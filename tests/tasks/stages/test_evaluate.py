"""A model scored by one process and by several: the same report, and mistakes in plain words."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from herd.llama3.evaluate.main import MISTAKE, REFUSED, EvaluateJob
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.job import AttemptResult
from herd.tasks.cluster import Cluster, EvaluationCluster
from herd.tasks.errors import EvaluationFailed
from herd.tasks.launch.local import rank_process
from herd.tasks.stages import evaluate
from herd.tasks.stages.evaluate import run_evaluation
from tests.agents import shared_agents
from tests.llama3.evaluate.suite_samples import make


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


@pytest.fixture(scope="module")
def recipe(workspace: Path, checkout: Path) -> Recipe:
    return make(workspace, checkout)


def cluster(processes: int, layout: Layout | None = None) -> Cluster:
    """Return a place with one thread for each process: the number of threads may change how sums are rounded."""
    return Cluster(evaluate=EvaluationCluster(processes=processes, layout=layout), threads=processes, device="cpu")


@pytest.mark.slow
def test_two_evaluators_report_what_one_does(workspace: Path, recipe: Recipe) -> None:
    one, two = (
        run_evaluation(
            recipe,
            workspace / "model",
            workspace / "curated",
            workspace / str(n),
            workspace / f"work-{n}",
            cluster(n),
            shared_agents(),
        )
        for n in (1, 2)
    )
    assert one == two
    names = sorted(path.name for path in (workspace / "1").iterdir())
    assert "scores.parquet" in names
    assert names == sorted(path.name for path in (workspace / "2").iterdir())
    for name in names:
        assert (workspace / "1" / name).read_bytes() == (workspace / "2" / name).read_bytes(), name


def test_a_mistake_of_all_processes_is_one_line(workspace: Path, recipe: Recipe, tmp_path: Path) -> None:
    shutil.copytree(workspace / "model", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json: is not a model configuration") as caught:
        run_evaluation(
            recipe,
            tmp_path / "model",
            workspace / "curated",
            tmp_path / "made",
            tmp_path / "work",
            cluster(2).model_copy(update={"threads": 1}),  # the agent's
            shared_agents(),
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("ends", "made", "timeout_s", "error", "match"),
    [
        ([-9, -9, -9, -9], 3, 60, EvaluationFailed, "ended with status -9:\nend 3"),
        ([-9, -9, 0], 3, 4000, None, ""),
        ([0], 1, 60, None, ""),
        ([-9, REFUSED, 0], 2, 4000, ValueError, "^end 2$"),
    ],
)
def test_an_evaluation_is_tried_as_often_as_the_cluster_allows(
    ends: list[int],
    made: int,
    timeout_s: int,
    error: type[Exception] | None,
    match: str,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with the cluster's own settings; ranks wait for one another for at least half an hour."""
    started: list[tuple[int, str]] = []

    def start(path: Path, processes: int, logs: Path) -> AttemptResult:
        logs.mkdir(parents=True)
        started.append((processes, logs.name))
        job, status = EvaluateJob.model_validate_json(path.read_text()), ends[len(started) - 1]
        assert (job.threads, job.device, job.timeout_s) == (2, "cpu", max(1800, timeout_s))
        if status == 0:
            job.result.mkdir()
            job.facts.write_text('{"eval/bpb": 2.5}')
        return AttemptResult(status=status, message=f"{MISTAKE if status == REFUSED else ''}end {len(started)}")

    launcher = SimpleNamespace(live=lambda path: None, start=start)
    monkeypatch.setattr(evaluate, "launcher_of", lambda *_: launcher)
    monkeypatch.setattr(evaluate, "wait", lambda outcome, stopped: outcome)
    place = cluster(2).model_copy(update={"attempts": 3, "timeout_s": timeout_s, "threads": 5})
    with pytest.raises(error, match=match) if error else nullcontext():
        scores = run_evaluation(
            recipe, tmp_path, tmp_path, tmp_path / "scores", tmp_path / "work", place, shared_agents()
        )
        assert scores == {"eval/bpb": 2.5}
    assert started == [(2, f"attempt-{number}") for number in range(1, made + 1)]


@pytest.mark.slow
def test_a_killed_evaluation_continues_on_a_split_model(workspace: Path, recipe: Recipe) -> None:
    """A rank is killed after the likelihoods; the second attempt does not compute them again."""
    place, work = cluster(4, Layout(tp=2)), workspace / "work-killed"
    place = place.model_copy(update={"attempts": 2})
    first = work / "done" / "000001.json"

    def kill() -> None:
        while not first.exists():
            time.sleep(0.01)
        os.kill(rank_process(0).pid, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        split = run_evaluation(
            recipe, workspace / "model", workspace / "curated", workspace / "split", work, place, shared_agents()
        )
        killed.result()
    logs = sorted((work / "logs").iterdir())
    assert [path.name for path in logs] == ["attempt-1", "attempt-2"]
    assert first.stat().st_mtime < min(path.stat().st_mtime for path in logs[1].glob("rank-*.log"))
    one = run_evaluation(
        recipe,
        workspace / "model",
        workspace / "curated",
        workspace / "one",
        workspace / "work-one",
        cluster(1),
        shared_agents(),
    )
    assert split.keys() == one.keys()
    assert {key: value for key, value in split.items() if not isinstance(value, float)} == {
        key: value for key, value in one.items() if not isinstance(value, float)
    }
    for key, value in one.items():
        if isinstance(value, float):
            assert split[key] == pytest.approx(value, rel=1e-5), key
