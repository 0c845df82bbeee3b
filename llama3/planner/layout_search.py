"""Search of layouts: which degrees of parallelism fit, how fast each is, and why the others were refused.

Every combination of TP, CP, PP, DP, virtual stages V, micro-batches in a row N and micro-batch is looked at; of ZeRO
level and recomputation the least costly one that fits. What does not fit keeps its reason, in GB by component. Memory
comes from the engine's own table (`llama3.parallel.memory`), time from `steptime`. Thousands take less than a second,
since neither grows with the number of micro-batches. Given up: zero-bubble schedules and copies of shards (HSDP), which
a user may still ask for; and layouts that cut tensors over more than one server, which no network carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

from llama3.model.flops import flops_per_token
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load, RankMemory, memory
from llama3.parallel.pipeline_schedule import split_layers
from llama3.planner.step_time import StepModel, StepTime
from llama3.recipe.sections import Model

RESERVE = 0.06
"""Share of a device's memory that is left free: context, buffers of collectives, fragments."""
MICRO_BATCHES = (1, 2, 4, 8)
LEAST_CHUNK = 4096
"""Tokens of a sequence that context parallelism leaves to a process, at least: kernels slow down below (assumed)."""
LADDER: tuple[tuple[Literal[2, 3], Literal["none", "selective", "full"]], ...] = (
    (2, "none"),
    (2, "selective"),
    (3, "none"),
    (2, "full"),
    (3, "full"),
)
"""ZeRO level and recomputation, from the least costly on; the last needs the least memory."""


@dataclass(frozen=True)
class LayoutQuery:
    """What a layout is searched for."""

    spec: Model
    rows: int
    seq: int
    batch: int
    """Tokens of a step."""
    world: int
    """GPUs."""
    memory_bytes: float
    """Of one GPU."""
    server_gpus: int = 8
    compute: Literal["fp8", "bf16", "fp32", "fp64"] = "bf16"

    @property
    def limit(self) -> float:
        """Bytes that a process may use."""
        return self.memory_bytes * (1 - RESERVE)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    load: Load
    world: int
    memory: RankMemory
    """Of the fullest process."""
    time: StepTime
    tflops: float
    """Per GPU, 6N and causal attention."""
    margin: float
    """Bytes left under the limit."""

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.layout.dp(self.world)


class Rejected(NamedTuple):
    """A layout that was refused."""

    layout: Layout
    micro_batch: int
    why: str
    needs: int = 0
    """Bytes of the fullest process in its most sparing form, where memory is the reason."""


@dataclass
class SearchResult:
    """What a search found, best first."""

    wanted: LayoutQuery
    fitting: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def looked_at(self) -> int:
        """Layouts that were looked at."""
        return len(self.fitting) + len(self.rejected)


def search(wanted: LayoutQuery, model: StepModel) -> SearchResult:
    """Return every layout of `wanted`, the fitting ones by time per step."""
    found = SearchResult(wanted)
    for cut, micro_batch in cuts(wanted):
        if fault := _fault(wanted, cut, micro_batch):
            found.rejected.append(Rejected(cut, micro_batch, fault))
            continue
        for layout in _pipelines(wanted, cut, micro_batch):
            fitting = _first_that_fits(wanted, layout, micro_batch)
            if isinstance(fitting, Rejected):
                found.rejected.append(fitting)
            else:
                found.fitting.append(candidate(wanted, *fitting, model))
    found.fitting.sort(key=lambda one: (one.time.total, one.memory.total))
    return found


def candidate(wanted: LayoutQuery, layout: Layout, load: Load, needs: RankMemory, model: StepModel) -> Candidate:
    """Return a layout with its time and its margin."""
    time = model.predict(layout, wanted.world, load)
    work = flops_per_token(wanted.spec, wanted.rows, wanted.seq).causal * wanted.batch
    tflops = work / wanted.world / time.total / 1e12
    return Candidate(layout, load, wanted.world, needs, time, tflops, wanted.limit - needs.total)


def judge(wanted: LayoutQuery, layout: Layout, micro_batch: int, model: StepModel) -> Candidate:
    """Return a given layout with its time, whether or not it fits. Raises ValueError if it cannot be cut so.

    `micro_batch`: sequences, at most.
    """
    layout.check(wanted.spec, wanted.rows, wanted.world)
    layout.check_sequence(wanted.seq)
    if fault := _batch_fault(wanted, layout, 1):
        raise ValueError(fault)
    sequences = wanted.batch // wanted.seq // layout.dp(wanted.world)
    load = Load(wanted.seq, *dealt(layout, sequences, micro_batch), wanted.compute)
    return candidate(wanted, layout, load, _fullest(wanted, layout, load, every=True), model)


def dealt(layout: Layout, sequences: int, most: int) -> tuple[int, int]:
    """Return the sequences of a micro-batch and the number of these, as the engine deals `sequences` of a process.

    No more than `most` at once; a pipeline wants equal micro-batches, without one the last may be smaller.
    """
    size = min(most, sequences)
    if layout.pp > 1:
        size = next(each for each in range(size, 0, -1) if sequences % each == 0)
    return size, -(-sequences // size)


def cuts(wanted: LayoutQuery) -> Iterator[tuple[Layout, int]]:
    """Yield every combination of TP, CP and PP that divides the GPUs, with every micro-batch."""
    for tp in _powers(wanted.server_gpus):
        for cp in _powers(max(1, wanted.seq // LEAST_CHUNK)):
            left, odd = divmod(wanted.world, tp * cp)
            if odd:
                continue
            for pp in (size for size in range(1, wanted.spec.layers + 3) if left % size == 0):
                yield from ((Layout(tp=tp, cp=cp, pp=pp), size) for size in MICRO_BATCHES)


def _pipelines(wanted: LayoutQuery, cut: Layout, micro_batch: int) -> Iterator[Layout]:
    """Yield a cut with every number of virtual stages, and of micro-batches in a row, that differ."""
    pp, count = cut.pp, _load(wanted, cut, micro_batch).micro_batches
    for virtual in _virtual(pp, wanted.spec.layers):
        for contiguous in (pp, 2 * pp) if pp > 1 and 2 * pp <= count else (pp,):
            yield cut.model_copy(update={"virtual": virtual, "contiguous": contiguous})


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def _virtual(pp: int, layers: int) -> list[int]:
    """Return numbers of stages per rank: powers of two, and as many as leave no stage without layers."""
    if pp == 1:
        return [1]
    most = (layers + 2) // pp
    return sorted({*_powers(most), most})


def _fault(wanted: LayoutQuery, layout: Layout, micro_batch: int) -> str:
    """Return why a layout cannot be cut so, or "" if it can."""
    try:
        layout.check(wanted.spec, wanted.rows, wanted.world)
        layout.check_sequence(wanted.seq)
    except ValueError as error:
        return str(error)
    return _batch_fault(wanted, layout, micro_batch)


def _batch_fault(wanted: LayoutQuery, layout: Layout, micro_batch: int) -> str:
    dp = layout.dp(wanted.world)
    sequences = wanted.batch // wanted.seq
    if sequences % (dp * micro_batch):
        return (
            f"batch: {sequences} sequences do not split over dp {dp} x micro-batch {micro_batch}; "
            f"{dp * micro_batch} must divide them"
        )
    return ""


def _load(wanted: LayoutQuery, layout: Layout, micro_batch: int) -> Load:
    count = wanted.batch // wanted.seq // (layout.dp(wanted.world) * micro_batch)
    return Load(wanted.seq, micro_batch, count, wanted.compute)


def _first_that_fits(
    wanted: LayoutQuery, layout: Layout, micro_batch: int
) -> tuple[Layout, Load, RankMemory] | Rejected:
    """Return the least costly ZeRO level and recomputation that fits, or why none does."""
    load = _load(wanted, layout, micro_batch)
    for number, (zero, recompute) in enumerate(LADDER):
        tried = layout.model_copy(update={"zero": zero, "recompute": recompute})
        needs = _fullest(wanted, tried, load)
        if needs.total <= wanted.limit:
            return tried, load, needs
        if number == 0 and (least := _fullest(wanted, _sparing(layout), load)).total > wanted.limit:
            break
    return Rejected(layout, micro_batch, f"memory: {too_much(least, wanted.limit)}", least.total)


def _sparing(layout: Layout) -> Layout:
    zero, recompute = LADDER[-1]
    return layout.model_copy(update={"zero": zero, "recompute": recompute})


def _fullest(wanted: LayoutQuery, layout: Layout, load: Load, every: bool = False) -> RankMemory:
    """Return the memory of the fullest process, out of all or of those that may be it (`_may_be_fullest`).

    If the first of these is too full, no other is looked at.
    """
    first, *others = range(layout.pp) if every else _may_be_fullest(wanted.spec.layers, layout.pp, layout.virtual)
    (most,) = memory(wanted.spec, wanted.rows, layout, wanted.world, load, [first])
    if most.total > wanted.limit and not every:
        return most
    needs = memory(wanted.spec, wanted.rows, layout, wanted.world, load, others)
    return max([most, *needs], key=lambda need: need.total)


@cache
def _may_be_fullest(layers: int, pp: int, virtual: int) -> tuple[int, ...]:
    """Return the pipeline ranks of which one needs most memory: the ends, and the earliest with each number of layers.

    Of two with as many layers the earlier one holds more micro-batches. The second rank is the fullest most often.
    """
    ranges = split_layers(layers, pp * virtual)
    counts = [tuple(len(part) for part in ranges[rank::pp]) for rank in range(pp)]
    earliest = [counts.index(each) for each in dict.fromkeys(counts)]
    return tuple(dict.fromkeys((min(1, pp - 1), 0, pp - 1, *earliest)))


def too_much(needs: RankMemory, limit: float) -> str:
    """Return what does not fit, in GB by component, the largest first."""
    parts = {
        "activations": needs.activations,
        "weights": needs.master + needs.gathered,
        "gradients": max(needs.gradients, needs.sharded_gradients),
        "optimizer": needs.moments,
        "temporary": needs.passing,
    }
    told = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in sorted(parts.items(), key=lambda pair: -pair[1]))
    return f"{needs.total / 1e9:.1f} GB of {limit / 1e9:.1f}: {told}"
