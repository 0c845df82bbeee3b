"""Tables of `herd plan verify` and `herd plan show`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import yaml
from rich.markup import escape
from rich.table import Table

from llama3.cluster.anchor import Anchor
from llama3.cluster.hardware import PRESETS

COLOURS = {"ok": "green", "misses": "green", "known miss": "yellow", "NOT CAUGHT": "yellow"}


def verify_table(rows: Sequence[Anchor]) -> Table:
    """Return a row per anchor: what our models say, what was published, and the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header in ("", "quantity", "ours", "published", "error", "target", "verdict"):
        right = header in ("ours", "published", "error")
        table.add_column(header, justify="right" if right else "left", no_wrap=header != "quantity")
    for number, group in groupby(rows, key=lambda row: row.number):
        for place, row in enumerate(group):
            table.add_row(
                number if place == 0 else "",
                _words(row),
                f"{figure(row.predicted)} {row.unit}".rstrip(),
                "" if row.published is None else figure(row.published),
                "" if row.error is None else f"{row.error:+.1%}",
                escape(row.target),
                f"[{COLOURS.get(row.verdict, 'bold red')}]{row.verdict}[/]",
            )
    return table


def _words(row: Anchor) -> str:
    what = escape(row.what.removeprefix("ablation: "))
    return f"[dim]{what}[/]" if row.ablation else what


def verdict_line(rows: Sequence[Anchor]) -> str:
    """Return how many rows are as they must be."""
    wrong, known = [row for row in rows if row.wrong], [row for row in rows if row.known]
    anchors, ablations = (sum(row.ablation is kind for row in rows) for kind in (False, True))
    told = f"{anchors} figures and {ablations} ablations, which must miss"
    if not wrong:
        numbers = ", ".join(sorted({row.number for row in known}))
        but = f", but for {len(known)} known misses ({numbers}; see limits.md)" if known else ""
        return f"[green]{told}: all as they must be{but}[/]"
    return f"[bold red]{told}: {len(wrong)} are not as they must be: {', '.join(sorted({w.number for w in wrong}))}[/]"


def figure(value: float) -> str:
    """Return a number with four digits, as people write it."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def presets_table() -> Table:
    """Return what each preset describes: its first comment."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("preset", "kind", "what it is"):
        table.add_column(header)
    for path in sorted(PRESETS.iterdir(), key=lambda path: path.name):
        text = path.read_text()
        first = text.splitlines()[0]
        table.add_row(path.name.removesuffix(".yaml"), _kind(yaml.safe_load(text)), first.removeprefix("# "))
    return table


def _kind(data: dict[str, object]) -> str:
    marks = {"tiers": "cluster", "link_gb_s": "server", "dense_tflops": "GPU"}
    return next((kind for mark, kind in marks.items() if mark in data), "failures")
