"""What `herd plan --cluster` prints below the stage table: layouts, time, memory, network, money, failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llama3.cluster.axes import AxisTraffic
from llama3.cluster.sensitivity import Effect
from llama3.cluster.topology import Fabric
from llama3.cluster.uptime import Uptime
from llama3.cluster.work import layer_work
from tasks.plan_cluster import Planned
from tasks.projection import best_table, memory_words, plain_table, refused_table, stages_table, time_table

UNITS = {"days": "", "gpu_hours": "", "money": ""}


def show(planned: Planned, out: Console, top: int) -> None:
    """Print the plan."""
    main, projection = planned.main, planned.projection
    for line in fabric_lines(projection.fabric, projection.curves.source):
        out.print(escape(line))
    _section(out, "layouts", stages_table(projection))
    best = main.best
    for line in doubts(planned):
        out.print(f"[yellow]warning[/]  {escape(line)}")
    _section(out, f"where a step of {main.stage} goes ({best.time.total:.2f} s)", time_table(main))
    out.print(
        f"memory   {memory_words(best, best.memory.total + best.margin)}, pipeline rank {best.memory.pipeline_rank}"
    )
    if main.found is not None:
        found = main.found
        out.print()
        out.print(f"[bold]{main.stage}: {found.looked_at:,} layouts, {len(found.fitting):,} fit[/]")
        out.print(best_table(found, top))
        out.print(refused_table(found))
    _section(out, "network", network_table(planned.placement.traffic, best.world))
    for line in (*placement_lines(planned), *budget_lines(planned), *uptime_lines(planned)):
        out.print(escape(line))


def doubts(planned: Planned) -> list[str]:
    """Return what lies outside of what was measured of the devices, for the main part."""
    best = planned.main.best
    work = layer_work(planned.projection.recipe.model, best.layout, best.load)
    return planned.projection.curves.extrapolates(work.products, [work.seq])


def _section(out: Console, title: str, table: Table) -> None:
    out.print()
    out.print(f"[bold]{title}[/]")
    out.print(table)


def fabric_lines(fabric: Fabric, curves: str) -> Iterator[str]:
    """Yield what the cluster is, and how its devices are known."""
    tiers = ", ".join(
        f"{tier.name} {tier.gpus:,}" + (f" (1:{tier.oversubscription:g})" if tier.oversubscription > 1 else "")
        for tier in fabric.tiers
    )
    flows = f", {fabric.queue_pairs} flows a pair" if fabric.queue_pairs > 1 else ""
    yield (
        f"cluster  {fabric.name}: {fabric.gpus:,} {fabric.accelerator.name} in {fabric.servers:,} servers; {tiers}; "
        f"{fabric.network}, {fabric.routing}{flows}"
    )
    yield f"devices  {curves}"


def network_table(rows: Sequence[AxisTraffic], world: int) -> Table:
    """Return which layer each axis crosses, and what a GPU sends there in a step."""
    layers = rows[0].layers if rows else ()
    table = plain_table("axis", "size", "crosses", *(f"{name}, GB" for name in layers), left=("axis", "crosses"))
    for row in rows:
        sent = (f"{size / world / 1e9:,.2f}" if size else "" for size in row.bytes)
        table.add_row(row.axis, str(row.size), row.crosses, *sent)
    return table


def placement_lines(planned: Planned) -> Iterator[str]:
    """Yield what the order of ranks saves on the oversubscribed layer."""
    found = planned.placement
    if found.layer:
        sizes = {
            name: found.crossing[name].get(found.layer, 0.0) / 1e12 for name in ("recommended", "contiguous", "random")
        }
        told = ", ".join(f"{name} {size:,.2f} TB" for name, size in sizes.items())
        yield f"placed   over the {found.layer} layer in a step: {told}"


def budget_lines(planned: Planned) -> Iterator[str]:
    """Yield days, GPU-hours, money, energy and storage, and what they hang on."""
    budget = planned.budget
    yield ""
    yield (
        f"takes    {budget.days:,.1f} days, {budget.gpu_hours / 1e6:,.2f}M GPU-hours, {budget.money / 1e6:,.1f}M at "
        f"{budget.prices.gpu_hour:g} per GPU-hour, {budget.mwh / 1e3:,.1f} GWh"
    )
    kept = budget.stored
    yield (
        f"stores   tokens {kept.token_bytes / 1e12:,.1f} TB, {kept.checkpoints:,.0f} checkpoints of "
        f"{kept.checkpoint_bytes / 1e12:,.2f} TB: {budget.storage_money / 1e6:,.2f}M"
    )
    for name, found in planned.effects().items():
        yield f"{name.replace('_', '-'):<10}hang on {'; '.join(effect_words(one, name) for one in found)}"


def effect_words(one: Effect, name: str) -> str:
    """Return what an unknown does to a quantity."""
    low, high = sorted((one.low, one.high))
    return f"{one.name} ({_short(low)} to {_short(high)}{UNITS[name]})"


def _short(value: float) -> str:
    return f"{value / 1e6:,.1f}M" if value >= 1e6 else f"{value:,.3g}"


def uptime_lines(planned: Planned) -> Iterator[str]:
    """Yield what breaks how often, and how often to save."""
    for one in planned.uptimes.values():
        yield (
            f"failures {one.gpus:,} GPUs: one every {one.mtti_s / 3600:.1f} h; effective time {one.share:.1%} "
            f"({one.spread.low:.1%} to {one.spread.high:.1%}); {one.spares} spare servers"
        )
        yield (
            f"saving   every {_time(one.interval_s)} as the recipe says; best {_time(one.cadence.interval_s)}"
            f"{_best(one)}; {_restart(one)}"
        )
    costs = next(iter(planned.uptimes.values())).costs
    least = planned.budget.stored.checkpoint_bytes / planned.projection.fabric.storage_gb_s / 1e9
    taken = f"a save blocks {costs.block_s:.3g} s and takes {costs.save_s:.3g} s, loading {costs.load_s:.3g} s"
    yield f"         {taken} ({costs.source}); the file system alone needs {least:.1f} s for one"


def _best(one: Uptime) -> str:
    return (
        f" ({one.cadence.share:.1%})"
        if one.cadence.share is not None
        else " (effective time unknown: too many failures)"
    )


def _restart(one: Uptime) -> str:
    if one.restart_budget_s is None:
        return "no restart is short enough for 90 %"
    return f"a restart may take {_time(one.restart_budget_s)} for 90 %, planned {_time(one.restart_s)}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
