"""The grid of needles as a figure: the longer and the deeper, the harder to find."""

from __future__ import annotations

from matplotlib import pyplot as plt

from llama3.evaluate.needle import grid
from llama3.evaluate.scores import Scores
from tasks.plots import INK, as_svg

TITLE = "Needles"
NOTE = (
    "Share of hidden sentences found (multi-key, four choices, so guessing finds a quarter), by the length of the text "
    "in tokens and by how much of it stands before the sentence."
)


def needles(scores: Scores) -> str | None:
    """Return the heat map of `scores` as SVG text; None where they have no grid."""
    rows = grid(scores)
    if not rows:
        return None
    depths = sorted({depth for row in rows.values() for depth in row})
    shares = [[row[depth].value if depth in row else float("nan") for depth in depths] for row in rows.values()]
    figure, axis = plt.subplots(figsize=(8, 0.34 * len(rows) + 1.2), layout="constrained")
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    for place, row in enumerate(rows.values()):
        for column, depth in enumerate(depths):
            if depth in row:
                axis.text(column, place, f"{row[depth].value:.0%}", ha="center", va="center", fontsize=8, color=INK)
    axis.set_xticks(range(len(depths)), [f"{depth} %" for depth in depths])
    axis.set_yticks(range(len(rows)), [f"{length:,}" for length in rows])
    axis.set_xlabel("depth")
    axis.set_ylabel("tokens")
    axis.grid(visible=False)
    axis.tick_params(length=0)
    return as_svg(figure)
