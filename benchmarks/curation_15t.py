"""What curating 15T tokens would take, from what the rows `scale/*` measured; and the page that says so.

    python -m benchmarks.curation_15t BEFORE.json [AFTER.json]

prints the tables of docs/benchmarks from the output of `python -m benchmarks data --only scale --json`, of one engine
or of two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.curation_scale import BOOKKEEPING, METHODS, count_of, exponent, size_lines, sizes_of, whole_items
from benchmarks.rows import Row, measured, number
from benchmarks.session import Session

TEXT = 60e12
"""Bytes of text: 15T tokens of four bytes."""
BUSY = 0.7
"""Share of the processors' time that is work: the rest waits for the store and for the last item of a step."""
DAYS = 7
"""How long the files between the steps are stored."""


class Instance(NamedTuple):
    """A machine to rent; prices of Amazon EC2, on demand, Linux, us-east-1, in USD an hour."""

    name: str
    vcpus: int
    gib: int
    gbit: float
    usd: float


# Assumptions: EC2 list prices as of the middle of 2025, from memory; S3 Standard, us-east-1, as published then.
INSTANCES = (
    Instance("c7i.48xlarge", 192, 384, 50, 8.568),
    Instance("m7i.48xlarge", 192, 768, 50, 9.6768),
    Instance("r7i.48xlarge", 192, 1536, 50, 12.7008),
)
USD_PER_GB_MONTH = 0.021


def estimate(
    sizes: Sequence[Mapping[str, Any]], whole: Mapping[str, Any], count: Mapping[str, float]
) -> dict[str, Any]:
    """Return what TEXT takes.

    `sizes` are the lines of the row scale/cpu, small work items, smallest corpus first; `whole` is the largest corpus
    with the engine's own work items: `mb`, `cpu_s`, `peak_mb`; `count` is that of TEXT.

    Tasks, files, requests and bytes are counted. CPU time goes with the text; a power above 1 goes on with the shards.
    """
    power = max(1.0, exponent([line["mb"] for line in sizes], [line["cpu_s"] for line in sizes]))
    cpu_s = whole["cpu_s"] / whole["mb"] * TEXT / 1e6 * (count["shards"] / sizes[-1]["files"]) ** (power - 1)
    moved, task_gib = count["read_bytes"] + count["written_bytes"], whole["peak_mb"] * 1e6 / 2**30
    machines: list[dict[str, Any]] = []
    for instance in INSTANCES:
        tasks_at_once = min(instance.vcpus, int(instance.gib / task_gib))
        compute_h = cpu_s / BUSY / tasks_at_once / 3600
        network_h = moved / (instance.gbit * 1e9 / 8) / 3600
        hours = max(compute_h, network_h)
        machines.append(
            {"name": instance.name, "tasks_at_once": tasks_at_once, "compute_h": compute_h, "network_h": network_h,
             "machine_h": hours, "machines_usd": hours * instance.usd}
        )  # fmt: skip
    best = min(machines, key=lambda machine: machine["machines_usd"])
    stored_usd = count["written_bytes"] / 1e9 * USD_PER_GB_MONTH * DAYS / 30
    return {
        "tasks": count["tasks"],
        "files": count["files"],
        "writing_requests": count["writes"],
        "reading_requests": count["reads"],
        "written_tb": count["written_bytes"] / 1e12,
        "moved_tb": moved / 1e12,
        "task_gib": task_gib,
        "core_h": cpu_s / 3600,
        "machines": machines,
        "cheapest": best["name"],
        "machines_usd": best["machines_usd"],
        "requests_usd": count["usd"],
        "stored_usd": stored_usd,
        "usd": best["machines_usd"] + count["usd"] + stored_usd,
    }


def estimated(run: Session) -> dict[str, Any]:
    """Return the estimate from what this session measures."""

    def measure() -> dict[str, Any]:
        sizes, whole = size_lines(sizes_of(run)), whole_items(run)
        line = {"mb": sizes[-1]["mb"], "cpu_s": whole.cpu_s, **whole.facts}
        corpus = str(run.settings.folder / "scale" / f"whole-x{sizes[-1]['files']}")
        made = estimate(sizes, line, count_of(corpus, TEXT, scaled=False))
        line.pop("steps")
        return {**made, "whole": line}

    found: dict[str, Any] = run.once("scale/15t", measure)
    return found


def money(run: Session, name: str) -> Row:
    """Money for 15T tokens on the cheapest of INSTANCES, requests and storage with it."""
    made = estimated(run)
    note = f"{number(made['core_h'])} core hours, {number(made['tasks'])} tasks, {number(made['files'])} files"
    note += f", {made['task_gib']:.2f} GiB a task, {made['cheapest']}"
    return measured(name, made["usd"], note, estimate=made)


def requests_share(run: Session, name: str) -> Row:
    """Money for requests over that for machines, for 15T tokens."""
    made = estimated(run)
    note = f"{number(made['requests_usd'])} of {number(made['machines_usd'])} USD"
    return measured(name, made["requests_usd"] / made["machines_usd"], note)


# The page.


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of the page as markdown; one report, or that of the engine before and after."""
    names = ("before", "after")[: len(reports)] if len(reports) > 1 else ("measured",)
    rows = [{row["name"]: row for row in made["rows"]} for made in reports]
    parts = [
        _bounds(names, rows), _growth(names, rows), _steps(names, rows), _requests(names, rows), _total(names, rows)
    ]  # fmt: skip
    return "\n".join(filter(None, parts))


def _table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    body = [header, ["---"] * len(header), *lines]
    return f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in body) + "\n"


def _bounds(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for name in dict.fromkeys(name for each in rows for name in each):
        each = [row.get(name, {}) for row in rows]
        values = ["" if row.get("value") is None else number(row["value"]) for row in each]
        first = next(filter(None, each))
        lines.append([name, *values, first["unit"], first["target"]])
    return _table("Rows", ["row", *names, "unit", "target"], lines)


GROWING = ("collect_cpu_s", "annotate_cpu_s", "curate_cpu_s", "items", "written", "reads", "read_mb", "peak_mb")


def _growth(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["", "MB", "shards", "collect", "annotate", "curate, CPU s", "tasks", "files", "read calls", "MB read",
              "peak MB"]  # fmt: skip
    lines = []
    for name, each in zip(names, rows, strict=True):
        for line in each.get("scale/cpu", {"detail": {}})["detail"].get("sizes", []):
            lines.append([name, number(line["mb"]), str(line["files"]), *(number(line[figure]) for figure in GROWING)])
    return _table("Growth", header, lines)


def _steps(names: Sequence[str], rows: Sequence[Mapping[str, Any]], most: int = 8) -> str:
    lines = []
    for name, each in zip(names, rows, strict=True):
        sizes = each.get("scale/cpu", {"detail": {}})["detail"].get("sizes", [])
        if not sizes:
            continue
        steps = sorted(sizes[-1]["steps"], key=lambda step: -sizes[-1]["steps"][step]["cpu_s"])[:most]
        for step in steps:
            spent = [size["steps"].get(step, {}).get("cpu_s", 0.0) for size in sizes]
            grown = exponent([size["mb"] for size in sizes], [max(value, 1e-3) for value in spent])
            lines.append([name, step, *(number(value) for value in spent), f"{grown:.2f}"])
    return _table("Steps with the most CPU time", ["", "step", *["CPU s"] * 4, "power"], lines)


def _requests(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for name, each in zip(names, rows, strict=True):
        sizes = each.get("scale/requests", {"detail": {}})["detail"].get("sizes", [])
        for size in sizes[:1] + sizes[-1:]:
            for folder, counts in sorted(size["requests"].items()):
                if folder not in BOOKKEEPING:
                    figures = [f"{counts[method]:,}" for method in METHODS]
                    lines.append([name, number(size["mb"]), str(size["files"]), folder, *figures])
    return _table("Requests", ["", "MB", "input files", "folder", *METHODS], lines)


FIGURES = {
    "tasks": "tasks",
    "files": "files written",
    "writing_requests": "PUT, POST and LIST",
    "reading_requests": "GET and HEAD",
    "written_tb": "written, TB",
    "moved_tb": "read and written, TB",
    "task_gib": "memory of a task, GiB",
    "core_h": "core hours",
    "requests_usd": "requests, USD",
    "stored_usd": "storage of all that is written, USD",
    "usd": "in all on the cheapest machine, USD",
}


def _total(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    made = [row.get("scale/15t", {"detail": {}})["detail"].get("estimate") for row in rows]
    known = [(name, each) for name, each in zip(names, made, strict=True) if each]
    lines = [
        [label, *(number(each[figure]) if figure in each else "" for _, each in known)]
        for figure, label in FIGURES.items()
    ]
    for place, instance in enumerate(INSTANCES):
        machines = [each["machines"][place] for _, each in known]
        lines.append([f"{instance.name}, hours", *(number(machine["machine_h"]) for machine in machines)])
        lines.append([f"{instance.name}, USD", *(number(machine["machines_usd"]) for machine in machines)])
    return _table("15T tokens", ["", *(name for name, _ in known)], lines if known else [])


if __name__ == "__main__":
    print(page([json.loads(Path(name).read_text()) for name in sys.argv[1:]]))
