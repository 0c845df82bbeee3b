"""A mix search as pictures: how well the fit foretells an arm that it has not seen, and bits per byte against shares.

Plain numbers go in, so the pictures know nothing of the form that was fitted. What this gives up: a share's effect at
equal other shares; in each panel the other domains move too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator

from llama3.scaling.forecast import Interval
from tasks.plots import COLOURS, INK, as_svg

Losses = Mapping[str, Mapping[str, float]]
"""Arm -> domain -> bits per byte, the mean over its repeats."""
Shares = Mapping[str, Mapping[str, float]]
"""Arm -> domain -> share of the tokens."""
WIDTH = 9.0
BLEND = "#b8860b"
LEFT_OUT = (
    "Each arm's bits per byte against what the fit through all other arms says of it; on the line both are equal. A "
    "fit that cannot order these arms can propose nothing."
)
PANELS = (
    "Bits per byte on the held-out text of each domain against that domain's share of the training tokens, a point for "
    "each arm. The ring is the base mix."
)
SPLIT = "Shares of the base mix and of the best blend of the arms; whiskers are 95 % intervals of the blend's shares."


def left_out(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return measured against predicted bits per byte, a panel for each domain; `pairs` are (predicted, measured)."""
    figure, axes = plt.subplots(1, len(pairs), figsize=(WIDTH, 2.7), layout="constrained", squeeze=False)
    for axis, (domain, points) in zip(axes.flat, pairs.items(), strict=True):
        values = np.array(points, np.float64)
        ends = [values.min(), values.max()]
        axis.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.scatter(values[:, 0], values[:, 1], s=22, color=_colour(domain), zorder=3)
        _panel(axis, domain, "predicted")
    axes[0, 0].set_ylabel("measured, bits per byte")
    return as_svg(figure)


def against_shares(shares: Shares, losses: Losses, base: str) -> str:
    """Return bits per byte against the domain's own share, a panel for each; `base` names the base mix's arm."""
    domains = list(losses[base])
    figure, axes = plt.subplots(1, len(domains), figsize=(WIDTH, 2.9), layout="constrained", squeeze=False)
    for axis, domain in zip(axes.flat, domains, strict=True):
        taken = [shares[arm].get(domain, 0.0) for arm in losses]
        axis.scatter(taken, [losses[arm][domain] for arm in losses], s=22, color=_colour(domain), zorder=3)
        own = (shares[base].get(domain, 0.0), losses[base][domain])
        axis.plot(*own, "o", markersize=10, color=INK, markerfacecolor="none", markeredgewidth=1.5, zorder=4)
        _panel(axis, domain, "share of tokens")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes[0, 0].set_ylabel("bits per byte")
    return as_svg(figure)


def split(base: Mapping[str, float], blend: Mapping[str, Interval]) -> str:
    """Return the shares of the base mix and of a blend side by side as SVG text."""
    domains = list(base)
    figure, axis = plt.subplots(figsize=(WIDTH, 0.5 * len(domains) + 1.1), layout="constrained")
    places = np.arange(len(domains))
    axis.barh(places - 0.19, [base[domain] for domain in domains], 0.34, color="#b4bcc6", label="base")
    found = [blend[domain] for domain in domains]
    errors = [[max(0.0, one.value - one.low) for one in found], [max(0.0, one.high - one.value) for one in found]]
    bars = [one.value for one in found]
    axis.barh(places + 0.19, bars, 0.34, xerr=errors, color=BLEND, capsize=3, ecolor=INK, label="best blend")
    axis.set_yticks(places, domains)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axis.legend(loc="lower right")
    return as_svg(figure)


def _panel(axis: Any, domain: str, label: str) -> None:
    axis.set_title(domain, fontsize=10, color=INK)
    axis.set_xlabel(label, fontsize=9)
    axis.tick_params(labelsize=8.5)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axis.margins(0.12)


def _colour(domain: str) -> str:
    return COLOURS.get(domain, INK)
