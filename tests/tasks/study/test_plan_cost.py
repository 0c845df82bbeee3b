"""What a study cost: a stage that several runs stand on is paid for once, one from elsewhere not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.model.files import save_model
from herd.llama3.model.flops import trained_flops
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.studies.expand import VariantRun, load_study
from herd.llama3.studies.results import distinct_stages
from herd.storage.artifact import ArtifactSpec
from herd.storage.lease import LeaseHeld, lease
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.runs.records import RunRecord, Runs, StepRecord
from herd.tasks.study.plan import spent
from herd.tasks.study.records import Studies, StudyRecord
from herd.tasks.study.report import rewrite

STUDY = load_study(Path("recipes/experiments/judge-cpu.yaml"))
VOCAB_SIZE, HOURS = 640, 0.75


def stage(root: Root, run: VariantRun, name: str, made_by: str, **parameters: str) -> StepRecord:
    store = open_store(root)
    with store.staging() as folder:
        (folder / "model").mkdir()
        save_model(folder / "model", run.recipe.model, VOCAB_SIZE, {})
        design = ArtifactSpec("checkpoint", name, 1, dict(parameters), {})
        cost = {"gpu_hours": HOURS * (4 if name == "half" else 1), "usd": 9.0}
        artifact = store.commit(design, folder, {"cost": cost}, made_by, "abc", 90.0)
    return StepRecord(artifact=artifact.label, outcome="created")


def answers(root: Root, half_by: str) -> dict[str, RunRecord]:
    """Return a run for each variant: all stand on one first stage, made by `half_by`."""
    found = {}
    half = stage(root, STUDY.runs[0], "half", half_by)
    for run in STUDY.runs:
        record = Runs(root).begin(run.recipe, "abc")
        record.steps = {"half": half, "anneal": stage(root, run, "anneal", record.name, of=run.name)}
        found[run.name] = record
    return found


def test_a_shared_stage_is_paid_for_once(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    found = spent(STUDY, open_store(root), answers(root, "judge-cpu-1"))
    first, *others = (found[run.name] for run in STUDY.runs)
    assert [one.device_hours for one in found.values()] == [5 * HOURS, *[HOURS] * len(others)]
    run = STUDY.runs[0]
    assert first.flops == pytest.approx(trained_flops(run.recipe, run.recipe.model, VOCAB_SIZE, run.tokens))
    half = Schedule(run.recipe).trained[0]
    assert others[0].flops == pytest.approx(
        first.flops - trained_flops(run.recipe, run.recipe.model, VOCAB_SIZE, half.end)
    )


@pytest.mark.parametrize(("maker", "payer"), [("judge-cpu-3", 2), ("judge-cpu-99", 0)])
def test_the_run_that_made_it_pays_else_the_first_that_stands_on_it(tmp_path: Path, maker: str, payer: int) -> None:
    """Runs side by side: any of them may make what they share; and the one that did may answer for no variant."""
    root = Root.parse(tmp_path)
    found = [*spent(STUDY, open_store(root), answers(root, maker)).values()]
    assert [cost.device_hours for cost in found] == [HOURS * (5 if n == payer else 1) for n in range(len(found))]


def test_the_sum_is_what_was_planned(tmp_path: Path) -> None:
    """The plan counts the vocabulary of the recipe, the cost those of the trained model."""
    root = Root.parse(tmp_path)
    found = spent(STUDY, open_store(root), answers(root, "judge-cpu-1"))
    planned = sum(work.flops for work in distinct_stages(STUDY.runs).values())
    whole = sum(run.flops for run in STUDY.runs)
    assert sum(one.flops for one in found.values()) / planned == pytest.approx(
        sum(trained_flops(run.recipe, run.recipe.model, VOCAB_SIZE, run.tokens) for run in STUDY.runs) / whole, rel=1e-6
    )


def test_a_stage_from_outside_costs_nothing(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    found = spent(STUDY, open_store(root), answers(root, "another-7"))
    assert [cost.device_hours for cost in found.values()] == [HOURS] * len(STUDY.runs)


def test_no_report_is_written_beside_a_study_at_work(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    studies = Studies(root)
    studies.ask(STUDY)
    name = STUDY.study.name
    studies.save(StudyRecord(name=name, digest="d", kind="annealing", recipe="r", started="2026", code="abc"))
    with lease(root, f"studies/{name}", name), pytest.raises(LeaseHeld, match="another process works on it"):
        rewrite(studies, name)
    with pytest.raises(ValueError, match=r"none of its \d+ runs is finished"):
        rewrite(studies, name)
