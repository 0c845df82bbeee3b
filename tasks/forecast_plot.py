"""The two steps of a forecast as one figure: likelihood over compute, accuracy over likelihood."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from llama3.evaluate.statistics import proportion
from llama3.scaling.forecast import Fit, Forecast, Interval
from tasks.plots import COLOURS, INK, as_svg

STEPS = 60
"""Places at which a curve is drawn."""
LINE, TARGET = COLOURS["general"], COLOURS["math"]


def forecast(fit: Fit, target: Forecast) -> str:
    """Return the figure as SVG text; `target` is the forecast that is marked."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", width_ratios=(1.1, 1))
    _compute(left, fit, target)
    _accuracy(right, fit, target)
    return as_svg(figure)


def _compute(axis: Any, fit: Fit, target: Forecast) -> None:
    ends = {point.run: point for point in sorted(fit.points, key=lambda point: point.flops)}.values()
    inner = [point for point in fit.points if point not in ends]
    least = min(point.flops for point in fit.points)
    made = [fit.at(flops) for flops in np.geomspace(least, max(target.flops, fit.largest), STEPS)]
    places = [one.flops for one in made]
    axis.fill_between(places, [o.nats.low for o in made], [o.nats.high for o in made], color=LINE, alpha=0.15, lw=0)
    axis.plot(places, [one.nats.value for one in made], color=LINE, linewidth=1.6)
    axis.scatter([p.flops for p in inner], [p.nats for p in inner], s=14, facecolors="none", edgecolors=INK, lw=0.8)
    axis.scatter([p.flops for p in ends], [p.nats for p in ends], s=18, color=INK, zorder=3)
    _mark(axis, target.flops, target.nats)
    axis.set_xscale("log")
    axis.set_xlabel("training operations")
    axis.set_ylabel("nats per byte of the gold answer")


def _accuracy(axis: Any, fit: Fit, target: Forecast) -> None:
    nats = [point.nats for point in fit.points]
    places = np.linspace(min(*nats, target.nats.low), max(nats), STEPS)
    axis.plot(places, fit.curve.at(places), color=LINE, linewidth=1.6)
    spreads = [proportion(round(point.accuracy * point.n), point.n) for point in fit.points]
    shares = [point.accuracy for point in fit.points]
    errors = [[max(0.0, a - s.low) for a, s in zip(shares, spreads, strict=True)]]
    errors.append([max(0.0, s.high - a) for a, s in zip(shares, spreads, strict=True)])
    axis.errorbar(nats, shares, yerr=errors, fmt="o", markersize=3.5, color=INK, elinewidth=0.7, zorder=3)
    axis.axhline(fit.chance, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
    axis.text(0.99, fit.chance, "chance", transform=axis.get_yaxis_transform(), ha="right", va="bottom", fontsize=8)
    _mark(axis, target.nats.value, target.accuracy)
    axis.invert_xaxis()
    axis.set_xlabel("nats per byte of the gold answer")
    axis.set_ylabel("accuracy")


def _mark(axis: Any, x: float, y: Interval) -> None:
    """Draw a forecast with its interval."""
    errors = [[max(0.0, y.value - y.low)], [max(0.0, y.high - y.value)]]
    axis.errorbar([x], [y.value], yerr=errors, fmt="s", markersize=6, color=TARGET, capsize=3, zorder=4)
