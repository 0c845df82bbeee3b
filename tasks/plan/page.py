"""The page of a plan: one self-contained HTML file, from the same `ClusterPlan` as the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from herd.llama3.parallel.memory import RankCoords, memory
from herd.llama3.planner.goodput import effective_time
from herd.llama3.planner.layout_search import RESERVE, LayoutQuery, search_layouts
from herd.llama3.planner.projection import fabric_step_model, segment_query
from herd.storage.filesystem import write_atomic
from herd.tasks.plan import plots
from herd.tasks.plan.cluster import ClusterPlan, budget_lines, fabric_lines, job_uptime, placement_lines, uptime_lines
from herd.tasks.plan.recipe import stage_rows
from herd.tasks.plan.tables import (
    NAMES,
    format_amount,
    format_days,
    format_degrees,
    format_energy,
    format_layout,
    format_memory,
    format_pipeline,
    rejection_reasons,
)
from herd.tasks.report.html import render

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
        found=main.found.fitting[:LAYOUTS] if main.found else [],
        reasons=rejection_reasons(main.found) if main.found else [],
        degrees=format_degrees,
        inner=format_pipeline,
        layout_words=format_layout,
        takes=format_days(planned.budget.days).rsplit(" ", 1),
        amount=format_amount,
        energy=format_energy(planned.budget.mwh),
        figures=plan_figures(planned),
    )


def plan_figures(planned: ClusterPlan) -> list[tuple[str, str, str]]:
    """Return title, explanation and SVG of every plot."""
    projection, main = planned.projection, planned.main
    best, fabric = main.best, projection.fabric
    model = fabric_step_model(_query(planned, best.world), fabric, projection.curves)
    parts = model.pipeline(best.layout, best.world, best.load)
    rank = np.array([RankCoords.from_rank(number, best.layout).pp for number in range(best.world)])
    needs = memory(projection.recipe.model, projection.rows, best.layout, best.world, best.load)
    whole = fabric.accelerator.memory_gb * 1e9
    reliability = planned.uptimes[best.world]
    cadence = plots.cadence(
        lambda seconds: effective_time(reliability.mtti_s, reliability.restart_s, seconds, reliability.costs),
        reliability.cadence.interval_s,
        reliability.interval_s,
    )
    return [
        (
            "The job on the cluster",
            "Each square is a server, its color the pipeline rank that it works on; gray servers are free.",
            plots.topology(fabric, planned.placement.placement, rank, best.layout.pp),
        ),
        (
            "Traffic of a step",
            "What a GPU sends that goes up to each layer of the network and no further, by axis of parallelism.",
            plots.traffic(planned.placement.traffic, best.world),
        ),
        (
            "The pipeline",
            "Who works when; light and dark are virtual stages in turn.",
            plots.pipeline(main, parts),
        ),
        (
            "Memory of a GPU",
            "At the fullest moment, by pipeline rank. Dashed: what a process may use.",
            plots.memory(needs, best.memory.total + best.margin, whole),
        ),
        ("How often to save", "Effective training time in closed form.", cadence),
        (
            "Cost against days",
            "The main stage's best layout on other numbers of GPUs, taken for the whole recipe, failures included.",
            plots.cost(cost_points(planned)),
        ),
    ]


def _query(planned: ClusterPlan, world: int) -> LayoutQuery:
    projection = planned.projection
    reserve = planned.main.found.query.reserve if planned.main.found else RESERVE
    segment = planned.main.segment
    return segment_query(projection.recipe, projection.rows, projection.fabric, segment, world, reserve)


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
