"""A recipe's plan on a cluster: layouts, steps, days, money, cadence and placement, for `herd plan --cluster`.

The cluster is a preset, a YAML file of one, or the file that `herd run` takes, whose layouts are then judged instead of
searched for. Everything is arithmetic on one core, in seconds; what cannot be known is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from llama3.cluster.axes import AxisBytes
from llama3.cluster.budget import Budget, Prices, StageTime, Stored, checkpoint_bytes
from llama3.cluster.cut import Recommendation, minimum_cut
from llama3.cluster.goodput import BYTECHECKPOINT, CheckpointCosts, Recovery
from llama3.cluster.projection import Projected, Projection, project
from llama3.cluster.sensitivity import Effect, effects
from llama3.cluster.topology import Fabric, fabric_names
from llama3.cluster.uptime import RECOVERY, Uptime, uptime
from llama3.cluster.volumes import stage_volumes
from llama3.parallel.sizes import stages
from llama3.recipe.schema import Recipe
from storage.root import Root
from tasks.measured_costs import measured_costs
from tasks.plan import Plan
from tasks.plan_options import curves_of, known_stages, open_cluster, parse_gpus, places_of
from tasks.projection import as_json

QUANTITIES = ("days", "gpu_hours", "money")


@dataclass(frozen=True)
class Planned:
    """A recipe on a cluster."""

    plan: Plan
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

    def write_page(self, path: Path) -> None:
        """Write the page with pictures."""
        from tasks.plan_page import write_page  # imports matplotlib

        write_page(self, path)

    def write_cluster(self, path: Path) -> None:
        """Write where the run is to work, for `herd run --cluster`: the main part's layout, and stages that differ."""
        path.write_text(yaml.safe_dump(cluster_fields(self.projection, self.named), sort_keys=False))


def plan_on(
    plan: Plan,
    named: str,
    gpus: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    sparse: bool = False,
    root: Root | None = None,
) -> Planned:
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
    return Planned(plan, _lasting(named), projection, *outlook(plan, projection, paid, measured))


def _lasting(named: str) -> str:
    """Return a preset's name as it is, and a file's path so that it holds in any folder."""
    return named if named in fabric_names() else str(Path(named).absolute())


def described_power(fabric: Fabric) -> dict[str, float]:
    """Return the watts of a GPU and of its share of a server, as the cluster's description has them."""
    return {"gpu_watts": fabric.accelerator.watts, "server_watts": fabric.server.overhead_watts / fabric.server.gpus}


def outlook(
    plan: Plan, projection: Projection, prices: Prices, measured: tuple[CheckpointCosts, Recovery] | None = None
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


def stored(plan: Plan) -> Stored:
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
    return Stored(text, float(tokens * width), checkpoint_bytes(plan.parameters), float(count))


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
