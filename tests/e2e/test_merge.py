"""A run whose checkpoints were merged: the merge is judged, and whatever reads the run reads it as before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.plan.cluster import measured_costs
from herd.tasks.promotion.log import read_log
from herd.tasks.report.compare import ComparedRun
from herd.tasks.report.run import evaluated_checkpoints
from herd.tasks.runs.records import Runs
from tests.e2e.conftest import Herd, NewHerd, lies


@pytest.mark.slow
def test_a_run_with_a_merge_is_read_as_before(herd: Herd, new_herd: NewHerd, tmp_path: Path) -> None:
    again = new_herd(tmp_path / "root")
    shutil.copytree(herd.root, again.root, dirs_exist_ok=True)
    root, name = Root.parse(again.root), "tiny-1"
    runs, store = Runs(root), open_store(root)

    def read() -> tuple[object, ...]:
        compared = ComparedRun.read(runs, store, name)
        points = [(point.run, point.evaluation) for point in evaluated_checkpoints(root)]
        return compared.results, compared.made_with, measured_costs(root, "tiny"), points

    before = read()
    main = runs.find(name).steps["main"].artifact
    assert "herd promote checkpoint/tiny-merge-" in again("merge", name, main, "--weights", "2,1")
    (merge,) = [step for step in runs.find(name).steps if step.startswith("merge-")]
    label = runs.find(name).steps[merge].artifact
    judged = again.start("promote", label)
    judged.communicate(timeout=300)
    assert judged.returncode in (0, 3)  # promoted or refused
    assert read_log(root, "tiny")[-1].artifact == label
    assert f"evaluate-{merge}" in runs.find(name).steps
    assert read() == before
    for words in (["report", name], ["status", name], ["verify", name], ["mlflow", "sync", name], ["gc"]):
        again(*words)
    again("export", label, str(tmp_path / "hf"), "--dtype", "fp32")
    assert "The weights are the mean of" in (tmp_path / "hf" / "README.md").read_text()
    assert lies(again) == []
