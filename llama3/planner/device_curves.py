"""Speed of a device as curves: matrix products by size, attention by length, elementwise work by bytes.

The efficiency of a product is ceiling * n / (n + half), n the smaller side of its local weight matrix: two constants,
which fit Megatron's published iterations within 3 % (anchor A4) and which `calibrate` measures. Rows (tokens) do not
count: with them as a third side that fit breaks down. A prediction outside the measured range says so.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log, sqrt

import numpy as np

from herd.llama3.hardware.specs import Accelerator
from herd.llama3.train.device import peak_flops

BACKWARD = 2.5
"""Work of attention's backward pass over its forward one: five products in place of two (arXiv 2205.14135)."""
ATTENTION = 550e12
"""Assumed rate of attention on Hopper, forward, FLOP/s (FlashAttention-3, arXiv 2407.08608: 400 to 650 at 8K, 16K)."""
REALIZED, HALF = 0.76, 320.0
"""Priors: rate of products in a step over their rate alone, and the side at which half of the ceiling is reached. The
first fits Table 4's first row (0.611 of the H100's peak) and absorbs all that is not modeled (launch gaps, falling
clocks, messages that slow products down); half is Megatron's."""
HOPPER, HOPPER_TFLOPS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989.0
MEMORY = 0.8
"""Rate of elementwise work over the memory's peak (assumed)."""
SIDES = ("rows", "smaller side", "larger side")
"""Sizes of a product: rows are tokens, sides those of the weight matrix."""
OUTLIER = 0.1
"""Relative error above which a measured product has a linear and no longer a quadratic loss in the fit."""
Shape = tuple[int, int, int]
"""Rows, inner and columns of a product."""
Range = tuple[int, int]
"""Smallest and largest."""
GEMM, FORWARD, BACK, ELEMENTWISE = "products", "attention forward", "attention backward", "elementwise"
UNSTEADY = 0.2
"""Spread above which a point is called unsteady: the machine was busy, or its clocks moved."""


@dataclass(frozen=True)
class GemmCurve:
    """Efficiency of matrix products."""

    peak_flops: float
    ceiling: float
    """Share of the peak that an infinite product reaches."""
    half: float
    """Smaller side of the weight matrix at which half of the ceiling is reached."""
    measured: tuple[Range, Range, Range] | None = None
    """Ranges of rows, smaller and larger sides in the fit; None: a prior."""

    def efficiency(self, side: float) -> float:
        """Return the share of the peak where the smaller side of the weight matrix is `side`."""
        return self.ceiling * side / (side + self.half)

    def seconds(self, rows: int, inner: int, columns: int) -> float:
        """Return the time of one product."""
        side = min(inner, columns)
        return 2.0 * rows * inner * columns * (side + self.half) / (self.peak_flops * self.ceiling * side)

    def extrapolates(self, rows: int, inner: int, columns: int) -> str:
        """Return which size of a product is outside the measured range, or ""."""
        if self.measured is None:
            return ""
        sizes = zip(SIDES, _sizes(rows, inner, columns), self.measured, strict=True)
        outside = [
            f"{side} {size:,} outside of the measured {low:,} to {high:,}"
            for side, size, (low, high) in sizes
            if not low <= size <= high
        ]
        return f"product {rows:,} x {inner:,} x {columns:,}: {', '.join(outside)}" if outside else ""


@dataclass(frozen=True)
class AttentionCurve:
    """Rates of attention by sequence length, the causal half counted; between two lengths by the logarithm."""

    lengths: tuple[int, ...]
    forward: tuple[float, ...]
    """Operations per second at each length."""
    backward: tuple[float, ...]
    measured: bool = False

    def seconds(self, flops: float, seq_len: int, backward: bool) -> float:
        """Return the seconds of `flops` forward operations at length `seq_len`, or of their backward pass."""
        rates = self.backward if backward else self.forward
        after = bisect_right(self.lengths, seq_len)
        if after in (0, len(self.lengths)):
            rate = rates[min(after, len(self.lengths) - 1)]
        else:
            low, high = self.lengths[after - 1], self.lengths[after]
            share = log(seq_len / low) / log(high / low)
            rate = rates[after - 1] * (1 - share) + rates[after] * share
        return flops * (BACKWARD if backward else 1.0) / rate

    def extrapolates(self, seq_len: int) -> str:
        """Return that a length is outside the measured range, or ""."""
        low, high = self.lengths[0], self.lengths[-1]
        if not self.measured or low <= seq_len <= high:
            return ""
        return f"attention over {seq_len:,} tokens: outside of the measured {low:,} to {high:,}"


@dataclass(frozen=True)
class MemoryCurve:
    """Rate of elementwise work, in bytes as the planner counts them: a backward pass moves twice the forward's."""

    bytes_per_s: float

    def seconds(self, moved: float) -> float:
        """Return the time to read and write `moved` bytes."""
        return moved / self.bytes_per_s


@dataclass(frozen=True)
class Curves:
    """Curves of a device, and their source."""

    device: str
    dtype: str
    source: str
    """Measured, with the date, or prior."""
    gemm: GemmCurve
    attention: AttentionCurve
    memory: MemoryCurve

    def with_attention(self, rate: float) -> Curves:
        """Return these curves with the same rate of attention at all lengths."""
        return replace(self, attention=AttentionCurve((1,), (rate,), (rate,)))

    def extrapolates(self, products: Iterable[Shape], lengths: Iterable[int]) -> list[str]:
        """Return a sentence for each product and each attention length outside the measured range."""
        sentences = [self.gemm.extrapolates(*shape) for shape in products]
        sentences += [self.attention.extrapolates(length) for length in lengths]
        return list(dict.fromkeys(filter(None, sentences)))

    def as_json(self) -> str:
        """Return the curves as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Curves:
        """Return the curves that `as_json` wrote. Raises ValueError, KeyError or TypeError for another text."""
        data = json.loads(text)
        gemm, attention, memory = (data.pop(name) for name in ("gemm", "attention", "memory"))
        gemm["measured"] = tuple((low, high) for low, high in gemm["measured"]) if gemm["measured"] else None
        for name in ("lengths", "forward", "backward"):
            attention[name] = tuple(attention[name])
        return cls(**data, gemm=GemmCurve(**gemm), attention=AttentionCurve(**attention), memory=MemoryCurve(**memory))


def prior_curves(accelerator: Accelerator) -> Curves:
    """Return the assumed curves of an accelerator that was not measured, from its description.

    Attention is proportional to the peak. Other devices than Hopper are scaled from it, and `source` says so.
    """
    peak = accelerator.dense_tflops * 1e12
    hopper = accelerator.driver_name in HOPPER
    rate = ATTENTION * accelerator.dense_tflops / HOPPER_TFLOPS
    source = (
        "assumed, from a published run of Llama 3 405B"
        if hopper
        else "assumed, Hopper's scaled by the peak: not validated"
    )
    return Curves(
        accelerator.name,
        "bf16",
        source,
        GemmCurve(peak, REALIZED * accelerator.reached_tflops / accelerator.dense_tflops, HALF),
        AttentionCurve((1,), (rate,), (rate,)),
        MemoryCurve(accelerator.memory_tb_s * 1e12 * MEMORY),
    )


def derate_for_step(measured: Curves) -> Curves:
    """Return measured curves for a training step, where products reach `REALIZED` of their rate alone."""
    gemm = replace(measured.gemm, ceiling=measured.gemm.ceiling * REALIZED)
    return replace(measured, gemm=gemm, source=f"{measured.source}; products times {REALIZED}, as fitted on Table 4")


def fit_gemm(shapes: Sequence[Shape], seconds: Sequence[float], peak_flops: float) -> GemmCurve:
    """Return the curve of least relative error through measured products.

    Errors above `OUTLIER` weigh less, because a busy machine makes some. `half` is at most four times the largest
    measured side; above, it cannot be separated from the ceiling. Raises ValueError for fewer than two smaller sides.
    """
    from scipy.optimize import least_squares  # takes a third of a second; plans do not need it

    rows, smaller, larger = (np.array(sizes) for sizes in zip(*(_sizes(*shape) for shape in shapes), strict=True))
    if len(set(smaller.tolist())) < 2:
        raise ValueError(
            f"calibrate: products of one size ({smaller[0]:,}) fit no curve of two constants; measure more"
        )
    reached = 2.0 * rows * smaller * larger / np.array(seconds) / peak_flops

    def misses(constants: np.ndarray) -> np.ndarray:
        ceiling, half = np.exp(constants)
        return np.asarray(np.log(ceiling * smaller / (smaller + half) / reached))

    start = np.log([reached.max(), np.median(smaller)])
    bounds = ([-np.inf, 0.0], [np.inf, np.log(4.0 * smaller.max())])
    ceiling, half = np.exp(least_squares(misses, start, bounds=bounds, loss="soft_l1", f_scale=OUTLIER).x)
    low_high = [(int(sizes.min()), int(sizes.max())) for sizes in (rows, smaller, larger)]
    return GemmCurve(peak_flops, float(ceiling), float(half), (low_high[0], low_high[1], low_high[2]))


def _sizes(rows: int, inner: int, columns: int) -> Shape:
    """Return the sizes of a product in the order of `SIDES`."""
    return rows, min(inner, columns), max(inner, columns)


# Calibration: measured points, the curves through them, and their errors


@dataclass(frozen=True)
class MeasuredPoint:
    """A measured operation."""

    what: str
    shape: tuple[int, ...]
    """Rows, inner and columns of a product; sequences, length, heads and features of attention; rows and width."""
    amount: float
    """FLOPs, of attention the causal half; bytes of elementwise work, as the planner counts them."""
    seconds: float
    """Median of the repeats."""
    spread: float
    """Interquartile range of the repeats over their median."""
    repeats: int

    @property
    def rate(self) -> float:
        """FLOP/s or bytes per second."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class Calibration:
    """Measurements of a device, and the curves through them."""

    curves: Curves
    points: tuple[MeasuredPoint, ...]
    date: str
    """ISO 8601, UTC."""
    torch: str
    """Version."""
    threads: int
    """CPU threads; 0 for a GPU."""

    def predicted_s(self, point: MeasuredPoint) -> float:
        """Return the seconds that the curves predict for a point."""
        match point.what:
            case "products":
                rows, inner, columns = point.shape
                return self.curves.gemm.seconds(rows, inner, columns)
            case "elementwise":
                return self.curves.memory.seconds(point.amount)
            case "attention forward" | "attention backward":
                backward = point.what == BACK
                forward_flops = point.amount / (BACKWARD if backward else 1.0)
                return self.curves.attention.seconds(forward_flops, point.shape[1], backward)
            case _:
                raise ValueError(f"calibration: {point.what!r} is an unknown kind of measurement")

    def miss(self, point: MeasuredPoint) -> float:
        """Return the relative error of the curves' seconds against the measured ones."""
        return self.predicted_s(point) / point.seconds - 1.0

    @property
    def gemm_miss(self) -> float:
        """Root mean square of the products' logarithmic errors: 0.05 is 5 % up or down."""
        misses = [log(self.predicted_s(point) / point.seconds) for point in self.points if point.what == GEMM]
        return exp(sqrt(sum(miss**2 for miss in misses) / len(misses))) - 1.0

    def warnings(self) -> list[str]:
        """Return warnings about a poor fit and unsteady points."""
        warnings = []
        if self.gemm_miss > UNSTEADY:
            warnings.append(
                f"products miss their curve by {self.gemm_miss:.0%}: two constants do not describe this device"
            )
        unsteady = sum(point.spread > UNSTEADY for point in self.points)
        if unsteady:
            warnings.append(
                f"{unsteady} of {len(self.points)} points spread by more than {UNSTEADY:.0%}: the machine was busy; "
                "calibrate again when it is idle"
            )
        return warnings

    def as_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({**asdict(self), "curves": json.loads(self.curves.as_json())}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Return what `as_json` wrote. Raises ValueError, KeyError or TypeError for another text."""
        data = json.loads(text)
        curves, points = Curves.from_json(json.dumps(data.pop("curves"))), data.pop("points")
        return cls(
            curves, tuple(MeasuredPoint(**{**point, "shape": tuple(point["shape"])}) for point in points), **data
        )


def fit_calibration(points: Sequence[MeasuredPoint], device: str, date: str) -> Curves:
    """Return the curves through measured points of every kind; lengths of attention in ascending order.

    Where the maker's peak is not known, shares are of the fastest product, and `source` says so. Elementwise work
    counts at the largest size, which no cache holds. Raises ValueError for products of only one size.
    """
    gemm, forward, backward, elementwise = (
        [point for point in points if point.what == kind] for kind in (GEMM, FORWARD, BACK, ELEMENTWISE)
    )
    peak = peak_flops(device, "bf16")
    flops = peak.flops if peak else max(point.rate for point in gemm)
    shapes = [(rows, inner, columns) for rows, inner, columns in (point.shape for point in gemm)]
    lengths = tuple(point.shape[1] for point in forward)
    forward_rates, backward_rates = (tuple(point.rate for point in passes) for passes in (forward, backward))
    return Curves(
        device,
        "bf16",
        f"measured {date[:10]}" + ("" if peak else ", shares of its fastest product: its peak is unknown"),
        fit_gemm(shapes, [point.seconds for point in gemm], flops),
        AttentionCurve(lengths, forward_rates, backward_rates, measured=True),
        MemoryCurve(max(elementwise, key=lambda point: point.amount).rate),
    )
