"""Console tables of `herd plan`: layouts and step times, rejected layouts, the network, presets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import floor, log10
from typing import Any, NamedTuple

import numpy as np
import yaml
from rich.table import Table

from herd.llama3.hardware.specs import PRESETS, HallUse, gpus_within, hall_use
from herd.llama3.hardware.topology import Fabric, Routing
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import memory_components
from herd.llama3.planner.collectives import ALL, collective_seconds, contiguous_group, crossover, fastest_algorithm
from herd.llama3.planner.layout_search import Candidate, Rejected, SearchResult
from herd.llama3.planner.projection import ProjectedSegment, Projection
from herd.llama3.planner.routing import RING, RoutedJob, make_zone, ring_share, slowdown
from herd.llama3.recipe.units import Tokens

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
"""Components of a step, as text."""
SIZES = (2**16, 2**20, 2**24, 2**28, 2**32)
ROUTINGS: tuple[tuple[Routing, int], ...] = (
    ("ecmp", 1),
    ("pinning", 1),
    ("e-ecmp", 4),
    ("e-ecmp", 16),
    ("adaptive", 1),
)


def plain_table(*headers: str, left: Sequence[str] = ()) -> Table:
    """Return an empty table in the style of the plan; columns in `left` are text."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", no_wrap=True)
    return table


def format_digits(value: float) -> str:
    """Return three significant digits without an exponent: `6,228`, `7.01`, `0.000131`."""
    decimals = 2 - floor(log10(value)) if 0 < value < 100 else 0
    return f"{value:,.{decimals}f}"


def format_amount(value: float) -> str:
    """Return GPU-hours, money, kWh or a time: `640`, `31,200`, `30.39M`, `under 0.01`."""
    if value >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if 0 < value < 0.01:
        return "under 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_unit(days: float) -> tuple[str, int]:
    """Return the unit in which a wall time is printed, and how many of it make a day."""
    for least, unit, a_day in ((2, "days", 1), (1 / 24, "hours", 24), (1 / 1440, "minutes", 1440)):
        if days >= least:
            return unit, a_day
    return "seconds", 86_400


def format_days(days: float) -> str:
    """Return a wall time: `77.2 days`, `18.8 hours`, `1 minute`."""
    unit, a_day = time_unit(days)
    amount = format_amount(days * a_day)
    return f"{amount} {unit.removesuffix('s') if amount == '1' else unit}"


def format_energy(mwh: float) -> str:
    """Return an energy: `31.3 GWh`, `640 kWh`."""
    return f"{mwh / 1e3:,.1f} GWh" if mwh >= 1e3 else f"{format_amount(mwh * 1e3)} kWh"


def format_layout(layout: Layout) -> str:
    """Return ZeRO-3, recomputation and compiled blocks, where a layout has them."""
    zero, recompute = f"Z{layout.zero}" if layout.zero != 2 else "", layout.recompute.removesuffix("none")
    return " ".join(filter(None, (zero, recompute, "compiled" if layout.compile else "")))


def stages_table(projection: Projection) -> Table:
    """Return a row per segment: its layout, memory, step and days without interruptions."""
    unit, a_day = time_unit(sum(projected.seconds for projected in projection.segments) / 86_400)
    table = plain_table(
        "stage", "seq_len", "GPUs", DEGREES, "V·N·mb", "GB", "step s", "TFLOP/s", unit, "", left=("stage", "")
    )
    table.columns[-1].no_wrap = False  # in a narrow terminal figures stay whole
    for projected in projection.segments:
        best = projected.best
        table.add_row(
            projected.stage,
            str(Tokens(projected.segment.seq_len)),
            f"{best.world:,}",
            format_degrees(best.layout, best.dp),
            format_pipeline(best),
            format_digits(best.memory.total / 1e9),
            format_digits(best.time.total),
            f"{best.tflops:.0f}",
            format_digits(projected.seconds / 86_400 * a_day),
            format_layout(best.layout),
        )
    return table


def format_degrees(layout: Layout, dp: int) -> str:
    """Return a layout's degrees of parallelism, the innermost first."""
    return f"{layout.tp}·{layout.cp}·{layout.pp}·{dp}"


def format_pipeline(candidate: Candidate) -> str:
    """Return virtual stages, micro-batches in a row, and sequences of a micro-batch."""
    layout = candidate.layout
    return f"{layout.vpp}·{layout.microbatch_group_size or layout.pp}·{candidate.load.micro_batch}"


def time_table(projected: ProjectedSegment) -> Table:
    """Return the components of a step, the largest first."""
    table = plain_table("", "ms", "share", "bar", left=("", "bar"))
    table.columns[3].header = ""
    seconds = projected.best.time.as_dict()
    for name, value in sorted(seconds.items(), key=lambda pair: -pair[1]):
        share = value / projected.best.time.total
        if share >= 0.0005:
            table.add_row(NAMES[name], format_digits(value * 1e3), f"{share:.1%}", "█" * max(1, round(share * BAR)))
    return table


def best_table(search: SearchResult, most: int) -> Table:
    """Return the fastest layouts."""
    table = plain_table("", DEGREES, "V·N·mb", "step s", "slower", "GB", "free GB", "", left=("",))
    table.columns[-1].no_wrap = False
    fastest = min(candidate.mean_step_s for candidate in search.fitting)  # the first has the larger micro-batch
    for number, candidate in enumerate(search.fitting[:most], 1):
        table.add_row(
            str(number),
            format_degrees(candidate.layout, candidate.dp),
            format_pipeline(candidate),
            format_digits(candidate.time.total),
            f"{candidate.mean_step_s / fastest - 1:+.1%}",
            format_digits(candidate.memory.total / 1e9),
            format_digits(candidate.margin / 1e9),
            format_layout(candidate.layout),
        )
    return table


class RejectionReason(NamedTuple):
    """A reason for which layouts were rejected."""

    layouts: int
    field: str
    example: str
    """A layout, with its figures."""


def rejection_reasons(search: SearchResult) -> list[RejectionReason]:
    """Return why layouts were rejected, the most common reason first; the example lacks least memory."""
    groups: dict[str, list[Rejected]] = defaultdict(list)
    for rejected in search.rejected:
        groups[rejected.why.split(":")[0].rsplit(".", 1)[-1]].append(rejected)
    summary = []
    for field, group in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        example = min(group, key=lambda rejected: rejected.needs)
        layout, why = example.layout, example.why.splitlines()[0].split(": ", 1)[-1]
        text = f"TP {layout.tp} CP {layout.cp} PP {layout.pp} V {layout.vpp}: {why}"
        summary.append(RejectionReason(len(group), field, text))
    return summary


def rejected_table(search: SearchResult) -> Table:
    """Return how many layouts were rejected for each reason, with an example."""
    table = plain_table("refused", "because of", "for example", left=("because of", "for example"))
    table.columns[2].no_wrap, table.columns[2].overflow = False, "fold"
    for reason in rejection_reasons(search):
        table.add_row(f"{reason.layouts:,}", reason.field, reason.example)
    return table


def format_memory(candidate: Candidate, limit: float) -> str:
    """Return the memory of the fullest GPU by component, the largest first."""
    sizes = sorted(memory_components(candidate.memory).items(), key=lambda pair: -pair[1])
    terms = ", ".join(f"{name} {format_digits(size / 1e9)}" for name, size in sizes if size)
    return f"{format_digits(candidate.memory.total / 1e9)} GB of {format_digits(limit / 1e9)}: {terms}"


def projection_json(projection: Projection, most: int) -> dict[str, Any]:
    """Return everything in the tables, and the reason of every rejected layout."""
    stages = [segment_json(projected, most) for projected in projection.segments]
    return {
        "recipe": projection.recipe.name,
        "cluster": projection.fabric.name,
        "curves": projection.curves.source,
        "stages": stages,
    }


def segment_json(projected: ProjectedSegment, most: int) -> dict[str, Any]:
    """Return one segment's figures."""
    refused = defaultdict(list)
    for rejected in projected.search.rejected if projected.search else ():
        layout = rejected.layout.model_dump(exclude_defaults=True)
        refused[rejected.why].append(layout | {"micro_batch": rejected.micro_batch})
    best = [candidate_json(candidate) for candidate in projected.search.fitting[:most]] if projected.search else []
    return {
        "stage": projected.stage,
        "seq_len": projected.segment.seq_len,
        "batch": projected.segment.batch,
        "steps": projected.segment.steps,
        "mfu": projected.mfu,
        "seconds": projected.seconds,
        **candidate_json(projected.best),
        "best": best,
        "refused": refused,
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Return a layout's figures."""
    return {
        "gpus": candidate.world,
        "layout": candidate.layout.model_dump(),
        "dp": candidate.dp,
        "micro_batch": candidate.load.micro_batch,
        "micro_batches": candidate.load.micro_batches,
        "step_s": candidate.time.total,
        "time_s": candidate.time.as_dict(),
        "tflops": candidate.tflops,
        "memory": candidate.memory.as_dict(),
        "free_bytes": candidate.margin,
    }


# `herd plan hall`: power, racks and readers


def hall_facts(fabric: Fabric, megawatts: float, gpu_mb_s: float) -> dict[str, Any]:
    """Return lines about the GPUs of a cluster that `megawatts` feed; a GPU takes `gpu_mb_s` from reader hosts.

    Raises ValueError for a cluster without a hall, and for too little power.
    """
    if fabric.hall is None:
        raise ValueError(f"cluster.hall: {fabric.name} has none, so its racks are unknown; write hall: meta-hall")
    gpus = gpus_within(fabric.hall, fabric.server, megawatts, gpu_mb_s)
    inner = next((tier for tier in reversed(fabric.tiers[:-1]) if tier.gpus <= gpus), fabric.tiers[0])
    groups = {"group": inner.name, "whole_groups": gpus // inner.gpus, "group_gpus": inner.gpus}
    return {**hall_use(fabric.hall, fabric.server, gpus, gpu_mb_s).as_dict(), **groups}


def hall_lines(fabric: Fabric, megawatts: float, gpu_mb_s: float) -> Iterator[str]:
    """Yield the same as text."""
    facts = hall_facts(fabric, megawatts, gpu_mb_s)
    left = facts["gpus"] - facts["whole_groups"] * facts["group_gpus"]
    yield (
        f"{megawatts:g} MW feed {facts['gpus']:,} {fabric.accelerator.name} of {fabric.name}: {facts['racks']:,} racks "
        f"of {facts['rack_kw']:g} kW; {facts['whole_groups']:,} {facts['group']}s of {facts['group_gpus']:,}"
        + (f" and {left:,} more" if left else "")
    )
    yield hall_line(HallUse(**{name: facts[name] for name in HallUse.__annotations__}))


def hall_line(use: HallUse) -> str:
    """Return the power of a number of GPUs and the reader hosts that feed them."""
    where = "inside" if use.readers_inside else "outside the hall"
    readers = f"; {use.readers:,} reader hosts {where}" if use.readers else "; no reader hosts: the tokens are ready"
    power = f"{use.megawatts:.3g} MW" if use.megawatts >= 1 else f"{use.megawatts * 1000:.3g} kW"
    return (
        f"power    {use.gpus:,} GPUs in {use.racks:,} rack{'s' * (use.racks != 1)} take {power} of the site by "
        f"nameplate, with switches and cooling{readers}"
    )


# `herd plan network`: collectives by message size and ranks, and the share of a card's rate under each routing


def network_tables(fabric: Fabric) -> Iterator[tuple[str, Table]]:
    """Yield titles and tables of a cluster's network."""
    facts = network_facts(fabric)
    table = plain_table("ranks", *(_size(size) for size in SIZES))
    short = {"halving nearest-first": "hd", "halving farthest-first": "far"}
    for fact in facts["collectives"]:
        best = (fact["best"][str(size)] for size in SIZES)
        cells = (
            f"{short.get(name, name)} {f'{s * 1e3:,.3g} ms' if s >= 1e-3 else f'{s * 1e6:,.3g} us'}" for name, s in best
        )
        table.add_row(f"{fact['ranks']:,}", *cells)
    yield "fastest all-reduce (hd: recursive halving and doubling, nearest first)", table
    table = plain_table("ranks", "message")
    for fact in facts["crossover"]:
        size = fact["bytes"]
        table.add_row(f"{fact['ranks']:,}", "never" if np.isinf(size) else _size(size) if size else "always")
    yield "above which size a ring is faster than halving and doubling", table
    if not facts["routing"]:
        return
    headers = ("routing", "flows", "mean", "worst of 100", "a link down", "fragmented", "")
    table = plain_table(*headers, left=("routing", ""))
    for fact in facts["routing"]:
        shares = (f"{fact[name]:.0%}" for name in ("mean", "p1", "link_down", "fragmented"))
        table.add_row(fact["routing"], str(fact["flows"]), *shares, "<- this cluster" if fact["here"] else "")
    yield f"share of a card's rate in a ring over {RING} racks, slowest pair", table


def network_facts(fabric: Fabric) -> dict[str, Any]:
    """Return the same as data."""
    layers = fabric.layers()
    collectives, crossovers = [], []
    for ranks in (8, 64, 256, 1_024, 4_096, 16_384):
        if ranks > fabric.gpus:
            continue
        group = contiguous_group(ranks, layers)
        best = {str(size): fastest_algorithm("all-reduce", size, group, layers, ALL) for size in SIZES}
        every = {
            str(size): {name: collective_seconds("all-reduce", size, group, layers, name) for name in ALL}
            for size in SIZES
        }
        collectives.append({"ranks": ranks, "best": best, "seconds": every})
        crossovers.append({"ranks": ranks, "bytes": crossover("all-reduce", group, layers)})
    routings = []
    for routing, flows in ROUTINGS if len(fabric.tiers) > 1 else ():
        clos = make_zone(fabric, RING)
        job = RoutedJob(clos, routing, flows, replica=clos.cards)
        whole = slowdown(job)
        routings.append(
            {
                "routing": routing,
                "flows": flows,
                "mean": whole.share,
                "p1": 1 / whole.quantile(0.99),
                "link_down": ring_share(replace(job, failed=1 / (clos.racks * clos.uplinks))),
                "fragmented": ring_share(replace(job, taken=0.25)),
                "here": routing == fabric.routing and flows == fabric.queue_pairs,
            }
        )
    return {"cluster": fabric.name, "collectives": collectives, "crossover": crossovers, "routing": routings}


def _size(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:.0f} B"


# `herd plan presets`


def presets_table() -> Table:
    """Return the presets, each with its first comment."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("preset", "kind", "what it is"):
        table.add_column(header)
    kinds = {"tiers": "cluster", "link_gb_s": "server", "dense_tflops": "GPU", "rack_kw": "hall"}
    for path in sorted(PRESETS.iterdir(), key=lambda path: path.name):
        text = path.read_text()
        data, first = yaml.safe_load(text), text.splitlines()[0]
        kind = next((kind for field, kind in kinds.items() if field in data), "failures")
        table.add_row(path.name.removesuffix(".yaml"), kind, first.removeprefix("# "))
    return table
