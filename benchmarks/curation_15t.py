"""What curating 15T tokens would take, from what the rows `scale/*` measured; and the page that says so.

    python -m benchmarks.curation_15t BEFORE.json [AFTER.json]

prints the tables of docs/benchmarks from the output of `python -m benchmarks data --only scale --json`, of one engine
or of two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.curation_scale import (
    BOOKKEEPING,
    METHODS,
    exponent,
    size_lines,
    sizes_of,
    stored_lines,
    stored_sizes,
    whole_items,
)
from benchmarks.rows import Row, measured, number
from benchmarks.session import Session

TEXT, INPUTS = 60e12, 1_000_000
"""Bytes of text and input files: 15T tokens of four bytes, in files of 60 MB, each a work item and a shard."""
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
USD_PER_WRITE, USD_PER_READ, USD_PER_GB_MONTH = 0.005e-3, 0.0004e-3, 0.021
WRITES = ("PUT", "POST", "LIST")
"""Requests that cost as much as a PUT; GET and HEAD cost less, DELETE nothing."""


def estimate(
    sizes: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]], whole: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what TEXT in INPUTS files takes.

    `sizes` and `stored` are the lines of the rows scale/cpu and scale/requests, small work items, smallest corpus
    first; `whole` is the largest corpus with the engine's own work items: `mb`, `cpu_s`, `peak_mb`, `shuffled_mb`,
    `read_mb`, `written_mb`.

    Numbers of things go with shards, at the power that was measured, at least 1. CPU time and bytes go with the text;
    a power above 1 goes on with the shards.
    """
    more = INPUTS / sizes[-1]["files"]

    def power(lines: Sequence[Mapping[str, Any]], value: Callable[[Any], float]) -> float:
        return max(1.0, exponent([line["mb"] for line in lines], [max(1.0, value(line)) for line in lines]))

    def things(name: str) -> float:
        return float(sizes[-1][name] * more ** power(sizes, lambda line: line[name]))

    def bytes_of(name: str, like: str = "") -> float:
        grown = power(sizes, lambda line: line[like or name]) - 1
        return float(whole[name] / whole["mb"] * TEXT * more**grown)

    def requests_of(methods: Sequence[str]) -> float:
        def count(line: Mapping[str, Any]) -> float:
            folders = [counts for folder, counts in line["requests"].items() if folder not in BOOKKEEPING]
            return float(sum(counts[method] for counts in folders for method in methods))

        return float(count(stored[-1]) * (INPUTS / stored[-1]["files"]) ** power(stored, count))

    cpu_s = bytes_of("cpu_s") / 1e6
    moved, task_gib = bytes_of("read_mb") + bytes_of("written_mb"), whole["peak_mb"] * 1e6 / 2**30
    writes, reads = requests_of(WRITES), requests_of(("GET", "HEAD"))
    shuffled = bytes_of("shuffled_mb", "written_mb")
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
    requests_usd = writes * USD_PER_WRITE + reads * USD_PER_READ
    stored_usd = shuffled / 1e9 * USD_PER_GB_MONTH * DAYS / 30
    return {
        "tasks": things("items"),
        "files": things("written"),
        "read_calls": things("reads"),
        "writing_requests": writes,
        "reading_requests": reads,
        "shuffled_tb": shuffled / 1e12,
        "moved_tb": moved / 1e12,
        "task_gib": task_gib,
        "core_h": cpu_s / 3600,
        "machines": machines,
        "cheapest": best["name"],
        "requests_usd": requests_usd,
        "stored_usd": stored_usd,
        "usd": best["machines_usd"] + requests_usd + stored_usd,
    }


def money(run: Session, name: str) -> Row:
    """Money for 15T tokens on the cheapest of INSTANCES, requests and storage with it."""
    sizes, whole = size_lines(sizes_of(run)), whole_items(run)
    mb = sizes[-1]["mb"]
    line = {"mb": mb, "cpu_s": whole.cpu_s, **whole.facts}
    made = estimate(sizes, stored_lines(stored_sizes(run)), line)
    note = f"{number(made['core_h'])} core hours, {number(made['tasks'])} tasks, {number(made['files'])} files"
    note += f", {made['task_gib']:.2f} GiB a task, {made['cheapest']}"
    line.pop("steps")
    return measured(name, made["usd"], note, estimate=made, whole=line)


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
    "read_calls": "read calls",
    "writing_requests": "PUT, POST and LIST",
    "reading_requests": "GET and HEAD",
    "shuffled_tb": "files between steps, TB",
    "moved_tb": "read and written, TB",
    "task_gib": "memory of a task, GiB",
    "core_h": "core hours",
    "requests_usd": "requests, USD",
    "stored_usd": "storage of the files between steps, USD",
    "usd": "in all on the cheapest machine, USD",
}


def _total(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    made = [row.get("scale/15t", {"detail": {}})["detail"].get("estimate") for row in rows]
    known = [(name, each) for name, each in zip(names, made, strict=True) if each]
    lines = [[label, *(number(each[figure]) for _, each in known)] for figure, label in FIGURES.items()]
    for place, instance in enumerate(INSTANCES):
        machines = [each["machines"][place] for _, each in known]
        lines.append([f"{instance.name}, hours", *(number(machine["machine_h"]) for machine in machines)])
        lines.append([f"{instance.name}, USD", *(number(machine["machines_usd"]) for machine in machines)])
    return _table("15T tokens", ["", *(name for name, _ in known)], lines if known else [])


if __name__ == "__main__":
    print(page([json.loads(Path(name).read_text()) for name in sys.argv[1:]]))
