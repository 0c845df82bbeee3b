"""Finish a study: verdict, page, and the views in MLflow and Prefect. Also apply a verdict to a recipe.

A report is computed from the finished runs each time, so a report that is written again uses the present code. MLflow
keeps the page of the first time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.table import Table

from herd.llama3.recipe.load import resolved
from herd.llama3.studies.apply import apply_annealing, apply_study
from herd.llama3.studies.expand import ExpandedStudy
from herd.llama3.studies.results import HELPS, HURTS, RunResult, StudyVerdict
from herd.llama3.train import metrics
from herd.storage.artifact import flatten
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.runs.records import RunRecord, Runs
from herd.tasks.stages.backfill import STATUS
from herd.tasks.study.analysis import analyze, leaks, other_data, outcomes, proposed_mix
from herd.tasks.study.page import FinishedRun, markdown_table, short, study_page, verdict_markdown
from herd.tasks.study.plan import HEADERS, StudyPlan, plan_lines, plan_rows, spent
from herd.tasks.study.records import PAGE, Studies, StudyRecord, runs_of
from herd.tasks.tracking import prefect_artifacts
from herd.tasks.tracking.mlflow import MetricPoint, MLflowTracker

LISTED = 5
"""Runs that a flag names."""


def conclude(studies: Studies, expanded: ExpandedStudy, record: StudyRecord, tracker: MLflowTracker) -> StudyVerdict:
    """Compute the verdict of a study from its finished runs, write and publish it. Raises ValueError."""
    root = studies.root
    answers = runs_of(Runs(root), expanded, expanded.runs)
    results = outcomes(expanded, open_store(root), answers)
    flags = _weak_points(expanded, answers)
    if expanded.study.annealing:
        flags += leaks(open_store(root), answers, expanded.runs[0].recipe)
    analysis = analyze(expanded, results, flags)
    record.verdict = analysis.verdict
    studies.save(record)
    runs = _finished_runs(root, expanded, answers, results)
    before = _present_values(expanded, analysis.verdict)
    page = studies.publish(record.name, PAGE, study_page(record, analysis, runs, before))
    text = verdict_markdown(record.name, record.question, analysis.verdict, before)
    _publish_to_mlflow(tracker, record, answers, runs, text)
    prefect_artifacts.markdown("study", text, f"Study {record.name}")
    tracker.log_file(record.mlflow_run, page)
    return analysis.verdict


def with_proposed(root: Root, expanded: ExpandedStudy) -> ExpandedStudy:
    """Return a finished mix search with the mix that it proposes as one more variant; another study as it is."""
    if expanded.study.mix is None or expanded.proposal is not None:
        return expanded
    answers = runs_of(Runs(root), expanded, expanded.runs)
    if len(answers) < len(expanded.runs):
        return expanded
    shares = proposed_mix(expanded, outcomes(expanded, open_store(root), answers))
    return expanded if shares is None else expanded.with_proposal(shares)


def rewrite(studies: Studies, name: str) -> StudyVerdict:
    """Compute the verdict of an earlier study again and write its page. Raises ValueError, or LeaseHeld if it runs."""
    expanded = with_proposed(studies.root, studies.expanded(name))
    with studies.alone(name):
        record = studies.find(name).abandoned()
        if not runs_of(Runs(studies.root), expanded, expanded.runs):
            raise ValueError(
                f"study {name}: none of its {len(expanded.runs)} runs is finished; go on with: {record.command}"
            )
        tracker = MLflowTracker(studies.root, name)
        tags = {"code.commit": record.code, "study.kind": record.kind}
        record.mlflow_run = tracker.open_study(name, record.digest[:16], tags, {})
        verdict = conclude(studies, expanded, record, tracker)
        ended = datetime.fromisoformat(record.ended).timestamp() if record.ended else None
        tracker.close(record.mlflow_run, STATUS[record.state], ended)
    return verdict


def _weak_points(expanded: ExpandedStudy, answers: Mapping[str, RunRecord]) -> list[str]:
    """Return the weak points of studies of every kind: different data, missing runs, different code."""
    flags = other_data(answers, expanded.runs)
    if missing := [run.name for run in expanded.runs if run.name not in answers]:
        listed = ", ".join(missing[:LISTED]) + (", ..." if len(missing) > LISTED else "")
        flags.append(
            f"{len(missing)} of {len(expanded.runs)} runs are not finished ({listed}); run the study to its end"
        )
    codes: dict[str, str] = {}
    for name, record in answers.items():
        codes.setdefault(record.code.removesuffix("+changes"), name)
    if len(codes) > 1:
        listed = ", ".join(f"{code} ({name})" for code, name in codes.items())
        flags.append(
            f"the runs were made by {len(codes)} versions of the code: {listed}; rerun the older ones to be sure"
        )
    return flags


def _finished_runs(
    root: Root, expanded: ExpandedStudy, answers: Mapping[str, RunRecord], results: Sequence[RunResult]
) -> list[FinishedRun]:
    """Return the finished runs with results and cost, in the order of the variants."""
    by_run = {(result.variant, result.repeat): result for result in results}
    costs = spent(expanded, open_store(root), answers)
    finished = []
    for run in expanded.runs:
        if run.name in answers:
            answer, result = answers[run.name], by_run[run.variant.name, run.repeat]
            ends = [datetime.fromisoformat(text) for text in (answer.started, answer.ended)]
            finished.append(
                FinishedRun(
                    variant=run.variant.name,
                    run=answer.name,
                    tokens=result.tokens,
                    flops=result.flops,
                    seconds=(ends[1] - ends[0]).total_seconds(),
                    trained=costs[run.name].flops,
                    device_hours=costs[run.name].device_hours,
                    scores={key: score.value for key, score in result.scores.items()},
                )
            )
    return finished


def _present_values(expanded: ExpandedStudy, verdict: StudyVerdict) -> dict[str, str]:
    """Return the base recipe's values of the fields that the verdict changes, by path."""
    plain = resolved(expanded.base)
    known = flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}})
    paths = [line.partition("=")[0] for line in verdict.change]
    return {path: str(known[path]) for path in paths if known.get(path) is not None}


def _publish_to_mlflow(
    tracker: MLflowTracker,
    record: StudyRecord,
    answers: Mapping[str, RunRecord],
    runs: Sequence[FinishedRun],
    text: str,
) -> None:
    """Log verdict and headline numbers to the study's MLflow run, and make it the parent of its runs."""
    assert record.verdict is not None
    now = time.time()
    points = [
        MetricPoint(metrics.STUDY_RUNS, len(runs), now, 0),
        MetricPoint(metrics.STUDY_FLOPS, sum(run.trained for run in runs), now, 0),
        MetricPoint(metrics.STUDY_GPU_HOURS, sum(run.device_hours for run in runs), now, 0),
    ]
    for finding in record.verdict.findings:
        points.append(MetricPoint(metrics.study_gain(finding.variant, finding.score), finding.gain, now, 0))
    tracker.log_points([record.mlflow_run], points)
    tags = {"verdict": "; ".join(record.verdict.headline)[:4000], "mlflow.note.content": text[:8000]}
    tracker.set_tags(record.mlflow_run, tags)
    for run in answers.values():
        if run.mlflow_run and (run_id := tracker.run_id(record.mlflow_run)):
            tracker.set_tags(run.mlflow_run, {"mlflow.parentRunId": run_id})


def verdict_table(verdict: StudyVerdict) -> Table:
    """Return the findings for a console: gains with their intervals, the significant ones in color."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("variant", "score", "unit", "gain", "95 %", ""):
        table.add_column(header, justify="right" if header in ("gain", "95 %") else "left", no_wrap=True)
    for finding in verdict.findings:
        says = {HELPS: "[green]helps[/]", HURTS: "[red]hurts[/]"}.get(finding.says, "")
        interval = f"{finding.low:+.4f} to {finding.high:+.4f}"
        table.add_row(finding.variant, short(finding.score), finding.unit, f"{finding.gain:+.4f}", interval, says)
    return table


def plan_markdown(plan: StudyPlan) -> str:
    """Return the plan as markdown, for Prefect's page of the study."""
    study = plan.expanded.study
    question = study.question or f"A study of kind {study.kind}."
    table = markdown_table(HEADERS, plan_rows(plan))
    return "\n".join([f"# {study.name}", "", question, "", table, "", *(f"- {line}" for line in plan_lines(plan))])


def applied(root: Root, name: str, recipe: Path | None = None) -> str:
    """Return the text of `recipe` (by default the study's base recipe) with the changes that the study proposes.

    Raises ValueError if there is no such study, it has no verdict, or there is nothing to apply. Any recipe is
    accepted, not only the studied one; the comment in the recipe names the study.
    """
    studies = Studies(root)
    record = studies.find(name)
    if record.verdict is None:
        raise ValueError(f"study {name}: has no verdict yet ({record.state}); go on with: {record.command}")
    path = recipe or Path(record.recipe)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); name the recipe to change: --recipe FILE"
        ) from error
    annealing = studies.expanded(name).study.annealing
    if annealing is not None:
        return apply_annealing(text, annealing.new, record.verdict, name, record.digest)
    return apply_study(text, record.verdict.change, name, record.digest, record.verdict.headline)
