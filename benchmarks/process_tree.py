"""Runs a command and writes what it and all its descendants cost: `python -m benchmarks.process_tree RESULT COMMAND`.

The operating system adds the CPU time of a process to its parent's once the parent has waited for it. A server whose
parent ends first would be lost to the sum, so this process adopts orphans, which only Linux can, and waits for them
too. What this gives up: one that goes on for `ORPHAN_S` after the command ended, which is told as an error.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
ORPHAN_S = 30.0
LOOK_S = 0.05


@dataclass(frozen=True)
class TreeCost:
    """What a command cost."""

    cpu_s: float
    """CPU time of all its processes, user and system."""
    wall_s: float


def tree_cost(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> TreeCost:
    """Run a command, its output in `log`, and return its cost. Raises RuntimeError with its last words if it fails."""
    result = log.with_suffix(".json")
    words = [sys.executable, "-m", "benchmarks.process_tree", str(result), *command]
    began = time.monotonic()
    with log.open("wb") as lines:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=lines, stderr=lines, env=environment)
    wall = time.monotonic() - began
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {last[0]}")
    return TreeCost(json.loads(result.read_text())["cpu_s"], wall)


def main(result: str, *command: str) -> int:
    """Run `command`, write its cost to `result` and return its status, or 1 if a descendant outlives it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    status = subprocess.Popen(command).wait()
    left = _last_orphan(time.monotonic() + ORPHAN_S)
    if left:
        print(f"a process outlived {' '.join(command)} by {ORPHAN_S:g} s", file=sys.stderr)
        return status or 1
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(result).write_text(json.dumps({"cpu_s": usage.ru_utime + usage.ru_stime}))
    return status


def _last_orphan(until: float) -> bool:
    """Wait for adopted processes; return whether one is left at the time `until`."""
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(LOOK_S)
        except ChildProcessError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
