"""How fast a device computes, as curves: matrix products by size, attention by length, elementwise work by bytes.

A product's efficiency grows with n, the smaller side of its local weight matrix, as ceiling * n / (n + half): two
constants, which fit Megatron's published iterations within 3 % (anchor A4) and which `calibrate` measures on the
machine at hand. Rows are tokens, thousands in training, and do not count: with them as a third side the fit of those
iterations breaks down. A prediction outside of what was measured says so.

Given up: tiles and waves, which make steps in the true curve of up to a tenth; other formats and widths of a head than
the ones measured. A measured ceiling is that of products alone: a prior's, fitted on whole steps, is lower, because it
also holds what no model here has (launch gaps, clocks that fall, messages that slow products down).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log, sqrt

import numpy as np

from llama3.planner.hardware import Accelerator
from llama3.train.peak_flops import peak_of

BACKWARD = 2.5
"""Work of attention's backward pass over its forward one: five products in place of two (arXiv 2205.14135)."""
ATTENTION = 550e12
"""Stated prior of attention on Hopper, forward, FLOP/s (FlashAttention-3, arXiv 2407.08608: 400 to 650 at 8K, 16K)."""
REALISED, HALF = 0.76, 320.0
"""Priors: what a step gets of the rate that large products reach alone, and the side at which half of it is reached.
The first fits Table 4's first row (0.611 of the H100's peak) and holds all that is not modelled; half as Megatron's."""
HOPPER, HOPPER_TFLOPS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989.0
MEMORY = 0.8
"""Share of the memory's peak that elementwise work reaches (assumed)."""
SIDES = ("rows", "smaller side", "larger side")
"""Sizes of a product: rows are tokens, sides those of the weight matrix."""
OUTLIER = 0.1
"""Relative miss from which a measured product pulls on the fit like its size and no longer like its square."""
Shape = tuple[int, int, int]
"""Rows, inner and columns of a product."""
Range = tuple[int, int]
"""Smallest and largest."""


@dataclass(frozen=True)
class GemmCurve:
    """Efficiency of matrix products."""

    peak_flops: float
    ceiling: float
    """Share of the peak that an endless product reaches."""
    half: float
    """Smaller side of the weight matrix at which half of the ceiling is reached."""
    measured: tuple[Range, Range, Range] | None = None
    """Rows, smaller and larger sides that the curve was fitted on; None: a prior."""

    def efficiency(self, side: float) -> float:
        """Return the share of the peak where the smaller side of the weight matrix is `side`."""
        return self.ceiling * side / (side + self.half)

    def seconds(self, rows: int, inner: int, columns: int) -> float:
        """Return the time of one product."""
        side = min(inner, columns)
        return 2.0 * rows * inner * columns * (side + self.half) / (self.peak_flops * self.ceiling * side)

    def extrapolates(self, rows: int, inner: int, columns: int) -> str:
        """Return which size of a product lies outside of what was measured, or ""."""
        if self.measured is None:
            return ""
        found = zip(SIDES, _sizes(rows, inner, columns), self.measured, strict=True)
        odd = [
            f"{side} {size:,} outside of the measured {low:,} to {high:,}"
            for side, size, (low, high) in found
            if not low <= size <= high
        ]
        return f"product {rows:,} x {inner:,} x {columns:,}: {', '.join(odd)}" if odd else ""


@dataclass(frozen=True)
class AttentionCurve:
    """Rates of attention by sequence length, the causal half counted; between two lengths by the logarithm."""

    lengths: tuple[int, ...]
    forward: tuple[float, ...]
    """Operations per second at each length."""
    backward: tuple[float, ...]
    measured: bool = False

    def seconds(self, flops: float, seq: int, backward: bool) -> float:
        """Return the time of `flops` forward operations at length `seq`, or of the backward pass that follows them."""
        rate = _between(self.lengths, self.backward if backward else self.forward, seq)
        return flops * (BACKWARD if backward else 1.0) / rate

    def extrapolates(self, seq: int) -> str:
        """Return that a length lies outside of what was measured, or ""."""
        low, high = self.lengths[0], self.lengths[-1]
        if not self.measured or low <= seq <= high:
            return ""
        return f"attention over {seq:,} tokens: outside of the measured {low:,} to {high:,}"


@dataclass(frozen=True)
class MemoryCurve:
    """Rate of elementwise work, in bytes as the planner counts them: a backward pass moves twice the forward's."""

    bytes_per_s: float

    def seconds(self, moved: float) -> float:
        """Return the time of reading and writing `moved` bytes."""
        return moved / self.bytes_per_s


@dataclass(frozen=True)
class Curves:
    """What a device does, and where the figures come from."""

    device: str
    dtype: str
    source: str
    """Measured, with the date, or prior."""
    gemm: GemmCurve
    attention: AttentionCurve
    memory: MemoryCurve

    def with_attention(self, rate: float) -> Curves:
        """Return these curves with one rate of attention at all lengths."""
        return replace(self, attention=AttentionCurve((1,), (rate,), (rate,)))

    def extrapolates(self, products: Iterable[Shape], lengths: Iterable[int]) -> list[str]:
        """Return a sentence for each product and each length of attention that lies outside of what was measured."""
        said = [self.gemm.extrapolates(*shape) for shape in products] + [
            self.attention.extrapolates(length) for length in lengths
        ]
        return list(dict.fromkeys(filter(None, said)))

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


def priors(accelerator: Accelerator) -> Curves:
    """Return the curves assumed of an accelerator that nobody measured, from its description.

    Attention goes with the peak. Outside of Hopper all of it is a guess by proportion, and `source` says so.
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
        GemmCurve(peak, REALISED * accelerator.reached_tflops / accelerator.dense_tflops, HALF),
        AttentionCurve((1,), (rate,), (rate,)),
        MemoryCurve(accelerator.memory_tb_s * 1e12 * MEMORY),
    )


def in_a_step(measured: Curves) -> Curves:
    """Return measured curves as a step of training sees them: products reach `REALISED` of what they reach alone."""
    gemm = replace(measured.gemm, ceiling=measured.gemm.ceiling * REALISED)
    return replace(measured, gemm=gemm, source=f"{measured.source}; products times {REALISED}, as fitted on Table 4")


def fit_gemm(shapes: Sequence[Shape], seconds: Sequence[float], peak_flops: float) -> GemmCurve:
    """Return the curve of least relative error through measured products.

    Misses above `OUTLIER` weigh less, because a busy machine makes some. Above four times the largest side measured
    half cannot be told from the ceiling, and ends there. Raises ValueError for fewer than two smaller sides.
    """
    from scipy.optimize import least_squares  # a third of a second, which plans do not wait for

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
    """Return what a product is judged by, as `SIDES` names it."""
    return rows, min(inner, columns), max(inner, columns)


def _between(lengths: Sequence[int], rates: Sequence[float], seq: int) -> float:
    after = bisect_right(lengths, seq)
    if after in (0, len(lengths)):
        return rates[min(after, len(lengths) - 1)]
    low, high = lengths[after - 1], lengths[after]
    share = log(seq / low) / log(high / low)
    return rates[after - 1] * (1 - share) + rates[after] * share


# What a calibration found: measured points, the curves through them, and how far those miss.
#
# Pure figures, as JSON both ways, so that a plan reads them without torch. Given up: the single repeats; a point is
# their median and the spread of their middle half.

GEMM, FORWARD, BACK, ELEMENTWISE = "products", "attention forward", "attention backward", "elementwise"
UNSTEADY = 0.2
"""Spread from which a point is called unsteady: the machine did something else, or its clocks moved."""


@dataclass(frozen=True)
class MeasuredPoint:
    """One measured thing."""

    what: str
    shape: tuple[int, ...]
    """Rows, inner and columns of a product; sequences, length, heads and features of attention; rows and width."""
    amount: float
    """Operations, of attention the causal half; bytes of elementwise work, as the planner counts them."""
    seconds: float
    """Median of the repeats."""
    spread: float
    """Middle half of the repeats over their median."""
    repeats: int

    @property
    def rate(self) -> float:
        """Operations or bytes a second."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class Calibration:
    """What was measured on a device, and the curves through it."""

    curves: Curves
    points: tuple[MeasuredPoint, ...]
    date: str
    """ISO 8601, UTC."""
    torch: str
    """Version."""
    threads: int
    """Of the processor; 0 for a GPU."""

    def predicted_s(self, point: MeasuredPoint) -> float:
        """Return the seconds that the curves say of a point."""
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
                raise ValueError(f"calibration: {point.what!r} is nothing that is measured")

    def miss(self, point: MeasuredPoint) -> float:
        """Return by what share the curves' seconds differ from the measured ones."""
        return self.predicted_s(point) / point.seconds - 1.0

    @property
    def gemm_miss(self) -> float:
        """Root mean square of the products' misses, by the logarithm: 0.05 is 5 % up or down."""
        misses = [log(self.predicted_s(point) / point.seconds) for point in self.points if point.what == GEMM]
        return exp(sqrt(sum(miss**2 for miss in misses) / len(misses))) - 1.0

    def warnings(self) -> list[str]:
        """Return what a reader of the curves should know: a poor fit, unsteady points."""
        said = []
        if self.gemm_miss > UNSTEADY:
            said.append(f"products miss their curve by {self.gemm_miss:.0%}: two constants do not describe this device")
        unsteady = sum(point.spread > UNSTEADY for point in self.points)
        if unsteady:
            said.append(
                f"{unsteady} of {len(self.points)} points spread by more than {UNSTEADY:.0%}: the machine was busy; "
                "calibrate again when it is idle"
            )
        return said

    def as_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({**asdict(self), "curves": json.loads(self.curves.as_json())}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Return what `as_json` wrote. Raises ValueError, KeyError or TypeError for another text."""
        data = json.loads(text)
        curves, points = Curves.from_json(json.dumps(data.pop("curves"))), data.pop("points")
        return cls(curves, tuple(MeasuredPoint(**{**one, "shape": tuple(one["shape"])}) for one in points), **data)


def fitted(points: Sequence[MeasuredPoint], device: str, date: str) -> Curves:
    """Return the curves through measured points of every kind; lengths of attention in ascending order.

    Where the maker's peak is not known, shares are of the fastest product, and `source` says so. Elementwise work
    counts at the largest size, which no cache holds. Raises ValueError for products of one size only.
    """
    of = {what: [one for one in points if one.what == what] for what in (GEMM, FORWARD, BACK, ELEMENTWISE)}
    peak = peak_of(device, "bf16")
    flops = peak.flops if peak else max(one.rate for one in of[GEMM])
    shapes = [(rows, inner, columns) for rows, inner, columns in (one.shape for one in of[GEMM])]
    rates = [tuple(one.rate for one in of[what]) for what in (FORWARD, BACK)]
    return Curves(
        device,
        "bf16",
        f"measured {date[:10]}" + ("" if peak else ", shares of its fastest product: its peak is unknown"),
        fit_gemm(shapes, [one.seconds for one in of[GEMM]], flops),
        AttentionCurve(tuple(one.shape[1] for one in of[FORWARD]), rates[0], rates[1], measured=True),
        MemoryCurve(max(of[ELEMENTWISE], key=lambda one: one.amount).rate),
    )
