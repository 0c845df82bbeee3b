"""`herd plan --cluster`: a recipe's plan on a cluster, with layouts, steps, days, money, checkpoints and placement.

The cluster is a preset, a YAML file of one, or the file that `herd run` takes, whose layouts are then checked instead
of searched. Everything is arithmetic on one core, in seconds; unknown figures are absent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pyarrow.parquet as parquet
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llama3.evaluate.held_out import document_bytes, longest_sequence
from llama3.evaluate.needle import KINDS, context_lengths
from llama3.evaluate.suite import recipe_suite, stage_suite_name, with_suite
from llama3.evaluate.task import WRITTEN
from llama3.model.flops import flops_per_token, parameter_count, vocab_rows
from llama3.parallel.layout import Layout
from llama3.parallel.memory import BYTES, DECODED, inference_bytes, stages
from llama3.planner.budget import Budget, Prices, StageTime, StorageUse, checkpoint_bytes
from llama3.planner.comm_volume import stage_volumes
from llama3.planner.goodput import BYTECHECKPOINT, CheckpointCosts, Recovery
from llama3.planner.placement import AxisBytes, AxisTraffic, PlacementChoice, minimum_cut
from llama3.planner.projection import ProjectedSegment, Projection, Sensitivity, project, sensitivities
from llama3.planner.routing import bandwidth_share
from llama3.planner.step_time import layer_work
from llama3.planner.topology import Fabric, fabric_names, load_fabric
from llama3.planner.uptime import RECOVERY, Uptime, uptime
from llama3.recipe.load import digest, resolved
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.train import metrics
from storage.artifact import flatten
from storage.object_artifact import open_store
from storage.root import Root
from tasks.cluster import Cluster
from tasks.plan.options import check_stage_names, device_curves, open_cluster, parse_gpus, stage_placements
from tasks.plan.predict import place_evaluation
from tasks.plan.recipe import RunPlan
from tasks.plan.tables import (
    best_table,
    format_memory,
    plain_table,
    projection_json,
    rejected_table,
    stages_table,
    time_table,
)
from tasks.runs.records import Runs
from tasks.tracking.mlflow import MLflowTracker
from tasks.tracking.tracker import MetricPoint

KEYS = (metrics.CHECKPOINT_S, metrics.CHECKPOINT_WRITE_S, metrics.FIRST_STEP_S)
QUANTITIES = ("days", "gpu_hours", "money")


def measured_costs(root: Root, family: str) -> tuple[CheckpointCosts, Recovery] | None:
    """Return the medians of saves and restarts in the newest run of `family` that saved, or None if there is none.

    They replace the published figures, also for a job of another size. The measured restart includes loading.
    """
    store = open_store(root)
    for record in reversed(Runs(root).all()):
        if record.family != family:
            continue
        values = {key: list[float]() for key in KEYS}
        for step in record.steps.values():
            if step.artifact.startswith("checkpoint/"):
                path = store.load(step.artifact).part("metrics.parquet")
                for row in parquet.read_table(path, filters=[("key", "in", KEYS)]).to_pylist():
                    values[row["key"]].append(row["value"])
        blocked, written, first = (values[key] for key in KEYS)
        if blocked and written and first:
            block_s, save_s = median(blocked), median(written)
            costs = CheckpointCosts(block_s, max(block_s, save_s), 0.0, f"measured in {record.name}")
            return costs, Recovery(RECOVERY.notice_s, RECOVERY.timeout_s, median(first))
    return None


@dataclass(frozen=True)
class ClusterPlan:
    """A recipe on a cluster."""

    plan: RunPlan
    named: str
    """The cluster as `herd run` reads it: a preset, or the path of a file."""
    projection: Projection
    uptimes: dict[int, Uptime]
    """By number of GPUs."""
    budget: Budget
    evaluation: EvaluationCost

    @property
    def main(self) -> ProjectedSegment:
        """The part that takes most GPU-hours."""
        return self.projection.main

    @cached_property
    def placement(self) -> PlacementChoice:
        """The recommended rank order of the main part."""
        best = self.main.best
        return minimum_cut(best.layout, best.world, self.projection.fabric, sent_bytes(self.projection, self.main))

    def effects(self) -> dict[str, list[Sensitivity]]:
        """Return the three unknowns that move each quantity most."""
        return {name: sensitivities(self.budget, name) for name in QUANTITIES}  # type: ignore[arg-type]

    def as_json(self, most: int) -> dict[str, Any]:
        """Return every figure that is shown."""
        return {
            **projection_json(self.projection, most),
            "budget": self.budget.as_dict(),
            "sensitivity": {name: [effect.as_dict() for effect in moving] for name, moving in self.effects().items()},
            "reliability": [
                {
                    "gpus": reliability.gpus,
                    "mtti_s": reliability.mtti_s,
                    "restart_s": reliability.restart_s,
                    "interval_s": reliability.interval_s,
                    "best_interval_s": reliability.cadence.interval_s,
                    "best_share": reliability.cadence.share,
                    "effective_time": reliability.share,
                    "effective_time_5_95": [reliability.spread.low, reliability.spread.high],
                    "spare_hosts": reliability.spares,
                    "restart_budget_s": reliability.restart_budget_s,
                    "checkpoint_costs": vars(reliability.costs),
                }
                for reliability in self.uptimes.values()
            ],
            "placement": {
                "bytes": self.placement.crossing,
                "traffic": [axis.as_dict() for axis in self.placement.traffic],
            },
            "evaluation": self.evaluation.as_dict(),
            "warnings": self.plan.warnings,
        }

    def write_cluster(self, path: Path) -> None:
        """Write the file for `herd run --cluster`: the main part's layout, and stages that differ."""

        def fields(part: ProjectedSegment) -> dict[str, Any]:
            # The lengths of a stage share a layout; a shorter step may split into smaller micro-batches by itself.
            sizes = [other.best.load.micro_batch for other in self.projection.parts if other.stage == part.stage]
            layout = part.best.layout.model_dump(exclude_defaults=True)
            return {"processes": part.best.world, "micro_batch": max(sizes), "layout": layout}

        main = fields(self.main)
        others = {part.stage: fields(part) for part in self.projection.parts if fields(part) != main}
        cluster = {**main, "fabric": self.named, **({"stages": others} if others else {})}
        path.write_text(yaml.safe_dump(cluster, sort_keys=False))


def plan_on_cluster(
    plan: RunPlan,
    named: str,
    gpus: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    sparse: bool = False,
    root: Root | None = None,
) -> ClusterPlan:
    """Return the plan on the cluster `named`; `prices` are fields of `Prices`.

    `root` has calibrations, and measurements of earlier runs of the recipe. Raises ValueError, a line per fault.
    """
    fabric, place = open_cluster(named, sparse)
    if fabric is None:
        raise ValueError(
            f"cluster.fabric: {named} names none, so its devices and network are unknown; write fabric: with one of "
            f"{', '.join(fabric_names())}, or the path of a YAML file like them (herd plan presets)"
        )
    paid = Prices(**{**power_per_gpu(fabric), **(prices or {})})
    everywhere, places = parse_gpus(gpus)
    check_stage_names(plan.recipe, places)
    if place is not None:
        if gpus:
            raise ValueError(
                f"gpus: {', '.join(gpus)} is given, but {named} sets the GPUs of each stage; edit the file"
            )
        places, named = stage_placements(plan.recipe, place), place.fabric
    projection = project(plan.recipe, plan.rows, fabric, device_curves(fabric, root), places, everywhere)
    measured = measured_costs(root, plan.recipe.name) if root is not None else None
    lasting = named if named in fabric_names() else str(Path(named).absolute())  # holds in any folder
    cost = evaluation_cost(plan.recipe, place or Cluster(fabric=named))
    return ClusterPlan(plan, lasting, projection, *estimate_uptime_and_budget(plan, projection, paid, measured), cost)


def power_per_gpu(fabric: Fabric) -> dict[str, float]:
    """Return the watts of a GPU and of its share of a server, from the cluster's description."""
    return {"gpu_watts": fabric.accelerator.watts, "server_watts": fabric.server.overhead_watts / fabric.server.gpus}


def estimate_uptime_and_budget(
    plan: RunPlan, projection: Projection, prices: Prices, measured: tuple[CheckpointCosts, Recovery] | None = None
) -> tuple[dict[int, Uptime], Budget]:
    """Return the reliability of each number of GPUs, and the budget.

    `measured`: costs of saves and restarts in an earlier run; None: the published figures.
    """
    per_host = projection.fabric.server.gpus
    interval = checkpoint_interval_s(plan.recipe, projection.main)
    costs, recovery = measured or (BYTECHECKPOINT, RECOVERY)
    sizes = sorted({part.best.world for part in projection.parts})
    uptimes = {size: uptime(size, interval, costs, recovery, gpus_per_host=per_host) for size in sizes}
    times = tuple(
        StageTime(
            part.stage,
            part.segment.tokens,
            part.segment.steps,
            part.best.world,
            part.best.time.total,
            uptimes[part.best.world].share,
            part.best.time.gemm_bound,
            part.best.time.exposed_comm,
        )
        for part in projection.parts
    )
    main = projection.main.best.world
    spares = replace(prices, spare_share=uptimes[main].spares * per_host / main)
    return uptimes, Budget(times, spares, storage_use(plan))


def checkpoint_interval_s(recipe: Recipe, part: ProjectedSegment) -> float:
    """Return the seconds between two checkpoints of a part."""
    every = recipe.checkpoint.every
    if every.unit == "seconds":
        return float(every.amount)
    return every.amount / part.segment.batch * part.best.time.total


def storage_use(plan: RunPlan) -> StorageUse:
    """Return the storage of the recipe: text if it was surveyed, tokens, and the checkpoints that are kept."""
    every, keep, tokens = plan.recipe.checkpoint.every, plan.recipe.checkpoint.keep, plan.schedule.tokens
    width = 2 if plan.rows <= 2**16 else 4
    count = 0
    for span in plan.schedule.trained:
        # The tokens between two saves: of a cadence in seconds assume at least four saves per milestone.
        stride = span.segments[-1].batch
        if every.unit == "tokens":
            stride = every.amount
        elif keep.every is not None:
            stride *= max(1, keep.every // (4 * stride))
        count += len(keep.kept((*range(span.start + stride, span.end, stride), span.end)))
    surveyed = bool(plan.sources) and all(survey.complete for survey in plan.sources)
    text = float(sum(survey.bytes for survey in plan.sources)) if surveyed else None
    return StorageUse(text, float(tokens * width), checkpoint_bytes(plan.parameters), float(count))


def sent_bytes(projection: Projection, part: ProjectedSegment) -> AxisBytes:
    """Return the bytes that a GPU in the middle of the pipeline sends in a step, by axis."""
    best, config = part.best, projection.recipe.model
    messages = [
        message
        for stage in stages(config, best.layout, best.layout.pp // 2)
        for message in stage_volumes(stage, config, projection.rows, best.layout, best.world, best.load)
    ]
    return AxisBytes.from_collectives(messages, best.layout, best.load.micro_batches)


# What evaluation costs. How many questions the published tasks have is assumed, so that a plan needs no data.

QUESTIONS, QUESTION_TOKENS, BUILT_IN_TOKENS = 2_000, 256, 64
"""Questions of a published task without `evaluate.limit`, tokens read for one without its shared examples, and tokens
of a built-in question."""
EFFICIENCY = 0.5
"""Share of a large product's rate that scoring reaches, and of the memory bandwidth that generating does: assumed."""
FP32_SHARE = 67 / 989
"""FP32 products without tensor cores over BF16 ones (H100 SXM data sheet)."""


class EvaluationCost(NamedTuple):
    """Estimate of all evaluations and gates of a run."""

    layout: Layout
    processes: int
    process_bytes: float
    evaluations: int
    gates: int
    read: float
    """Tokens read by scoring."""
    written: float
    """Tokens generated."""
    seconds: float

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.processes / 3600

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "layout": self.layout.model_dump(include={"tp", "pp"}), "gpu_hours": self.gpu_hours}


def evaluation_cost(recipe: Recipe, cluster: Cluster) -> EvaluationCost:
    """Return the estimate for `cluster`, which has a fabric. Raises ValueError as `place_evaluation` does."""
    layout, processes = place_evaluation(recipe, cluster)
    accelerator, section, rows = load_fabric(cluster.fabric).accelerator, recipe.evaluate, vocab_rows(recipe)
    schedule, domains = Schedule(recipe), sum(bool(sources) for sources in recipe.sources.values())
    window = min(recipe.model.max_seq_len, longest_sequence(recipe))
    evaluated = [*(section.after or [recipe.stages[-1].name]), "champion"]
    work: list[tuple[float, int]] = []  # positions, and the sequence length that attention sees
    written = 0.0
    for suite in (recipe_suite(with_suite(recipe, stage_suite_name(recipe, name))) for name in evaluated):
        if "bits" in suite.built_in:
            work.append((section.documents * domains * document_bytes(recipe) / 4, window))
        if "needle" in suite.built_in:
            work += [(section.needles * len(KINDS) * length, length) for length in context_lengths(window)]
        count = section.limit or QUESTIONS
        work.append((len(suite.built_in) * section.questions * BUILT_IN_TOKENS, BUILT_IN_TOKENS))
        work.append((len(suite.tasks) * count * QUESTION_TOKENS, QUESTION_TOKENS))
        answers = [task.definition for task in suite.tasks if not isinstance(task.definition, Path)]
        written += sum(
            count * task.writing.samples * task.writing.max_tokens for task in answers if task.kind in WRITTEN
        )
    gated = [(span, part) for span in schedule.spans if span.stage.gates for part in span.parts]
    for span, part in gated:
        if "needle" in span.stage.gates:
            work.append((section.needles * part.lengths[-1], part.lengths[-1]))
        if "short-context" in span.stage.gates:
            work.append((2 * section.documents * domains * span.lengths[0], span.lengths[0]))
    flops = sum(positions * flops_per_token(recipe.model, rows, length).causal / 3 for positions, length in work)
    rate = accelerator.reached_tflops * 1e12 * EFFICIENCY * (1 if section.precision == "bf16" else FP32_SHARE)
    weights = BYTES[section.precision] * parameter_count(recipe.model, rows)
    token_s = weights / layout.tp / (accelerator.memory_tb_s * 1e12 * EFFICIENCY)  # stage after stage
    replicas = processes // layout.model_parallel
    seconds = flops / rate / processes + written / DECODED["cuda"] / replicas * token_s
    need = inference_bytes(recipe.model, rows, layout, BYTES[section.precision], "cuda")
    read = sum(positions for positions, _ in work)
    return EvaluationCost(layout, processes, need, len(evaluated), len(gated), read, written, seconds)


# Console output


def print_cluster_plan(planned: ClusterPlan, out: Console, top: int) -> None:
    """Print the plan."""
    main, projection, best = planned.main, planned.projection, planned.main.best

    def section(title: str, *tables: Table) -> None:
        out.print(f"\n[bold]{title}[/]")
        for table in tables:
            out.print(table)

    for line in fabric_lines(projection.fabric, projection.curves.source):
        out.print(escape(line))
    section("layouts", stages_table(projection))
    for line in extrapolation_warnings(planned):
        out.print(f"[yellow]warning[/]  {escape(line)}")
    section(f"where a step of {main.stage} goes ({best.time.total:.2f} s)", time_table(main))
    out.print(
        f"memory   {format_memory(best, best.memory.total + best.margin)}, pipeline rank {best.memory.pipeline_rank}"
    )
    if (result := main.found) is not None:
        title = f"{main.stage}: {result.considered:,} layouts, {len(result.fitting):,} fit"
        section(title, best_table(result, top), rejected_table(result))
    section("network", network_table(planned.placement.traffic, best.world))
    for line in (
        *placement_lines(planned),
        *budget_lines(planned),
        evaluation_line(planned),
        *uptime_lines(planned),
    ):
        out.print(escape(line))


def extrapolation_warnings(planned: ClusterPlan) -> list[str]:
    """Return warnings about sizes of the main part outside the measured range of the device."""
    best = planned.main.best
    work = layer_work(planned.projection.recipe.model, best.layout, best.load)
    return planned.projection.curves.extrapolates(work.products, [work.seq_len])


def fabric_lines(fabric: Fabric, curves: str) -> Iterator[str]:
    """Yield a description of the cluster, and the source of its device curves."""
    tiers = ", ".join(
        f"{tier.name} {tier.gpus:,}" + (f" (1:{tier.oversubscription:g})" if tier.oversubscription > 1 else "")
        for tier in fabric.tiers
    )
    flows = f", {fabric.queue_pairs} flows a pair" if fabric.queue_pairs > 1 else ""
    yield (
        f"cluster  {fabric.name}: {fabric.gpus:,} {fabric.accelerator.name} in {fabric.servers:,} servers; {tiers}; "
        f"{fabric.network}, {fabric.routing}{flows}"
    )
    yield f"devices  {curves}"


def network_table(rows: Sequence[AxisTraffic], world: int) -> Table:
    """Return the layer that each axis crosses, and the bytes that a GPU sends there in a step."""
    layers = rows[0].layers if rows else ()
    table = plain_table("axis", "size", "crosses", *(f"{name}, GB" for name in layers), left=("axis", "crosses"))
    for row in rows:
        sent = (f"{size / world / 1e9:,.2f}" if size else "" for size in row.bytes)
        table.add_row(row.axis, str(row.size), row.crosses, *sent)
    return table


def placement_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield the bytes over the oversubscribed layer for each order of ranks."""
    cut = planned.placement
    if cut.layer:
        sizes = {
            name: cut.crossing[name].get(cut.layer, 0.0) / 1e12 for name in ("recommended", "contiguous", "random")
        }
        parts = ", ".join(f"{name} {size:,.2f} TB" for name, size in sizes.items())
        yield f"placed   over the {cut.layer} layer in a step: {parts}"


def budget_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield days, GPU-hours, money, energy and storage, and the unknowns they depend on most."""

    def short(value: float) -> str:
        if value >= 1e6:
            return f"{value / 1e6:,.4g}M"
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    budget = planned.budget
    energy = f"{budget.mwh / 1e3:,.1f} GWh" if budget.mwh >= 1e3 else f"{short(budget.mwh * 1e3)} kWh"
    yield ""
    yield (
        f"takes    {budget.days:,.1f} days, {short(budget.gpu_hours)} GPU-hours, {short(budget.money)} at "
        f"{budget.prices.gpu_hour:g} per GPU-hour, {energy}"
    )
    kept = budget.stored
    yield (
        f"stores   tokens {kept.token_bytes / 1e12:,.1f} TB, {kept.checkpoints:,.0f} checkpoints of "
        f"{kept.checkpoint_bytes / 1e12:,.2f} TB: {short(budget.storage_money)}"
    )
    for name, moving in planned.effects().items():
        parts = "; ".join(
            f"{effect.name} ({short(min(effect.low, effect.high))} to {short(max(effect.low, effect.high))})"
            for effect in moving
        )
        yield f"{name.replace('_', '-'):<10}hang on {parts}"


def evaluation_line(planned: ClusterPlan) -> str:
    """Return where and for how long the models of the run are evaluated."""
    cost = planned.evaluation
    gates = f" and {cost.gates} gates" if cost.gates else ""
    return (
        f"scores   {cost.evaluations} evaluations{gates} in {planned.plan.recipe.evaluate.precision} on "
        f"{cost.processes} GPU{'s' * (cost.processes > 1)} (tp {cost.layout.tp} x pp {cost.layout.pp}, "
        f"{cost.process_bytes / 1e9:,.1f} GB each): about {cost.seconds / 3600:,.1f} h, {cost.gpu_hours:,.0f} GPU-hours"
    )


def uptime_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield how often the job fails and how often to save, for each number of GPUs."""
    for reliability in planned.uptimes.values():
        spread, cadence = reliability.spread, reliability.cadence
        yield (
            f"failures {reliability.gpus:,} GPUs: one every {reliability.mtti_s / 3600:.1f} h; effective time "
            f"{reliability.share:.1%} ({spread.low:.1%} to {spread.high:.1%}); {reliability.spares} spare servers"
        )
        share = f"{cadence.share:.1%}" if cadence.share is not None else "effective time unknown: too many failures"
        restart = "no restart is short enough for 90 %"
        if reliability.restart_budget_s is not None:
            longest, planned_restart = _time(reliability.restart_budget_s), _time(reliability.restart_s)
            restart = f"a restart may take {longest} for 90 %, planned {planned_restart}"
        yield (
            f"saving   every {_time(reliability.interval_s)} as the recipe says; best {_time(cadence.interval_s)} "
            f"({share}); {restart}"
        )
    costs = next(iter(planned.uptimes.values())).costs
    least = planned.budget.stored.checkpoint_bytes / planned.projection.fabric.storage_gb_s / 1e9
    seconds = f"a save blocks {costs.block_s:.3g} s and takes {costs.save_s:.3g} s, loading {costs.load_s:.3g} s"
    yield f"         {seconds} ({costs.source}); the file system alone needs {least:.1f} s for one"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


# Comparison of clusters for one recipe. The MLflow experiment `<recipe>-plan` has one run per cluster, replaced each
# time. Positions are tokens, so MLflow overlays the plans with each other and with a real run. Metrics that a plan
# cannot know are absent.


@dataclass(frozen=True)
class ClusterProjection:
    """A recipe on one cluster."""

    projection: Projection
    share: float
    """Of a card's rate that flows between racks get under the cluster's routing."""
    uptime: Uptime
    run: str = ""
    """Page of its MLflow run; "" without an MLflow server."""

    @property
    def fabric(self) -> Fabric:
        return self.projection.fabric

    @property
    def days(self) -> float:
        """Wall time with the goodput of the main part."""
        return sum(part.seconds for part in self.projection.parts) / self.uptime.share / 86_400

    @property
    def gpu_hours(self) -> float:
        return sum(part.seconds * part.best.world for part in self.projection.parts) / self.uptime.share / 3600

    def as_json(self) -> dict[str, Any]:
        """Return what the table shows."""
        main = self.projection.main
        return {
            "cluster": self.fabric.name,
            "network": self.fabric.network,
            "routing": self.fabric.routing,
            "card_share": self.share,
            "gpus": main.best.world,
            "step_s": main.best.time.total,
            "tflops": main.best.tflops,
            "effective_time": self.uptime.share,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "run": self.run,
        }


def compare_fabrics(
    root: Root, recipe: Recipe, clusters: Sequence[str], gpus: Sequence[str]
) -> list[ClusterProjection]:
    """Return the recipe on each cluster, the fastest first, each recorded in MLflow. Raises ValueError."""
    everywhere, places = parse_gpus(gpus)
    check_stage_names(recipe, places)
    planned = []
    for fabric in [load_fabric(name) for name in clusters]:
        curves = device_curves(fabric, root)
        projection = project(recipe, vocab_rows(recipe), fabric, curves, places, everywhere)
        main = projection.main
        reliability = uptime(main.best.world, checkpoint_interval_s(recipe, main), gpus_per_host=fabric.server.gpus)
        planned.append(ClusterProjection(projection, bandwidth_share(fabric), reliability))
    tracker = MLflowTracker(root, f"{recipe.name}-plan")
    recorded = [replace(plan, run=_record(tracker, plan.projection, plan.uptime)) for plan in planned]
    return sorted(recorded, key=lambda plan: plan.days)


def fabrics_table(found: Sequence[ClusterProjection]) -> Table:
    """Return a row per cluster, the fastest first."""
    table = plain_table(
        "cluster", "routing", "card", "GPUs", "step s", "TFLOP/s", "uptime", "days", "GPU-hours", "slower",
        left=("cluster", "routing"),
    )  # fmt: skip
    for plan in found:
        best = plan.projection.main.best
        table.add_row(
            plan.fabric.name,
            plan.fabric.routing,
            f"{plan.share:.0%}",
            f"{best.world:,}",
            f"{best.time.total:.3f}",
            f"{best.tflops:.0f}",
            f"{plan.uptime.share:.1%}",
            f"{plan.days:.1f}",
            f"{plan.gpu_hours / 1e6:.2f}M",
            f"{plan.days / found[0].days - 1:+.1%}",
        )
    return table


def _record(tracker: MLflowTracker, projection: Projection, reliability: Uptime) -> str:
    """Write a plan as an MLflow run; return its page."""
    recipe, fabric = projection.recipe, projection.fabric
    tags = {"cluster": fabric.name, "recipe.digest": digest(resolved(recipe)), "stage": "plan"}
    params = flatten({"cluster": fabric.model_dump(mode="json"), "model": resolved(recipe)["model"]}, depth=2)
    name = f"plan-{recipe.name}-{fabric.name}"

    def discard() -> None:
        """Delete the runs of earlier comparisons: MLflow keeps every point and every parameter of a run."""
        for run in tracker.client.search_runs([tracker.experiment], tracker.query(name)):
            tracker.client.delete_run(run.info.run_id)

    tracker.reach.attempt(discard, None)
    run = tracker.open_run(name, tags, params)
    now, hours, points = time.time(), 0.0, list[MetricPoint]()
    for part in projection.parts:  # figures at the first and the last token, with the names of a training run
        hours += part.seconds * part.best.world / reliability.share / 3600
        values = part_metrics(part, reliability.share)
        for position in (part.segment.start, part.segment.end):
            points += [MetricPoint(key, value, now, position) for key, value in values.items()]
        points.append(MetricPoint(metrics.GPU_HOURS, hours, now, part.segment.end))
    tracker.log_points([run], points)
    tracker.close(run, "FINISHED")
    return tracker.page(run)


def part_metrics(part: ProjectedSegment, effective: float) -> dict[str, float]:
    """Return the metrics of a training run that a prediction knows."""
    best, step_s = part.best, part.best.time.total
    return {
        metrics.STEP_S: step_s,
        metrics.TOKENS_PER_S: part.segment.batch / step_s,
        metrics.TOKENS_PER_S_PER_DEVICE: part.segment.batch / step_s / best.world,
        metrics.TFLOPS_PER_DEVICE: best.tflops,
        metrics.MFU: part.mfu,
        metrics.GOODPUT: effective,
        metrics.DEVICE_PEAK_GIB: best.memory.total / 2**30,
        metrics.SEQ_LEN: float(part.segment.seq_len),
        metrics.BATCH_TOKENS: float(part.segment.batch),
    }
