"""What a calibration found: measured points, the curves through them, and how far those miss.

Pure figures, as JSON both ways, so that a plan reads them without torch. Given up: the single repeats; a point is
their median and the spread of their middle half.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt

from llama3.cluster.curves import BACKWARD, AttentionCurve, Curves, MemoryCurve, fit_gemm
from llama3.train.peaks import peak_of

GEMM, FORWARD, BACK, ELEMENTWISE = "products", "attention forward", "attention backward", "elementwise"
UNSTEADY = 0.2
"""Spread from which a point is called unsteady: the machine did something else, or its clocks moved."""


@dataclass(frozen=True)
class Point:
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
    points: tuple[Point, ...]
    date: str
    """ISO 8601, UTC."""
    torch: str
    """Version."""
    threads: int
    """Of the processor; 0 for a GPU."""

    def predicted_s(self, point: Point) -> float:
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

    def miss(self, point: Point) -> float:
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
        return cls(curves, tuple(Point(**{**one, "shape": tuple(one["shape"])}) for one in points), **data)


def fitted(points: Sequence[Point], device: str, date: str) -> Curves:
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
