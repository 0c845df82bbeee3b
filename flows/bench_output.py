"""How a benchmark tells its rows: a table for people, JSON for machines, and each row's name as it is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.terminal import problems

if TYPE_CHECKING:
    from llama3.bench.rows import Row

out = Console(highlight=False)


def told(measured: Iterator[Row], quiet: bool) -> list[Row]:
    """Return the rows, naming each on standard error as it is measured."""
    rows = []
    for row in measured:
        rows.append(row)
        if not quiet:
            problems.print(f"[dim]{row.name}[/]")
    return rows


def tell(corpus: dict[str, Any], rows: list[Row], versions: dict[str, str], as_json: bool, path: Path | None) -> None:
    """Print the rows, and write them to `path` if there is one."""
    from llama3.bench.rows import report

    made = report(rows, corpus, versions)
    text = json.dumps(made, indent=1)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    if as_json:
        print(text)
        return
    out.print(_table(rows))
    out.print(_about(made))


def _table(rows: Sequence[Row]) -> Table:
    from llama3.bench.rows import number

    table = Table(box=None, pad_edge=False)
    for column in ("name", "value", "unit", "target", "ok", ""):
        table.add_column(column, justify="right" if column in ("value", "target") else "left", no_wrap=column == "name")
    verdicts = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for row in rows:
        value = "-" if row.value is None else number(row.value)
        table.add_row(row.name, value, row.unit, row.target, verdicts[row.ok], escape(row.note))
    return table


def _about(made: dict[str, Any]) -> str:
    """Return a line on where and on what this was measured."""
    machine, corpus = made["machine"], made["corpus"]
    peers = ", ".join(f"{name} {version}" for name, version in made["peers"].items() if name != "numpy")
    text = f"; {corpus['documents']:,} documents, {corpus['mb']} MB" if corpus else ""
    return f"{machine['cpu']}, {machine['cores']} cores{text}; peers: {peers or 'none'}; {made['date']}"
