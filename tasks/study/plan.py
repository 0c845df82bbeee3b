"""What a study will do, before it does anything: its runs, what they cost, and what is there already.

Operations are counted from the recipes. Seconds come from what is measured: the calibration of a named fabric or of
this machine (`herd plan calibrate`), else the operations per second of earlier runs under this root whose models were
of similar size; where neither exists they are unknown, and nothing is guessed. What this gives up: runs side by side
are taken to be as fast as alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from rich.table import Table

from llama3.model.files import CONFIG, read_config
from llama3.model.flops import flops_per_token
from llama3.recipe.schedule import Schedule, Segment
from llama3.recipe.sections import Model
from llama3.recipe.units import tokens
from llama3.studies.expand import ArmRun, ExpandedStudy
from llama3.studies.results import data_digest, once, stage_works
from llama3.studies.study import Variant
from llama3.train import metrics
from storage.artifact import Artifact, Store
from storage.root import Root
from tasks.cluster import Cluster
from tasks.format import clock
from tasks.plan.predict import predict
from tasks.runs.records import RunRecord, Runs, family_number
from tasks.study.records import answers_for, runs_of

MEASURED = 20
"""So many of the newest runs say how fast this root's machine is."""
SIMILAR = 4.0
"""A run says nothing of models whose tokens take this many times more or fewer operations: small ones mostly wait for
Python (17 times fewer took twice the seconds that were promised)."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    run: ArmRun
    answer: RunRecord | None
    """The finished run that already answers for it."""
    shared: list[str]
    """Its stages that another run of the study makes before it."""
    flops: float
    """What is left to be trained, shared stages left out."""
    seconds: float | None

    @property
    def stands(self) -> str:
        if self.answer is not None:
            return f"reused: {self.answer.name}"
        return f"shares {', '.join(self.shared)}" if self.shared else "new"


@dataclass(frozen=True)
class StudyPlan:
    posed: ExpandedStudy
    runs: list[PlannedRun]
    data: int
    """How many different token shards the runs need."""
    devices: int
    speed: str
    """Where the seconds come from."""
    price: float | None
    """Of a device-hour."""

    @property
    def flops(self) -> float:
        return sum(planned.flops for planned in self.runs)

    @property
    def seconds(self) -> float | None:
        known = [planned.seconds for planned in self.runs]
        return None if any(one is None for one in known) else sum(one for one in known if one is not None)

    @property
    def device_hours(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.devices / 3600


def plan_study(
    root: Root,
    posed: ExpandedStudy,
    cluster: Cluster,
    price: float | None = None,
    chosen: Sequence[ArmRun] | None = None,
) -> StudyPlan:
    """Return the plan of a study."""
    arms = posed.runs if chosen is None else chosen
    runs = Runs(root)
    answers = runs_of(runs, posed, arms)
    pace, speed = _pace(root, posed, cluster, runs)
    first = {work.lineage: work.run for work in once(arms).values()}
    planned = [_planned(arm, answers.get(arm.name), first, pace) for arm in arms]
    data = len({data_digest(arm.recipe) for arm in arms})
    return StudyPlan(posed, planned, data, cluster.processes, speed, price)


def check_hours(plan: StudyPlan) -> None:
    """Raise ValueError if what is left to do takes more device-hours than the study may."""
    limit, hours = plan.posed.study.limits.device_hours, plan.device_hours
    if limit is not None and hours is not None and hours > limit:
        raise ValueError(
            f"{plan.posed.study.name}: limits.device_hours: {hours:.3g} device-hours are left to do, more than "
            f"{limit:g}; take fewer arms or repeats, shorten them, or raise it"
        )


def _planned(arm: ArmRun, answer: RunRecord | None, first: Mapping[str, str], pace: dict[str, float]) -> PlannedRun:
    works = list(stage_works(arm))
    own = [work for work in works if first[work.lineage] == arm.name]
    flops = 0.0 if answer else sum(work.flops for work in own)
    seconds = flops * pace[arm.name] if arm.name in pace else None
    return PlannedRun(arm, answer, [work.stage for work in works if work not in own], flops, seconds)


def _pace(root: Root, posed: ExpandedStudy, cluster: Cluster, runs: Runs) -> tuple[dict[str, float], str]:
    """Return seconds per operation by the name of an arm's run, and where they come from."""
    predicted = {arm.name: _predicted(root, arm, cluster) for arm in posed.runs}
    if all(one is not None for one in predicted.values()):
        found = cluster.fabric or "this machine's calibration"
        return {name: one for name, one in predicted.items() if one is not None}, f"predicted from {found}"
    measured = _measured(runs)
    if not measured:
        return {}, "unknown: no run here yet, and no calibration (herd plan calibrate)"
    nearest = {arm.name: _nearest(measured, arm.flops / arm.tokens) for arm in posed.runs}
    pace = {name: one for name, one in nearest.items() if one is not None}
    if len(pace) < len(nearest):
        return pace, "unknown: earlier runs here were of other sizes, and no calibration (herd plan calibrate)"
    return pace, f"measured on {len(measured)} earlier run(s) under this root"


def _predicted(root: Root, arm: ArmRun, cluster: Cluster) -> float | None:
    seconds = 0.0
    for span in Schedule(arm.recipe).trained:
        found = predict(root, arm.recipe, cluster.at(span.stage.name, span.name), span)
        for part in span.segments:
            step = found.by_seq[part.seq].get(metrics.PLANNED_STEP_S) if found else None
            if step is None:
                return None
            seconds += step * part.steps
    return seconds / arm.flops


def _measured(runs: Runs) -> list[tuple[float, float]]:
    """Return (operations per token, seconds per operation) of the newest runs that made their own stages."""
    found = (_speed(runs, record) for record in reversed(runs.all()) if record.state == "finished")
    return list(islice((speed for speed in found if speed), MEASURED))


def _speed(runs: Runs, record: RunRecord) -> tuple[float, float] | None:
    try:
        recipe = runs.recipe(record.name)
    except ValueError:  # written by another version
        return None
    names = {span.name for span in Schedule(recipe).trained}
    made = [step for name, step in record.steps.items() if name in names]
    whole = answers_for(record, recipe) and all(step.outcome == "made" for step in made)
    if recipe.start is not None or not whole:
        return None
    run = ArmRun(Variant(record.name), 1, recipe)
    return run.flops / run.tokens, sum(step.seconds for step in made) / run.flops


def _nearest(measured: Sequence[tuple[float, float]], per_token: float) -> float | None:
    """Return the seconds per operation of the run whose tokens took most nearly as many; None: of none similar."""
    size, pace = min(measured, key=lambda one: abs(math.log(one[0] / per_token)))
    return pace if 1 / SIMILAR <= size / per_token <= SIMILAR else None


def plan_table(plan: StudyPlan) -> Table:
    """Return the runs of the plan for a console, a row for each."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("arm", "stands") else "right", no_wrap=True)
    for row in plan_rows(plan):
        table.add_row(*row)
    return table


HEADERS = ("arm", "repeat", "parameters", "tokens", "FLOPs", "time", "cost", "stands")


def plan_rows(plan: StudyPlan) -> list[tuple[str, ...]]:
    """Return the runs of the plan as text, under HEADERS; time and cost of what is left to do."""
    return [
        (
            planned.run.arm.name,
            str(planned.run.repeat),
            tokens(planned.run.parameters),
            tokens(planned.run.tokens),
            f"{planned.run.flops:.3g}",
            "" if planned.seconds is None else clock(planned.seconds),
            _money(plan, planned.seconds),
            planned.stands,
        )
        for planned in plan.runs
    ]


def plan_lines(plan: StudyPlan) -> list[str]:
    """Return the totals below the table, one fact a line."""
    total = sum(planned.run.flops for planned in plan.runs)
    trained = sum(planned.run.tokens for planned in plan.runs)
    arms = len({planned.run.arm.name for planned in plan.runs})
    reused = sum(planned.answer is not None for planned in plan.runs)
    time = "unknown" if plan.seconds is None else clock(plan.seconds)
    hours = "" if plan.device_hours is None else f", {plan.device_hours:.3g} device-hours"
    cost = f", {money}" if (money := _money(plan, plan.seconds)) else ""
    return [
        f"runs     {len(plan.runs)} of {arms} arms, {reused} of them finished; {tokens(trained)} tokens",
        f"FLOPs    {total:.3g} in all, {plan.flops:.3g} to do: finished runs and shared stages are not trained again",
        f"data     curated and tokenised {'once' if plan.data == 1 else f'{plan.data} times'} for all runs",
        f"time     {time}{hours}{cost} ({plan.speed})",
    ]


def _money(plan: StudyPlan, seconds: float | None) -> str:
    if plan.price is None or seconds is None:
        return ""
    return f"{seconds * plan.devices / 3600 * plan.price:,.2f}"


# What the runs of a study cost: every stage is paid for once, by the run that made it.
#
# Operations are counted from the recipe and the model as it was trained, hours are those that the stage's artifact
# was made in, times the devices of its run. A stage that was there before the study costs it nothing. What this
# gives up: the hours of an attempt that was killed before it committed anything; the steps that it saved are
# counted.


@dataclass(frozen=True)
class RunCost:
    """What one run trained itself."""

    flops: float
    device_hours: float
    reused: tuple[str, ...]
    """Its stages that were there before it."""


def spent(
    posed: ExpandedStudy, store: Store, answers: Mapping[str, RunRecord], devices: Callable[[str], int]
) -> dict[str, RunCost]:
    """Return what each run of a study trained itself, by the name of an arm's run; `devices` are those of a run."""
    payers = _payers(posed, store, answers)
    return {
        run.name: _spent(posed, store, run, answers[run.name], devices, payers)
        for run in posed.runs
        if run.name in answers
    }


def _payers(posed: ExpandedStudy, store: Store, answers: Mapping[str, RunRecord]) -> dict[str, str]:
    """Return by whom each stage of the study's own is paid: the run that made it, else the first that stands on it."""
    names = {record.name for record in answers.values()}
    payers: dict[str, str] = {}
    for run in posed.runs:
        if run.name in answers:
            for _, _, artifact in _stages(store, run, answers[run.name]):
                made_by = artifact.manifest.made_by
                if family_number(posed.study.name, made_by):
                    payers.setdefault(artifact.label, made_by if made_by in names else answers[run.name].name)
    return payers


def training_flops(posed: ExpandedStudy, segments: Sequence[Segment], spec: Model, rows: int) -> float:
    """Return the operations of a part of a schedule, by the study's formula."""
    formula = posed.study.ladder.formula if posed.study.ladder else "causal"
    name = {"6N": "six_n"}.get(formula, formula)
    return float(sum(part.tokens * getattr(flops_per_token(spec, rows, part.seq), name) for part in segments))


def _spent(
    posed: ExpandedStudy,
    store: Store,
    run: ArmRun,
    record: RunRecord,
    devices: Callable[[str], int],
    payers: Mapping[str, str],
) -> RunCost:
    flops = hours = 0.0
    reused = []
    for name, segments, artifact in _stages(store, run, record):
        if payers.get(artifact.label) != record.name:
            reused.append(name)
            continue
        spec, rows = read_config(artifact.part(f"model/{CONFIG}").parent)
        flops += training_flops(posed, segments, spec, rows)
        hours += artifact.manifest.seconds * devices(artifact.manifest.made_by) / 3600
    return RunCost(flops, hours, tuple(reused))


def _stages(store: Store, run: ArmRun, record: RunRecord) -> Iterator[tuple[str, Sequence[Segment], Artifact]]:
    for span in Schedule(run.recipe).trained:
        with suppress(ValueError):  # deleted by retention
            yield span.name, span.segments, store.at(record.steps[span.name].artifact)
