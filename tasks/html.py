"""The frame of every HTML page, and its charts.

A template extends `base.html`, which has the style and the script of all pages; a page is one file and loads nothing.
Curves over tokens are drawn in the browser by uPlot (`templates/uplot`, MIT). Other figures are SVG by matplotlib,
whose colors become CSS variables, so that they follow the color scheme too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from herd.llama3.recipe.base import CONVERSATIONS

Series = Sequence[tuple[float, float]]
"""(position in tokens, value)"""
Figure = tuple[str, str, str]
"""Title, explanation, and SVG text or a chart."""
TEMPLATES = Path(__file__).parent / "templates"
COLORS = {"general": "#3b6fb6", "math": "#d1603d", "code": "#3f9b6c", "multilingual": "#8a63b8"}
GROUPS = {**COLORS, CONVERSATIONS: "#6b6b6b"}
"""Colors of the domains, and of conversations."""
INK, FAINT, DIM, PAGE = "#30363d", "#d8dee4", "#9aa4af", "#fefefe"
"""Colors of text, grids, lesser lines and the background in figures."""
POINTS = 2_000
"""Points of a curve on a page."""
THEME = {
    **{INK: "ink", FAINT: "line", DIM: "dim", PAGE: "page"},
    **{"#3b6fb6": "blue", "#d1603d": "orange", "#3f9b6c": "green", "#8a63b8": "purple"},
}
"""Colors of the figures that differ between light and dark, and their variables in `page.css`."""
NOSCRIPT = "<noscript><style>.chart::before { content: 'This curve needs JavaScript.'; }</style></noscript>"
UPLOT = ("uPlot.min.css", "uPlot.iife.min.js")
WORDS = {
    "loss": "Cross-entropy of the next token in nats (natural logarithm), mean over the tokens; lower is better.",
    "bits per byte": "The loss for each byte of text instead of each token, in bits: models with different tokenizers "
    "compare. Lower is better; random bytes take 8.",
    "tokens": "Pieces of text, a word or a part of one, that the model reads. K, M, B, T: thousands, millions, "
    "billions, trillions.",
    "position": "Tokens trained on since the start of the run.",
    "seq_len": "Tokens that the model sees at once.",
    "batch": "Tokens of one optimizer step.",
    "lr": "Learning rate: how far one step moves the weights.",
    "mix": "Shares of the domains, in tokens.",
    "tokens/s": "Tokens trained on each second.",
    "goodput": "Share of the time that went into steps that count: 1 means no interruption and no wait.",
    "MFU": "Model FLOPs utilization: share of the accelerator's peak that 6N + causal attention uses.",
    "TFLOP/s": "Trillions of operations a second, on each GPU.",
    "TP·CP·PP·DP": "Parallelism: tensor, context, pipeline, data. Their product is the number of GPUs.",
    "V·N·mb": "Virtual pipeline stages, micro-batches in a row, sequences of a micro-batch.",
    "GPU-hours": "GPUs times hours.",
    "device-hours": "Devices (GPUs, or processes without one) times hours, interruptions included.",
    "effective time": "Share of the days that trains, after failures, restarts and saving.",
    "candidate": "The model of this run.",
    "champion": "The model of the family that was promoted before.",
    "95 %": "Confidence interval: the true value is inside in 95 of 100 such measurements.",
    "p": "How often chance alone makes a difference this large; small means that it is real.",
    "chance": "Score of guessing.",
    "arithmetic": "Share of calculations, most of them in words, for which the right one of four answers is the "
    "likeliest to the model; guessing gives 0.25.",
    "continuation": "Share of openings of held-out documents for which the right one of four continuations is the "
    "likeliest to the model; guessing gives 0.25.",
    "core": "Mean over the tasks of (accuracy - chance) / (1 - chance): 0 is guessing, 1 is all answers right.",
    "bpb_macro": "Bits per byte of each document, then their mean: a short document counts as much as a long one.",
    "gold_nll": "Nats per byte of the right answers; lower is better.",
    "n": "Documents or questions.",
    "shots": "Solved examples before each question.",
    "asked": "Fingerprint of the questions: only equal ones compare.",
    "planned": "Share that the recipe wants.",
    "realized": "Share of the tokens that were trained on.",
    "outcome": "What became of it; a step is created, or reused because its inputs are the same.",
    "held out": "Kept away from training, to measure on.",
    "FLOPs": "Operations of training.",
    "tokens per word": "How finely the tokenizer cuts; fewer is cheaper.",
    "precision": "Share of the flagged examples that one document really contains.",
}
"""Words of heads and tiles, explained at the end of each page that has them."""
ALIASES = {
    **{"mean loss": "loss", "bits/byte": "bits per byte", "bpb": "bits per byte"},
    **{"train/loss": "loss", "throughput/tokens_per_s": "tokens/s", "time/goodput": "goodput"},
    "cost/gpu_hours": "device-hours",
}


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    points: Series
    color: str
    """`#rrggbb`, as in a figure."""
    thin: bool = False
    steps: bool = False
    """Constant from each point to the next."""
    dots: bool = False


def chart(
    unit: str,
    curves: Sequence[Curve],
    stages: Sequence[tuple[float, float, str]] = (),
    zero: bool = False,
    log2: bool = False,
) -> str:
    """Return curves over tokens as HTML: values under the pointer, and a dragged span enlarged in all charts.

    `stages` are (start, end, name), drawn as marks. The value axis is called `unit`, begins at 0 if `zero`, and is
    logarithmic if `log2`. Of long series some `POINTS` points are shown, always the last.
    """
    data = {
        "unit": unit,
        "zero": zero,
        "log2": log2,
        "stages": [{"start": start, "end": end, "name": name} for start, end, name in stages],
        "curves": [_curve(curve) for curve in curves if curve.points],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<div class="chart"><script type="application/json">{text}</script></div>'


def _curve(curve: Curve) -> dict[str, Any]:
    every = max(1, len(curve.points) // POINTS)
    points = [*reversed(curve.points[::-1][::every])]
    return {
        "label": curve.label,
        "color": f"--{THEME[curve.color]}" if curve.color in THEME else curve.color,
        "thin": curve.thin,
        "steps": curve.steps,
        "dots": curve.dots,
        "x": [position for position, _ in points],
        "y": [float(f"{value:.6g}") if math.isfinite(value) else None for _, value in points],
    }


def themed(figure: str) -> Markup:
    """Return a figure, SVG text or a chart, for a page: its colors follow the color scheme."""

    def variable(match: re.Match[str]) -> str:
        return f"var(--{THEME[match[0]]}, {match[0]})"

    return Markup(re.sub("|".join(THEME), variable, figure) if figure.startswith("<svg") else figure)


@cache
def asset(name: str) -> Markup:
    """Return a style or script of `tasks/templates`."""
    return Markup((TEMPLATES / name).read_text())


def render(name: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """Return the template `name` of `tasks/templates` with `values`, those in HTML escaped.

    A page in HTML gets its list of contents, the meaning of its words and, if it has charts, uPlot.
    """
    html = name.endswith(".html")
    environment = Environment(
        loader=PackageLoader("herd.tasks"),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"themed": themed, **(filters or {})}
    environment.globals["asset"] = asset
    text = environment.get_template(name).render(**values)
    if not html:
        return text
    entries: list[tuple[str, str]] = []
    words: dict[str, str] = {}

    def heading(match: re.Match[str]) -> str:
        title = re.sub("<[^>]+>", "", match[2])
        anchor = match[1] or re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")
        entries.append((anchor, title))
        return f'<h2 id="{anchor}">{match[2]}</h2>'

    def explained(match: re.Match[str]) -> str:
        word = match[3].strip()
        word = word.split("/")[1] if word.startswith("eval/") else word
        word = ALIASES.get(word, word)
        if word not in WORDS:
            return match[0]
        words[word] = WORDS[word]
        return f'{match[1]} title="{escape(WORDS[word])}"{match[2]}{match[3]}'

    # Only the templates write tags: what comes from documents and recipes is escaped.
    text = re.sub(r'<h2(?: id="([^"]*)")?>(.*?)</h2>', heading, text)
    text = re.sub(r'(<t[hd]|<div)((?: class="[^"]*")?>)([^<]+)(?=<)', explained, text)
    listed = "".join(f"<dt>{escape(word)}</dt><dd>{escape(words[word])}</dd>" for word in sorted(words, key=str.lower))
    if listed:
        entries.append(("words", "Words"))
        listed = f'<section id="words"><h2>Words</h2><dl>{listed}</dl></section>'
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in entries)
    style, script = (asset(f"uplot/{file}") if '<div class="chart">' in text else "" for file in UPLOT)
    charts = f"<style>{style}</style><script>{script}</script>{NOSCRIPT}" if script else ""
    parts = {"contents": f'<nav id="contents" aria-label="Contents">{links}</nav>', "words": listed, "charts": charts}
    return re.sub("<!-- (contents|words|charts) -->", lambda match: parts[match[1]], text)
