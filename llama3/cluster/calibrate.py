"""Measures what the device at hand reaches in what a layer does: matrix products, attention, elementwise work.

Each thing is what the model itself calls (`kernels`): the three products of a linear layer, attention with the heads of
Llama 3 405B on a tensor-parallel rank, and the norms, sums and SwiGLU of a layer. Sizes double until the time that a
kind may take is used up, so a slow device gets a smaller range, which its curves state.

Given up: documents shorter than the sequence, other formats than bf16, and clocks that fall after minutes of load. The
way over CUDA follows torch's documented events and was not run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import ceil
from statistics import median, quantiles
from typing import TYPE_CHECKING

from llama3.cluster.calibration import BACK, ELEMENTWISE, FORWARD, GEMM, Calibration, Point, fitted
from llama3.cluster.curves import BACKWARD
from llama3.train.peaks import device_name

if TYPE_CHECKING:  # who plans without measuring does without torch
    import torch

    from llama3.cluster.kernels import Call

HEADS, FEATURES = (16, 1), 128
"""Query and key heads, and features of one: Llama 3 405B on one of 8 tensor-parallel ranks (arXiv 2407.21783)."""
LEAST, MOST = 3, 9
"""Repeats of a point."""
SHORT_S = 2e-3
"""Shorter calls are timed several at once: a clock and a launch cost microseconds."""
GROWTH = 4
"""Times that a group of cases costs the one before it at most: operations grow with the square of a size."""


@dataclass(frozen=True)
class Reach:
    """Sizes that a kind of device is measured at: the first two always, later ones while there is time."""

    rows: int
    """Tokens."""
    sides: tuple[int, ...]
    """Of weight matrices."""
    lengths: tuple[int, ...]
    """Of sequences."""
    widths: tuple[int, ...]
    """Of the residual stream, in elementwise work."""


def _doubled(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << step for step in range((last // first).bit_length()))


REACH = {
    "cpu": Reach(2048, _doubled(64, 4096), _doubled(128, 8192), _doubled(512, 2048)),
    "cuda": Reach(8192, _doubled(512, 16_384), _doubled(1024, 131_072), _doubled(2048, 8192)),
}
"""A GPU's smallest sizes are those below which a launch costs more than the work."""


@dataclass(frozen=True)
class Case:
    """Something to measure."""

    what: str
    shape: tuple[int, ...]
    amount: float
    """Operations or bytes."""
    prepare: Callable[[], Call]
    """Makes the tensors and returns what is timed."""
    parts: int = 1
    """How often a call does the amount."""


def calibrate(
    device: str = "auto", seconds: float = 60.0, say: Callable[[Point], object] = lambda _: None
) -> Calibration:
    """Measure `device` (auto, cpu or cuda) for about `seconds`, longer if two sizes of each kind need it.

    `say` gets each point when it is measured. Raises ValueError for no time, and for a device that is not there.
    """
    if not seconds > 0:
        raise ValueError(f"seconds: {seconds:g} leaves no time to measure; write 30 or more")
    import torch

    from llama3.cluster.kernels import device_at_hand

    place = device_at_hand(device)
    reach, points = REACH[place.type], list[Point]()
    for groups, share in ((gemms(reach, place), 0.5), (attentions(reach, place), 0.35), (layers(reach, place), 0.15)):
        for point in measured(groups, share * seconds, place):
            say(point)
            points.append(point)
    date = datetime.now(UTC).isoformat(timespec="milliseconds")
    threads = torch.get_num_threads() if place.type == "cpu" else 0
    return Calibration(fitted(points, device_name(place), date), tuple(points), date, torch.__version__, threads)


def gemms(reach: Reach, place: torch.device) -> Iterator[list[Case]]:
    """Yield the products for each side: square, gate and up in one, down, and square of fewer rows.

    Amounts are those of one product, and so are the seconds: `spend` prices gradients like the forward product.
    """
    from llama3.cluster.kernels import products

    for side in reach.sides:
        rows = reach.rows
        shapes = [(rows, side, side), (rows // 4, side, side), (rows, side, 8 * side), (rows, 4 * side, side)]
        yield [Case(GEMM, (m, k, n), 2.0 * m * k * n, partial(products, m, k, n, place), 3) for m, k, n in shapes]


def attentions(reach: Reach, place: torch.device) -> Iterator[list[Case]]:
    """Yield both passes at each length. Operations of the forward one: 2 T S D, as `work.layer_work` counts them."""
    from llama3.cluster.kernels import attention

    for length in reach.lengths:
        batch = max(1, reach.rows // length)
        shape, flops = (batch, length, HEADS[0], FEATURES), 2.0 * batch * length**2 * HEADS[0] * FEATURES
        passes = [partial(attention, batch, length, HEADS, FEATURES, backward, place) for backward in (False, True)]
        yield [Case(FORWARD, shape, flops, passes[0]), Case(BACK, shape, BACKWARD * flops, passes[1])]


def layers(reach: Reach, place: torch.device) -> Iterator[list[Case]]:
    """Yield a layer's elementwise work at each width D, hidden 3.5 D. Bytes: as `work.layer_work`, backward twice."""
    from llama3.cluster.kernels import elementwise

    for width in reach.widths:
        hidden, rows = width * 7 // 2, reach.rows
        moved = 3.0 * rows * (10 * width + 5 * hidden) * 2
        yield [Case(ELEMENTWISE, (rows, width), moved, partial(elementwise, rows, width, hidden, place))]


def measured(groups: Iterator[list[Case]], limit_s: float, place: torch.device) -> Iterator[Point]:
    """Yield the points of the first two groups, and of more while the time that they take at least is left."""
    began, least_s = time.monotonic(), 0.0
    for number, cases in enumerate(groups):
        left = limit_s - (time.monotonic() - began)
        if number >= 2 and least_s > left:
            return
        points = [timed(case, left / GROWTH / len(cases), place) for case in cases]
        yield from points
        calls_s = sum(point.seconds * case.parts for case, point in zip(cases, points, strict=True))
        least_s = GROWTH * (LEAST + 2) * calls_s


def timed(case: Case, limit_s: float, place: torch.device) -> Point:
    """Return the point of a case: warmed up, then repeated for about `limit_s`, from `LEAST` to `MOST` times."""
    from llama3.cluster.kernels import seconds_of

    call = case.prepare()
    seconds_of(call, 1, place)
    first = max(seconds_of(call, 1, place), 1e-7)
    at_once = ceil(SHORT_S / first)
    repeats = min(MOST, max(LEAST, int(limit_s / (first * at_once))))
    found = [seconds_of(call, at_once, place) / case.parts for _ in range(repeats)]
    low, _, high = quantiles(found, n=4, method="inclusive")
    middle = median(found)
    return Point(case.what, case.shape, case.amount, middle, (high - low) / middle, repeats)
