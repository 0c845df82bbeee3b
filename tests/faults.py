"""The list of faults, F1 to F26: what herd promises under each, and the tests that inject it.

A test says `@pytest.mark.fault("F6", ...)`; tests/faults.yaml has the promises, and `python -m tests.faults` writes
docs/reference/faults.md.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import yaml

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/reference/faults.md"
CHAOS = TESTS.parent / "docs/benchmarks"
"""Folder of the tables `*-chaos.md`, whose lines begin with a fault: `| F1 rank killed | 4 | 31 | 62 |`."""


class Fault(NamedTuple):
    """A fault and what herd promises under it."""

    id: str
    fault: str
    promise: str


def load() -> list[Fault]:
    """Return the list."""
    return [Fault(**entry) for entry in yaml.safe_load((TESTS / "faults.yaml").read_text())]


def marked() -> dict[str, list[str]]:
    """Return the tests (`path::name`) that inject each fault."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if "pytest.mark.fault" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
                    for name in decorator.args:
                        assert isinstance(name, ast.Constant)
                        found[str(name.value)].append(f"{path.relative_to(TESTS.parent)}::{node.name}")
    return dict(found)


def recovery() -> dict[str, str]:
    """Return fault -> the recovery times of its kinds in the newest table of chaos: `rank killed 31 s`."""
    times: dict[str, list[str]] = defaultdict(list)
    pages = sorted(CHAOS.glob("*-chaos.md"))
    for line in pages[-1].read_text().splitlines() if pages else ():
        if match := re.match(r"\| (F\d+) ([^|]+) \| \d+ \| (\d+) \|", line):
            times[match[1]].append(f"{match[2]} {match[3]} s")
    return {fault: ", ".join(kinds) for fault, kinds in times.items()}


def page() -> str:
    """Return the page."""
    tests, times = marked(), recovery()
    lines = [
        "# Faults",
        "",
        "Each fault is injected by the tests named here, which compare bytes, states or messages with the promise.",
        "Combinations of F2, F5, F12, F14 and F24 run under thousands of schedules in `tests/storage/simulation.py`.",
        "Recovery is the median time from the end of a fault until a run had done more than ever before, by the newest",
        "table of `python -m benchmarks chaos`, imports and busy processors included; a dash: not measured.",
        "Written by `python -m tests.faults`.",
        "",
        "| | fault | promise | tests | recovery |",
        "|---|---|---|---|---|",
    ]
    for fault in load():
        where = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in tests.get(fault.id, []))
        lines.append(f"| {fault.id} | {fault.fault} | {fault.promise} | {where} | {times.get(fault.id, '–')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
