"""What `herd plan --cluster` prints: layouts and step times of each stage, where the time goes, what was refused.

Tables of the console; the same figures are in `--json` and on the page (`tasks.plan.cluster`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.markup import escape
from rich.table import Table

from llama3.parallel.layout import Layout
from llama3.planner.collectives import ALL, choose, contiguous, crossover, seconds
from llama3.planner.hardware import PRESETS
from llama3.planner.layout_search import Candidate, Rejected, SearchResult, too_much
from llama3.planner.projection import Projected, Projection
from llama3.planner.routing import RING, RoutedJob, ring_share, slowdown, zone
from llama3.planner.topology import Fabric, Layer, Routing
from llama3.planner.validation.anchor import Anchor
from llama3.recipe.units import Tokens

BAR = 30
"""Characters of the longest bar."""
DEGREES = "TP·CP·PP·DP"
NAMES = {
    "gemm": "matrix products",
    "attention": "attention",
    "elementwise": "norms, SwiGLU, sums",
    "recompute": "recomputed",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline transfers",
    "dp": "gradients and weights",
    "bubble": "bubble",
    "imbalance": "uneven stages",
    "optimizer": "optimizer",
}
"""Components of a step, in words."""


def plain_table(*headers: str, left: Sequence[str] = ()) -> Table:
    """Return an empty table of the plan's look; columns named in `left` are text."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", no_wrap=True)
    return table


def layout_words(layout: Layout) -> str:
    """Return ZeRO-3 and recomputation, where a layout has them."""
    words = [f"Z{layout.zero}"] if layout.zero != 2 else []
    return " ".join([*words, *([layout.recompute] if layout.recompute != "none" else [])])


def stages_table(projection: Projection) -> Table:
    """Return a row per segment: its layout, memory, step and days without interruptions."""
    table = plain_table(
        "stage", "seq", "GPUs", DEGREES, "V·N·mb", "GB", "step s", "TFLOP/s", "days", "", left=("stage", "")
    )
    for part in projection.parts:
        best = part.best
        table.add_row(
            part.stage,
            str(Tokens(part.segment.seq)),
            f"{best.world:,}",
            degrees(best.layout, best.dp),
            inner(best),
            f"{best.memory.total / 1e9:.1f}",
            f"{best.time.total:.2f}",
            f"{best.tflops:.0f}",
            f"{part.seconds / 86_400:.2f}",
            layout_words(best.layout),
        )
    return table


def degrees(layout: Layout, dp: int) -> str:
    """Return a layout's degrees of parallelism, the innermost first."""
    return f"{layout.tp}·{layout.cp}·{layout.pp}·{dp}"


def inner(one: Candidate) -> str:
    """Return virtual stages, micro-batches in a row, and sequences of a micro-batch."""
    return f"{one.layout.virtual}·{one.layout.contiguous or one.layout.pp}·{one.load.micro_batch}"


def time_table(part: Projected) -> Table:
    """Return where the time of a step goes, the largest first."""
    table = plain_table("", "ms", "share", "bar", left=("", "bar"))
    table.columns[3].header = ""
    seconds = part.best.time.as_dict()
    for name, value in sorted(seconds.items(), key=lambda pair: -pair[1]):
        share = value / part.best.time.total
        if share >= 0.0005:
            table.add_row(NAMES[name], f"{value * 1e3:,.0f}", f"{share:.1%}", "█" * max(1, round(share * BAR)))
    return table


def best_table(found: SearchResult, most: int) -> Table:
    """Return the fastest layouts."""
    table = plain_table("", DEGREES, "V·N·mb", "step s", "slower", "GB", "free GB", "", left=("",))
    for number, one in enumerate(found.fitting[:most], 1):
        table.add_row(
            str(number),
            degrees(one.layout, one.dp),
            inner(one),
            f"{one.time.total:.2f}",
            f"{one.time.total / found.fitting[0].time.total - 1:+.1%}",
            f"{one.memory.total / 1e9:.1f}",
            f"{one.margin / 1e9:.1f}",
            layout_words(one.layout),
        )
    return table


class Reason(NamedTuple):
    """Why layouts were refused."""

    layouts: int
    field: str
    example: str
    """One of them, with its figures."""


def reasons(found: SearchResult) -> list[Reason]:
    """Return why layouts were refused, the commonest reason first; of those that lack memory the one nearest to fit."""
    groups: dict[str, list[Rejected]] = defaultdict(list)
    for one in found.rejected:
        groups[one.why.split(":")[0].rsplit(".", 1)[-1]].append(one)
    rows = []
    for field, mine in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        one = min(mine, key=lambda each: each.needs)
        rows.append(Reason(len(mine), field, f"{_cut(one.layout)}: {one.why.splitlines()[0].split(': ', 1)[-1]}"))
    return rows


def refused_table(found: SearchResult) -> Table:
    """Return why layouts were refused: how many for each reason, and one of them."""
    table = plain_table("refused", "because of", "for example", left=("because of", "for example"))
    table.columns[2].no_wrap, table.columns[2].overflow = False, "fold"
    for reason in reasons(found):
        table.add_row(f"{reason.layouts:,}", reason.field, reason.example)
    return table


def _cut(layout: Layout) -> str:
    return f"TP {layout.tp} CP {layout.cp} PP {layout.pp} V {layout.virtual}"


def memory_words(one: Candidate, limit: float) -> str:
    """Return where the memory of the fullest GPU goes."""
    return too_much(one.memory, limit)


def as_json(projection: Projection, most: int) -> dict[str, Any]:
    """Return everything in the tables, and the reason of every refused layout."""
    stages = [part_json(part, most) for part in projection.parts]
    return {
        "recipe": projection.recipe.name,
        "cluster": projection.fabric.name,
        "curves": projection.curves.source,
        "stages": stages,
    }


def part_json(part: Projected, most: int) -> dict[str, Any]:
    """Return one segment's figures."""
    refused = defaultdict(list)
    for one in part.found.rejected if part.found else ():
        refused[one.why].append(one.layout.model_dump(exclude_defaults=True) | {"micro_batch": one.micro_batch})
    best = [candidate_json(one) for one in part.found.fitting[:most]] if part.found else []
    return {
        "stage": part.stage,
        "seq": part.segment.seq,
        "batch": part.segment.batch,
        "steps": part.segment.steps,
        "mfu": part.mfu,
        "seconds": part.seconds,
        **candidate_json(part.best),
        "best": best,
        "refused": refused,
    }


def candidate_json(one: Candidate) -> dict[str, Any]:
    """Return a layout's figures."""
    return {
        "gpus": one.world,
        "layout": one.layout.model_dump(),
        "dp": one.dp,
        "micro_batch": one.load.micro_batch,
        "micro_batches": one.load.micro_batches,
        "step_s": one.time.total,
        "time_s": one.time.as_dict(),
        "tflops": one.tflops,
        "memory": one.memory.as_dict(),
        "free_bytes": one.margin,
    }


# Tables of `herd plan network`: collectives by message size and ranks, and what routing leaves of a card's rate.

SIZES = (2**16, 2**20, 2**24, 2**28, 2**32)
ROUTINGS: tuple[tuple[Routing, int], ...] = (
    ("ecmp", 1),
    ("pinning", 1),
    ("e-ecmp", 4),
    ("e-ecmp", 16),
    ("adaptive", 1),
)


def network_tables(fabric: Fabric) -> Iterator[tuple[str, Table]]:
    """Yield title and table of what a cluster's network gives."""
    facts = network_facts(fabric)
    yield (
        "fastest all-reduce (hd: recursive halving and doubling, nearest first)",
        _collectives_table(facts["collectives"]),
    )
    yield "above which size a ring is faster than halving and doubling", _crossover_table(facts["crossover"])
    if facts["routing"]:
        yield f"share of a card's rate in a ring over {RING} racks, slowest pair", _routing_table(facts["routing"])


def network_facts(fabric: Fabric) -> dict[str, Any]:
    """Return the same as data."""
    layers = fabric.layers()
    return {
        "cluster": fabric.name,
        "collectives": [_collective(ranks, layers) for ranks in _ranks(fabric)],
        "crossover": [
            {"ranks": ranks, "bytes": crossover("all-reduce", contiguous(ranks, layers), layers)}
            for ranks in _ranks(fabric)
        ],
        "routing": [*_routing(fabric)],
    }


def _ranks(fabric: Fabric) -> list[int]:
    return [ranks for ranks in (8, 64, 256, 1_024, 4_096, 16_384) if ranks <= fabric.gpus]


def _collective(ranks: int, layers: list[Layer]) -> dict[str, Any]:
    group = contiguous(ranks, layers)
    best = {size: choose("all-reduce", size, group, layers, ALL) for size in SIZES}
    every = {str(size): {name: seconds("all-reduce", size, group, layers, name) for name in ALL} for size in SIZES}
    return {"ranks": ranks, "best": {str(size): found for size, found in best.items()}, "seconds": every}


def _routing(fabric: Fabric) -> Iterator[dict[str, Any]]:
    """Yield the share of a card's rate of each routing: whole racks, a link down, a quarter of the servers taken."""
    if len(fabric.tiers) == 1:
        return
    clos = zone(fabric, RING)
    for routing, flows in ROUTINGS:
        job = RoutedJob(clos, routing, flows, replica=clos.cards)
        whole = slowdown(job)
        yield {
            "routing": routing,
            "flows": flows,
            "mean": whole.share,
            "p1": 1 / whole.quantile(0.99),
            "link_down": ring_share(replace(job, failed=1 / (clos.racks * clos.uplinks))),
            "fragmented": ring_share(replace(job, taken=0.25)),
            "here": routing == fabric.routing and flows == fabric.queue_pairs,
        }


def _collectives_table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table("ranks", *(_size(size) for size in SIZES))
    for row in rows:
        found = (row["best"][str(size)] for size in SIZES)
        table.add_row(f"{row['ranks']:,}", *(f"{_short(name)} {_time(taken)}" for name, taken in found))
    return table


def _crossover_table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table("ranks", "message")
    for row in rows:
        size = row["bytes"]
        table.add_row(f"{row['ranks']:,}", "never" if np.isinf(size) else _size(size) if size else "always")
    return table


def _routing_table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "routing", "flows", "mean", "worst of 100", "a link down", "fragmented", "", left=("routing", "")
    )
    for row in rows:
        shares = (f"{row[name]:.0%}" for name in ("mean", "p1", "link_down", "fragmented"))
        table.add_row(row["routing"], str(row["flows"]), *shares, "<- this cluster" if row["here"] else "")
    return table


def _short(algorithm: str) -> str:
    return {"halving nearest-first": "hd", "halving farthest-first": "far"}.get(algorithm, algorithm)


def _size(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:.0f} B"


def _time(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value >= 1e-3 else f"{value * 1e6:,.3g} us"


# Tables of `herd plan verify` and `herd plan show`.

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
