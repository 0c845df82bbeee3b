"""What `herd plan --cluster` prints: layouts and step times of each stage, where the time goes, what was refused.

Tables of the console; the same figures are in `--json` and on the page (`tasks.plan_page`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from llama3.cluster.layout import Candidate, Found, Rejected, too_much
from llama3.cluster.projection import Projected, Projection
from llama3.parallel.layout import Layout
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


def best_table(found: Found, most: int) -> Table:
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


def reasons(found: Found) -> list[Reason]:
    """Return why layouts were refused, the commonest reason first; of those that lack memory the one nearest to fit."""
    groups: dict[str, list[Rejected]] = defaultdict(list)
    for one in found.rejected:
        groups[one.why.split(":")[0].rsplit(".", 1)[-1]].append(one)
    rows = []
    for field, mine in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        one = min(mine, key=lambda each: each.needs)
        rows.append(Reason(len(mine), field, f"{_cut(one.layout)}: {one.why.splitlines()[0].split(': ', 1)[-1]}"))
    return rows


def refused_table(found: Found) -> Table:
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
