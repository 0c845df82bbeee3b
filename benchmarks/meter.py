"""Runs one measured thing and writes what it cost: the program inside each process that a benchmark starts.

Standard library only, because the interpreter may be another one, with nothing of ours but this package. The thing is a
module with a function `work(source, folder, **options)`; it runs first on a few documents, which pays for imports, JIT
and tables on either side, and is then timed on all of them. Time is CPU time, user and system, all threads and the
children that have ended: a busy machine changes it little. What this gives up: the cost of starting, which a user
of short jobs does feel.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from herd.storage.processes import peak_rss

SHORT_S, REPEATS = 10.0, 5
"""What takes less CPU time than this in all is done again, at most so often, and the median counts: on either side."""
MISSING = "missing"
"""Key of a result that says which library could not be imported."""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def metered(module: str, source: Path, warm_up: Path, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that the `work` of `module` returned and its cost, or the library that is missing."""
    try:
        work = importlib.import_module(module).work
        (folder / warm_up.name).mkdir(parents=True)
        work(warm_up, folder / warm_up.name, **options)
    except ImportError as error:
        if (error.name or "").split(".")[0] in ("herd", "benchmarks"):  # a mistake of ours, no missing library
            raise
        return {MISSING: str(error)}
    spent: list[tuple[float, float]] = []
    while sum(cpu for cpu, _ in spent) < SHORT_S and len(spent) < REPEATS:
        place = folder / str(len(spent))
        place.mkdir()
        wall, cpu = time.perf_counter(), cpu_seconds()
        facts = work(source, place, **options)
        spent.append((cpu_seconds() - cpu, time.perf_counter() - wall))
    cpu, wall = sorted(spent)[len(spent) // 2]
    return {"cpu_s": cpu, "wall_s": wall, "peak_bytes": peak_rss(), "facts": facts, "repeats": len(spent)}


def main() -> None:
    """Read the request (JSON) from standard input and write the result to the file that it names."""
    request = json.load(sys.stdin)
    source, warm_up, folder = (Path(request[name]) for name in ("source", "warm_up", "folder"))
    result = metered(request["module"], source, warm_up, folder, request["options"])
    Path(request["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
