"""`herd plan --cluster`: a recipe's plan on a cluster, with layouts, steps, days, money, checkpoints and placement.

The cluster is a preset, a YAML file of one, or the file that `herd run` takes, whose layouts are then checked instead
of searched. Everything is arithmetic on one core, in seconds; unknown figures are absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as parquet
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llama3.parallel.memory import stages
from llama3.planner.budget import Budget, Prices, StageTime, StorageUse, checkpoint_bytes
from llama3.planner.comm_volume import stage_volumes
from llama3.planner.goodput import BYTECHECKPOINT, CheckpointCosts, Recovery
from llama3.planner.placement import AxisBytes, AxisTraffic, Recommendation, minimum_cut
from llama3.planner.projection import Effect, Projected, Projection, effects, project
from llama3.planner.step_time import layer_work
from llama3.planner.topology import Fabric, fabric_names
from llama3.planner.uptime import RECOVERY, Uptime, uptime
from llama3.recipe.schema import Recipe
from llama3.train import metrics
from storage.object_artifact import open_store
from storage.root import Root
from tasks.plan.options import curves_of, known_stages, open_cluster, parse_gpus, places_of
from tasks.plan.recipe import RunPlan
from tasks.plan.tables import (
    as_json,
    best_table,
    memory_words,
    plain_table,
    refused_table,
    stages_table,
    time_table,
)
from tasks.runs.records import Runs

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
                path = store.at(step.artifact).part("metrics.parquet")
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

    @property
    def main(self) -> Projected:
        """The part that takes most GPU-hours."""
        return self.projection.main

    @cached_property
    def placement(self) -> Recommendation:
        """The recommended rank order of the main part."""
        best = self.main.best
        return minimum_cut(best.layout, best.world, self.projection.fabric, sent_bytes(self.projection, self.main))

    def effects(self) -> dict[str, list[Effect]]:
        """Return the three unknowns that move each quantity most."""
        return {name: effects(self.budget, name) for name in QUANTITIES}  # type: ignore[arg-type]

    def as_json(self, most: int) -> dict[str, Any]:
        """Return every figure that is shown."""
        return {
            **as_json(self.projection, most),
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
            "warnings": self.plan.warnings,
        }

    def write_cluster(self, path: Path) -> None:
        """Write the file for `herd run --cluster`: the main part's layout, and stages that differ."""

        def fields(part: Projected) -> dict[str, Any]:
            layout = part.best.layout.model_dump(exclude_defaults=True)
            return {"processes": part.best.world, "micro_batch": part.best.load.micro_batch, "layout": layout}

        main = fields(self.main)
        others = {part.stage: fields(part) for part in self.projection.parts if fields(part) != main}
        cluster = {**main, "fabric": self.named, **({"stages": others} if others else {})}
        path.write_text(yaml.safe_dump(cluster, sort_keys=False))


def plan_on(
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
            f"{', '.join(fabric_names())}, or the path of a YAML file like them (herd plan show)"
        )
    paid = Prices(**{**described_power(fabric), **(prices or {})})
    everywhere, places = parse_gpus(gpus)
    known_stages(plan.recipe, places)
    if place is not None:
        if gpus:
            raise ValueError(
                f"gpus: {', '.join(gpus)} is given, but {named} sets the GPUs of each stage; edit the file"
            )
        places, named = places_of(plan.recipe, place), place.fabric
    projection = project(plan.recipe, plan.rows, fabric, curves_of(fabric, root), places, everywhere)
    measured = measured_costs(root, plan.recipe.name) if root is not None else None
    lasting = named if named in fabric_names() else str(Path(named).absolute())  # holds in any folder
    return ClusterPlan(plan, lasting, projection, *outlook(plan, projection, paid, measured))


def described_power(fabric: Fabric) -> dict[str, float]:
    """Return the watts of a GPU and of its share of a server, from the cluster's description."""
    return {"gpu_watts": fabric.accelerator.watts, "server_watts": fabric.server.overhead_watts / fabric.server.gpus}


def outlook(
    plan: RunPlan, projection: Projection, prices: Prices, measured: tuple[CheckpointCosts, Recovery] | None = None
) -> tuple[dict[int, Uptime], Budget]:
    """Return the reliability of each number of GPUs, and the budget.

    `measured`: costs of saves and restarts in an earlier run; None: the published figures.
    """
    per_host = projection.fabric.server.gpus
    interval = save_interval(plan.recipe, projection.main)
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
            part.best.time.products,
            part.best.time.messages,
        )
        for part in projection.parts
    )
    main = projection.main.best.world
    spares = replace(prices, spare_share=uptimes[main].spares * per_host / main)
    return uptimes, Budget(times, spares, stored(plan))


def save_interval(recipe: Recipe, part: Projected) -> float:
    """Return the seconds between two checkpoints of a part."""
    every = recipe.checkpoint.every
    if every.unit == "seconds":
        return float(every.amount)
    return every.amount / part.segment.batch * part.best.time.total


def stored(plan: RunPlan) -> StorageUse:
    """Return the storage of the recipe: text if it was surveyed, tokens, and checkpoints.

    Each trained part keeps its last checkpoints, and one at every milestone that it passes.
    """
    keep, tokens = plan.recipe.checkpoint.keep, plan.schedule.tokens
    width = 2 if plan.rows <= 2**16 else 4
    count = sum(
        keep.last + (span.end // keep.every - span.start // keep.every if keep.every else 0)
        for span in plan.schedule.trained
    )
    surveyed = bool(plan.sources) and all(survey.complete for survey in plan.sources)
    text = float(sum(survey.bytes for survey in plan.sources)) if surveyed else None
    return StorageUse(text, float(tokens * width), checkpoint_bytes(plan.parameters), float(count))


def sent_bytes(projection: Projection, part: Projected) -> AxisBytes:
    """Return the bytes that a GPU in the middle of the pipeline sends in a step, by axis."""
    best, spec = part.best, projection.recipe.model
    messages = [
        message
        for stage in stages(spec, best.layout, best.layout.pp // 2)
        for message in stage_volumes(stage, spec, projection.rows, best.layout, best.world, best.load)
    ]
    return AxisBytes.of(messages, best.layout, best.load.micro_batches)


# Console output


def show(planned: ClusterPlan, out: Console, top: int) -> None:
    """Print the plan."""
    main, projection, best = planned.main, planned.projection, planned.main.best

    def section(title: str, *tables: Table) -> None:
        out.print(f"\n[bold]{title}[/]")
        for table in tables:
            out.print(table)

    for line in fabric_lines(projection.fabric, projection.curves.source):
        out.print(escape(line))
    section("layouts", stages_table(projection))
    for line in doubts(planned):
        out.print(f"[yellow]warning[/]  {escape(line)}")
    section(f"where a step of {main.stage} goes ({best.time.total:.2f} s)", time_table(main))
    out.print(
        f"memory   {memory_words(best, best.memory.total + best.margin)}, pipeline rank {best.memory.pipeline_rank}"
    )
    if (result := main.found) is not None:
        title = f"{main.stage}: {result.looked_at:,} layouts, {len(result.fitting):,} fit"
        section(title, best_table(result, top), refused_table(result))
    section("network", network_table(planned.placement.traffic, best.world))
    for line in (*placement_lines(planned), *budget_lines(planned), *uptime_lines(planned)):
        out.print(escape(line))


def doubts(planned: ClusterPlan) -> list[str]:
    """Return warnings about sizes of the main part outside the measured range of the device."""
    best = planned.main.best
    work = layer_work(planned.projection.recipe.model, best.layout, best.load)
    return planned.projection.curves.extrapolates(work.products, [work.seq])


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
    budget = planned.budget
    yield ""
    yield (
        f"takes    {budget.days:,.1f} days, {budget.gpu_hours / 1e6:,.2f}M GPU-hours, {budget.money / 1e6:,.1f}M at "
        f"{budget.prices.gpu_hour:g} per GPU-hour, {budget.mwh / 1e3:,.1f} GWh"
    )
    kept = budget.stored
    yield (
        f"stores   tokens {kept.token_bytes / 1e12:,.1f} TB, {kept.checkpoints:,.0f} checkpoints of "
        f"{kept.checkpoint_bytes / 1e12:,.2f} TB: {budget.storage_money / 1e6:,.2f}M"
    )

    def short(value: float) -> str:
        return f"{value / 1e6:,.1f}M" if value >= 1e6 else f"{value:,.3g}"

    for name, moving in planned.effects().items():
        parts = "; ".join(
            f"{effect.name} ({short(min(effect.low, effect.high))} to {short(max(effect.low, effect.high))})"
            for effect in moving
        )
        yield f"{name.replace('_', '-'):<10}hang on {parts}"


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
