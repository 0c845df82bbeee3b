"""Pipeline schedules as lists of actions, and their simulated cost. No torch: trainer and planner share this module.

A schedule gives the order in which each rank runs its stages on its micro-batches; stage s is on rank s % P. Llama 3
(section 3.3.2) runs N micro-batches in a row through a stage before the rank's next stage. Zero-bubble (arXiv
2401.10241, ZB-H1) splits a backward action into input and weight gradients. Lists are static, for equal stages.
P ranks, V stages per rank, M micro-batches, N of them in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

Kind = Literal["1f1b", "interleaved", "zero-bubble"]
FIELD = "cluster.layout"


class Action(NamedTuple):
    """One stage's work on one micro-batch: F forward, B backward, or B in two: I of the input, W of the weights."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    micro_batch: int


ROUNDS = 2
"""Rounds of as many micro-batches as ranks after which a schedule repeats itself (see `peak_in_flight`)."""
Lists = list[list[Action]]
"""Actions of each rank, in order."""


@dataclass(frozen=True)
class Times:
    """How long actions take, in any unit: B is I and W together; a transfer delays the next stage, not the sender."""

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0
    transfer: float = 0.0
    stages: tuple[float, ...] = ()
    """Factor of each stage, where stages are not equal."""

    def duration(self, action: Action) -> float:
        input_gradient = self.backward - self.weight
        base = {"F": self.forward, "B": self.backward, "I": input_gradient, "W": self.weight}[action.kind]
        return base * (self.stages[action.stage] if self.stages else 1.0)


def check(kind: str, pipeline: int, vpp: int, micro_batches: int, microbatch_group_size: int) -> None:
    """Raise ValueError if no such schedule exists; the arguments are those of `actions`."""
    sizes = {"pp": pipeline, "vpp": vpp, "micro-batches": micro_batches}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{FIELD}.{name}: {size} is too small; write 1 or more")
    if kind not in ("1f1b", "interleaved", "zero-bubble"):
        raise ValueError(f"{FIELD}.schedule: {kind!r} is unknown; write interleaved, 1f1b or zero-bubble")
    if microbatch_group_size < 0:
        raise ValueError(
            f"{FIELD}.microbatch_group_size: {microbatch_group_size} is negative; write 0 (as many as pp) or more"
        )
    if kind == "1f1b" and vpp > 1:
        raise ValueError(f"{FIELD}.schedule: 1f1b has one stage per process, vpp is {vpp}; write interleaved")
    if pipeline == 1 and vpp > 1:
        raise ValueError(f"{FIELD}.vpp: {vpp} stages per process need pp above 1; write vpp: 1")


def check_split(zero: int, recompute: str, compiled: bool) -> None:
    """Raise ValueError if zero-bubble cannot cut backward passes in two with these settings of a layout."""
    conflicts = {
        f"zero: {zero} frees weights before the second half; write zero: 2": zero != 2,
        f"recompute: {recompute} computes activations twice; write recompute: none": recompute != "none",
        "compile: true makes a backward pass one piece; write compile: false": compiled,
    }
    for message, conflict in conflicts.items():
        if conflict:
            raise ValueError(f"{FIELD}.{message}, or schedule: interleaved instead of zero-bubble")


def actions(kind: Kind, pipeline: int, vpp: int, micro_batches: int, microbatch_group_size: int = 0) -> Lists:
    """Return each rank's actions in order.

    `microbatch_group_size` 0 is `pipeline`; more than `micro_batches` is as many as there are, so that one setting
    serves a batch that grows. Raises ValueError as `check`.
    """
    check(kind, pipeline, vpp, micro_batches, microbatch_group_size)
    rounds = _rounds(micro_batches, min(microbatch_group_size or pipeline, micro_batches))
    lists = [_rank_order(rank, pipeline, vpp, rounds) for rank in range(pipeline)]
    return _split(lists) if kind == "zero-bubble" else lists


def ideal_bubble(pipeline: int, vpp: int, micro_batches: int) -> float:
    """Return (P - 1) / (V M): waiting as a share of working, where N >= P and transfers take no time."""
    return (pipeline - 1) / (vpp * micro_batches)


def bubble(lists: Lists, times: Times | None = None) -> float:
    """Return the waiting of a simulated step as a share of the work of the busiest rank."""
    times = times or Times()
    work = max(sum(times.duration(action) for action in order) for order in lists)
    return max(action_end_times(lists, times).values()) / work - 1


def in_flight(lists: Lists) -> list[int]:
    """Return, for each rank, the most activations held at once; one is that of a stage for a micro-batch."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(accumulate((change[action.kind] for action in order), initial=0)) for order in lists]


@cache
def peak_in_flight(
    kind: Kind, pipeline: int, vpp: int, micro_batches: int, microbatch_group_size: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    """Return how many micro-batches each stage of `rank` holds at its fullest moments, those that no other exceeds.

    Rounds of one length repeat the first ones: only `ROUNDS` and those that shorter ones need to fill the pipeline are
    simulated, and the cost does not grow with the batch. Raises ValueError as `check`.
    """
    check(kind, pipeline, vpp, micro_batches, microbatch_group_size)
    rounds = _rounds(micro_batches, min(microbatch_group_size or pipeline, micro_batches))
    if len({len(batch) for batch in rounds}) == 1:
        rounds = rounds[: ROUNDS + (pipeline - 1) // len(rounds[0])]
    if kind == "zero-bubble":
        order = _split([_rank_order(other, pipeline, vpp, rounds) for other in range(pipeline)])[rank]
    else:
        order = _rank_order(rank, pipeline, vpp, rounds)
    change, running = {"F": 1, "B": -1, "I": 0, "W": -1}, [0] * vpp
    seen: set[tuple[int, ...]] = set()
    for action, after in zip(order, [*order[1:], Action(0, "B", 0)], strict=True):
        running[action.stage // pipeline] += change[action.kind]
        if action.kind == "F" and after.kind != "F":
            seen.add(tuple(running))
    return tuple(
        counts
        for counts in seen
        if not any(counts != peak and all(a <= b for a, b in zip(counts, peak, strict=True)) for peak in seen)
    )


def action_end_times(lists: Lists, times: Times | None = None) -> dict[Action, float]:
    """Return the end time of each action if every rank starts an action as soon as its inputs are ready.

    Fails with AssertionError on a deadlock.
    """
    times, last = times or Times(), max(action.stage for order in lists for action in order)
    transfer = times.transfer if len(lists) > 1 else 0.0
    ends: dict[Action, float] = {}
    clocks, done = [0.0] * len(lists), [0] * len(lists)
    ranks = set(range(len(lists)))
    while ranks:
        before = len(ends)
        for rank in sorted(ranks):
            while done[rank] < len(lists[rank]):
                action = lists[rank][done[rank]]
                ready = _ready(action, ends, last, transfer)
                if ready is None:
                    break
                clocks[rank] = ends[action] = max(clocks[rank], ready) + times.duration(action)
                done[rank] += 1
            else:
                ranks.discard(rank)
        assert len(ends) > before or not ranks, f"ranks {sorted(ranks)} wait for each other"
    return ends


@cache
def split_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each stage; the embedding and the output count as one layer each (Llama 3, 3.3.2).

    126 layers in 16 stages are 7, 14 x 8, 7; in 128 stages the first has only the embedding and the last only the
    output. What does not divide goes to the latest stages but the last, which hold the fewest activations; with as many
    layers as stages, none is left empty. Raises ValueError where a stage between would have no layer.
    """
    if not 1 <= stages <= layers + 2:
        raise ValueError(
            f"{FIELD}.pp x {FIELD}.vpp: {stages} stages are too many for {layers} layers; use at most {layers + 2} "
            "(the first with only the embedding, the last with only the output)"
        )
    size, extra = divmod(layers + 2, stages)
    sizes = [size] * stages
    between = [*range(stages - 2, 0, -1)]
    for stage in ([0, stages - 1, *between] if size == 1 else [*between, 0])[:extra]:
        sizes[stage] += 1
    sizes[0] -= 1
    sizes[-1] -= 1
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def _rounds(micro_batches: int, microbatch_group_size: int) -> list[range]:
    """Split micro-batches evenly into rounds of `microbatch_group_size` or more."""
    # Even rounds keep the bubble at (P - 1) / (V M) for every M; a short last round costs up to 4.5 times as much,
    # and some such schedules deadlock (P <= 5, V <= 4).
    count = micro_batches // microbatch_group_size
    ends = [micro_batches * number // count for number in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def rank_actions(rank: int, pipeline: int, vpp: int, rounds: Sequence[range], warm_up: int) -> list[Action]:
    """Return `warm_up` forwards, then one backward after each forward, then the rest.

    `rounds`: the micro-batches that a stage runs in a row each time.
    """
    stages = range(rank, pipeline * vpp, pipeline)
    forward = [Action(stage, "F", number) for batch in rounds for stage in stages for number in batch]
    backward = [Action(stage, "B", number) for batch in rounds for stage in reversed(stages) for number in batch]
    first = min(warm_up, len(forward))
    steady = [action for pair in zip(forward[first:], backward, strict=False) for action in pair]
    return forward[:first] + steady + backward[len(forward) - first :]


def _rank_order(rank: int, pipeline: int, vpp: int, rounds: Sequence[range]) -> list[Action]:
    """Return the actions of `rank`, with the warm-up forwards of its schedule."""
    warm_up = pipeline - 1 - rank
    if vpp > 1:
        # Neighbors differ by two, which hides transfers. Rank 0 is ahead of the last rank by at most two rounds;
        # without the bound, N = 1 with P = 3, V = 2 deadlocks.
        sizes = [len(batch) for batch in rounds]
        warm_up = 2 * max(warm_up, pipeline - 1 - min(sizes)) + (vpp - 1) * max(sizes)
    return rank_actions(rank, pipeline, vpp, rounds, warm_up)


def _split(lists: Lists) -> Lists:
    """Return `lists` with B in two, I where B was and W wherever the rank would wait.

    Simulated with F, I and W of equal length. A rank holds no more activations than the rank of `lists` with the
    most: at that number, W comes before the next F.
    """
    last, limit, times = max(action.stage for order in lists for action in order), max(in_flight(lists)), Times()
    waiting = [[a._replace(kind="I") if a.kind == "B" else a for a in reversed(order)] for order in lists]
    deferred: Lists = [[] for _ in lists]  # W of each rank, oldest first
    split: Lists = [[] for _ in lists]
    clocks, activations = [0.0] * len(lists), [0] * len(lists)
    ends: dict[Action, float] = {}
    while any(waiting) or any(deferred):
        candidates = []
        for rank, order in enumerate(waiting):
            full = order and order[-1].kind == "F" and activations[rank] == limit
            ready = _ready(order[-1], ends, last, 0.0) if order and not full else None
            if ready is not None:
                candidates.append((max(clocks[rank], ready), 0, rank))
            if deferred[rank]:
                candidates.append((clocks[rank], 1, rank))
        start, is_weight, rank = min(candidates)
        action = deferred[rank].pop(0) if is_weight else waiting[rank].pop()
        if action.kind == "I":
            deferred[rank].append(action._replace(kind="W"))
        activations[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
        clocks[rank] = ends[action] = start + times.duration(action)
        split[rank].append(action)
    return split


def _ready(action: Action, ends: dict[Action, float], last: int, transfer: float) -> float | None:
    """Return the time at which the inputs of `action` are ready, or None if not yet known."""
    stage, kind, number = action
    if kind == "W":
        return ends.get(Action(stage, "I", number))
    if kind == "F":
        hidden = ends.get(Action(stage - 1, "F", number))
        return 0.0 if stage == 0 else None if hidden is None else hidden + transfer
    forward = ends.get(Action(stage, "F", number))
    if stage == last or forward is None:
        return forward
    gradient = ends.get(Action(stage + 1, "B", number), ends.get(Action(stage + 1, "I", number)))
    return None if gradient is None else max(forward, gradient + transfer)
