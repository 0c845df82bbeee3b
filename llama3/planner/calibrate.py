"""Measures how fast this device computes what a layer does: matrix products, attention, elementwise work.

Each operation is what the model itself calls: the three products of a linear layer, attention with the heads of Llama 3
405B on a tensor-parallel rank, and the norms, sums and SwiGLU of a layer. Sizes double until the time of a kind is used
up, so a slow device gets a smaller range. Imports torch: import this module only to measure.
Shapes: T rows (tokens), I inner and C columns of a product, D residual stream, F hidden of the feed-forward block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import ceil
from statistics import median, quantiles

import torch
from torch.nn import functional as F

from herd.llama3.model.attention import AttentionMask, attend
from herd.llama3.model.comms import NoComms
from herd.llama3.model.linear import RMSNorm
from herd.llama3.planner.device_curves import (
    BACK,
    BACKWARD,
    ELEMENTWISE,
    FORWARD,
    GEMM,
    Calibration,
    MeasuredPoint,
    fit_calibration,
)
from herd.llama3.train.device import device_name

Call = Callable[[], object]
DTYPE = torch.bfloat16
HEADS, FEATURES = (16, 1), 128
"""Query and key heads, and features per head: Llama 3 405B on one of 8 tensor-parallel ranks (arXiv 2407.21783)."""
LEAST, MOST = 3, 9
"""Repeats of a point."""
SHORT_S = 2e-3
"""Calls shorter than this are timed several at once: a clock and a launch cost microseconds."""
GROWTH = 4
"""Largest cost of a group of cases over that of the one before: operations grow with the square of a size."""


@dataclass(frozen=True)
class MeasuredSizes:
    """Sizes to measure on a kind of device: the first two always, later ones while there is time."""

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
    "cpu": MeasuredSizes(2048, _doubled(64, 4096), _doubled(128, 8192), _doubled(512, 2048)),
    "cuda": MeasuredSizes(8192, _doubled(512, 16_384), _doubled(1024, 131_072), _doubled(2048, 8192)),
}
"""Below a GPU's smallest sizes a launch costs more than the work."""


@dataclass(frozen=True)
class DeviceBenchmark:
    """An operation to measure."""

    what: str
    shape: tuple[int, ...]
    amount: float
    """Operations or bytes."""
    prepare: Callable[[], Call]
    """Makes the tensors and returns the call to time."""
    parts: int = 1
    """How many times a call does the amount."""


def calibrate(
    device: str = "auto", seconds: float = 60.0, log: Callable[[MeasuredPoint], object] = lambda _: None
) -> Calibration:
    """Measure `device` (auto, cpu or cuda) for about `seconds`, longer if two sizes of each kind need it.

    `say` gets each point when it is measured. Raises ValueError for no time, and for a device that is missing.
    """
    if not seconds > 0:
        raise ValueError(f"seconds: {seconds:g} leaves no time to measure; write 30 or more")
    target = resolve_device(device)
    reach, points = REACH[target.type], list[MeasuredPoint]()
    for groups, share in (
        (gemm_cases(reach, target), 0.5),
        (attention_cases(reach, target), 0.35),
        (elementwise_cases(reach, target), 0.15),
    ):
        for point in measure_groups(groups, share * seconds, target):
            log(point)
            points.append(point)
    date = datetime.now(UTC).isoformat(timespec="milliseconds")
    threads = torch.get_num_threads() if target.type == "cpu" else 0
    return Calibration(
        fit_calibration(points, device_name(target), date), tuple(points), date, torch.__version__, threads
    )


def gemm_cases(reach: MeasuredSizes, device: torch.device) -> Iterator[list[DeviceBenchmark]]:
    """Yield the products for each side: square, gate and up in one, down, and square of fewer rows.

    Amounts and seconds are those of one product: `spend` prices gradients like the forward product.
    """
    for side in reach.sides:
        rows = reach.rows
        shapes = [(rows, side, side), (rows // 4, side, side), (rows, side, 8 * side), (rows, 4 * side, side)]
        yield [
            DeviceBenchmark(GEMM, (m, k, n), 2.0 * m * k * n, partial(linear_layer_ops, m, k, n, device), 3)
            for m, k, n in shapes
        ]


def attention_cases(reach: MeasuredSizes, device: torch.device) -> Iterator[list[DeviceBenchmark]]:
    """Yield both passes at each length. FLOPs of the forward pass: 2 T S D, as `step_time.layer_work` counts them."""
    for length in reach.lengths:
        batch = max(1, reach.rows // length)
        shape, flops = (batch, length, HEADS[0], FEATURES), 2.0 * batch * length**2 * HEADS[0] * FEATURES
        passes = [partial(attention_op, batch, length, HEADS, FEATURES, backward, device) for backward in (False, True)]
        yield [
            DeviceBenchmark(FORWARD, shape, flops, passes[0]),
            DeviceBenchmark(BACK, shape, BACKWARD * flops, passes[1]),
        ]


def elementwise_cases(reach: MeasuredSizes, device: torch.device) -> Iterator[list[DeviceBenchmark]]:
    """Yield a layer's elementwise work at each width D, hidden 3.5 D. Bytes: as `layer_work`, backward twice."""
    for width in reach.widths:
        hidden, rows = width * 7 // 2, reach.rows
        moved = 3.0 * rows * (10 * width + 5 * hidden) * 2
        yield [DeviceBenchmark(ELEMENTWISE, (rows, width), moved, partial(elementwise_op, rows, width, hidden, device))]


def measure_groups(
    groups: Iterator[list[DeviceBenchmark]], limit_s: float, device: torch.device
) -> Iterator[MeasuredPoint]:
    """Yield the points of the first two groups, and of later ones while there is time for them."""
    began, least_s = time.monotonic(), 0.0
    for number, cases in enumerate(groups):
        left = limit_s - (time.monotonic() - began)
        if number >= 2 and least_s > left:
            return
        points = [measure_case(case, left / GROWTH / len(cases), device) for case in cases]
        yield from points
        calls_s = sum(point.seconds * case.parts for case, point in zip(cases, points, strict=True))
        least_s = GROWTH * (LEAST + 2) * calls_s


def measure_case(case: DeviceBenchmark, limit_s: float, device: torch.device) -> MeasuredPoint:
    """Return the point of a case: warmed up, then repeated for about `limit_s`, from `LEAST` to `MOST` times."""
    call = case.prepare()
    time_calls(call, 1, device)  # warm-up; the first products of a process on a CPU also repack weights
    first = max(time_calls(call, 1, device), 1e-7)
    at_once = ceil(SHORT_S / first)
    repeats = min(MOST, max(LEAST, int(limit_s / (first * at_once))))
    times = [time_calls(call, at_once, device) / case.parts for _ in range(repeats)]
    low, _, high = quantiles(times, n=4, method="inclusive")
    middle = median(times)
    return MeasuredPoint(case.what, case.shape, case.amount, middle, (high - low) / middle, repeats)


# The model's calls on random numbers: these cost a device more power than zeros, and so lower clocks, as in training


def linear_layer_ops(rows: int, inner: int, columns: int, device: torch.device) -> Call:
    """Return the three products of a linear layer [T, I] -> [T, C]: forward, gradients of input and of weight."""
    x_TI, weight_CI, gradient_TC = (
        torch.randn(*size, dtype=DTYPE, device=device) for size in ((rows, inner), (columns, inner), (rows, columns))
    )

    def call() -> None:
        x_TI @ weight_CI.T
        gradient_TC @ weight_CI
        gradient_TC.T @ x_TI

    return call


def attention_op(
    batch: int, length: int, heads: tuple[int, int], features: int, backward: bool, device: torch.device
) -> Call:
    """Return causal attention over whole sequences; `heads` are those of queries and of keys.

    The forward pass saves tensors for backward, as in training.
    """
    queries, keys, values = (
        torch.randn(batch, length, count, features, dtype=DTYPE, device=device, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    )
    if not backward:
        return lambda: attend(queries, keys, values, AttentionMask())
    out = attend(queries, keys, values, AttentionMask())
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (queries, keys, values), gradient, retain_graph=True)


def elementwise_op(rows: int, width: int, hidden: int, device: torch.device) -> Call:
    """Return two norms with their residual sums and one SwiGLU, forward and backward."""
    stream_TD = torch.randn(rows, width, dtype=DTYPE, device=device, requires_grad=True)
    gate_TF, up_TF = (torch.randn(rows, hidden, dtype=DTYPE, device=device, requires_grad=True) for _ in range(2))
    norm = RMSNorm(width, 1e-5, NoComms()).to(device)
    torch.nn.init.ones_(norm.weight)
    gradients = torch.randn(rows, width, dtype=DTYPE, device=device), torch.randn_like(gate_TF)

    def call() -> object:
        once_TD = stream_TD + norm(stream_TD)
        twice_TD = once_TD + norm(once_TD)
        return torch.autograd.grad(
            (twice_TD, F.silu(gate_TF) * up_TF), (stream_TD, norm.weight, gate_TF, up_TF), gradients
        )

    return call


def time_calls(call: Call, times: int, device: torch.device) -> float:
    """Return the seconds of one of `times` calls in a row, by the device's own clock where it has one."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def resolve_device(name: str) -> torch.device:
    """Return the device that `asked` (auto, cpu, cuda) names. Raises ValueError if it is missing."""
    present = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda") or (name == "cuda" and not present):
        has = "cpu and cuda" if present else "cpu alone"
        raise ValueError(f"device: {name!r} is not available, this machine has {has}; write auto or one of them")
    return torch.device("cuda" if present and name != "cpu" else "cpu")
