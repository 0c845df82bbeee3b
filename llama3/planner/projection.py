"""Projection of a recipe on a cluster: a layout, a step time and memory for each stage, and which unknowns matter.

Every trained part gets the fastest layout that fits, on the requested GPUs or as many as the cluster has; of layouts
that are as fast, the one with the largest micro-batch. A stage of several sequence lengths without gates keeps one
layout, the fastest for all of them. Time between stages is not modeled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from herd.llama3.hardware.topology import Fabric
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import RESERVE, average_bytes, memory_error
from herd.llama3.planner.budget import Budget
from herd.llama3.planner.collectives import Network
from herd.llama3.planner.device_curves import Curves
from herd.llama3.planner.layout_search import (
    HEADROOM,
    Candidate,
    LayoutQuery,
    SearchResult,
    evaluate_layout,
    search_layouts,
)
from herd.llama3.planner.routing import bandwidth_share
from herd.llama3.planner.step_time import StepModel
from herd.llama3.recipe.schedule import Segment, StageSpan
from herd.llama3.recipe.schema import Recipe

PIPELINE, CHUNK = 16, 8192
"""Pipeline ranks, and tokens per context-parallel rank, that limit the GPUs of a stage without a requested number."""
Quantity = Literal["days", "gpu_hours", "money", "mwh"]
TIE = 0.01
"""Relative difference of step times that is less than the model's error."""
ENOUGH_TOKENS = 8192
"""Tokens of a GPU's micro-batch above which a larger one is not preferred."""
NUDGE = 1e-5
"""Relative change of a parameter for its elasticity."""


@dataclass(frozen=True)
class FabricProjection:
    """A job on one cluster."""

    fabric: Fabric
    share: float
    """Of a card's rate that flows between racks get under the cluster's routing."""
    best: Candidate


def fabric_step_model(query: LayoutQuery, fabric: Fabric, curves: Curves) -> StepModel:
    """Return the step model of a cluster, with the share of a card's rate under its routing."""
    return StepModel(query.config, query.vocab_size, Network(fabric, bandwidth_share(fabric)), curves)


def project_on_fabric(query: LayoutQuery, fabric: Fabric, curves: Curves, layout: Layout) -> FabricProjection:
    """Return a job on a cluster, with micro-batches of one sequence. Raises ValueError for an impossible layout."""
    return FabricProjection(
        fabric, bandwidth_share(fabric), evaluate_layout(query, layout, 1, fabric_step_model(query, fabric, curves))
    )


@dataclass(frozen=True)
class StagePlacement:
    """GPUs of one stage, and a layout if it is given."""

    gpus: int
    """0: as many as a layout can use."""
    layout: Layout | None = None
    micro_batch: int = 1


@dataclass(frozen=True)
class ProjectedSegment:
    """One segment of a stage on its layout."""

    stage: str
    """Name of the trained part: a stage, or one of its sequence lengths between gates."""
    segment: Segment
    best: Candidate
    search: SearchResult | None
    """The whole search; None where the layout was given."""
    mfu: float
    """Over the dense peak, 6N and causal attention."""

    @property
    def seconds(self) -> float:
        """Of all its steps, without interruptions."""
        return self.segment.steps * self.best.time.total


@dataclass(frozen=True)
class Projection:
    """A recipe on a cluster."""

    recipe: Recipe
    vocab_size: int
    fabric: Fabric
    curves: Curves
    segments: tuple[ProjectedSegment, ...]

    @property
    def main(self) -> ProjectedSegment:
        """The segment that takes longest, which pages and tables explain."""
        return max(self.segments, key=lambda projected: projected.seconds * projected.best.world)


def project(
    recipe: Recipe,
    vocab_size: int,
    fabric: Fabric,
    curves: Curves,
    placements: Mapping[str, StagePlacement],
    gpus: int = 0,
    most_gpus: int = 0,
) -> Projection:
    """Return the projection of `recipe`; `places` by stage or part, others on `gpus`.

    `gpus` 0: as many as a layout can use, up to `most_gpus` (0: the whole cluster).
    Raises ValueError, one line per fault: too few GPUs in the cluster, a layout that does not fit, or no layout that
    fits, with the smallest number of GPUs that would do.
    """
    most = max([gpus, *(placement.gpus for placement in placements.values())])
    if most > fabric.gpus:
        raise ValueError(f"gpus: {most:,} are more than the {fabric.gpus:,} of {fabric.name}; ask for fewer")
    segments: list[ProjectedSegment] = []
    for span in recipe.schedule.trained:
        placement = placements.get(span.name) or placements.get(span.stage.name) or StagePlacement(gpus)
        segments += _project_span(recipe, vocab_size, fabric, curves, span, placement, most_gpus or fabric.gpus)
    return Projection(recipe, vocab_size, fabric, curves, tuple(segments))


def max_gpus(fabric: Fabric, span: StageSpan, most: int) -> int:
    """Return the largest power of two that neither `most` nor the sequences of a step exceed.

    One sequence may be split over a server by tensor parallelism, over 16 pipeline ranks, and by context parallelism
    into chunks of 8,192 tokens.
    """
    for segment in span.segments:
        parts = fabric.server.gpus * PIPELINE * max(1, segment.seq_len // CHUNK)
        most = min(most, segment.batch // segment.seq_len * parts)
    return 1 << (most.bit_length() - 1)


def segment_query(
    recipe: Recipe, vocab_size: int, fabric: Fabric, segment: Segment, gpus: int, reserve: float = RESERVE
) -> LayoutQuery:
    """Return the query of a segment's layouts, eager and compiled, on `gpus` of a cluster."""
    memory, per_server = fabric.accelerator.memory_gb * 1e9, fabric.server.gpus
    query = LayoutQuery(
        recipe.model, vocab_size, segment.seq_len, segment.batch, gpus, memory, per_server, recipe.precision
    )
    return replace(query, reserve=reserve, compiled=True, average=average_bytes(recipe, segment))


def _project_span(
    recipe: Recipe,
    vocab_size: int,
    fabric: Fabric,
    curves: Curves,
    span: StageSpan,
    placement: StagePlacement,
    most: int,
) -> list[ProjectedSegment]:
    """Return the segments of a span, all on the layout with the least time for them together.

    `most`: GPUs, if none are requested. A proposed layout leaves `HEADROOM` of a GPU's memory free, or, if none can,
    `RESERVE`.
    """
    heaviest = max(span.segments, key=lambda segment: segment.tokens)
    steps = {segment.seq_len: segment.steps for segment in span.segments}

    def on_layout(
        gpus: int, layout: Layout, micro_batch: int, reserve: float, result: SearchResult | None
    ) -> list[ProjectedSegment]:
        """Return each segment on one layout, whether or not it fits. Raises ValueError for an impossible layout."""
        segments = []
        for segment in span.segments:
            query = segment_query(recipe, vocab_size, fabric, segment, gpus, reserve)
            best = evaluate_layout(query, layout, micro_batch, fabric_step_model(query, fabric, curves))
            mfu = best.tflops / fabric.accelerator.dense_tflops
            segments.append(ProjectedSegment(span.name, segment, best, result if segment is heaviest else None, mfu))
        return segments

    if placement.layout is not None:
        segments = on_layout(placement.gpus, placement.layout, placement.micro_batch, RESERVE, None)
        for projected in segments:
            query = segment_query(recipe, vocab_size, fabric, projected.segment, placement.gpus)
            check_fits(span.name, replace(query, steps=steps), projected.best, fabric, curves)
        return segments
    largest = placement.gpus or max_gpus(fabric, span, most)
    # No number was requested: halve until a layout fits.
    sizes = [largest] if placement.gpus else [largest >> halvings for halvings in range(largest.bit_length())]
    for reserve in (HEADROOM, RESERVE):
        results = []
        for gpus in sizes:
            query = replace(segment_query(recipe, vocab_size, fabric, heaviest, gpus, reserve), steps=steps)
            result = search_layouts(query, fabric_step_model(query, fabric, curves))
            results.append(result)
            if result.fitting:
                if reserve == HEADROOM:  # with less memory free, a larger micro-batch is a risk
                    _prefer_large_micro_batch(result)
                best = result.fitting[0]
                return on_layout(gpus, best.layout, best.load.micro_batch, reserve, result)
    raise _nothing_fits(results[0], fabric, curves, span.name)


def _prefer_large_micro_batch(result: SearchResult) -> None:
    """Put first, of the layouts within `TIE` of the fastest, the one with most tokens in a GPU's micro-batch.

    A small micro-batch costs launches, whose time is not modeled; `ENOUGH_TOKENS` hide them.
    """

    def tokens(candidate: Candidate) -> int:
        return min(ENOUGH_TOKENS, candidate.load.micro_batch * candidate.load.seq_len // candidate.layout.cp)

    slowest = result.fitting[0].mean_step_s * (1 + TIE)
    best = max((candidate for candidate in result.fitting if candidate.mean_step_s <= slowest), key=tokens)
    result.fitting.remove(best)
    result.fitting.insert(0, best)


def check_fits(name: str, query: LayoutQuery, best: Candidate, fabric: Fabric, curves: Curves) -> None:
    """Raise ValueError, with a layout that would fit, if `best` needs more memory than a GPU has."""
    if best.margin < 0:
        result = search_layouts(query, fabric_step_model(query, fabric, curves))
        if not result.fitting:
            raise _nothing_fits(result, fabric, curves, name)
        other = result.fitting[0]
        raise ValueError(
            f"{name}: {_describe(best)} does not fit: {memory_error(best.memory, query.limit)}; {_describe(other)} "
            f"would, with {other.memory.total / 1e9:.1f}"
        )


def _describe(candidate: Candidate) -> str:
    layout = candidate.layout
    return (
        f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} x dp {candidate.dp}, zero {layout.zero}, recompute "
        f"{layout.recompute}, vpp {layout.vpp}, micro-batch {candidate.load.micro_batch}"
        + (", compile" if layout.compile else "")
    )


def _nothing_fits(result: SearchResult, fabric: Fabric, curves: Curves, name: str) -> ValueError:
    """Return the error of a search that found nothing, with numbers of GPUs that would do."""
    query, reasons = result.query, [rejected.why for rejected in result.rejected]
    nearest = next((why for why in reasons if why.startswith("memory")), reasons[0])
    lengths = " to ".join(f"{length:,}" for length in dict.fromkeys((min(query.lengths), max(query.lengths))))
    remedy = f"no number of GPUs of {fabric.name} would do; take a larger cluster"
    if enough := nearest_gpus(query, fabric, curves):
        remedy = f"{' or '.join(f'{gpus:,}' for gpus in enough)} GPU{'s' * (enough[-1] > 1)} would do"
    if len(query.lengths) > 1:
        remedy += "; or let the stage advance from length to length, so that each has its own layout"
    return ValueError(
        f"{name}: no layout of {query.world:,} GPU{'s' * (query.world > 1)} fits sequences of {lengths} ({nearest}); "
        f"{remedy}"
    )


def nearest_gpus(query: LayoutQuery, fabric: Fabric, curves: Curves) -> list[int]:
    """Return the nearest numbers of GPUs below and above `query.world` on which a layout fits, where there are any.

    Powers of two are tried, and the whole cluster.
    """
    sizes = sorted({*(1 << exponent for exponent in range(fabric.gpus.bit_length())), fabric.gpus})
    below, above = [size for size in sizes if size < query.world], [size for size in sizes if size > query.world]

    def fits(gpus: int) -> bool:
        asked = replace(query, world=gpus)
        return bool(search_layouts(asked, fabric_step_model(asked, fabric, curves)).fitting)

    return [size for side in (reversed(below), above) if (size := next(filter(fits, side), 0))]


# Sensitivity: each unknown moves alone from its low to its high value; unknowns that move together are not modeled


@dataclass(frozen=True)
class UncertainInput:
    """An uncertain parameter and its range."""

    name: str
    low: float
    high: float
    """As factors of the planned value."""
    change: Callable[[Budget, float], Budget]
    why: str
    """Where the range comes from."""


@dataclass(frozen=True)
class Sensitivity:
    """Effect of an unknown on a quantity."""

    name: str
    low: float
    high: float
    """The quantity at the unknown's low and high value."""
    planned: float
    why: str
    elasticity: float
    """d log(quantity) / d log(parameter) at the planned value; independent of the range."""

    @property
    def swing(self) -> float:
        """Return the difference over the planned value."""
        return abs(self.high - self.low) / self.planned if self.planned else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return every field and the swing."""
        return {**asdict(self), "swing": self.swing}


UNKNOWNS = (
    UncertainInput(
        "speed of matrix products", 0.9, 1.1, Budget.with_products, "assumed; Table 4's rows were predicted within 2 %"
    ),
    UncertainInput("speed of the network", 0.7, 1.2, Budget.with_messages, "assumed"),
    UncertainInput(
        "goodput",
        0.95,
        1.04,
        Budget.with_goodput,
        "more than 90 % (arXiv 2407.21783, section 3.3.4) to 97 % (arXiv 2312.11805) are published",
    ),
    UncertainInput(
        "price of a GPU-hour",
        0.6,
        1.6,
        lambda budget, factor: budget.with_price(gpu_hour=budget.prices.gpu_hour * factor),
        "assumed: prices of 1.5 to 4 around 2.5",
    ),
    UncertainInput(
        "power drawn by a GPU",
        0.8,
        1.1,
        lambda budget, factor: budget.with_price(gpu_load=min(1.0, budget.prices.gpu_load * factor)),
        "assumed; at most gpu_watts",
    ),
    UncertainInput(
        "PUE",
        1.0,
        1.35,
        lambda budget, factor: budget.with_price(pue=max(1.0, budget.prices.pue * factor)),
        "assumed: 1.1 at large sites; the mean of all was 1.58 in 2023 (Uptime Institute)",
    ),
    UncertainInput(
        "price of storage",
        0.5,
        2.0,
        lambda budget, factor: budget.with_price(gb_month=budget.prices.gb_month * factor),
        "assumed",
    ),
)


def sensitivities(budget: Budget, quantity: Quantity, most: int = 3) -> list[Sensitivity]:
    """Return the unknowns that move `quantity` most, the largest first; those that do not move it are left out."""
    moving = []
    for unknown in UNKNOWNS:

        def value(factor: float, unknown: UncertainInput = unknown) -> float:
            return float(getattr(unknown.change(budget, factor), quantity))

        planned = value(1.0)
        above, below = value(1 + NUDGE) - planned, planned - value(1 - NUDGE)
        # At a bound (goodput 1, PUE 1, full load) only the side that can move counts.
        slope = (above + below) / 2 if above and below else above + below
        elasticity = slope / NUDGE / planned if planned else 0.0
        effect = Sensitivity(unknown.name, value(unknown.low), value(unknown.high), planned, unknown.why, elasticity)
        if effect.swing > 1e-9:
            moving.append(effect)
    return sorted(moving, key=lambda effect: -effect.swing)[:most]
