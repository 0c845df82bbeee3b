"""What a plan costs: layouts per CPU second, and the CPU time of the commands as a user gives them, in a fresh process.

CPU time and not wall time, since the machine may be shared; a plan is one thread, so that on a quiet core the two are
nearly equal. `start` is what a command takes before it does anything. Given up: the first search of a process, which
fills caches, is counted with the second.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.plan_anchors.published import llama3_model, table4_query
from benchmarks.rows import PLAN_TARGETS, Row, measured, rows_of
from herd.llama3.planner.layout_search import search_layouts

ROWS_OF_TABLE_4 = range(3)
USAGE = 2
"""Exit status of a command that does not exist."""


@dataclass(frozen=True)
class PlanSettings:
    """What is measured."""

    only: tuple[str, ...]
    herd: Sequence[str]
    """How the command line is started."""
    recipe: str


@dataclass(frozen=True)
class PlanSession:
    """One run of the benchmark."""

    settings: PlanSettings


def plan_rows(session: PlanSession) -> Iterator[Row]:
    """Yield the rows of `python -m benchmarks plan`. Raises ValueError as `rows_of`."""
    commands = dict.fromkeys(PLAN_TARGETS, _command)
    return rows_of(session, PLAN_TARGETS, {**commands, "search/rate": _search})


def _search(session: PlanSession, name: str) -> Row:
    """Search the layouts of Table 4's three rows, twice."""
    model = llama3_model()
    begin = time.process_time()
    found = [search_layouts(table4_query(row), model) for row in ROWS_OF_TABLE_4 for _ in range(2)]
    spent = time.process_time() - begin
    considered = sum(one.considered for one in found)
    note = f"{considered:,} layouts of the 405B on 8,192 and 16,384 GPUs in {spent:.2f} CPU s"
    return measured(name, considered / spent, note, cpu_s=spent, layouts=considered)


def _command(session: PlanSession, name: str) -> Row:
    """Run a command in a process of its own."""
    settings = session.settings
    words = {
        "recipe/cpu": ("plan", settings.recipe, "--cluster", "roce-24k"),
        "start/help": ("--help",),
        "start/usage": ("no-such-command",),
        "start/status": ("status",),
        "start/plan": ("plan", settings.recipe),
        "start/engine": ("-c", "import herd.flows.pipeline"),
    }[name]
    command = [*(settings.herd[:1] if name == "start/engine" else settings.herd), *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != (USAGE if name == "start/usage" else 0):
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return measured(name, spent, " ".join(("python" if name == "start/engine" else "herd", *words)))
