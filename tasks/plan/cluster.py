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
from typing import Any

import pyarrow.parquet as parquet
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from herd.llama3.hardware.prices import Prices
from herd.llama3.hardware.specs import hall_use
from herd.llama3.hardware.topology import Fabric, fabric_names, is_fabric_name, load_fabric
from herd.llama3.model.flops import checkpoint_bytes, parameter_count, recipe_vocab_size
from herd.llama3.parallel.comm_records import Collective
from herd.llama3.parallel.memory import stages
from herd.llama3.planner.budget import Budget, StageTime, StorageUse
from herd.llama3.planner.collectives import Network, fastest_algorithm
from herd.llama3.planner.comm_volume import stage_volumes
from herd.llama3.planner.goodput import CheckpointCosts, Recovery, scaled_costs, shared_network_loss
from herd.llama3.planner.layout_search import HEADROOM
from herd.llama3.planner.placement import AxisBytes, AxisTraffic, PlacementChoice, minimum_cut, server_order
from herd.llama3.planner.projection import ProjectedSegment, Projection, Sensitivity, project, sensitivities
from herd.llama3.planner.routing import bandwidth_share
from herd.llama3.planner.step_time import layer_work
from herd.llama3.planner.uptime import RECOVERY, Uptime, scaled_recovery, uptime
from herd.llama3.recipe.load import digest, resolved
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train import metrics
from herd.storage.artifact import flatten
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import SCHEDULERS, Cluster
from herd.tasks.format import format_bytes
from herd.tasks.plan.options import (
    check_stage_names,
    device_curves,
    free_gpus,
    open_cluster,
    parse_gpus,
    read_hosts,
    stage_placements,
)
from herd.tasks.plan.predict import EvaluationCost, evaluation_cost
from herd.tasks.plan.recipe import RunPlan
from herd.tasks.plan.tables import (
    best_table,
    format_amount,
    format_days,
    format_digits,
    format_energy,
    format_memory,
    hall_facts,
    hall_line,
    plain_table,
    projection_json,
    rejected_table,
    stages_table,
    time_table,
    time_unit,
)
from herd.tasks.runs.records import Runs, is_merge
from herd.tasks.tracking.mlflow import MetricPoint, MLflowTracker

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
            if step.artifact.startswith("checkpoint/") and not is_merge(stage := store.load(step.artifact)):
                table = parquet.read_table(stage.path_of("metrics.parquet"), filters=[("key", "in", KEYS)])
                for row in table.to_pylist():
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
    measured: tuple[CheckpointCosts, Recovery] | None
    """Costs of saves and restarts in an earlier run."""
    evaluation: EvaluationCost | None
    """None if the cluster cannot evaluate the model; a warning of the plan says why."""
    hosts: tuple[str, ...] = ()
    """Name of each server's host; "" for one that other jobs use. Empty: not known, and all are free."""

    def __repr__(self) -> str:
        return f"<plan of {self.plan.recipe.name} on {self.named}: {self.budget.days:.3g} days>"

    @property
    def main(self) -> ProjectedSegment:
        """The part that takes most GPU-hours."""
        return self.projection.main

    @cached_property
    def placement(self) -> PlacementChoice:
        """The recommended rank order of the main part."""
        best, fabric = self.main.best, self.projection.fabric
        free = free_gpus(self.hosts, fabric) if self.hosts else None
        return minimum_cut(best.layout, best.world, fabric, sent_bytes(self.projection, self.main), free)

    @cached_property
    def host_order(self) -> tuple[list[str], float]:
        """The main part's hosts in the order of ranks, and the bytes of a step that cross the placement's layer."""
        best, fabric = self.main.best, self.projection.fabric
        servers, crossing = server_order(self.placement, best.layout, fabric, sent_bytes(self.projection, self.main))
        return [self.hosts[server] for server in servers], crossing

    def effects(self) -> dict[str, list[Sensitivity]]:
        """Return the three unknowns that move each quantity most."""
        return {name: sensitivities(self.budget, name) for name in QUANTITIES}  # type: ignore[arg-type]

    def as_json(self, most: int) -> dict[str, Any]:
        """Return every figure that is shown."""
        fabric, state_bytes = self.projection.fabric, self.budget.stored.checkpoint_bytes
        return {
            **projection_json(self.projection, most),
            "budget": self.budget.as_dict(),
            "sensitivity": {name: [effect.as_dict() for effect in moving] for name, moving in self.effects().items()},
            "reliability": [
                {
                    "gpus": reliability.gpus,
                    "mtti_s": reliability.mtti_s,
                    "rsc1_mtti_s": reliability.rsc1_mtti_s,
                    "rsc1_effective_time": reliability.rsc1_share,
                    "restart_s": reliability.restart_s,
                    "interval_s": reliability.interval_s,
                    "best_interval_s": reliability.cadence.interval_s,
                    "best_share": reliability.cadence.share,
                    "effective_time": reliability.share,
                    "effective_time_5_95": [reliability.spread.low, reliability.spread.high],
                    "spare_hosts": reliability.spares,
                    "restart_budget_s": reliability.restart_budget_s,
                    "checkpoint_costs": vars(reliability.costs),
                    "storing_s": state_bytes / fabric.storage_bytes_per_s(reliability.gpus),
                }
                for reliability in self.uptimes.values()
            ],
            "placement": {
                "bytes": self.placement.crossing,
                "traffic": [axis.as_dict() for axis in self.placement.traffic],
                "hosts": self.host_order[0] if self.hosts else None,
                "hosts_bytes": self.host_order[1] if self.hosts else None,
            },
            "saving_loss": saving_loss(fabric, self.main, self.uptimes[self.main.best.world], state_bytes),
            "nccl": nccl_variables(self.projection, self.main),
            "power": hall_use(fabric.hall, fabric.server, self.main.best.world).as_dict() if fabric.hall else None,
            "evaluation": self.evaluation.as_dict() if self.evaluation else None,
            "warnings": self.plan.warnings,
        }

    def write_cluster(self, path: Path) -> None:
        """Write the file for `herd run --cluster`: the main part's layout, stages that differ, what launchers need.

        With `hosts` a file of the same name with the ending .hosts lists them in the order of ranks, for Slurm.
        """
        segments = self.projection.segments

        def fields(projected: ProjectedSegment) -> dict[str, Any]:
            # The lengths of a stage share a layout; a shorter step may split into smaller micro-batches by itself.
            sizes = [other.best.load.micro_batch for other in segments if other.stage == projected.stage]
            layout = projected.best.layout.model_dump(exclude_defaults=True)
            return {"processes": projected.best.world, "micro_batch": max(sizes), "layout": layout}

        nodes: dict[str, dict[str, Any]] = {launcher: {} for launcher in SCHEDULERS}
        if variables := nccl_variables(self.projection, self.main):
            nodes = {launcher: {"environment": dict(variables)} for launcher in nodes}
        if self.hosts:
            names = path.with_suffix(".hosts").absolute()
            names.write_text("".join(f"{host}\n" for host in self.host_order[0]))
            nodes["slurm"] |= {"processes_per_node": self.projection.fabric.server.gpus, "host_file": str(names)}
        main = fields(self.main)
        others = {projected.stage: fields(projected) for projected in segments if fields(projected) != main}
        settings: dict[str, Any] = {"launcher": "slurm"} if self.hosts else {}
        settings |= {launcher: own for launcher, own in nodes.items() if own}
        cluster = {**main, "fabric": self.named, **({"stages": others} if others else {}), **settings}
        path.write_text(yaml.safe_dump(cluster, sort_keys=False))


def plan_on_cluster(
    plan: RunPlan,
    named: str,
    gpus: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    sparse: bool = False,
    root: Root | None = None,
    megawatts: float = 0.0,
    hosts: Path | None = None,
) -> ClusterPlan:
    """Return the plan on the cluster `named`; `prices` are fields of `Prices`.

    `megawatts`: power of the site, which limits the GPUs; 0: not at all. `hosts`: see `read_hosts`. `root` has
    calibrations, and measurements of earlier runs of the recipe. Raises ValueError, a line per fault.
    """
    fabric, given_cluster = open_cluster(named, sparse)
    if fabric is None:
        raise ValueError(
            f"cluster.fabric: {named} names none, so its devices and network are unknown; write fabric: with one of "
            f"{', '.join(fabric_names())}, or the path of a YAML file like them (herd plan presets)"
        )
    fed = min(fabric.gpus, int(hall_facts(fabric, megawatts, 0.0)["gpus"])) if megawatts else fabric.gpus
    names = read_hosts(hosts, fabric) if hosts else ()
    free = len(free_gpus(names, fabric)) if hosts else fabric.gpus
    paid = Prices(**{**power_per_gpu(fabric), **(prices or {})})
    everywhere, placements = parse_gpus(gpus)
    check_stage_names(plan.recipe, placements)
    if given_cluster is not None:
        if gpus:
            raise ValueError(
                f"gpus: {', '.join(gpus)} is given, but {named} sets the GPUs of each stage; edit the file"
            )
        placements, named = stage_placements(plan.recipe, given_cluster), given_cluster.fabric
    most = max([everywhere, *(stage.gpus for stage in placements.values())])
    for limit, field in ((fed, f"megawatts: {megawatts:g} feed"), (free, f"hosts: {hosts} names hosts with")):
        if limit < min(most, fabric.gpus):
            raise ValueError(f"{field} {limit:,} GPUs of {fabric.name}, not {most:,}; ask for fewer")
    limit = min(fed, free)
    projection = project(
        plan.recipe, plan.vocab_size, fabric, device_curves(fabric, root), placements, everywhere, limit
    )
    measured = measured_costs(root, plan.recipe.name) if root is not None else None
    lasting = named if is_fabric_name(named) else str(Path(named).absolute())  # holds in any folder
    warnings, cost = headroom_warnings(projection), None
    try:
        cost = evaluation_cost(plan.recipe, given_cluster or Cluster(fabric=named))
    except ValueError as error:
        warnings.append(f"{error}; herd run refuses this before it starts")
    plan = replace(plan, warnings=[*plan.warnings, *warnings])
    uptimes, budget = estimate_uptime_and_budget(plan, projection, paid, measured)
    return ClusterPlan(plan, lasting, projection, uptimes, budget, measured, cost, names)


def nccl_variables(projection: Projection, projected: ProjectedSegment) -> dict[str, str]:
    """Return the variables that make NCCL send as the plan assumes; none for a job on one server.

    The algorithm is named for all-reduces only: others have but a ring, and NVLink's switches inside a server.
    """
    best, fabric = projected.best, projection.fabric
    if best.world <= fabric.server.gpus:
        return {}
    network = Network(fabric, bandwidth_share(fabric))
    algorithms = {
        fastest_algorithm(
            "all-reduce", message.bytes, network.group(message.axis, best.layout, best.world), network.layers
        )
        for message in sent_messages(projection, projected)
        if message.kind == "all-reduce" and message.axis in ("fsdp", "replica")
    }
    names = {algorithm for algorithm, _ in algorithms}
    flows = {"NCCL_IB_QPS_PER_CONNECTION": str(fabric.queue_pairs)} if fabric.queue_pairs > 1 else {}
    return flows | ({"NCCL_ALGO": f"allreduce:{names.pop()}"} if len(names) == 1 else {})


def headroom_warnings(projection: Projection) -> list[str]:
    """Return a line for the stages whose layouts leave too little memory free."""
    memory = projection.fabric.accelerator.memory_gb * 1e9
    used = [(projected.best.memory.total / memory, projected.stage) for projected in projection.segments]
    full = dict.fromkeys(stage for share, stage in used if share > 1 - HEADROOM)
    if not full:
        return []
    most = max(used)[0]
    return [
        f"layout: {', '.join(full)} take {most:.0%} of a GPU's memory; the estimate may be 5 % off, and NCCL, the CUDA "
        "context and fragments need some of the rest; take more GPUs, or measure a step before you rely on it"
    ]


def power_per_gpu(fabric: Fabric) -> dict[str, float]:
    """Return the watts of a GPU and of its share of a server, from the cluster's description."""
    return {"gpu_watts": fabric.accelerator.watts, "server_watts": fabric.server.overhead_watts / fabric.server.gpus}


def estimate_uptime_and_budget(
    plan: RunPlan, projection: Projection, prices: Prices, measured: tuple[CheckpointCosts, Recovery] | None = None
) -> tuple[dict[int, Uptime], Budget]:
    """Return the reliability of each number of GPUs, and the budget.

    `measured`: as in `job_uptime`.
    """
    fabric, state_bytes = projection.fabric, checkpoint_bytes(plan.parameters)
    sizes = sorted({projected.best.world for projected in projection.segments})
    uptimes = {size: job_uptime(projection, size, measured) for size in sizes}
    times = tuple(
        StageTime(
            projected.stage,
            projected.segment.tokens,
            projected.segment.steps,
            projected.best.world,
            projected.best.time.total,
            uptimes[projected.best.world].share
            / (1 + saving_loss(fabric, projected, uptimes[projected.best.world], state_bytes)),
            projected.best.time.gemm_bound,
            projected.best.time.exposed_comm,
        )
        for projected in projection.segments
    )
    main = projection.main.best.world
    spares = replace(prices, spare_share=uptimes[main].spares * fabric.server.gpus / main)
    return uptimes, Budget(times, spares, storage_use(plan))


def job_uptime(projection: Projection, gpus: int, measured: tuple[CheckpointCosts, Recovery] | None = None) -> Uptime:
    """Return the reliability of the recipe on `gpus`.

    `measured`: costs of saves and restarts in an earlier run; None: the published figures, scaled to this size.
    """
    recipe, fabric = projection.recipe, projection.fabric
    state_bytes = checkpoint_bytes(parameter_count(recipe.model, projection.vocab_size))
    costs, recovery = measured or (
        scaled_costs(state_bytes, gpus, fabric.storage_bytes_per_s(gpus)),
        scaled_recovery(gpus),
    )
    interval = checkpoint_interval_s(recipe, projection.main)
    return uptime(gpus, interval, costs, recovery, gpus_per_host=fabric.server.gpus)


def saving_loss(fabric: Fabric, projected: ProjectedSegment, reliability: Uptime, state_bytes: float) -> float:
    """Return the share of time that saves cost because they use the network of training; 0 with a frontend network."""
    gpus, costs = projected.best.world, reliability.costs
    if fabric.server.frontend_gbit_s or gpus <= fabric.server.gpus:
        return 0.0
    sent = state_bytes / max(costs.save_s - costs.block_s, 1e-3) / (gpus * fabric.server.nic_bytes_per_s)
    exposed = projected.best.time.exposed_comm / projected.best.time.total
    return shared_network_loss(exposed, sent, costs.save_s, reliability.interval_s)


def checkpoint_interval_s(recipe: Recipe, projected: ProjectedSegment) -> float:
    """Return the seconds between two checkpoints of a part."""
    every = recipe.checkpoint.every
    if every.unit == "seconds":
        return float(every.amount)
    return every.amount / projected.segment.batch * projected.best.time.total


def storage_use(plan: RunPlan) -> StorageUse:
    """Return the storage of the recipe: text if it was surveyed, tokens, and the checkpoints that are kept."""
    every, keep, tokens = plan.recipe.checkpoint.every, plan.recipe.checkpoint.keep, plan.schedule.tokens
    width = 2 if plan.vocab_size <= 2**16 else 4
    count = 0
    for span in plan.schedule.trained:
        # The tokens between two saves: of a cadence in seconds assume at least four saves per milestone.
        stride = every.amount if every.unit == "tokens" else span.segments[-1].batch
        if every.unit == "seconds" and keep.every is not None:
            stride *= max(1, keep.every // (4 * stride))
        saved = (*range(span.start + stride, span.end, stride), span.end)
        count += len(keep.kept(saved, rollback=plan.recipe.rollback_tokens(span)))
    surveyed = bool(plan.sources) and all(survey.complete for survey in plan.sources)
    text = float(sum(survey.bytes for survey in plan.sources)) if surveyed else None
    return StorageUse(text, float(tokens * width), checkpoint_bytes(plan.parameters), float(count))


def sent_bytes(projection: Projection, projected: ProjectedSegment) -> AxisBytes:
    """Return the bytes that a GPU in the middle of the pipeline sends in a step, by axis."""
    best = projected.best
    return AxisBytes.from_collectives(sent_messages(projection, projected), best.layout, best.load.micro_batches)


def sent_messages(projection: Projection, projected: ProjectedSegment) -> list[Collective]:
    """Return the messages of a GPU in the middle of the pipeline."""
    best, config = projected.best, projection.recipe.model
    return [
        message
        for stage in stages(config, best.layout, best.layout.pp // 2)
        for message in stage_volumes(stage, config, projection.vocab_size, best.layout, best.world, best.load)
    ]


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
    section(f"where a step of {main.stage} goes ({format_digits(best.time.total)} s)", time_table(main))
    where = f", pipeline rank {best.memory.pipeline_rank}" if best.layout.pp > 1 else ""
    out.print(f"memory   {format_memory(best, best.memory.total + best.margin)}{where}")
    rate = main.segment.batch / best.time.total
    each = f"{format_amount(rate / best.world)} of each GPU, " if best.world > 1 else ""
    out.print(f"speed    {format_amount(rate)} tokens/s, {each}MFU {main.mfu:.1%} (6N + causal attention)")
    if (result := main.search) is not None:
        title = f"{main.stage}: {result.considered:,} layouts, {len(result.fitting):,} fit"
        section(title, best_table(result, top), *([rejected_table(result)] if result.rejected else []))
    if planned.placement.traffic:
        section("network", network_table(planned.placement.traffic, best.world))
    for line in (
        *placement_lines(planned),
        *budget_lines(planned),
        *evaluation_lines(planned),
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
    servers, network = "1 server", ""  # which sends nothing through a switch
    if fabric.servers > 1:
        servers, network = f"{fabric.servers:,} servers", f"; {tiers}; {fabric.network}, {fabric.routing}{flows}"
    yield f"cluster  {fabric.name}: {fabric.gpus:,} {fabric.accelerator.name} in {servers}{network}"
    yield f"devices  {curves}"


def network_table(rows: Sequence[AxisTraffic], world: int) -> Table:
    """Return the layer that each axis crosses, and the bytes that a GPU sends there in a step."""
    used = [index for index in range(len(rows[0].layers)) if any(row.bytes[index] for row in rows)]
    layers = (f"{rows[0].layers[index]}, GB" for index in used)
    table = plain_table("axis", "size", "crosses", *layers, left=("axis", "crosses"))
    for row in rows:
        sent = (format_digits(row.bytes[index] / world / 1e9) if row.bytes[index] else "" for index in used)
        table.add_row(row.axis, str(row.size), row.crosses, *sent)
    return table


def placement_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield the bytes over the oversubscribed layer for each order of ranks."""
    cut = planned.placement
    if cut.layer and planned.main.best.world > planned.projection.fabric.server.gpus:
        sizes = {name: cut.crossing[name].get(cut.layer, 0.0) for name in ("recommended", "contiguous", "random")}
        terms = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        if planned.hosts:
            terms += f", hosts of the file in order {format_bytes(planned.host_order[1])}"
        yield f"placed   over the {cut.layer} layer in a step: {terms}"
    if variables := nccl_variables(planned.projection, planned.main):
        yield f"nccl     {', '.join(f'{name}={value}' for name, value in variables.items())}"


def budget_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield days, GPU-hours, money, energy and storage, and the unknowns they depend on most."""
    budget, prices, short = planned.budget, planned.budget.prices, format_amount
    price, spares = f"{prices.gpu_hour:g} per GPU-hour", planned.uptimes[planned.main.best.world].spares
    if prices.gpu_hour == Prices.gpu_hour and "h100" not in planned.projection.fabric.accelerator.name.lower():
        price += " (assumed, of an H100)"
    if spares:
        price += f", {short(budget.gpu_money)} with {spares} spare server{'s' * (spares > 1)}"
    yield ""
    yield (
        f"takes    {format_days(budget.days)}, {short(budget.gpu_hours)} GPU-hours, "
        f"{short(budget.gpu_hours * prices.gpu_hour)} USD at {price}, {format_energy(budget.mwh)}"
    )
    kept = budget.stored
    text = "without text" if kept.text_bytes is None else f"with {format_bytes(kept.text_bytes)} of text"
    yield (
        f"stores   {format_bytes(kept.total)} {text}: tokens {format_bytes(kept.token_bytes)}, "
        f"{kept.checkpoints:,.0f} checkpoints of {format_bytes(kept.checkpoint_bytes)}; "
        f"{short(budget.storage_money)} USD at {prices.gb_month:g} per GB and month"
    )
    unit, a_day = time_unit(budget.days)
    for name, moving in planned.effects().items():
        scale, label = (a_day, unit) if name == "days" else (1, name.replace("_", "-"))
        if getattr(budget, name) * scale < 0.01:  # every range would be "under 0.01"
            continue
        ranges = ((effect.name, sorted((effect.low * scale, effect.high * scale))) for effect in moving)
        terms = "; ".join(f"{effect} ({short(low)} to {short(high)})" for effect, (low, high) in ranges)
        yield f"{label:<10}depend on {terms}"


def evaluation_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield where and for how long the models of the run are evaluated."""
    if (cost := planned.evaluation) is None:
        return
    gates = f" and {cost.gates} gate{'s' * (cost.gates > 1)}" if cost.gates else ""
    yield (
        f"scores   {cost.evaluations} evaluations{gates} in {planned.plan.recipe.evaluate.precision} on "
        f"{cost.processes} GPU{'s' * (cost.processes > 1)} (tp {cost.layout.tp} x pp {cost.layout.pp}, "
        f"{cost.process_bytes / 1e9:,.1f} GB each): about {format_days(cost.seconds / 86_400)}, "
        f"{format_amount(cost.gpu_hours)} GPU-hours"
    )


def uptime_lines(planned: ClusterPlan) -> Iterator[str]:
    """Yield how often the job fails and how often to save, for each number of GPUs."""
    for reliability in planned.uptimes.values():
        spread, cadence = reliability.spread, reliability.cadence
        yield (
            f"failures {reliability.gpus:,} GPU{'s' * (reliability.gpus > 1)}: one every {_time(reliability.mtti_s)}; "
            f"effective time {reliability.share:.1%} ({spread.low:.1%} to {spread.high:.1%}); "
            f"{reliability.spares or 'no'} spare server{'s' * (reliability.spares > 1)}"
        )
        if reliability.rsc1_mtti_s is not None:
            share = f", effective time {reliability.rsc1_share:.1%}" if reliability.rsc1_share is not None else ""
            often = _time(reliability.rsc1_mtti_s)
            yield f"         on a fleet like RSC-1 (arXiv 2410.21680): one every {often}{share}"
        share = f"{cadence.share:.1%}" if cadence.share is not None else "effective time unknown: too many failures"
        restart, longest = "", reliability.restart_budget_s
        if longest is None:
            restart = "; no restart is short enough for 90 %"
        elif longest < 86_400:  # no restart takes a day
            restart = f"; restarts of up to {_time(longest)} leave 90 %, planned {_time(reliability.restart_s)}"
        yield (
            f"saving   every {_time(reliability.interval_s)} as the recipe says; best {_time(cadence.interval_s)} "
            f"({share}){restart}"
        )
    fabric, main, state_bytes = planned.projection.fabric, planned.main, planned.budget.stored.checkpoint_bytes
    reliability, gpus = planned.uptimes[main.best.world], main.best.world
    costs, least = reliability.costs, state_bytes / fabric.storage_bytes_per_s(gpus)
    block, save, load, bare = map(format_digits, (costs.block_s, costs.save_s, costs.load_s, least))
    seconds = f"a save blocks {block} s and takes {save} s, loading {load} s"
    yield f"         {seconds} ({costs.source}); its bytes alone need {bare} s"
    if fabric.server.frontend_gbit_s:
        yield f"         saves and data use the frontend network, {fabric.server.frontend_gbit_s:g} Gb/s a server"
    elif loss := saving_loss(fabric, main, reliability, state_bytes):
        yield f"         saves and data use the network of training, which costs {loss:.2%} of the time"
    if fabric.hall is not None:
        yield hall_line(hall_use(fabric.hall, fabric.server, gpus))


def _time(seconds: float) -> str:
    return format_days(seconds / 86_400)


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
        return sum(projected.seconds for projected in self.projection.segments) / self.uptime.share / 86_400

    @property
    def gpu_hours(self) -> float:
        return (
            sum(projected.seconds * projected.best.world for projected in self.projection.segments)
            / self.uptime.share
            / 3600
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values of the table."""
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
    everywhere, placements = parse_gpus(gpus)
    check_stage_names(recipe, placements)
    planned = []
    for fabric in [load_fabric(name) for name in clusters]:
        curves = device_curves(fabric, root)
        projection = project(recipe, recipe_vocab_size(recipe), fabric, curves, placements, everywhere)
        reliability = job_uptime(projection, projection.main.best.world)
        planned.append(ClusterProjection(projection, bandwidth_share(fabric), reliability))
    tracker = MLflowTracker(root, f"{recipe.name}-plan")
    recorded = [replace(plan, run=_record(tracker, plan.projection, plan.uptime)) for plan in planned]
    return sorted(recorded, key=lambda plan: plan.days)


def fabrics_table(projections: Sequence[ClusterProjection]) -> Table:
    """Return a row per cluster, the fastest first."""
    table = plain_table(
        "cluster", "routing", "card", "GPUs", "step s", "TFLOP/s", "uptime", "days", "GPU-hours", "slower",
        left=("cluster", "routing"),
    )  # fmt: skip
    for plan in projections:
        best = plan.projection.main.best
        table.add_row(
            plan.fabric.name,
            plan.fabric.routing,
            f"{plan.share:.0%}",
            f"{best.world:,}",
            format_digits(best.time.total),
            f"{best.tflops:.0f}",
            f"{plan.uptime.share:.1%}",
            format_digits(plan.days),
            format_amount(plan.gpu_hours),
            f"{plan.days / projections[0].days - 1:+.1%}",
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
    for projected in projection.segments:  # figures at the first and the last token, with the names of a training run
        hours += projected.seconds * projected.best.world / reliability.share / 3600
        values = segment_metrics(projected, reliability.share)
        for position in (projected.segment.start, projected.segment.end):
            points += [MetricPoint(key, value, now, position) for key, value in values.items()]
        points.append(MetricPoint(metrics.GPU_HOURS, hours, now, projected.segment.end))
    tracker.log_points([run], points)
    tracker.close(run, "FINISHED")
    return tracker.page(run)


def segment_metrics(projected: ProjectedSegment, effective: float) -> dict[str, float]:
    """Return the metrics of a training run that a prediction knows."""
    best, step_s = projected.best, projected.best.time.total
    return {
        metrics.STEP_S: step_s,
        metrics.TOKENS_PER_S: projected.segment.batch / step_s,
        metrics.TOKENS_PER_S_PER_DEVICE: projected.segment.batch / step_s / best.world,
        metrics.TFLOPS_PER_DEVICE: best.tflops,
        metrics.MFU: projected.mfu,
        metrics.GOODPUT: effective,
        metrics.DEVICE_PEAK_GIB: best.memory.total / 2**30,
        metrics.SEQ_LEN: float(projected.segment.seq_len),
        metrics.BATCH_TOKENS: float(projected.segment.batch),
    }
