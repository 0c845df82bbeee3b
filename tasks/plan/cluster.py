"""A recipe's plan on a cluster: layouts, steps, days, money, cadence and placement, for `herd plan --cluster`.

The cluster is a preset, a YAML file of one, or the file that `herd run` takes, whose layouts are then judged instead of
searched for. Everything is arithmetic on one core, in seconds; what cannot be known is absent.
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
from tasks.runs.records import RunRecord, Runs

# What the options of `herd plan` name: a cluster, GPUs of stages, and the curves of a cluster's devices.


# What checkpoints and restarts cost a recipe's own runs, for the plan of the next one.
#
# A run writes down how long each save blocked and took, and how long each attempt needed to its first step. The
# medians of the newest run that has any replace the published figures. Given up: what a job of another size would
# take.

KEYS = (metrics.CHECKPOINT_S, metrics.CHECKPOINT_WRITE_S, metrics.FIRST_STEP_S)


def measured_costs(root: Root, family: str) -> tuple[CheckpointCosts, Recovery] | None:
    """Return what saves and restarts took in the newest run of `family` that saved, or None if there is none.

    Loading is part of a restart, which is measured whole.
    """
    for record in reversed(Runs(root).all()):
        if record.family == family:
            blocked, written, first = (_values(root, record)[key] for key in KEYS)
            if blocked and written and first:
                block_s, save_s = median(blocked), median(written)
                costs = CheckpointCosts(block_s, max(block_s, save_s), 0.0, f"measured in {record.name}")
                return costs, Recovery(RECOVERY.notice_s, RECOVERY.timeout_s, median(first))
    return None


def _values(root: Root, record: RunRecord) -> dict[str, list[float]]:
    store, found = open_store(root), {key: list[float]() for key in KEYS}
    for step in record.steps.values():
        if not step.artifact.startswith("checkpoint/"):
            continue
        table = parquet.read_table(store.at(step.artifact).part("metrics.parquet"), filters=[("key", "in", KEYS)])
        for row in table.to_pylist():
            found[row["key"]].append(row["value"])
    return found


QUANTITIES = ("days", "gpu_hours", "money")


@dataclass(frozen=True)
class ClusterPlan:
    """A recipe on a cluster."""

    plan: RunPlan
    named: str
    """The cluster as `herd run` finds it: a preset, or the path of a file."""
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
        """Where the ranks of the main part are best put."""
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
            "sensitivity": {name: [one.as_dict() for one in found] for name, found in self.effects().items()},
            "reliability": [_uptime_json(one) for one in self.uptimes.values()],
            "placement": {
                "bytes": self.placement.crossing,
                "traffic": [row.as_dict() for row in self.placement.traffic],
            },
            "warnings": self.plan.warnings,
        }

    def write_cluster(self, path: Path) -> None:
        """Write where the run is to work, for `herd run --cluster`: the main part's layout, and stages that differ."""
        path.write_text(yaml.safe_dump(cluster_fields(self.projection, self.named), sort_keys=False))


def plan_on(
    plan: RunPlan,
    named: str,
    gpus: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    sparse: bool = False,
    root: Root | None = None,
) -> ClusterPlan:
    """Return the plan on the cluster `named`; `prices` are fields of `Prices`.

    `root` has what was measured: calibrations, and earlier runs of the recipe. Raises ValueError, a line per fault.
    """
    fabric, place = open_cluster(named, sparse)
    if fabric is None:
        raise ValueError(
            f"cluster.fabric: {named} names none, so nothing is known of its devices and network; write fabric: with "
            f"one of {', '.join(fabric_names())}, or the path of a YAML file like them (herd plan show)"
        )
    paid = Prices(**{**described_power(fabric), **(prices or {})})
    everywhere, places = parse_gpus(gpus)
    known_stages(plan.recipe, places)
    if place is not None:
        if gpus:
            raise ValueError(f"gpus: {', '.join(gpus)} was asked for, but {named} says where each stage works; edit it")
        places, named = places_of(plan.recipe, place), place.fabric
    projection = project(plan.recipe, plan.rows, fabric, curves_of(fabric, root), places, everywhere)
    measured = measured_costs(root, plan.recipe.name) if root is not None else None
    return ClusterPlan(plan, _lasting(named), projection, *outlook(plan, projection, paid, measured))


def _lasting(named: str) -> str:
    """Return a preset's name as it is, and a file's path so that it holds in any folder."""
    return named if named in fabric_names() else str(Path(named).absolute())


def described_power(fabric: Fabric) -> dict[str, float]:
    """Return the watts of a GPU and of its share of a server, as the cluster's description has them."""
    return {"gpu_watts": fabric.accelerator.watts, "server_watts": fabric.server.overhead_watts / fabric.server.gpus}


def outlook(
    plan: RunPlan, projection: Projection, prices: Prices, measured: tuple[CheckpointCosts, Recovery] | None = None
) -> tuple[dict[int, Uptime], Budget]:
    """Return what failures do to each number of GPUs, and what everything costs.

    `measured`: what saves and restarts took in an earlier run; None: the published figures.
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
    """Return what the recipe leaves in storage: text as far as it was surveyed, tokens, and checkpoints.

    Each trained part keeps its own last ones, and one at every milestone that it passes.
    """
    keep, tokens = plan.recipe.checkpoint.keep, plan.schedule.tokens
    width = 2 if plan.rows <= 2**16 else 4
    count = sum(
        keep.last + (span.end // keep.every - span.start // keep.every if keep.every else 0)
        for span in plan.schedule.trained
    )
    surveyed = bool(plan.sources) and all(found.complete for found in plan.sources)
    text = float(sum(found.bytes for found in plan.sources)) if surveyed else None
    return StorageUse(text, float(tokens * width), checkpoint_bytes(plan.parameters), float(count))


def sent_bytes(projection: Projection, part: Projected) -> AxisBytes:
    """Return what a GPU in the middle of the pipeline sends in a step, by axis."""
    best, spec = part.best, projection.recipe.model
    mine = stages(spec, best.layout, best.layout.pp // 2)
    found = [
        one for stage in mine for one in stage_volumes(stage, spec, projection.rows, best.layout, best.world, best.load)
    ]
    return AxisBytes.of(found, best.layout, best.load.micro_batches)


def cluster_fields(projection: Projection, named: str) -> dict[str, Any]:
    """Return the fields of `herd run`'s file: where the main part works, and stages that work elsewhere.

    `named`: the preset or the file of the cluster.
    """
    main = _place_fields(projection.main)
    others = {}
    for part in projection.parts:
        if (mine := _place_fields(part)) != main:
            others[part.stage] = mine
    return {**main, "fabric": named, **({"stages": others} if others else {})}


def _place_fields(part: Projected) -> dict[str, Any]:
    best = part.best
    return {
        "processes": best.world,
        "micro_batch": best.load.micro_batch,
        "layout": best.layout.model_dump(exclude_defaults=True),
    }


def _uptime_json(one: Uptime) -> dict[str, Any]:
    return {
        "gpus": one.gpus,
        "mtti_s": one.mtti_s,
        "restart_s": one.restart_s,
        "interval_s": one.interval_s,
        "best_interval_s": one.cadence.interval_s,
        "best_share": one.cadence.share,
        "effective_time": one.share,
        "effective_time_5_95": [one.spread.low, one.spread.high],
        "spare_hosts": one.spares,
        "restart_budget_s": one.restart_budget_s,
        "checkpoint_costs": vars(one.costs),
    }


# What `herd plan --cluster` prints below the stage table: layouts, time, memory, network, money, failures.

UNITS = {"days": "", "gpu_hours": "", "money": ""}


def show(planned: ClusterPlan, out: Console, top: int) -> None:
    """Print the plan."""
    main, projection = planned.main, planned.projection
    for line in fabric_lines(projection.fabric, projection.curves.source):
        out.print(escape(line))
    _section(out, "layouts", stages_table(projection))
    best = main.best
    for line in doubts(planned):
        out.print(f"[yellow]warning[/]  {escape(line)}")
    _section(out, f"where a step of {main.stage} goes ({best.time.total:.2f} s)", time_table(main))
    out.print(
        f"memory   {memory_words(best, best.memory.total + best.margin)}, pipeline rank {best.memory.pipeline_rank}"
    )
    if main.found is not None:
        found = main.found
        out.print()
        out.print(f"[bold]{main.stage}: {found.looked_at:,} layouts, {len(found.fitting):,} fit[/]")
        out.print(best_table(found, top))
        out.print(refused_table(found))
    _section(out, "network", network_table(planned.placement.traffic, best.world))
    for line in (*placement_lines(planned), *budget_lines(planned), *uptime_lines(planned)):
        out.print(escape(line))


def doubts(planned: ClusterPlan) -> list[str]:
    """Return what lies outside of what was measured of the devices, for the main part."""
    best = planned.main.best
    work = layer_work(planned.projection.recipe.model, best.layout, best.load)
    return planned.projection.curves.extrapolates(work.products, [work.seq])


def _section(out: Console, title: str, table: Table) -> None:
    out.print()
    out.print(f"[bold]{title}[/]")
    out.print(table)


def fabric_lines(fabric: Fabric, curves: str) -> Iterator[str]:
    """Yield what the cluster is, and how its devices are known."""
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
    """Return which layer each axis crosses, and what a GPU sends there in a step."""
    layers = rows[0].layers if rows else ()
    table = plain_table("axis", "size", "crosses", *(f"{name}, GB" for name in layers), left=("axis", "crosses"))
    for row in rows:
        sent = (f"{size / world / 1e9:,.2f}" if size else "" for size in row.bytes)
        table.add_row(row.axis, str(row.size), row.crosses, *sent)
    return table


def placement_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield what the order of ranks saves on the oversubscribed layer."""
    found = planned.placement
    if found.layer:
        sizes = {
            name: found.crossing[name].get(found.layer, 0.0) / 1e12 for name in ("recommended", "contiguous", "random")
        }
        told = ", ".join(f"{name} {size:,.2f} TB" for name, size in sizes.items())
        yield f"placed   over the {found.layer} layer in a step: {told}"


def budget_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield days, GPU-hours, money, energy and storage, and what they hang on."""
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
    for name, found in planned.effects().items():
        yield f"{name.replace('_', '-'):<10}hang on {'; '.join(effect_words(one, name) for one in found)}"


def effect_words(one: Effect, name: str) -> str:
    """Return what an unknown does to a quantity."""
    low, high = sorted((one.low, one.high))
    return f"{one.name} ({_short(low)} to {_short(high)}{UNITS[name]})"


def _short(value: float) -> str:
    return f"{value / 1e6:,.1f}M" if value >= 1e6 else f"{value:,.3g}"


def uptime_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield what breaks how often, and how often to save."""
    for one in planned.uptimes.values():
        yield (
            f"failures {one.gpus:,} GPUs: one every {one.mtti_s / 3600:.1f} h; effective time {one.share:.1%} "
            f"({one.spread.low:.1%} to {one.spread.high:.1%}); {one.spares} spare servers"
        )
        yield (
            f"saving   every {_time(one.interval_s)} as the recipe says; best {_time(one.cadence.interval_s)}"
            f"{_best(one)}; {_restart(one)}"
        )
    costs = next(iter(planned.uptimes.values())).costs
    least = planned.budget.stored.checkpoint_bytes / planned.projection.fabric.storage_gb_s / 1e9
    taken = f"a save blocks {costs.block_s:.3g} s and takes {costs.save_s:.3g} s, loading {costs.load_s:.3g} s"
    yield f"         {taken} ({costs.source}); the file system alone needs {least:.1f} s for one"


def _best(one: Uptime) -> str:
    return (
        f" ({one.cadence.share:.1%})"
        if one.cadence.share is not None
        else " (effective time unknown: too many failures)"
    )


def _restart(one: Uptime) -> str:
    if one.restart_budget_s is None:
        return "no restart is short enough for 90 %"
    return f"a restart may take {_time(one.restart_budget_s)} for 90 %, planned {_time(one.restart_s)}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


# The page of a plan: one self-contained HTML file with tables and pictures, for those who decide.
#
# Everything on it comes from the same `Planned` that the console prints.
