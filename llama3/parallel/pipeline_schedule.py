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
from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["1f1b", "interleaved", "zero-bubble"]
FIELD = "cluster.layout"


class Action(NamedTuple):
    """One stage's work on one micro-batch: F forward, B backward, or B in two: I of the input, W of the weights."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    micro_batch: int


ROUNDS = 2
"""Rounds, of as many micro-batches as ranks, after which a schedule of equal ones only repeats itself (see `held`)."""
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

    def of(self, action: Action) -> float:
        """Return the duration of `action`."""
        input_gradient = self.backward - self.weight
        each = {"F": self.forward, "B": self.backward, "I": input_gradient, "W": self.weight}[action.kind]
        return each * (self.stages[action.stage] if self.stages else 1.0)


def check(kind: str, pipeline: int, virtual: int, micro_batches: int, contiguous: int) -> None:
    """Raise ValueError if no such schedule exists; the arguments are those of `actions`."""
    sizes = {"pp": pipeline, "virtual": virtual, "micro-batches": micro_batches}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{FIELD}.{name}: {size} is not a number of them; write 1 or more")
    if kind not in ("1f1b", "interleaved", "zero-bubble"):
        raise ValueError(f"{FIELD}.schedule: {kind!r} is unknown; write interleaved, 1f1b or zero-bubble")
    if contiguous < 0:
        raise ValueError(f"{FIELD}.contiguous: {contiguous} micro-batches in a row; write 0 (as many as pp) or more")
    if kind == "1f1b" and virtual > 1:
        raise ValueError(f"{FIELD}.schedule: 1f1b has one stage per process, virtual is {virtual}; write interleaved")
    if pipeline == 1 and virtual > 1:
        raise ValueError(f"{FIELD}.virtual: {virtual} stages per process need pp above 1; write virtual: 1")


def check_split(zero: int, recompute: str, compiled: bool) -> None:
    """Raise ValueError if zero-bubble cannot cut backward passes in two with these settings of a layout."""
    why = {
        f"zero: {zero} gives weights up before the second half; write zero: 2": zero != 2,
        f"recompute: {recompute} computes activations twice; write recompute: none": recompute != "none",
        "compile: true makes one piece of a backward pass; write compile: false": compiled,
    }
    for reason, wrong in why.items():
        if wrong:
            raise ValueError(f"{FIELD}.{reason}, or schedule: interleaved instead of zero-bubble")


def actions(kind: Kind, pipeline: int, virtual: int, micro_batches: int, contiguous: int = 0) -> Lists:
    """Return each rank's actions in order.

    `contiguous` 0 is `pipeline`; more than `micro_batches` is as many as there are, so that one setting serves a batch
    that grows. Raises ValueError as `check`.
    """
    check(kind, pipeline, virtual, micro_batches, contiguous)
    rounds = _rounds(micro_batches, min(contiguous or pipeline, micro_batches))
    lists = [_one_rank(rank, pipeline, virtual, rounds) for rank in range(pipeline)]
    return _split(lists) if kind == "zero-bubble" else lists


def ideal_bubble(pipeline: int, virtual: int, micro_batches: int) -> float:
    """Return (P - 1) / (V M): waiting as a share of working, where N >= P and transfers take no time."""
    return (pipeline - 1) / (virtual * micro_batches)


def bubble(lists: Lists, times: Times | None = None) -> float:
    """Return the waiting of a simulated step as a share of the work of the busiest rank."""
    times = times or Times()
    work = max(sum(times.of(action) for action in mine) for mine in lists)
    return max(finish(lists, times).values()) / work - 1


def in_flight(lists: Lists) -> list[int]:
    """Return, for each rank, the most activations held at once; one is that of a stage for a micro-batch."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    most = []
    for mine in lists:
        held = peak = 0
        for action in mine:
            held += change[action.kind]
            peak = max(peak, held)
        most.append(peak)
    return most


@cache
def held(
    kind: Kind, pipeline: int, virtual: int, micro_batches: int, contiguous: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    """Return how many micro-batches each stage of `rank` holds at its fullest moments, those that no other exceeds.

    Rounds of one length repeat the first ones: only `ROUNDS` and those that shorter ones need to fill the pipeline are
    simulated, and the cost does not grow with the batch. Raises ValueError as `check`.
    """
    check(kind, pipeline, virtual, micro_batches, contiguous)
    rounds = _rounds(micro_batches, min(contiguous or pipeline, micro_batches))
    if len({len(batch) for batch in rounds}) == 1:
        rounds = rounds[: ROUNDS + (pipeline - 1) // len(rounds[0])]
    if kind == "zero-bubble":
        mine = _split([_one_rank(each, pipeline, virtual, rounds) for each in range(pipeline)])[rank]
    else:
        mine = _one_rank(rank, pipeline, virtual, rounds)
    change, running = {"F": 1, "B": -1, "I": 0, "W": -1}, [0] * virtual
    seen: set[tuple[int, ...]] = set()
    for action, after in zip(mine, [*mine[1:], Action(0, "B", 0)], strict=True):
        running[action.stage // pipeline] += change[action.kind]
        if action.kind == "F" and after.kind != "F":
            seen.add(tuple(running))
    return tuple(
        counts
        for counts in seen
        if not any(counts != peak and all(a <= b for a, b in zip(counts, peak, strict=True)) for peak in seen)
    )


def finish(lists: Lists, times: Times | None = None) -> dict[Action, float]:
    """Return the end time of each action if every rank starts an action as soon as its inputs are ready.

    Fails with AssertionError on a deadlock.
    """
    times, last = times or Times(), _last_stage(lists)
    ends: dict[Action, float] = {}
    clocks, places = [0.0] * len(lists), [0] * len(lists)
    ranks = set(range(len(lists)))
    while ranks:
        before = len(ends)
        for rank in sorted(ranks):
            while places[rank] < len(lists[rank]):
                action = lists[rank][places[rank]]
                ready = _ready(action, ends, last, len(lists), times.transfer)
                if ready is None:
                    break
                clocks[rank] = ends[action] = max(clocks[rank], ready) + times.of(action)
                places[rank] += 1
            else:
                ranks.discard(rank)
        assert len(ends) > before or not ranks, f"ranks {sorted(ranks)} wait for each other for ever"
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
            f"{FIELD}.pp x {FIELD}.virtual: {stages} stages for {layers} layers leave a stage without any; "
            f"{layers + 2} are the most (the first with only the embedding, the last with only the output)"
        )
    each, left = divmod(layers + 2, stages)
    sizes = [each] * stages
    between = [*range(stages - 2, 0, -1)]
    for stage in ([0, stages - 1, *between] if each == 1 else [*between, 0])[:left]:
        sizes[stage] += 1
    sizes[0] -= 1
    sizes[-1] -= 1
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def _rounds(micro_batches: int, contiguous: int) -> list[range]:
    """Split micro-batches evenly into rounds of `contiguous` or more."""
    # Even rounds keep the bubble at (P - 1) / (V M) for every M; a short last round costs up to 4.5 times as much,
    # and some such schedules deadlock (P <= 5, V <= 4).
    count = micro_batches // contiguous
    ends = [micro_batches * number // count for number in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def rank_actions(rank: int, pipeline: int, virtual: int, rounds: Sequence[range], warm_up: int) -> list[Action]:
    """Return `warm_up` forwards, then one backward after each forward, then the rest.

    `rounds`: the micro-batches that a stage runs in a row each time.
    """
    stages = range(rank, pipeline * virtual, pipeline)
    forward = [Action(stage, "F", number) for batch in rounds for stage in stages for number in batch]
    backward = [Action(stage, "B", number) for batch in rounds for stage in reversed(stages) for number in batch]
    first = min(warm_up, len(forward))
    steady = [action for pair in zip(forward[first:], backward, strict=False) for action in pair]
    return forward[:first] + steady + backward[len(forward) - first :]


def _one_rank(rank: int, pipeline: int, virtual: int, rounds: Sequence[range]) -> list[Action]:
    """Return the actions of `rank`, with the warm-up forwards of its schedule."""
    warm_up = pipeline - 1 - rank
    if virtual > 1:
        # Neighbors differ by two, which hides transfers. Rank 0 is ahead of the last rank by at most two rounds;
        # without the bound, N = 1 with P = 3, V = 2 deadlocks.
        sizes = [len(batch) for batch in rounds]
        warm_up = 2 * max(warm_up, pipeline - 1 - min(sizes)) + (virtual - 1) * max(sizes)
    return rank_actions(rank, pipeline, virtual, rounds, warm_up)


def _split(lists: Lists) -> Lists:
    """Return `lists` with B in two, I where B was and W wherever the rank would wait.

    Simulated with F, I and W of equal length. A rank holds no more activations than the rank of `lists` with the
    most: at that number, W comes before the next F.
    """
    last, limit, times = _last_stage(lists), max(in_flight(lists)), Times()
    waiting = [[a._replace(kind="I") if a.kind == "B" else a for a in reversed(mine)] for mine in lists]
    owed: Lists = [[] for _ in lists]  # W of each rank, oldest first
    split: Lists = [[] for _ in lists]
    clocks, held = [0.0] * len(lists), [0] * len(lists)
    ends: dict[Action, float] = {}
    while any(waiting) or any(owed):
        offers = []
        for rank, mine in enumerate(waiting):
            full = mine and mine[-1].kind == "F" and held[rank] == limit
            ready = _ready(mine[-1], ends, last, len(lists), 0.0) if mine and not full else None
            if ready is not None:
                offers.append((max(clocks[rank], ready), 0, rank))
            if owed[rank]:
                offers.append((clocks[rank], 1, rank))
        start, fills, rank = min(offers)
        action = owed[rank].pop(0) if fills else waiting[rank].pop()
        if action.kind == "I":
            owed[rank].append(action._replace(kind="W"))
        held[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
        clocks[rank] = ends[action] = start + times.of(action)
        split[rank].append(action)
    return split


def _ready(action: Action, ends: dict[Action, float], last: int, ranks: int, transfer: float) -> float | None:
    """Return the time at which the inputs of `action` are ready, or None if not yet known."""
    stage, kind, number = action
    if kind == "W":
        return ends.get(Action(stage, "I", number))
    if kind == "F":
        return 0.0 if stage == 0 else _arrival(ends.get(Action(stage - 1, "F", number)), ranks, transfer)
    own = ends.get(Action(stage, "F", number))
    if stage == last or own is None:
        return own
    gradient = ends.get(Action(stage + 1, "B", number), ends.get(Action(stage + 1, "I", number)))
    arrival = _arrival(gradient, ranks, transfer)
    return None if arrival is None else max(own, arrival)


def _arrival(end: float | None, ranks: int, transfer: float) -> float | None:
    return None if end is None else end + (transfer if ranks > 1 else 0.0)


def _last_stage(lists: Lists) -> int:
    return max(action.stage for mine in lists for action in mine)
