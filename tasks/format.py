"""Format times, sizes, losses and commands for tables and pages."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from herd.storage.root import DEFAULT_ROOT, Root


def command(root: Root, *arguments: str, page: bool = False) -> str:
    """Return a herd command line for this root that can be copied as printed.

    A `page` is read in another shell than the one it is written from, which may not have its HERD_ROOT.
    """
    program = sys.argv[0] if Path(sys.argv[0]).name == "herd" and not shutil.which("herd") else "herd"
    known = Root.parse(("" if page else os.environ.get("HERD_ROOT")) or DEFAULT_ROOT)
    return shlex.join([program, *arguments, *([] if known == root else ["--root", root.uri])])


NO_CHANGE = "no change"


def format_change(value: float, before: float, points: bool = False) -> str:
    """Return a change relative to `before`, `-2.0 %`, or that of a share in `points`, `+6.7 points`.

    A change that one digit would round to 0 has more of them; `no change` for none.
    """
    if math.isclose(value, before, rel_tol=1e-9, abs_tol=1e-12):
        return NO_CHANGE
    if not points and before == 0:
        return f"{value:+.3g}"
    amount = 100 * (value - before) / (1 if points else abs(before))
    digits = 1 if abs(amount) >= 0.05 else 1 - math.floor(math.log10(abs(amount)))
    return f"{amount:+,.{digits}f} {'points' if points else '%'}"


def format_losses(metadata: Mapping[str, Any], digits: int = 3) -> str:
    """Return the mean losses at both ends of a stage: `5.390 > 4.978`."""
    return f"{metadata['first_loss']:.{digits}f} > {metadata['last_loss']:.{digits}f}"


def format_bits_per_byte(metadata: Mapping[str, Any], digits: int = 3) -> str:
    """Return the bits per byte on held-out text at the end of a stage; empty if it was not scored."""
    return f"{metadata['bits_per_byte']:.{digits}f}" if "bits_per_byte" in metadata else ""


def format_costs(costs: Mapping[str, float]) -> str:
    """Return `gpu_hours`, `usd` and `kwh`, as far as they are known: `12.4 device-hours, 31 USD, 9.1 kWh`."""
    units = (("gpu_hours", "device-hours"), ("usd", "USD"), ("kwh", "kWh"))
    return ", ".join(f"{costs[name]:,.3g} {unit}" for name, unit in units if name in costs)


def format_duration(seconds: float) -> str:
    """Return a duration: `45 s`, `3:07 min`, `5:12 h`, `3 d 4 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60, whole // 3600
    if hours == 0:
        return f"{minutes}:{whole % 60:02d} min"
    return f"{hours}:{minutes % 60:02d} h" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_bytes(count: float) -> str:
    """Return a number of bytes: `812 B`, `4.2 MB`, `1.7 TB` (powers of 1000)."""
    for suffix, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {suffix}"
    return f"{count:.0f} B"


UNBOUNDED = 10_000
WRAPPED = ("why", "what", "what to do")
"""Columns of sentences: their text is wrapped."""
LEAST_WRAPPED = 30
"""Minimum width of such a column, in characters."""


@dataclass
class FittedTable:
    """A table that leaves out columns on a narrow terminal, the least important first, and names them.

    In a pipe nothing is left out or wrapped, so that `grep` and `awk` see whole lines. Empty columns are not shown.
    """

    title: str
    headers: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Columns that may be left out, in this order."""
    numbers: tuple[str, ...] = ()
    """Columns that are right-aligned."""
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Add a row; missing cells are empty."""
        self.rows.append((*cells, *[""] * (len(self.headers) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = width_of(console, options)
        shown = [header for at, header in enumerate(self.headers) if any(row[at] for row in self.rows)]
        removed: list[str] = []
        for header in self.left_out:
            if self._needs(console, shown) <= width:
                break
            if header in shown:
                shown.remove(header)
                removed.append(header)
        yield from console.render(self._table(shown), options.update(width=max(width, self._needs(console, shown))))
        if removed:
            yield Text(f"no room for: {', '.join(removed)}", style="dim")

    def _needs(self, console: Console, shown: list[str]) -> int:
        """Return the minimum width of the columns."""
        unwrapped = [header for header in shown if header not in WRAPPED]
        table = self._table(unwrapped)
        natural = Measurement.get(console, console.options.update(width=UNBOUNDED), table).maximum
        return natural + (len(shown) - len(unwrapped)) * (LEAST_WRAPPED + 2)

    def _table(self, shown: list[str]) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            header_style="bold",
            title=self.title or None,
            title_justify="left",
            title_style="bold cyan",
        )
        for header in shown:
            side: Literal["left", "right"] = "right" if header in self.numbers else "left"
            table.add_column(header, justify=side, no_wrap=header not in WRAPPED, overflow="fold")
        for row in self.rows:
            table.add_row(*[row[self.headers.index(header)] for header in shown])
        return table


@dataclass
class FactTable:
    """Names and values, one per line; values are wrapped between words, so that a path is never broken."""

    rows: dict[str, str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = max(map(len, self.rows), default=0) + 2
        room = max(20, width_of(console, options) - indent)
        for name, value in self.rows.items():
            text = Text.from_markup(value)
            longest = max(map(cell_len, text.plain.split()), default=0)
            for number, line in enumerate(text.wrap(console, max(room, longest))):
                line.rstrip()
                yield Text.assemble(("" if number else name).ljust(indent), line, no_wrap=True, overflow="ignore")


def width_of(console: Console, options: ConsoleOptions) -> int:
    """Return the terminal's width; in a pipe it is unbounded unless COLUMNS is set."""
    bounded = console.is_terminal or os.environ.get("COLUMNS")
    return options.max_width if bounded else UNBOUNDED
