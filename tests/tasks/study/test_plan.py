"""What a study's plan says of reuse, sharing, time and money, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.studies.expand import ExpandedStudy, VariantRun, load_study
from herd.llama3.studies.results import distinct_stages
from herd.llama3.studies.study import Variant
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.runs.records import RunRecord, Runs, StepRecord, StudyPart
from herd.tasks.study.plan import HEADERS, check_hours, plan_lines, plan_rows, plan_study
from herd.tasks.study.records import Studies, runs_of

STUDIES = Path("recipes/experiments")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.parse(tmp_path / "root")


@pytest.fixture(scope="module")
def judge() -> ExpandedStudy:
    return load_study(STUDIES / "judge-cpu.yaml")


def finished(root: Root, run: VariantRun, seconds: float) -> RunRecord:
    """Write the record of a run that trained every stage for `seconds` and was scored."""
    runs = Runs(root)
    record = runs.begin(run.recipe, "abc")
    record.study = StudyPart(study=run.recipe.name, variant=run.variant.name, repeat=run.repeat)
    for stage in run.recipe.stages:
        record.steps[stage.name] = StepRecord(artifact=f"checkpoint/{stage.name}", outcome="created", seconds=seconds)
    record.steps[f"evaluate-{run.recipe.stages[-1].name}"] = StepRecord(artifact="evaluation/x", outcome="created")
    record.state = "finished"
    runs.save(record)
    return record


def test_nothing_is_known_of_time_where_nothing_was_measured(root: Root, judge: ExpandedStudy) -> None:
    plan = plan_study(root, judge, Cluster(), price=2.0)
    assert plan.seconds is None
    assert plan.device_hours is None
    assert "unknown" in plan_lines(plan)[-1]
    assert {row[HEADERS.index("time")] for row in plan_rows(plan)} == {""}


def test_a_shared_stage_is_counted_once(root: Root, judge: ExpandedStudy) -> None:
    plan = plan_study(root, judge, Cluster())
    assert plan.flops == pytest.approx(sum(work.flops for work in distinct_stages(judge.runs).values()))
    assert plan.flops < 0.7 * sum(run.flops for run in judge.runs)
    assert [planned.status for planned in plan.runs] == ["new", *["shares half"] * (len(judge.runs) - 1)]
    assert plan.data == 1


def test_a_finished_run_answers_and_says_how_fast_the_rest_is(root: Root, judge: ExpandedStudy) -> None:
    first = judge.runs[0]
    record = finished(root, first, seconds=60)
    plan = plan_study(root, judge, Cluster(processes=4), price=3.0)
    assert plan_lines(plan)[0].startswith(f"runs     {len(judge.runs)} (2 variants), 1 finished; ")
    assert plan.runs[0].status == f"reused: {record.name}"
    assert plan.runs[0].seconds == 0
    pace = 120 / first.flops
    assert plan.runs[1].seconds == pytest.approx(plan.runs[1].flops * pace)
    assert plan.device_hours == pytest.approx(4 * sum(planned.flops for planned in plan.runs) * pace / 3600)
    assert f"{plan.device_hours * 3:,.2f}" in plan_lines(plan)[-1]
    assert "1 earlier run" in plan.speed


def test_a_run_of_another_size_says_nothing_of_the_time(root: Root, judge: ExpandedStudy) -> None:
    large = judge.recipe(["model.dim=512", "model.ffn=1536", "name=large", "data_seed=1"])
    finished(root, VariantRun(Variant("large"), 1, large), seconds=60)
    plan = plan_study(root, judge, Cluster())
    assert plan.seconds is None
    assert "of other sizes" in plan_lines(plan)[-1]
    finished(root, judge.runs[0], seconds=60)
    assert plan_study(root, judge, Cluster()).seconds is not None


def test_an_unfinished_run_and_one_of_another_recipe_answer_for_nothing(root: Root, judge: ExpandedStudy) -> None:
    first, second = judge.runs[:2]
    stopped = finished(root, first, 60)
    stopped.state = "interrupted"
    Runs(root).save(stopped)
    early = finished(root, first, 60)
    early.steps = {"half": early.steps["half"], "evaluate-half": early.steps["evaluate-anneal"]}
    Runs(root).save(early)  # asked to stop after the first stage, which was scored
    assert runs_of(Runs(root), judge, judge.runs) == {}
    finished(root, second, 60)
    assert list(runs_of(Runs(root), judge, judge.runs)) == [second.name]


def test_more_device_hours_than_the_limit_are_refused(root: Root, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    base = str((STUDIES / "base-cpu.yaml").absolute())
    text = (STUDIES / "judge-cpu.yaml").read_text().replace("base-cpu.yaml", base)
    path.write_text(f"{text}\nlimits: {{device_hours: 0.01}}\n")
    expanded = load_study(path)
    check_hours(plan_study(root, expanded, Cluster()))  # nothing is known yet
    finished(root, expanded.runs[0], seconds=100)
    with pytest.raises(ValueError, match=r"limits\.device_hours"):
        check_hours(plan_study(root, expanded, Cluster()))


def test_a_question_is_written_down_whole(root: Root, judge: ExpandedStudy) -> None:
    studies = Studies(root)
    with pytest.raises(ValueError, match="studies: none yet"):
        studies.find("judge-cpu")
    studies.ask(judge)
    again = load_study(studies.folder("judge-cpu") / "study.yaml")
    assert again.digest == judge.digest
    assert [run.digest for run in again.runs] == [run.digest for run in judge.runs]
