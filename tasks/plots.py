"""Style of all figures, and their SVG text. Importing this module loads matplotlib."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

matplotlib.use("svg")


COLOURS = {"general": "#3b6fb6", "math": "#d1603d", "code": "#3f9b6c", "multilingual": "#8a63b8"}
INK, FAINT = "#30363d", "#d8dee4"
plt.rcParams.update(
    {
        "font.size": 10,
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "svg.hashsalt": "herd",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.grid": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
    }
)


def as_svg(figure: Any) -> str:
    """Return `figure` as SVG text without dates, and close it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
