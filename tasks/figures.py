"""The style of figures drawn by matplotlib, and figures as SVG text.

Importing this module loads matplotlib.
"""

from __future__ import annotations

import io
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure

from herd.tasks.html import COLORS, FAINT, INK

# Neither pyplot nor its defaults: a notebook that draws a report keeps its own figures and their style.
styled = rc_context(
    {
        "font.size": 10,
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "svg.hashsalt": "herd",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=[*COLORS.values(), "#b8860b", "#c2477f"]),
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
    }
)
"""Decorator of a function that draws."""


def subplots(rows: int = 1, columns: int = 1, *, figsize: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """Return a figure and its axes, as pyplot's function of this name."""
    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def as_svg(figure: Any) -> str:
    """Return `figure` as SVG text without dates."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = buffer.getvalue()
    return text[text.index("<svg") :]
