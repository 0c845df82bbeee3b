"""A step of runs that work side by side: made once, waited for, resumed, and given up when another took it over."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.recipe.load import load_recipe
from herd.storage.artifact import ArtifactSpec
from herd.storage.lease import LeaseHeld, LeaseLost, lease
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.runs.records import Runs
from herd.tasks.step import Context, WorkInProgress, ensure_artifact, ensure_in_scratch, tracked_step
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.storage.commit_samples import started

RECIPE = load_recipe(Path("recipes/quickstart.yaml"))


class Heard:
    """A console that keeps what is said."""

    rich = None

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)

    def table(self, table: Any) -> None: ...

    def progress(self, name: str, total: int) -> Any: ...

    def about(self, step: str) -> list[str]:
        return [line.split(step, 1)[1].strip() for line in self.lines if step in line]


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> MLflowTracker:
    return MLflowTracker(Root.parse(tmp_path_factory.mktemp("mlflow")), "quickstart")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.parse(tmp_path / "root")


def context(root: Root, tracker: MLflowTracker) -> Context:
    """The context of one more run."""
    runs = Runs(root)
    record = runs.begin(RECIPE, "code")
    record.mlflow_run = tracker.open_run(record.name, {"herd.run": record.name}, {})
    return Context(RECIPE, Cluster(), open_store(root), runs, record, tracker, Heard(), [])  # type: ignore[arg-type]


def heard(of: Context) -> list[str]:
    assert isinstance(of.console, Heard)
    return of.console.about("thing")


def design(**parameters: object) -> ArtifactSpec:
    return ArtifactSpec("annotated", "quickstart", 1, parameters, {})


def writes(folder: Path, _: object) -> dict[str, Any]:
    (folder / "a.txt").write_text("a")
    return {"count": 1}


def refuses(folder: Path, _: object) -> dict[str, Any]:
    raise AssertionError("it is there and must not be made")


def test_the_log_says_what_is_new_or_reused(root: Root, tracker: MLflowTracker) -> None:
    first, second = context(root, tracker), context(root, tracker)
    ensure_artifact(first, "thing", design(jaccard=0.8), writes)
    ensure_artifact(first, "thing", design(jaccard=0.7), writes)
    assert heard(first) == ["[dim]new: nothing of this name was made before[/]", "[dim]new: jaccard 0.8 -> 0.7[/]"]
    ensure_artifact(second, "thing", design(jaccard=0.7), refuses)
    (line,) = heard(second)
    assert line.startswith("reused annotated/quickstart-")
    assert second.record.steps["thing"].outcome == "reused"


def test_a_flow_that_asks_again_leaves_the_record_of_a_run_that_is_over(root: Root, tracker: MLflowTracker) -> None:
    run = context(root, tracker)
    made = ensure_artifact(run, "thing", design(), writes)
    before = run.record.steps["thing"]
    run.record.state = "finished"
    assert ensure_artifact(run, "thing", design(), refuses).label == made.label
    assert run.record.steps["thing"] == before
    assert before.outcome == "created"


@pytest.mark.fault("F13")
def test_a_second_run_waits_and_reuses(root: Root, tracker: MLflowTracker) -> None:
    maker, waiter = context(root, tracker), context(root, tracker)
    began, go_on, found = threading.Event(), threading.Event(), []

    def slowly(folder: Path, _: object) -> dict[str, Any]:
        began.set()
        assert go_on.wait(30)
        return writes(folder, _)

    threads = [threading.Thread(target=lambda: found.append(ensure_artifact(maker, "thing", design(), slowly)))]
    threads[0].start()
    assert began.wait(30)
    threads.append(threading.Thread(target=lambda: found.append(ensure_artifact(waiter, "thing", design(), refuses))))
    threads[1].start()
    while not heard(waiter):
        time.sleep(0.01)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found[0].key == found[1].key
    assert (maker.record.steps["thing"].outcome, waiter.record.steps["thing"].outcome) == ("created", "reused")
    assert heard(waiter)[0].startswith("[yellow]waits for quickstart-1 (process")
    assert heard(waiter)[0].endswith("which is making it[/]")
    assert len(heard(waiter)) == 2


def test_work_in_progress_is_resumed_and_then_removed(root: Root, tracker: MLflowTracker) -> None:
    run, done = context(root, tracker), []
    folder = run.scratch / "thing-place"
    folder.mkdir(parents=True)
    ensure_artifact(
        run,
        "thing",
        design(),
        writes,
        work=WorkInProgress("thing-place", lambda: 1_200_000_000, lambda: done.append(1)),
    )
    assert heard(run) == ["resumed at 1.2B"]
    assert run.record.steps["thing"].outcome == "resumed at 1.2B"
    assert not folder.exists()
    assert done == [1]


def test_designs_that_share_a_work_folder_wait_for_each_other(root: Root, tracker: MLflowTracker) -> None:
    run = context(root, tracker)

    def tries(folder: Path, _: object) -> dict[str, Any]:
        with pytest.raises(LeaseHeld, match="quickstart-1"), lease(root, "work/thing-place", "another"):
            pass
        return writes(folder, _)

    ensure_artifact(run, "thing", design(), tries, work=WorkInProgress("thing-place"))


def test_scratch_outlives_an_error_but_not_the_commit(root: Root, tracker: MLflowTracker) -> None:
    run = context(root, tracker)

    def half(folder: Path, scratch: Path) -> dict[str, Any]:
        (scratch / "half").write_text("x")
        raise OSError("no space left")

    def whole(folder: Path, scratch: Path) -> dict[str, Any]:
        assert (scratch / "half").read_text() == "x"
        return writes(folder, None)

    with pytest.raises(OSError, match="no space left"):
        ensure_in_scratch(run, "thing", design(), half)
    ensure_in_scratch(run, "thing", design(), whole)
    assert not list(run.scratch.iterdir())


def test_nothing_is_committed_under_a_lost_lease(root: Root, tracker: MLflowTracker) -> None:
    run = context(root, tracker)

    def robbed(folder: Path, _: object) -> dict[str, Any]:
        for path in (root.local / "leases" / "annotated").iterdir():
            path.unlink()
        return writes(folder, _)

    with pytest.raises(LeaseLost):
        ensure_artifact(run, "thing", design(), robbed)
    assert run.store.find(design()) is None
    assert "thing" not in run.record.steps


def make_and_report(pipe: Connection, root: Root) -> None:
    """In a process: make the thing when told, and send its label."""
    folder = root.local / "made"
    folder.mkdir(parents=True, exist_ok=True)
    store = open_store(root)
    pipe.send("ready")
    pipe.recv()
    with lease(root, "annotated/x", "run", lambda _: None):
        found = store.find(design())
        if found is None:
            with store.staging() as staging:
                (folder / str(time.time_ns())).touch()
                found = store.commit(design(), staging, writes(staging, None), "run", "code", 0.0)
    pipe.send(found.label)


@pytest.mark.fault("F13")
@pytest.mark.slow
def test_racing_processes_make_one(root: Root) -> None:
    """The order of `ensure_artifact` (find, lease, find again, make) with four processes at once."""
    racers = [started(make_and_report, root) for _ in range(4)]
    for _, pipe in racers:
        pipe.send("go")
    labels = {pipe.recv() for _, pipe in racers}
    for racer, _ in racers:
        racer.join()
    assert len(labels) == 1
    assert len(list((root.local / "made").iterdir())) == 1


def test_a_child_run_is_closed_with_the_truth(root: Root, tracker: MLflowTracker) -> None:
    run = context(root, tracker)
    ended = {}
    for key, error in (("a", None), ("b", ValueError()), ("c", KeyboardInterrupt())):
        try:
            with tracked_step(run, "thing", f"step-{key}", key) as child:
                if error:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        ended[key] = tracker.client.get_run(child).info.status
    assert ended == {"a": "FINISHED", "b": "FAILED", "c": "KILLED"}


def test_a_damaged_artifact_is_named_set_aside_and_made_again_by_its_step(root: Root, tracker: MLflowTracker) -> None:
    first, second = context(root, tracker), context(root, tracker)
    path = ensure_artifact(first, "thing", design(), writes).path_of("a.txt")
    path.write_text("b")
    made = ensure_artifact(second, "thing", design(), writes)
    assert made.path_of("a.txt").read_text() == "a"
    assert second.record.steps["thing"].outcome == "created"
    assert second.record.steps["thing"].why == "the one there was damaged"
    assert heard(second)[0] == f"[yellow]set aside: artifact {design().label}: a.txt changed since it was committed[/]"
    (aside,) = (root.local / ".damaged").iterdir()
    assert (aside / "a.txt").read_text() == "b"
