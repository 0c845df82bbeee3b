"""The page of a plan: one self-contained HTML file, from the same `ClusterPlan` as the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from herd.llama3.hardware.topology import Fabric
from herd.llama3.parallel.memory import RESERVE, RankCoords, RankMemory, memory, memory_components
from herd.llama3.parallel.pipeline_schedule import Times, action_end_times, actions
from herd.llama3.planner.goodput import effective_time
from herd.llama3.planner.layout_search import LayoutQuery, search_layouts
from herd.llama3.planner.placement import AxisTraffic, Placement
from herd.llama3.planner.projection import ProjectedSegment, fabric_step_model, segment_query
from herd.llama3.planner.step_time import PipelineTiming
from herd.storage.filesystem import write_atomic
from herd.tasks.figures import as_svg, styled, subplots
from herd.tasks.html import DIM, INK, render
from herd.tasks.plan.cluster import ClusterPlan, budget_lines, fabric_lines, job_uptime, placement_lines, uptime_lines
from herd.tasks.plan.recipe import stage_rows
from herd.tasks.plan.tables import (
    NAMES,
    format_amount,
    format_days,
    format_degrees,
    format_digits,
    format_energy,
    format_layout,
    format_memory,
    format_pipeline,
    rejection_reasons,
    time_unit,
)

LAYOUTS = 12
"""On the page; the rest is in --json."""
LEAST_GPUS = 16
"""The plot of cost starts at the main part's GPUs over this number."""


def write_page(planned: ClusterPlan, path: Path) -> None:
    """Write the page of a plan."""
    write_atomic(path, render_plan_page(planned))


def render_plan_page(planned: ClusterPlan) -> str:
    """Return the page of a plan as HTML text."""
    main = planned.main
    unit, a_day = time_unit(sum(projected.seconds for projected in planned.projection.segments) / 86_400)
    return render(
        "plan.html",
        planned=planned,
        main=main,
        best=main.best,
        stages=stage_rows(planned.plan),
        fabric=list(fabric_lines(planned.projection.fabric, planned.projection.curves.source)),
        money=[line for line in (*placement_lines(planned), *budget_lines(planned)) if line],
        failures=list(uptime_lines(planned)),
        seconds=sorted(main.best.time.as_dict().items(), key=lambda pair: -pair[1]),
        names=NAMES,
        words=format_memory(main.best, main.best.memory.total + main.best.margin),
        fitting=main.search.fitting[:LAYOUTS] if main.search else [],
        reasons=rejection_reasons(main.search) if main.search else [],
        degrees=format_degrees,
        inner=format_pipeline,
        layout_words=format_layout,
        takes=format_days(planned.budget.days).rsplit(" ", 1),
        amount=format_amount,
        digits=format_digits,
        unit=unit,
        a_day=a_day,
        energy=format_energy(planned.budget.mwh),
        figures=plan_figures(planned),
    )


def plan_figures(planned: ClusterPlan) -> list[tuple[str, str, str]]:
    """Return title, explanation and SVG of every plot."""
    projection, main = planned.projection, planned.main
    best, fabric = main.best, projection.fabric
    model = fabric_step_model(_query(planned, best.world), fabric, projection.curves)
    timing = model.pipeline(best.layout, best.world, best.load)
    rank = np.array([RankCoords.from_rank(number, best.layout).pp for number in range(best.world)])
    needs = memory(projection.recipe.model, projection.vocab_size, best.layout, best.world, best.load)
    whole = fabric.accelerator.memory_gb * 1e9
    reliability = planned.uptimes[best.world]
    cadence = _cadence_plot(
        lambda seconds: effective_time(reliability.mtti_s, reliability.restart_s, seconds, reliability.costs),
        reliability.cadence.interval_s,
        reliability.interval_s,
    )
    figures: list[tuple[str, str, str]] = []
    if fabric.servers > 1:
        note = "Each square is a server, its color the pipeline rank that it works on; gray servers are free."
        plot = _topology_plot(fabric, planned.placement.placement, rank, best.layout.pp)
        figures.append(("The job on the cluster", note, plot))
    if planned.placement.traffic:  # a GPU alone has none
        note = "What a GPU sends that goes up to each layer of the network and no further, by axis of parallelism."
        figures.append(("Traffic of a step", note, _traffic_plot(planned.placement.traffic, best.world)))
    if best.layout.pp > 1:
        note = "Which rank works when" + ("; dark and light: virtual stages in turn." if best.layout.vpp > 1 else ".")
        figures.append(("The pipeline", note, _pipeline_plot(main, timing)))
    return [
        *figures,
        (
            "Memory of a GPU",
            "At the fullest moment, by pipeline rank. Dashed: what a process may use; solid: all of it.",
            _memory_plot(needs, best.memory.total + best.margin, whole),
        ),
        ("How often to save", "Effective training time in closed form.", cadence),
        (
            "Cost against days",
            "The main stage's best layout on other numbers of GPUs, taken for the whole recipe, failures included.",
            _cost_plot(cost_points(planned)),
        ),
    ]


def _query(planned: ClusterPlan, world: int) -> LayoutQuery:
    projection = planned.projection
    reserve = planned.main.search.query.reserve if planned.main.search else RESERVE
    segment = planned.main.segment
    return segment_query(projection.recipe, projection.vocab_size, projection.fabric, segment, world, reserve)


def cost_points(planned: ClusterPlan) -> Sequence[tuple[int, float, float]]:
    """Return GPUs, days and money of jobs of other sizes, if all stages scale as the main one does."""
    projection, main = planned.projection, planned.main
    points: list[tuple[int, float, float]] = []
    reliability = planned.uptimes[main.best.world]
    world = 1 << (projection.fabric.gpus.bit_length() - 1)
    while world >= max(1, main.best.world // LEAST_GPUS):
        query = _query(planned, world)
        fitting = search_layouts(query, fabric_step_model(query, projection.fabric, projection.curves)).fitting
        if fitting:
            share = job_uptime(projection, world, planned.measured).share
            slower = fitting[0].time.total / main.best.time.total * reliability.share / share
            days = planned.budget.days * slower
            hours = days * 24 * world
            prices = planned.budget.prices
            points.append((world, days, hours * (1 + prices.spare_share) * prices.gpu_hour))
        world //= 2
    return points


PALETTE = ("#3b6fb6", "#d1603d", "#3f9b6c", "#8a63b8", "#c9a227", "#4aa3b5", "#b65a86", "#7a7f87", "#9bb13c", "#a5714a")
FREE = (0.5, 0.5, 0.5, 0.2)
AXES = {"tp": PALETTE[0], "cp": PALETTE[4], "pp": PALETTE[2], "dp": PALETTE[1], "replica": PALETTE[3]}
MEMORY = {
    "activations": PALETTE[0],
    "weights": PALETTE[2],
    "gradients": PALETTE[1],
    "optimizer": PALETTE[3],
    "average": PALETTE[4],
    "temporary": PALETTE[7],
}
WIDTH = 8.0
PIXELS = 2_400
"""Columns of the pipeline plot; anything shorter than a column is invisible."""
MONEY = {"million": 1e6, "thousand": 1e3}
SHOWN_ROUNDS = 2
"""Rounds of micro-batches in the pipeline plot; later ones repeat."""


@styled
def _topology_plot(fabric: Fabric, placement: Placement, pipeline_rank: np.ndarray, stages: int) -> str:
    """Return a map of servers, a block for each group of the tier below the outermost, colored by pipeline rank.

    `pipeline_rank` [world]: of each rank.
    """
    per_server = fabric.server.gpus
    color = np.full(fabric.servers, stages)
    color[placement.gpus // per_server] = pipeline_rank
    outer = fabric.tiers[-2].gpus if len(fabric.tiers) > 1 else fabric.gpus
    groups, servers = fabric.gpus // outer, outer // per_server
    across = min(groups, 4)
    down = -(-groups // across)
    figure, grid = subplots(down, across, figsize=(WIDTH, 1.55 * down), squeeze=False)
    tints = [colormaps["viridis"](rank / max(1, stages - 1)) for rank in range(stages)]
    colors = ListedColormap([*tints, FREE])  # type: ignore[list-item]
    group_name = fabric.tiers[-2].name if len(fabric.tiers) > 1 else fabric.tiers[-1].name
    columns = min(
        (size for size in range(1, servers + 1) if servers % size == 0),
        key=lambda size: abs(size * size - 1.6 * servers),
    )
    for number, axis in enumerate(grid.flat):
        axis.axis("off")
        if number < groups:
            block = color[number * servers : (number + 1) * servers]
            axis.imshow(block.reshape(-1, columns), cmap=colors, vmin=0, vmax=stages, interpolation="nearest")
            used = int((block < stages).sum()) * per_server
            axis.set_title(f"{group_name} {number + 1}: {used:,} GPUs", fontsize=9)
    return as_svg(figure)


@styled
def _traffic_plot(rows: Sequence[AxisTraffic], world: int) -> str:
    """Return the bytes that a GPU sends in a step over each layer of the network, by axis."""
    layers = rows[0].layers
    figure, axis = subplots(figsize=(WIDTH, 0.5 * len(layers) + 1.0))
    left = np.zeros(len(layers))
    for row in rows:
        each = np.array(row.bytes) / world
        axis.barh(layers, each, left=left, color=AXES[row.axis], label=f"{row.axis} {row.size}", height=0.6)
        left += each
    for layer, whole in enumerate(left):
        axis.text(whole, layer, f" {_bytes(whole)}", va="center", fontsize=9)
    axis.set_xlim(right=max(left) * 1.12)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    axis.set_xlabel("bytes per GPU and step")
    axis.legend(ncols=5, loc="lower right")
    return as_svg(figure)


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


@styled
def _pipeline_plot(projected: ProjectedSegment, timing: PipelineTiming) -> str:
    """Return the schedule: forward and backward passes of the ranks over time, dark and light by vpp stage."""
    layout, load = projected.best.layout, projected.best.load
    contiguous = layout.microbatch_group_size or layout.pp
    count = min(load.micro_batches, SHOWN_ROUNDS * contiguous)
    forward = sum(timing.rank_seconds) / len(timing.rank_seconds) / layout.vpp / 3
    times = Times(forward, 2 * forward, forward, timing.transfer)
    ends = action_end_times(actions(layout.schedule, layout.pp, layout.vpp, count, layout.microbatch_group_size), times)
    whole = max(ends.values())
    image = np.zeros((layout.pp, PIXELS), dtype=int)
    for action, end in ends.items():
        begin = end - times.duration(action)
        tone = 1 + action.stage // layout.pp % 2 + (2 if action.kind != "F" else 0)
        image[action.stage % layout.pp, int(begin / whole * PIXELS) : max(1, int(end / whole * PIXELS))] = tone
    figure, axis = subplots(figsize=(WIDTH, 0.16 * layout.pp + 1.1))
    colors = ListedColormap([FREE, "#3b6fb6", "#8fb3e0", "#3f9b6c", "#9fd3b5"])
    extent = (0, whole, layout.pp - 0.5, -0.5)
    axis.imshow(image, cmap=colors, vmin=0, vmax=4, aspect="auto", interpolation="nearest", extent=extent)
    axis.grid(visible=False)
    axis.set_xlabel(f"seconds; {count} of {load.micro_batches} micro-batches")
    axis.set_ylabel("pipeline rank")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    legend = {"forward": "#3b6fb6", "backward": "#3f9b6c", "waits": FREE}
    patches = [Rectangle((0, 0), 1, 1, color=color) for color in legend.values()]
    axis.legend(patches, list(legend), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(legend))
    return as_svg(figure)


@styled
def _memory_plot(ranks: Sequence[RankMemory], limit: float, whole: float) -> str:
    """Return the memory of a GPU of each pipeline rank by component, against the limit and the device."""
    figure, axis = subplots(figsize=(WIDTH, 3.2))
    pipeline_ranks = [need.pipeline_rank for need in ranks]
    bottom = np.zeros(len(ranks))
    for name, color in MEMORY.items():
        each = np.array([memory_components(need)[name] / 1e9 for need in ranks])
        if each.any():
            axis.bar(pipeline_ranks, each, bottom=bottom, color=color, label=name, width=0.8)
        bottom += each
    axis.axhline(limit / 1e9, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    edge = axis.get_yaxis_transform()
    axis.text(0.995, limit / 1e9, "limit", va="bottom", ha="right", fontsize=9, transform=edge)
    axis.axhline(whole / 1e9, color=INK, linewidth=1.2)
    axis.set_ylim(top=whole / 1e9 * 1.08)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # one rank: 0, not -0.4 to 0.4
    axis.set_ylabel("GB")
    axis.set_xlabel("pipeline rank")
    axis.grid(axis="x", visible=False)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(MEMORY))
    return as_svg(figure)


@styled
def _cadence_plot(share: Callable[[float], float | None], best_s: float, planned_s: float) -> str:
    """Return effective training time against the time between two checkpoints; `share` of an interval in seconds."""
    figure, axis = subplots(figsize=(WIDTH, 2.8))
    minutes = np.geomspace(max(0.2, best_s / 60 / 10), best_s / 60 * 60, 200)
    points = [(minute, effective) for minute in minutes if (effective := share(minute * 60)) is not None]
    axis.plot([minute for minute, _ in points], [effective for _, effective in points], color=PALETTE[0], linewidth=1.8)
    best = max((effective for _, effective in points), default=1.0)
    for seconds, name, color, way in ((best_s, "best", PALETTE[2], -16), (planned_s, "the recipe's", PALETTE[1], 10)):
        effective = share(seconds)
        if effective is not None:
            axis.plot([seconds / 60], [effective], marker="o", color=color)
            label = f"{name}: {seconds / 60:.3g} min, {effective:.1%}"
            axis.annotate(label, (seconds / 60, effective), xytext=(4, way), textcoords="offset points", fontsize=9)
    axis.set_ylim(max(0.0, best - 0.15), min(1.0, best + 0.03))
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1%}"))
    axis.set_xlabel("minutes of work between two checkpoints")
    axis.set_ylabel("effective training time")
    return as_svg(figure)


@styled
def _cost_plot(points: Sequence[tuple[int, float, float]]) -> str:
    """Return money against days; `points`: GPUs, days, money."""
    figure, axis = subplots(figsize=(WIDTH, 3.0))
    unit, a_day = time_unit(min((days for _, days, _ in points), default=1.0))
    most = max((money for *_, money in points), default=0.0)
    scale, name = next(((size, f"{word}s of ") for word, size in MONEY.items() if most >= size), (1.0, ""))
    xs, ys = [days * a_day for _, days, _ in points], [money / scale for *_, money in points]
    axis.plot(xs, ys, color=DIM, linewidth=1.6, marker="o", markerfacecolor=PALETTE[0], markeredgecolor=PALETTE[0])
    for (gpus, *_), x, y in zip(points, xs, ys, strict=True):
        axis.annotate(f"{gpus:,} GPUs", (x, y), xytext=(6, 5), textcoords="offset points", fontsize=9)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    axis.set_xlabel(unit)
    axis.set_ylabel(f"{name}USD")
    axis.margins(x=0.12)
    axis.set_ylim(0, max(ys, default=1.0) * 1.15)
    return as_svg(figure)
