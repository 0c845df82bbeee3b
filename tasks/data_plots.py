"""Figures of the data page as SVG text."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from tasks.data_page import DataPage
from tasks.plots import COLOURS, as_svg


def lengths(page: DataPage) -> str:
    """Draw, by domain, how many documents of each size were kept, and in outline how many were read."""
    domains = [domain for domain in COLOURS if any(row["domain"] == domain for row in page.lengths)]
    figure, axes = plt.subplots(1, len(domains), figsize=(9, 2.6), layout="constrained", squeeze=False)
    least, most = (pick(row["log2_bytes"] for row in page.lengths) for pick in (min, max))
    for axis, domain in zip(axes[0], domains, strict=True):
        counts = {kept: dict.fromkeys(range(least, most + 1), 0) for kept in (True, False)}
        for row in page.lengths:
            if row["domain"] == domain:
                counts[row["kept"]][row["log2_bytes"]] += row["documents"]
        places = list(counts[True])
        read = [counts[True][place] + counts[False][place] for place in places]
        axis.bar(places, list(counts[True].values()), color=COLOURS[domain], width=0.9)
        axis.bar(places, read, fill=False, edgecolor="#30363d", linewidth=0.8, width=0.9)
        axis.set_title(domain, fontsize=10)
        axis.xaxis.set_major_formatter(FuncFormatter(_power))
        axis.grid(axis="x", visible=False)
    axes[0][0].set_ylabel("documents")
    return as_svg(figure)


def _power(value: float, _: object) -> str:
    """Return 2^value bytes as people say it."""
    size, unit = 2**value, "B"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1024, larger
    return f"{size:.0f} {unit}"
