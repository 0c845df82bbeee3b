"""Starts a fresh process for one measured thing and returns what it cost.

One process each, so that no side finds the other's memory, caches or imports; one thread each (the libraries' own pools
too), so that CPU time is the work and not the waiting of a pool. A peer runs under the interpreter that has it
(`Bench.peers`): its pins (xxhash below 4, older lxml) need not agree with ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.meter import MISSING

ROOT = Path(__file__).parents[1]
"""What a process needs on its path to import this package; last, so that the interpreter's own libraries win."""
PEERS = (
    "datatrove",
    "datasketch",
    "daft",
    "spacy",
    "tokenizers",
    "tiktoken",
    "pycld2",
    "cld3-py",
    "py3langid",
    "numpy",
)
"""Distributions whose versions matter to the peers' costs."""
_START = "import sys; sys.path.append(sys.argv[1]); from benchmarks.meter import main; main()"
_POOLS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_LIST = """
import importlib.metadata, json
print(json.dumps({found.name.lower(): found.version for found in importlib.metadata.distributions()}))
"""
_LAST_LINES = 12


class NotMeasured(Exception):
    """A library is not installed; the message says which."""


@dataclass(frozen=True)
class Cost:
    """What one measured thing cost, and the facts that it returned."""

    cpu_s: float
    wall_s: float
    peak_bytes: int
    facts: dict[str, Any]
    repeats: int = 1
    """How often it was done; CPU and wall time are those of the median."""


@dataclass(frozen=True)
class Bench:
    """Where a benchmark works and which interpreter has the peers."""

    folder: Path
    peers: str = sys.executable

    def cost(self, module: str, source: Path, warm_up: Path, **options: Any) -> Cost:
        """Return the cost of `benchmarks.<module>` on `source`.

        The files that it writes stay. Raises NotMeasured if a library is missing and RuntimeError, with the end of its
        output, if it fails.
        """
        python = self.peers if module.startswith("peers.") else sys.executable
        outputs = self.folder / "runs" / f"{module}-{source.stem}"
        result = outputs / "result.json"
        request = {
            "module": f"benchmarks.{module}",
            "source": str(source),
            "warm_up": str(warm_up),
            "folder": str(outputs),
            "options": options,
            "result": str(result),
        }
        _clear(outputs)
        ended = subprocess.run(
            [python, "-c", _START, str(ROOT)],
            input=json.dumps(request),
            cwd=outputs,
            env=_environment(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode:
            raise RuntimeError(f"{module} failed:\n" + "\n".join(ended.stdout.splitlines()[-_LAST_LINES:]))
        answer = json.loads(result.read_text())
        if MISSING in answer:
            raise NotMeasured(answer[MISSING])
        return Cost(**answer)


def peer_versions(python: str) -> dict[str, str]:
    """Return the versions of the peers that the interpreter `python` has.

    Raises ValueError if there is no such interpreter.
    """
    try:
        listed = subprocess.run([python, "-c", _LIST], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"--peers: {python} is no Python interpreter ({error}); give the path of one") from error
    found = json.loads(listed)
    return {name: found[name] for name in PEERS if name in found}


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of a measured process: one thread, no network, caches of its own."""
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0", "TMPDIR": str(folder)}
    return {**os.environ, **dict.fromkeys(_POOLS, "1"), **own}
