"""The end of a study: verdict, page, and what MLflow and Prefect show of it; each can be made again at any time.

Everything is worked out anew from the runs that answer for the arms, so a report written again after an upgrade says
what the code says now. What this gives up: the page as it was; MLflow keeps the file that was logged at the end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from rich.table import Table

from llama3.recipe.load import resolved
from llama3.studies.apply import apply_annealing, apply_study
from llama3.studies.expand import ArmRun, ExpandedStudy
from llama3.studies.results import HELPS, HURTS, RunResult, StudyVerdict
from llama3.train import metrics
from storage.artifact import flatten
from storage.object_artifact import open_store
from storage.root import Root
from tasks.cluster import Cluster
from tasks.format import clock
from tasks.runs.records import RunRecord, Runs
from tasks.study.analysis import analyse, other_data, outcomes, shared
from tasks.study.page import Analysis, ArmRow, StudyView, picture_name, short, study_figures, study_html, study_markdown
from tasks.study.plan import HEADERS, RunCost, StudyPlan, plan_lines, plan_rows, plan_study, spent
from tasks.study.records import NOTES, PAGE, PICTURES, Studies, StudyRecord, runs_of
from tasks.tracking import prefect_artifacts
from tasks.tracking.backfill import STATUS
from tasks.tracking.mlflow import MetricPoint, Tracker

LISTED = 5
"""Runs that a flag names."""


def conclude(studies: Studies, posed: ExpandedStudy, record: StudyRecord, tracker: Tracker) -> StudyVerdict:
    """Work out the verdict of a study whose runs are there, write it down, and show it. Raises ValueError."""
    root = studies.root
    answers = runs_of(Runs(root), posed, posed.runs)
    found = outcomes(posed, open_store(root), answers)
    analysis = analyse(posed, found, _weak_points(root, posed, answers))
    record.verdict = analysis.verdict
    studies.save(record)
    view = _view(root, posed, record, answers, found, analysis, tracker)
    page = studies.publish(record.name, PAGE, study_html(view))
    studies.publish(record.name, NOTES, study_markdown(view, PICTURES))
    for title, _, svg in study_figures(view):
        studies.publish(record.name, f"{PICTURES}/{picture_name(title)}", svg)
    _show(tracker, record, answers, view)
    tracker.log_file(record.mlflow_run, page)
    return analysis.verdict


def rewrite(studies: Studies, name: str) -> StudyVerdict:
    """Work out the verdict of an earlier study again and write its page. Raises ValueError, and LeaseHeld at work."""
    posed = studies.posed(name)
    with studies.alone(name):
        record = studies.find(name).abandoned()
        if not runs_of(Runs(studies.root), posed, posed.runs):
            raise ValueError(
                f"study {name}: none of its {len(posed.runs)} runs is finished; go on with: {record.command}"
            )
        tracker = Tracker(studies.root, name)
        tags = {"code.commit": record.code, "study.kind": record.kind}
        record.mlflow_run = tracker.open_study(name, record.digest[:16], tags, {})
        verdict = conclude(studies, posed, record, tracker)
        ended = datetime.fromisoformat(record.ended).timestamp() if record.ended else None
        tracker.close(record.mlflow_run, STATUS[record.state], ended)
    return verdict


def _weak_points(root: Root, posed: ExpandedStudy, answers: Mapping[str, RunRecord]) -> list[str]:
    """Return what weakens the study whatever its kind: other data, runs that lack, other code."""
    flags = other_data(open_store(root), answers, posed.runs)
    if lacking := [run.name for run in posed.runs if run.name not in answers]:
        listed = ", ".join(lacking[:LISTED]) + (", ..." if len(lacking) > LISTED else "")
        flags.append(f"{len(lacking)} of {len(posed.runs)} runs are not finished ({listed}); run the study to its end")
    codes: dict[str, str] = {}
    for name, record in answers.items():
        codes.setdefault(record.code.removesuffix("+changes"), name)
    if len(codes) > 1:
        listed = ", ".join(f"{code} ({name})" for code, name in codes.items())
        flags.append(
            f"the runs were made by {len(codes)} versions of the code: {listed}; rerun the older ones to be sure"
        )
    return flags


def _view(
    root: Root,
    posed: ExpandedStudy,
    record: StudyRecord,
    answers: Mapping[str, RunRecord],
    found: list[RunResult],
    analysis: Analysis,
    tracker: Tracker,
) -> StudyView:
    plan = plan_study(root, posed, Cluster())
    by_run = {(one.arm, one.repeat): one for one in found}
    costs = spent(posed, open_store(root), answers, lambda run: int(tracker.noted_tags(run).get("world", "1")))
    arms = [
        _arm_row(run, answers[run.name], by_run[run.arm.name, run.repeat], costs[run.name])
        for run in posed.runs
        if run.name in answers
    ]
    return StudyView(
        name=record.name,
        digest=record.digest,
        question=posed.study.question,
        state=record.state,
        started=record.started,
        ended=record.ended,
        machine=record.machine,
        command=record.command,
        verdict=analysis.verdict,
        plan=[HEADERS, *plan_rows(plan)],
        arms=arms,
        tables=analysis.tables,
        figures=analysis.figures,
        cost=_cost(record, arms),
        lineage=shared(posed, open_store(root), answers),
        before=_before(posed, analysis.verdict),
    )


def _before(posed: ExpandedStudy, verdict: StudyVerdict) -> dict[str, str]:
    """Return what the fields that the verdict changes are in the base recipe."""
    plain = resolved(posed.base)
    known = flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}})
    paths = [line.partition("=")[0] for line in verdict.change]
    return {path: str(known[path]) for path in paths if known.get(path) is not None}


def _arm_row(run: ArmRun, record: RunRecord, outcome: RunResult, cost: RunCost) -> ArmRow:
    return ArmRow(
        arm=run.arm.name,
        repeat=run.repeat,
        run=record.name,
        state=record.state,
        tokens=outcome.tokens,
        flops=outcome.flops,
        seconds=_seconds(record),
        trained=cost.flops,
        device_hours=cost.device_hours,
        scores={key: score.value for key, score in outcome.scores.items()},
        reused=", ".join(cost.reused),
    )


def _seconds(record: RunRecord) -> float:
    ends = [datetime.fromisoformat(text) for text in (record.started, record.ended)]
    return (ends[1] - ends[0]).total_seconds()


def _cost(record: StudyRecord, arms: list[ArmRow]) -> list[tuple[str, str]]:
    """Return what the study cost; its overhead is what it spent outside of its arms."""
    overhead = record.seconds - record.arm_seconds
    lines = [
        ("runs", f"{len(arms)}"),
        ("training operations", f"{sum(arm.trained for arm in arms):.3g}, shared stages counted once"),
        ("time of the runs", clock(sum(arm.seconds for arm in arms))),
        ("device-hours of training", f"{sum(arm.device_hours for arm in arms):.3g}"),
    ]
    if record.arm_seconds and overhead > 0:
        share = overhead / record.arm_seconds
        lines.append(("the study's own time", f"{clock(overhead)}, {share:.1%} of its arms'"))
    return lines


def _show(tracker: Tracker, record: StudyRecord, answers: Mapping[str, RunRecord], view: StudyView) -> None:
    """Send verdict and headline numbers to MLflow, put the runs below the study, and show its page in Prefect."""
    now = time.time()
    points = [
        MetricPoint(metrics.STUDY_RUNS, len(view.arms), now, 0),
        MetricPoint(metrics.STUDY_FLOPS, sum(arm.trained for arm in view.arms), now, 0),
        MetricPoint(metrics.STUDY_DEVICE_H, sum(arm.device_hours for arm in view.arms), now, 0),
    ]
    points += [MetricPoint(metrics.study_gain(one.arm, one.score), one.gain, now, 0) for one in view.verdict.findings]
    tracker.log_points([record.mlflow_run], points)
    tags = {"verdict": "; ".join(view.verdict.headline)[:4000], "mlflow.note.content": study_markdown(view)[:8000]}
    tracker.set_tags(record.mlflow_run, tags)
    for run in answers.values():
        if run.mlflow_run and tracker.run_id(record.mlflow_run):
            tracker.set_tags(run.mlflow_run, {"mlflow.parentRunId": tracker.run_id(record.mlflow_run)})
    prefect_artifacts.markdown("study", study_markdown(view), f"Study {record.name}")


def verdict_table(verdict: StudyVerdict) -> Table:
    """Return the findings for a console: gains with their intervals, those beyond chance in colour."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("arm", "score", "unit", "gain", "95 %", ""):
        table.add_column(header, justify="right" if header in ("gain", "95 %") else "left", no_wrap=True)
    for one in verdict.findings:
        said = {HELPS: "[green]helps[/]", HURTS: "[red]hurts[/]"}.get(one.says, "")
        interval = f"{one.low:+.4f} to {one.high:+.4f}"
        table.add_row(one.arm, short(one.score), one.unit, f"{one.gain:+.4f}", interval, said)
    return table


def plan_markdown(plan: StudyPlan) -> str:
    """Return the plan as markdown, for Prefect's page of the study."""
    head = f"| {' | '.join(HEADERS)} |\n|{'---|' * len(HEADERS)}"
    rows = [f"| {' | '.join(row)} |" for row in plan_rows(plan)]
    question = plan.posed.study.question or f"A study of kind {plan.posed.study.kind}."
    return "\n".join(
        [f"# {plan.posed.study.name}", "", question, "", head, *rows, "", *(f"- {x}" for x in plan_lines(plan))]
    )


# From a study to a changed recipe: the file it was asked about, or another one, with what the study proposes.
#
# The study's digest goes into the recipe, so the next run's lineage names it. What this gives up: a check that the
# recipe is still the one that was studied; the comment says which it was.


def applied(root: Root, name: str, recipe: Path | None = None) -> str:
    """Return the text of `recipe` (none: the study's base recipe) as the study `name` proposes it.

    Raises ValueError if there is no such study, it has no verdict, or there is nothing to apply.
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
    annealing = studies.posed(name).study.annealing
    if annealing is not None:
        return apply_annealing(text, annealing.new, record.verdict, name, record.digest)
    return apply_study(text, record.verdict.change, name, record.digest, record.verdict.headline)
