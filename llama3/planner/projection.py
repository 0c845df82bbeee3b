"""What a recipe will take on a cluster: a layout, a step time and a share of memory for each stage.

Every trained part of a stage gets the fastest layout that fits, on as many GPUs as asked for or as the cluster has; a
stage of several sequence lengths that is trained in one go keeps one layout for all of them. The result is what the
trainer takes (`Layout`, micro-batch, processes) and what the budget, the reliability model and the pages read. Given
up: the time between stages, and documents shorter than the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from llama3.parallel.layout import Layout
from llama3.planner.budget import Budget
from llama3.planner.device_curves import Curves
from llama3.planner.layout_search import Candidate, LayoutQuery, SearchResult, judge, search, too_much
from llama3.planner.network import Network
from llama3.planner.routing import bandwidth_share
from llama3.planner.step_time import StepModel
from llama3.planner.topology import Fabric
from llama3.recipe.schedule import Schedule, Segment, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.sections import Model

# The same job on several clusters: what the network costs a step, and what routing costs the network.
#
# Meta built two clusters of 24,576 GPUs, one on RoCE and one on InfiniBand, tuned both until they trained equally
# fast, and trained the largest model on RoCE (arXiv 2407.21783, section 3.3.1). Here each is a file, and the
# comparison asks what share of a card's rate flows get under its routing, and what the step makes of that.
# "Equivalent" is all that is published of it, so the difference is a calibration and not a validation.


@dataclass(frozen=True)
class OnFabric:
    """A job on one cluster."""

    fabric: Fabric
    share: float
    """Of a card's rate that flows between racks get under the cluster's routing."""
    best: Candidate


def step_model(wanted: LayoutQuery, fabric: Fabric, curves: Curves) -> StepModel:
    """Return the model of steps on a cluster, with the rate that its routing leaves."""
    return StepModel(wanted.spec, wanted.rows, Network(fabric, bandwidth_share(fabric)), curves)


def on_fabric(wanted: LayoutQuery, fabric: Fabric, curves: Curves, layout: Layout) -> OnFabric:
    """Return a job on a cluster, with micro-batches of one sequence. Raises ValueError if it cannot be cut so."""
    return OnFabric(fabric, bandwidth_share(fabric), judge(wanted, layout, 1, step_model(wanted, fabric, curves)))


PIPELINE, CHUNK = 16, 8192
"""Ranks of a pipeline, and tokens of a context-parallel part, for which a stage that names no GPUs is given as many."""


@dataclass(frozen=True)
class StagePlacement:
    """Where one stage is to work: GPUs, and a layout if it is given."""

    gpus: int
    """0: as many as a layout can use."""
    layout: Layout | None = None
    micro_batch: int = 1


@dataclass(frozen=True)
class Projected:
    """One segment of a stage on its layout."""

    stage: str
    """Name of the trained part: a stage's, or one of its lengths' between gates."""
    segment: Segment
    best: Candidate
    found: SearchResult | None
    """What else was looked at; None where the layout was given."""
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
    rows: int
    fabric: Fabric
    curves: Curves
    parts: tuple[Projected, ...]

    @property
    def main(self) -> Projected:
        """The part that takes longest: the one that pages and tables explain."""
        return max(self.parts, key=lambda part: part.seconds * part.best.world)


def project(
    recipe: Recipe, rows: int, fabric: Fabric, curves: Curves, places: Mapping[str, StagePlacement], gpus: int = 0
) -> Projection:
    """Return the projection of `recipe`; `places` by stage or part, others on `gpus` (0: as many as fit).

    Raises ValueError, one line per fault: too few GPUs in the cluster, a layout that does not fit, or none that does,
    with the smallest number of GPUs that would do.
    """
    check_gpus(fabric, [gpus, *(place.gpus for place in places.values())])
    parts: list[Projected] = []
    for span in Schedule(recipe).trained:
        place = places.get(span.name) or places.get(span.stage.name) or StagePlacement(gpus)
        parts += _span(recipe.model, rows, fabric, curves, span, place, recipe.compute)
    return Projection(recipe, rows, fabric, curves, tuple(parts))


def check_gpus(fabric: Fabric, asked: list[int]) -> None:
    """Raise ValueError if more GPUs are asked for than the cluster has."""
    if max(asked) > fabric.gpus:
        raise ValueError(f"gpus: {max(asked):,} are more than the {fabric.gpus:,} of {fabric.name}; ask for fewer")


def most_gpus(fabric: Fabric, span: StageSpan) -> int:
    """Return the largest power of two of the cluster's GPUs that is no more than the sequences of a step allow.

    One sequence may be cut over a server by tensor parallelism, over 16 ranks of the pipeline, and by context
    parallelism into parts of 8,192 tokens.
    """
    most = fabric.gpus
    for segment in span.segments:
        parts = fabric.server.gpus * PIPELINE * max(1, segment.seq // CHUNK)
        most = min(most, segment.batch // segment.seq * parts)
    return 1 << (most.bit_length() - 1)


def _span(
    spec: Model, rows: int, fabric: Fabric, curves: Curves, span: StageSpan, place: StagePlacement, compute: str
) -> list[Projected]:
    """Return each segment of what is trained in one go, all on the layout that is best where most time goes."""
    if place.layout is not None:
        given = _judged(spec, rows, fabric, curves, span, place, compute, None)
        for part in given:
            asked = _wanted(spec, rows, fabric, part.segment, place.gpus, compute)
            check_fits(span.name, asked, part.best, fabric, curves)
        return given
    heaviest = max(span.segments, key=lambda segment: segment.tokens)
    asked = _wanted(spec, rows, fabric, heaviest, place.gpus or most_gpus(fabric, span), compute)
    found = _found(asked, fabric, curves, span.name, free=not place.gpus)
    faults = ""
    for one in found.fitting:
        chosen = StagePlacement(found.wanted.world, one.layout, one.load.micro_batch)
        try:
            parts = _judged(spec, rows, fabric, curves, span, chosen, compute, found)
        except ValueError as error:  # another length of the stage cannot be cut so
            faults = faults or str(error)
            continue
        if all(part.best.margin >= 0 for part in parts):
            return parts
        faults = faults or "memory"
    raise ValueError(
        f"{span.name}: no layout of {found.wanted.world:,} GPUs serves all its lengths ({faults}); take other GPUs, or "
        "let the stage advance from length to length, so that each has a layout of its own"
    )


def _judged(
    spec: Model,
    rows: int,
    fabric: Fabric,
    curves: Curves,
    span: StageSpan,
    place: StagePlacement,
    compute: str,
    found: SearchResult | None,
) -> list[Projected]:
    """Return each segment on one layout, whether or not it fits. Raises ValueError if it cannot be cut so."""
    assert place.layout is not None
    parts = []
    for segment in span.segments:
        asked = _wanted(spec, rows, fabric, segment, place.gpus, compute)
        best = judge(asked, place.layout, place.micro_batch, step_model(asked, fabric, curves))
        mine = found if found is not None and found.wanted.seq == segment.seq else None
        parts.append(Projected(span.name, segment, best, mine, best.tflops / fabric.accelerator.dense_tflops))
    return parts


def check_fits(name: str, asked: LayoutQuery, best: Candidate, fabric: Fabric, curves: Curves) -> None:
    """Raise ValueError, with a layout that would fit, if one needs more memory than there is."""
    if best.margin < 0:
        other = _search(asked, fabric, curves, name).fitting[0]
        raise ValueError(
            f"{name}: {_words(best)} does not fit: {too_much(best.memory, asked.limit)}; {_words(other)} would, with "
            f"{other.memory.total / 1e9:.1f}"
        )


def _words(one: Candidate) -> str:
    layout = one.layout
    more = f", zero {layout.zero}, recompute {layout.recompute}, virtual {layout.virtual}"
    return f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} x dp {one.dp}{more}, micro-batch {one.load.micro_batch}"


def _wanted(spec: Model, rows: int, fabric: Fabric, segment: Segment, gpus: int, compute: str) -> LayoutQuery:
    memory, servers = fabric.accelerator.memory_gb * 1e9, fabric.server.gpus
    return LayoutQuery(spec, rows, segment.seq, segment.batch, gpus, memory, servers, compute)  # type: ignore[arg-type]


def _found(asked: LayoutQuery, fabric: Fabric, curves: Curves, name: str, free: bool) -> SearchResult:
    """Return the layouts on the GPUs that are asked for; if `free`, on half as many and so on until one fits."""
    while free and asked.world > 1:
        found = search(asked, step_model(asked, fabric, curves))
        if found.fitting:
            return found
        asked = replace(asked, world=asked.world // 2)
    return _search(asked, fabric, curves, name)


def _search(wanted: LayoutQuery, fabric: Fabric, curves: Curves, name: str) -> SearchResult:
    found = search(wanted, step_model(wanted, fabric, curves))
    if found.fitting:
        return found
    nearest = [one.why for one in found.rejected if one.why.startswith("memory")][:1] or [found.rejected[0].why]
    enough = smallest_cluster(wanted, fabric, curves)
    remedy = f"{enough:,} GPUs would do" if enough else f"no number of GPUs of {fabric.name} would do"
    raise ValueError(
        f"{name}: no layout of {wanted.world:,} GPUs fits sequences of {wanted.seq:,} ({nearest[0]}); {remedy}"
    )


def smallest_cluster(wanted: LayoutQuery, fabric: Fabric, curves: Curves) -> int:
    """Return the fewest servers' GPUs, doubling, on which a layout fits; 0 if none does up to the whole cluster."""
    gpus = 1
    while gpus <= fabric.gpus:
        asked = replace(wanted, world=gpus)
        if search(asked, step_model(asked, fabric, curves)).fitting:
            return gpus
        gpus *= 2
    return 0


# Which unknown moves days, GPU-hours and money most: each is moved alone, from its low to its high value.
#
# What comes out is a tornado: the parameters in the order of what they do over their ranges, and the elasticity of
# each, d log(quantity) / d log(parameter), which no range goes into. A range is assumed unless it names its source.
# Days and GPU-hours hang on two unknowns only, speed and goodput; the rest moves money and energy. Given up:
# unknowns that move together.

Quantity = Literal["days", "gpu_hours", "money", "mwh"]
NUDGE = 1e-5
"""By how much of its value a parameter is moved for its elasticity."""


@dataclass(frozen=True)
class Unknown:
    """A parameter that nobody knows exactly."""

    name: str
    low: float
    high: float
    """As factors of the planned value."""
    change: Callable[[Budget, float], Budget]
    why: str
    """Where the range comes from."""


@dataclass(frozen=True)
class Effect:
    """What an unknown does to a quantity."""

    name: str
    low: float
    high: float
    """The quantity at the unknown's low and high value."""
    planned: float
    why: str
    elasticity: float
    """Percent by which the quantity moves for a percent of the unknown, near the planned value."""

    @property
    def swing(self) -> float:
        """Return the difference over the planned value."""
        return abs(self.high - self.low) / self.planned if self.planned else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return every field and the swing."""
        return {**asdict(self), "swing": self.swing}


UNKNOWNS = (
    Unknown(
        "speed of matrix products", 0.9, 1.1, Budget.with_products, "assumed; Table 4's rows were predicted within 2 %"
    ),
    Unknown("speed of the network", 0.7, 1.2, Budget.with_messages, "assumed"),
    Unknown(
        "goodput",
        0.95,
        1.04,
        Budget.with_goodput,
        "more than 90 % (arXiv 2407.21783, section 3.3.4) to 97 % (arXiv 2312.11805) are published",
    ),
    Unknown(
        "price of a GPU-hour",
        0.6,
        1.6,
        lambda budget, factor: budget.with_price(gpu_hour=budget.prices.gpu_hour * factor),
        "assumed: prices of 1.5 to 4 around 2.5",
    ),
    Unknown(
        "power drawn by a GPU",
        0.8,
        1.1,
        lambda budget, factor: budget.with_price(gpu_load=min(1.0, budget.prices.gpu_load * factor)),
        "assumed; at most gpu_watts",
    ),
    Unknown(
        "PUE",
        1.0,
        1.35,
        lambda budget, factor: budget.with_price(pue=max(1.0, budget.prices.pue * factor)),
        "assumed: 1.1 at large sites; the mean of all was 1.58 in 2023 (Uptime Institute)",
    ),
    Unknown(
        "price of storage",
        0.5,
        2.0,
        lambda budget, factor: budget.with_price(gb_month=budget.prices.gb_month * factor),
        "assumed",
    ),
)


def effects(budget: Budget, quantity: Quantity, most: int = 3) -> list[Effect]:
    """Return the unknowns that move `quantity` most, the largest first; those that do not move it are left out."""
    found = [_effect(budget, quantity, one) for one in UNKNOWNS]
    moving = [one for one in found if one.swing > 1e-9]
    return sorted(moving, key=lambda one: -one.swing)[:most]


def _effect(budget: Budget, quantity: Quantity, one: Unknown) -> Effect:
    def at(factor: float) -> float:
        return float(getattr(one.change(budget, factor), quantity))

    planned = at(1.0)
    return Effect(one.name, at(one.low), at(one.high), planned, one.why, _elasticity(at, planned))


def _elasticity(at: Callable[[float], float], planned: float) -> float:
    """Return the central difference; at a bound (goodput 1, PUE 1, full load) the side that can move counts alone."""
    above, below = at(1 + NUDGE) - planned, planned - at(1 - NUDGE)
    slope = (above + below) / 2 if above and below else above + below
    return slope / NUDGE / planned if planned else 0.0
