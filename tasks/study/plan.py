"""Plan a study before it starts: its runs, their cost, and what already exists. Also the actual cost of finished runs.

Operations come from the recipes. Seconds come from measurements: a calibration (`herd plan calibrate`) of the named
fabric or of this machine, else earlier runs of similar models under this root; without either they are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.table import Table

from herd.llama3.model.files import CONFIG, read_config
from herd.llama3.model.flops import flops_per_token
from herd.llama3.recipe.schedule import Segment
from herd.llama3.recipe.sections import Model
from herd.llama3.recipe.units import tokens
from herd.llama3.studies.expand import ExpandedStudy, VariantRun
from herd.llama3.studies.results import data_digest, distinct_stages, stage_flops
from herd.llama3.studies.study import BASE, Variant
from herd.llama3.train import metrics
from herd.storage.artifact import Artifact, Store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.format import format_duration
from herd.tasks.plan.predict import predict_step_times
from herd.tasks.runs.records import RunRecord, Runs, family_number
from herd.tasks.study.records import answers_for, runs_of

MEASURED = 20
"""Number of the newest runs that are used to estimate the speed."""
SIMILAR = 4.0
"""Largest factor in operations per token at which a run is used for another model. Small models mostly wait for Python:
a model of 17 times fewer operations took twice the predicted seconds."""
HEADERS = ("variant", "repeat", "parameters", "tokens", "FLOPs", "time", "cost", "status")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    run: VariantRun
    answer: RunRecord | None
    """The finished run of the same recipe, if there is one."""
    shared: list[str]
    """Its stages that an earlier run of the study trains."""
    flops: float
    """Operations left to train, without shared stages."""
    seconds: float | None

    @property
    def status(self) -> str:
        if self.answer is not None:
            return f"reused: {self.answer.name}"
        return f"shares {', '.join(self.shared)}" if self.shared else "new"


@dataclass(frozen=True)
class StudyPlan:
    """The runs of a study with their cost. Runs in parallel are assumed to be as fast as alone."""

    expanded: ExpandedStudy
    runs: list[PlannedRun]
    data: int
    """Number of different sets of token shards."""
    devices: int
    speed: str
    """Source of the seconds."""
    price: float | None
    """Of a device-hour."""
    proposed: list[PlannedRun]
    """Runs like those of the base mix, which a mix search adds if it predicts a better mix."""

    @property
    def flops(self) -> float:
        return sum(planned.flops for planned in self.runs)

    @property
    def seconds(self) -> float | None:
        known = [planned.seconds for planned in self.runs if planned.seconds is not None]
        return sum(known) if len(known) == len(self.runs) else None

    @property
    def device_hours(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.devices / 3600


def plan_study(
    root: Root,
    expanded: ExpandedStudy,
    cluster: Cluster,
    price: float | None = None,
    chosen: Sequence[VariantRun] | None = None,
) -> StudyPlan:
    """Return the plan of a study."""
    variants = expanded.runs if chosen is None else chosen
    runs = Runs(root)
    answers = runs_of(runs, expanded, variants)
    pace, speed = _pace(root, expanded, cluster, runs)
    trained_by = {work.lineage: work.run for work in distinct_stages(variants).values()}
    planned = []
    for variant in variants:
        works, answer = list(stage_flops(variant)), answers.get(variant.name)
        own = [work for work in works if trained_by[work.lineage] == variant.name]
        flops = 0.0 if answer else sum(work.flops for work in own)
        seconds = flops * pace[variant.name] if variant.name in pace else None
        planned.append(PlannedRun(variant, answer, [work.stage for work in works if work not in own], flops, seconds))
    data = len({data_digest(variant.recipe) for variant in variants})
    proposed = []
    if expanded.study.mix and expanded.proposal is None:
        for variant in (run for run in expanded.runs if run.variant.name == BASE):
            seconds = variant.flops * pace[variant.name] if variant.name in pace else None
            proposed.append(PlannedRun(variant, None, [], variant.flops, seconds))
    return StudyPlan(expanded, planned, data, cluster.processes, speed, price, proposed)


def check_hours(plan: StudyPlan) -> None:
    """Raise ValueError if the remaining work takes more device-hours than the study's limit."""
    limit, hours = plan.expanded.study.limits.device_hours, plan.device_hours
    if hours is not None:
        hours += sum(planned.seconds or 0 for planned in plan.proposed) * plan.devices / 3600
    if limit is not None and hours is not None and hours > limit:
        raise ValueError(
            f"{plan.expanded.study.name}: limits.device_hours: {hours:.3g} device-hours are left to do, more than "
            f"{limit:g}; reduce the variants, the repeats or their length, or raise the limit"
        )


def _pace(root: Root, expanded: ExpandedStudy, cluster: Cluster, runs: Runs) -> tuple[dict[str, float], str]:
    """Return seconds per operation by the name of a variant's run, and their source."""
    predicted = {variant.name: _predicted_pace(root, variant, cluster) for variant in expanded.runs}
    pace = {name: value for name, value in predicted.items() if value is not None}
    if len(pace) == len(predicted):
        source = cluster.fabric or "this machine's calibration"
        return pace, f"predicted from {source}"
    measured = _measured_paces(runs)
    if not measured:
        return {}, "unknown: no run here yet, and no calibration (herd plan calibrate)"
    pace = {}
    for variant in expanded.runs:
        size = variant.flops / variant.tokens
        nearest, seconds = min(measured, key=lambda run: abs(math.log(run[0] / size)))
        if 1 / SIMILAR <= nearest / size <= SIMILAR:
            pace[variant.name] = seconds
    if any(variant.name not in pace for variant in expanded.runs):
        return pace, "unknown: earlier runs here were of other sizes, and no calibration (herd plan calibrate)"
    return pace, f"measured on {len(measured)} earlier run(s) under this root"


def _predicted_pace(root: Root, variant: VariantRun, cluster: Cluster) -> float | None:
    """Return seconds per operation from a calibration; None without one."""
    seconds = 0.0
    for span in variant.recipe.schedule.trained:
        prediction = predict_step_times(root, variant.recipe, cluster.for_stage(span.stage.name, span.name), span)
        for segment in span.segments:
            step = prediction.by_seq[segment.seq_len].get(metrics.PLANNED_STEP_S) if prediction else None
            if step is None:
                return None
            seconds += step * segment.steps
    return seconds / variant.flops


def _measured_paces(runs: Runs) -> list[tuple[float, float]]:
    """Return (operations per token, seconds per operation) of the newest runs that trained all their stages."""
    paces: list[tuple[float, float]] = []
    for record in reversed(runs.all()):
        if record.state != "finished":
            continue
        try:
            recipe = runs.recipe(record.name)
        except ValueError:  # written by another version
            continue
        names = {span.name for span in recipe.schedule.trained}
        trained = [step for name, step in record.steps.items() if name in names]
        if (
            recipe.init_from is None
            and answers_for(record, recipe)
            and all(step.outcome == "created" for step in trained)
        ):
            run = VariantRun(Variant(record.name), 1, recipe)
            paces.append((run.flops / run.tokens, sum(step.seconds for step in trained) / run.flops))
            if len(paces) == MEASURED:
                break
    return paces


# The plan as text


def plan_table(plan: StudyPlan) -> Table:
    """Return the runs of the plan for a console, a row for each."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("variant", "status") else "right", no_wrap=True)
    for row in plan_rows(plan):
        table.add_row(*row)
    return table


def plan_rows(plan: StudyPlan) -> list[tuple[str, ...]]:
    """Return the runs of the plan as text, under HEADERS; time and cost are those of the remaining work."""
    return [
        (
            planned.run.variant.name,
            str(planned.run.repeat),
            tokens(planned.run.parameters),
            tokens(planned.run.tokens),
            f"{planned.run.flops:.3g}",
            "" if planned.seconds is None else format_duration(planned.seconds),
            _money(plan, planned.seconds),
            planned.status,
        )
        for planned in plan.runs
    ]


def plan_lines(plan: StudyPlan) -> list[str]:
    """Return the totals below the table, one fact per line."""
    total = sum(planned.run.flops for planned in plan.runs)
    trained = sum(planned.run.tokens for planned in plan.runs)
    variants = len({planned.run.variant.name for planned in plan.runs})
    counted = f"{variants} variant{'s' if variants > 1 else ''}"
    reused = sum(planned.answer is not None for planned in plan.runs)
    time = "unknown" if plan.seconds is None else format_duration(plan.seconds)
    hours = "" if plan.device_hours is None else f", {plan.device_hours:.3g} device-hours"
    cost = f", {money}" if (money := _money(plan, plan.seconds)) else ""
    then = f"; then {len(plan.proposed)} of the proposed mix, if the fit predicts a gain" if plan.proposed else ""
    return [
        f"runs     {len(plan.runs)} ({counted}), {reused} finished; {tokens(trained)} tokens{then}",
        f"FLOPs    {total:.3g} in all, {plan.flops:.3g} to do: finished runs and shared stages are not trained again",
        f"data     curated and tokenized {'once' if plan.data == 1 else f'{plan.data} times'} for all runs",
        f"time     {time}{hours}{cost} ({plan.speed})",
    ]


def _money(plan: StudyPlan, seconds: float | None) -> str:
    if plan.price is None or seconds is None:
        return ""
    return f"{seconds * plan.devices / 3600 * plan.price:,.2f}"


# The actual cost of finished runs


@dataclass(frozen=True)
class RunCost:
    """The cost of the stages that are booked to a run."""

    flops: float
    device_hours: float


def spent(expanded: ExpandedStudy, store: Store, answers: Mapping[str, RunRecord]) -> dict[str, RunCost]:
    """Return the cost of each run of a study, by the name of a variant's run.

    A stage is booked to the run that trained it, else to the first run that uses it; a stage from before the study
    costs nothing. The hours are those of all attempts at the stage, as its trainer counts them.
    """
    names = {record.name for record in answers.values()}
    stages = {run.name: list(_stages(store, run, answers[run.name])) for run in expanded.runs if run.name in answers}
    booked_to: dict[str, str] = {}
    for run, trained in stages.items():
        for _, artifact in trained:
            created_by = artifact.manifest.created_by
            if family_number(expanded.study.name, created_by):
                booked_to.setdefault(artifact.label, created_by if created_by in names else answers[run].name)
    costs = {}
    for run, trained in stages.items():
        flops = hours = 0.0
        for segments, artifact in trained:
            if booked_to.get(artifact.label) == answers[run].name:
                config, vocab_size = read_config(artifact.path_of(f"model/{CONFIG}").parent)
                flops += training_flops(expanded, segments, config, vocab_size)
                hours += artifact.metadata["cost"]["gpu_hours"]
        costs[run] = RunCost(flops, hours)
    return costs


def _stages(store: Store, run: VariantRun, record: RunRecord) -> Iterator[tuple[Sequence[Segment], Artifact]]:
    """Yield segments and checkpoint of each stage whose checkpoint still exists."""
    for span in run.recipe.schedule.trained:
        with suppress(ValueError):  # deleted by retention
            yield span.segments, store.load(record.steps[span.name].artifact)


def training_flops(expanded: ExpandedStudy, segments: Sequence[Segment], config: Model, vocab_size: int) -> float:
    """Return the operations of a part of a schedule, by the study's formula."""
    formula = expanded.study.ladder.formula if expanded.study.ladder else "causal"
    name = {"6N": "six_n"}.get(formula, formula)
    return float(
        sum(
            segment.tokens * getattr(flops_per_token(config, vocab_size, segment.seq_len), name) for segment in segments
        )
    )
