"""Search of parallel layouts: which fit in memory, how fast each is, and why the others were rejected.

Looks at every combination of TP, CP, PP, DP, virtual stages V, micro-batches in a row N and micro-batch size, with the
cheapest ZeRO level, recomputation and compiled or eager blocks that fit. Memory comes from
`herd.llama3.parallel.memory`, time from `step_time`.
Zero-bubble schedules, HSDP and tensor parallelism over more than one server are not searched; a user may ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from herd.llama3.model.flops import flops_per_token
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import RESERVE, Load, RankMemory, memory, memory_error, split_micro_batches
from herd.llama3.parallel.pipeline_schedule import split_layers
from herd.llama3.planner.step_time import StepModel, StepTime
from herd.llama3.recipe.sections import Model

HEADROOM = 0.10
"""The same for layouts that a plan proposes: the table of memory is up to 5 % off (docs/benchmarks), and less where
torch decides what a compiled block keeps."""
MICRO_BATCHES = (1, 2, 4, 8)
LEAST_CHUNK = 4096
"""Fewest tokens per context-parallel rank: kernels are slower below (assumed)."""
LADDER: tuple[tuple[Literal[2, 3], Literal["none", "selective", "full"]], ...] = (
    (2, "none"),
    (2, "selective"),
    (3, "none"),
    (2, "full"),
    (3, "full"),
)
"""ZeRO level and recomputation, the cheapest first; the last needs the least memory."""


@dataclass(frozen=True)
class LayoutQuery:
    """The job for which a layout is searched."""

    config: Model
    vocab_size: int
    seq_len: int
    batch: int
    """Tokens of a step."""
    world: int
    """GPUs."""
    memory_bytes: float
    """Of one GPU."""
    server_gpus: int = 8
    precision: Literal["fp8", "bf16", "fp32", "fp64"] = "bf16"
    reserve: float = RESERVE
    """Share of `memory_bytes` that stays free."""
    compiled: bool = False
    """Whether compiled blocks are searched too."""
    average: int = 0
    """As in `Load`."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """Steps of every sequence length that shares the layout, `seq_len` among them; empty: `seq_len` alone."""

    @property
    def lengths(self) -> list[int]:
        """Every sequence length, `seq_len` first, then the longest, which fits least often."""
        return [self.seq_len, *sorted({*self.steps} - {self.seq_len}, reverse=True)]

    @property
    def limit(self) -> float:
        """Bytes that a process may use."""
        return self.memory_bytes * (1 - self.reserve)

    @property
    def ladder(self) -> list[dict[str, Any]]:
        """Fields of a layout in the order in which they are tried: `LADDER`, compiled blocks before eager ones.

        An eager block keeps less, unless all of it is recomputed.
        """
        kinds = {"full": (True,)} if self.compiled else {}
        both = (True, False) if self.compiled else (False,)
        return [
            {"zero": zero, "recompute": recompute, "compile": compiled}
            for zero, recompute in LADDER
            for compiled in kinds.get(recompute, both)
        ]


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
    mean_step_s: float
    """Seconds of a step, as a mean over the steps of all lengths of the query."""

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.layout.dp(self.world)


class Rejected(NamedTuple):
    """A layout that was rejected."""

    layout: Layout
    micro_batch: int
    why: str
    needs: int = 0
    """Bytes of the fullest process with the last entry of `LADDER`, where memory is the reason."""


@dataclass
class SearchResult:
    """Layouts that fit, the fastest first, and those that were rejected."""

    query: LayoutQuery
    fitting: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def considered(self) -> int:
        """Number of layouts that were considered."""
        return len(self.fitting) + len(self.rejected)


def search_layouts(query: LayoutQuery, model: StepModel) -> SearchResult:
    """Return every layout of `query`, the fitting ones by time per step, the mean of all lengths."""
    result = SearchResult(query)
    for cut, micro_batch in enumerate_layouts(query):
        try:
            cut.check(query.config, query.vocab_size, query.world)
            _check_batch(query, cut, query.seq_len, micro_batch)
            for seq_len in query.lengths:
                cut.check_sequence(seq_len)
                _check_batch(query, cut, seq_len)
        except ValueError as error:
            result.rejected.append(Rejected(cut, micro_batch, str(error)))
            continue
        loads = [_load(query, cut, seq_len, micro_batch) for seq_len in query.lengths]
        for layout in _pipelines(query, cut, loads[0].micro_batches):
            fitting = _first_that_fits(query, layout, loads)
            if isinstance(fitting, Rejected):
                result.rejected.append(fitting)
                continue
            candidate = make_candidate(query, fitting[0], loads[0], fitting[1], model)
            if query.steps:
                spent = query.steps[query.seq_len] * candidate.time.total
                for load in loads[1:]:
                    spent += query.steps[load.seq_len] * model.predict(candidate.layout, query.world, load).total
                candidate = replace(candidate, mean_step_s=spent / sum(query.steps.values()))
            result.fitting.append(candidate)
    result.fitting.sort(key=lambda candidate: (candidate.mean_step_s, candidate.memory.total))
    return result


def make_candidate(query: LayoutQuery, layout: Layout, load: Load, needs: RankMemory, model: StepModel) -> Candidate:
    """Return a layout with its step time and free memory."""
    time = model.predict(layout, query.world, load)
    work = flops_per_token(query.config, query.vocab_size, query.seq_len).causal * query.batch
    tflops = work / query.world / time.total / 1e12
    return Candidate(layout, load, query.world, needs, time, tflops, query.limit - needs.total, time.total)


def evaluate_layout(query: LayoutQuery, layout: Layout, micro_batch: int, model: StepModel) -> Candidate:
    """Return a given layout with its time, whether or not it fits. Raises ValueError for an impossible layout.

    `micro_batch`: sequences, at most.
    """
    layout.check(query.config, query.vocab_size, query.world)
    layout.check_sequence(query.seq_len)
    _check_batch(query, layout, query.seq_len)
    load = _load(query, layout, query.seq_len, micro_batch)
    return make_candidate(query, layout, load, _fullest(query, layout, load, every=True), model)


def _check_batch(query: LayoutQuery, layout: Layout, seq_len: int, micro_batch: int = 1) -> None:
    """Raise ValueError if the sequences of a step do not divide evenly."""
    dp = layout.dp(query.world)
    sequences = query.batch // seq_len
    if sequences % (dp * micro_batch):
        raise ValueError(
            f"batch: {sequences} sequences do not split over dp {dp} x micro-batch {micro_batch}; "
            f"{dp * micro_batch} must divide them"
        )


def _load(query: LayoutQuery, layout: Layout, seq_len: int, micro_batch: int) -> Load:
    sequences = query.batch // seq_len // layout.dp(query.world)
    return Load(seq_len, *split_micro_batches(layout, sequences, micro_batch), query.precision, average=query.average)


def enumerate_layouts(query: LayoutQuery) -> Iterator[tuple[Layout, int]]:
    """Yield every combination of TP, CP and PP that divides the GPUs, with every micro-batch."""
    for tp in _powers(query.server_gpus):
        for cp in _powers(max(1, max(query.lengths) // LEAST_CHUNK)):
            left, odd = divmod(query.world, tp * cp)
            if odd:
                continue
            for pp in (size for size in range(1, query.config.layers + 3) if left % size == 0):
                yield from ((Layout(tp=tp, cp=cp, pp=pp), size) for size in MICRO_BATCHES)


def _pipelines(query: LayoutQuery, cut: Layout, micro_batches: int) -> Iterator[Layout]:
    """Yield a cut with every number of virtual stages, and of micro-batches in a row, that differ."""
    pp = cut.pp
    most = (query.config.layers + 2) // pp  # more would leave a stage without layers
    for vpp in sorted({*_powers(most), most}) if pp > 1 else [1]:
        for microbatch_group_size in (pp, 2 * pp) if pp > 1 and 2 * pp <= micro_batches else (pp,):
            yield cut.model_copy(update={"vpp": vpp, "microbatch_group_size": microbatch_group_size})


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def _first_that_fits(query: LayoutQuery, layout: Layout, loads: Sequence[Load]) -> tuple[Layout, RankMemory] | Rejected:
    """Return the layout with the cheapest entry of the ladder that fits every load, or why none does.

    With the layout comes the memory of the first load.
    """
    first, rungs = loads[0], [layout.model_copy(update=fields) for fields in query.ladder]
    for number, tried in enumerate(rungs):
        needs: dict[Load, RankMemory] = {}
        for load in loads:
            least = needs[load] = _fullest(query, tried, load)
            if least.total > query.limit:
                break
        else:
            return tried, needs[first]
        loads = sorted(loads, key=lambda other: other is not load)  # the next entry fails at the same one most often
        # Most layouts that fail at all fail at the end of the ladder too; looking there first saves the others.
        if number == 0 and (least := _fullest(query, rungs[-1], load)).total > query.limit:
            break
    return Rejected(layout, first.micro_batch, f"memory: {memory_error(least, query.limit)}", least.total)


def _fullest(query: LayoutQuery, layout: Layout, load: Load, every: bool = False) -> RankMemory:
    """Return the memory of the fullest process, of all or of those that can be the fullest (`_fullest_ranks`).

    If the first of these is too full, no other is computed.
    """
    first, *others = range(layout.pp) if every else _fullest_ranks(query.config.layers, layout.pp, layout.vpp)
    (most,) = memory(query.config, query.vocab_size, layout, query.world, load, [first])
    if most.total > query.limit and not every:
        return most
    needs = memory(query.config, query.vocab_size, layout, query.world, load, others)
    return max([most, *needs], key=lambda need: need.total)


@cache
def _fullest_ranks(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Return the pipeline ranks that can need most memory: the ends, and the earliest with each number of layers.

    Of two with as many layers the earlier one holds more micro-batches. The second rank is the fullest most often.
    """
    ranges = split_layers(layers, pp * vpp)
    counts = [tuple(len(stage) for stage in ranges[rank::pp]) for rank in range(pp)]
    earliest = [counts.index(count) for count in dict.fromkeys(counts)]
    return tuple(dict.fromkeys((min(1, pp - 1), 0, pp - 1, *earliest)))
