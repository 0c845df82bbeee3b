"""Figures of the report as SVG text, by matplotlib; the x axis is always tokens."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from llama3.recipe.units import tokens
from llama3.train import metrics
from tasks.report_data import ReportData, Series

COLOURS = {"general": "#3b6fb6", "math": "#d1603d", "code": "#3f9b6c", "multilingual": "#8a63b8"}
SMOOTH = 9
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


def loss(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "loss, nats per token")
    points = data.series[metrics.LOSS]
    axis.plot(*_xy(points), color="#9aa4af", linewidth=0.8, label="each step")
    axis.plot(*_xy(_smooth(points)), color=INK, linewidth=1.8, label=f"mean of {SMOOTH} steps")
    _legend(figure)
    return as_svg(figure)


def domain_loss(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "loss, nats per token")
    for domain, colour in COLOURS.items():
        points = data.series.get(metrics.domain_loss(domain), [])
        axis.plot(*_xy(_smooth(points)), color=colour, linewidth=1.6, label=domain)
    _legend(figure)
    return as_svg(figure)


def held_out(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "bits per byte")
    for domain, colour in COLOURS.items():
        points = data.series.get(metrics.held_out(domain), [])
        axis.plot(*_xy(points), color=colour, linewidth=1.4, marker="o", markersize=3, label=domain)
    axis.plot(*_xy(data.series[metrics.HELD_OUT]), color=INK, linewidth=1.8, marker="o", markersize=4, label="all")
    _legend(figure)
    return as_svg(figure)


def schedule(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "learning rate")
    axis.plot(*_xy(data.series[metrics.LEARNING_RATE]), color="#3b6fb6", linewidth=1.8, label="learning rate")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    batch = axis.twinx()
    batch.grid(visible=False)
    batch.spines["right"].set_visible(True)
    for key, colour, label in (
        (metrics.BATCH_TOKENS, "#d1603d", "batch, tokens"),
        (metrics.SEQ_LEN, "#3f9b6c", "sequence"),
    ):
        batch.step(*_xy(data.series[key]), where="pre", color=colour, linewidth=1.4, label=label)
    batch.set_yscale("log", base=2)
    batch.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(figure)
    return as_svg(figure)


def throughput(data: ReportData) -> str:
    figure, axis = _over_tokens(data, "tokens per second")
    axis.plot(*_xy(data.series[metrics.TOKENS_PER_S]), color="#3f9b6c", linewidth=1.2)
    axis.set_ylim(bottom=0)
    return as_svg(figure)


def mix(data: ReportData) -> str:
    stages = list(dict.fromkeys(row.stage for row in data.mix))
    figure, axis = plt.subplots(figsize=(8, 0.55 * len(stages) + 1.1), layout="constrained")
    for place, stage in enumerate(stages):
        planned = realised = 0.0
        for row in (row for row in data.mix if row.stage == stage):
            axis.barh(place, row.realised, left=realised, color=COLOURS[row.domain], height=0.6)
            axis.barh(place, row.planned, left=planned, fill=False, edgecolor=INK, linewidth=1, height=0.78)
            axis.text(
                realised + row.realised / 2, place, f"{row.realised:.1%}", ha="center", va="center", color="white"
            )
            planned, realised = planned + row.planned, realised + row.realised
    axis.set_yticks(range(len(stages)), stages)
    axis.invert_yaxis()
    axis.grid(visible=False)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axis.legend(patches, list(COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return as_svg(figure)


def bits_per_byte(data: ReportData) -> str:
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    keys = [key for key in ("eval/bpb", *(f"eval/bpb/{domain}" for domain in COLOURS)) if _has(data, key)]
    width = 0.8 / len(data.evaluations)
    for index, (stage, scores) in enumerate(data.evaluations.items()):
        values = [scores[key] for key in keys]
        places = [place - 0.4 + width * (index + 0.5) for place in range(len(keys))]
        errors = [[s.value - s.low for s in values], [s.high - s.value for s in values]]
        axis.bar(places, [s.value for s in values], width * 0.9, label=stage, yerr=errors, capsize=3, alpha=0.85)
    axis.set_xticks(range(len(keys)), ["all" if key == "eval/bpb" else key.rsplit("/", 1)[1] for key in keys])
    axis.set_ylabel("bits per byte")
    axis.grid(axis="x", visible=False)
    _legend(figure)
    return as_svg(figure)


def _legend(figure: Any) -> None:
    """Name the lines below the figure, where they cross nothing."""
    figure.legend(loc="outside lower center", ncols=5)


def _has(data: ReportData, key: str) -> bool:
    return all(key in scores for scores in data.evaluations.values())


def _over_tokens(data: ReportData, label: str) -> tuple[Any, Any]:
    """Return a figure whose x axis is tokens, with the stages marked."""
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for index, stage in enumerate(data.stages):
        if index:
            axis.axvline(stage.start, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        middle = (stage.start + stage.end) / 2
        axis.text(middle, 1.02, stage.name, transform=axis.get_xaxis_transform(), ha="center", fontsize=9)
    axis.set_xlim(0, data.stages[-1].end)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axis.set_xlabel("tokens")
    axis.set_ylabel(label)
    return figure, axis


def _xy(points: Series) -> tuple[list[int], list[float]]:
    return [position for position, _ in points], [value for _, value in points]


def _smooth(points: Series, window: int = SMOOTH) -> Series:
    smooth = []
    for index in range(len(points)):
        near = points[max(0, index - window // 2) : index + window // 2 + 1]
        smooth.append((points[index][0], sum(value for _, value in near) / len(near)))
    return smooth


def as_svg(figure: Any) -> str:
    """Return `figure` as SVG text without dates, and close it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
