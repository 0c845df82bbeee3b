"""A decision after a fault at any call to the disk or MLflow, given again: one record, one version, one alert."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from herd.flows import run_lifecycle
from herd.llama3.evaluate.gate import Check
from herd.llama3.evaluate.scores import Score
from herd.llama3.recipe.schedule import Schedule
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.operate.recovery import COMPLETE, reconcile
from herd.tasks.promotion.approval import decide
from herd.tasks.promotion.log import (
    CHAMPION,
    PROMOTED,
    REJECTED,
    ROLLED_BACK,
    Log,
    current_aliases,
    current_label,
    read_log,
    version_tags,
)
from herd.tasks.promotion.rollback import RollbackRequest, roll_back
from herd.tasks.runs.records import OPEN, PENDING_APPROVAL, Runs, now
from herd.tasks.stages import promote
from herd.tasks.stages.alerts import read_alerts
from herd.tasks.stages.gate import CandidateModel, ChampionModel, Override
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.orders import NONE, Boundary, Fault, cut_short, walk, watch_mlflow
from tests.tasks.promotion_samples import FAMILY
from tests.tasks.tracked_run import TrackedRun, models

RUN = f"{FAMILY}-1"
FOLDERS = ("runs", "promotions", OPEN)


class Workspace:
    """A finished run with two models, of which the first may be the champion, as it was before each operation."""

    def __init__(self, folder: Path) -> None:
        self.root = Root.parse(folder / "root")
        run = TrackedRun(self.root, promote={"when": {"eval/bpb": "at most 9"}, "mlflow_timeout": "1 s"})
        tokens = run.tokens()
        self.recipe = run.context.recipe
        main, anneal = Schedule(self.recipe).trained
        self.first = run.stage(main, tokens, None)
        self.second = run.stage(anneal, tokens, self.first)
        self.evaluation = run.evaluate(self.second)
        run.end()
        self.root.write(now(), OPEN, COMPLETE)  # the reconciler looks at runs that are marked
        self.folder = folder
        self.save("evaluated")

    def save(self, name: str) -> None:
        """Have `restore(name)` return to the present state."""
        for kind in FOLDERS:
            (self.root.local / kind).mkdir(exist_ok=True)
            shutil.copytree(self.root.local / kind, self.folder / name / kind)
        _copy_database(self.root.local / "mlflow.db", self.folder / name / "mlflow.db")

    def restore(self, name: str) -> None:
        for kind in FOLDERS:
            shutil.rmtree(self.root.local / kind)
            shutil.copytree(self.folder / name / kind, self.root.local / kind)
        _copy_database(self.folder / name / "mlflow.db", self.root.local / "mlflow.db")

    def judge(self, passed: bool = True, approval: str = "none", first: bool = False) -> None:
        """Do the step `promote` in a new process, with measurements as they would be."""
        checkpoint = self.first if first else self.second
        digest, position = checkpoint.metadata["model_sha256"], checkpoint.metadata["end"]
        check = Check(metric="contamination", passed=passed, reason="looked for")
        score = Score("eval/bpb", 2.5, 0.1, 2.3, 2.7, 9, None, "bits per byte", "lower", "r" * 64)
        candidate = CandidateModel(RUN, FAMILY, checkpoint.label, digest, position, {score.key: score}, [check])

        def champion(context: Context, log: Log, *_: Any) -> ChampionModel:
            return ChampionModel(current_label(log, CHAMPION), tuple(log))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_lifecycle, "current_console", TerminalConsole)
            patch.setattr(promote, "judge_model", promote.judge_model.fn)
            patch.setattr(promote, "measure_candidate", lambda *_: candidate)
            patch.setattr(promote, "measure_champion", champion)
            with run_lifecycle.existing_run(self.root, RUN, Cluster()) as context:
                policy = self.recipe.promote.model_copy(update={"approval": approval})
                context.recipe = self.recipe.model_copy(update={"promote": policy})
                promote.promote_model(context, checkpoint, self.evaluation, self.evaluation, Override())


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as here, closing(sqlite3.connect(target)) as there:
        here.backup(there)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"))


def approve(workspace: Workspace) -> None:
    decide(workspace.root, RUN, True, "Ada")


def go_back(workspace: Workspace) -> None:
    if read_log(workspace.root, FAMILY)[-1].kind != ROLLED_BACK:  # who sees that it is done does not ask again
        roll_back(workspace.root, RollbackRequest(FAMILY, by="Ada"))


Operation = Callable[[Workspace], object]
OPERATIONS: dict[str, tuple[list[Operation], Operation, list[str], str]] = {
    "promote": ([], lambda workspace: workspace.judge(), [PROMOTED], PROMOTED),
    "reject": ([], lambda workspace: workspace.judge(passed=False), [REJECTED], REJECTED),
    "approve": (
        [lambda workspace: workspace.judge(approval="manual")],
        approve,
        [PENDING_APPROVAL, PROMOTED],
        PROMOTED,
    ),
    "roll back": (
        [lambda workspace: workspace.judge(first=True), lambda workspace: workspace.judge()],
        go_back,
        [PROMOTED, PROMOTED, ROLLED_BACK],
        PROMOTED,
    ),
}
"""What was decided before, what is decided, the kinds of records in the log after it, and the verdict on the run."""


@pytest.mark.fault("F2", "F15", "F26")
@pytest.mark.parametrize("every", [pytest.param(5, marks=pytest.mark.slow), 131])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_decision_is_one_record_and_is_shown_after_a_fault_at_any_call(
    name: str, every: int, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, operation, kinds, verdict = OPERATIONS[name]
    root = workspace.root
    monkeypatch.setattr("herd.tasks.tracking.mlflow.WAIT_INTERVAL_S", 0.5)
    workspace.restore("evaluated")
    for earlier in before:
        earlier(workspace)
    workspace.save(f"before {name} {every}")

    def play(fault: Fault) -> int:
        workspace.restore(f"before {name} {every}")
        old = current_label(read_log(root, FAMILY), CHAMPION)
        boundary, ended = Boundary(fault), False
        with boundary.watch_disk(root.local), watch_mlflow(boundary), cut_short(ValueError):
            operation(workspace)
            ended = True
        log = read_log(root, FAMILY)
        assert [record.kind for record in log] in (kinds, kinds[:-1])
        tracker = MLflowTracker(root, FAMILY)
        if old:
            assert models(tracker)["aliases"][CHAMPION] in (old, current_label(log, CHAMPION)), "ahead of the log"
        if not ended or fault == NONE:
            with suppress(ValueError):  # what is decided cannot be decided again
                operation(workspace)
        reconcile(root, None)
        log = read_log(root, FAMILY)
        assert [record.kind for record in log] == kinds
        shown = models(tracker)
        assert shown["aliases"] == current_aliases(log)
        labels = {record.artifact for record in log}
        assert shown["versions"].keys() == labels
        assert len(tracker.client.search_model_versions(f"name = '{FAMILY}'")) == len(labels)
        for label in labels:
            assert version_tags(log, label).items() <= shown["versions"][label].items()
            assert len(shown["versions"][label]) <= 6
        record = Runs(root).find(RUN)
        assert (record.verdict, record.mlflow_stale, record.state) == (verdict, False, "finished")
        runs = tracker.client.search_runs([tracker.experiment], tracker.query(RUN))
        assert {run.data.tags["verdict"] for run in runs if run.data.tags["kind"] == "run"} == {verdict}
        assert {run.info.status for run in runs} == {"FINISHED"}
        assert [alert.kind for alert in read_alerts(root, RUN)] == (["gate"] if verdict == REJECTED else [])
        return len(boundary.calls)

    walk(play, every)
