"""Steps of several sides in turn, so that what a busy machine does to one it does to all.

A round is one step of each side, in an order that turns by one each round. What counts is the ratio of two sides within
a round; its median over the rounds is the value, and its noise is the half-width of the interval in which that median
lies with 95 % confidence (order statistics, no assumption about the distribution). Time is CPU time of one thread.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.measure import ROOT, NotMeasured
from benchmarks.meter import MISSING

WARM_UP = 2
"""Steps of each side that are not counted."""
_START = "import sys; sys.path.append(sys.argv[1]); from benchmarks.train_side import main; main()"
_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class Side:
    """Which step is measured, and by which interpreter."""

    module: str
    """Below benchmarks."""
    python: str = sys.executable
    bf16: bool = False
    products: str = "highest"
    """torch's float32_matmul_precision."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Added to the shape that all sides get."""


@dataclass(frozen=True)
class Ratio:
    """CPU time of one side over another's."""

    value: float
    noise: float
    """Half-width of its 95 % interval, as a share of the value."""


@dataclass(frozen=True)
class Rounds:
    """What each side answered, one number per round."""

    cpu_s: Mapping[str, Sequence[float]]
    losses: Mapping[str, Sequence[float]]
    """Of the steps that are not counted too."""
    extra_bytes: Mapping[str, int]
    """Largest memory less that before the first step."""
    versions: Mapping[str, str]
    missing: Mapping[str, str]
    """Sides whose library is not installed, and what their import said."""

    def ratio(self, side: str, over: str) -> Ratio:
        """Return the median over rounds of the CPU time of `side` over that of `over`."""
        ratios = sorted(one / other for one, other in zip(self.cpu_s[side], self.cpu_s[over], strict=True))
        below = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
        value = median(ratios)
        return Ratio(value, (ratios[len(ratios) - 1 - below] - ratios[below]) / 2 / value)

    def seconds(self, side: str) -> float:
        """Return the median CPU time of a step of `side`."""
        return median(self.cpu_s[side])


def take_rounds(sides: Mapping[str, Side], weights: Path, shape: Mapping[str, Any], rounds: int) -> Rounds:
    """Return `rounds` rounds of the sides on the weights and batch in the file `weights`, beside which they log.

    Raises RuntimeError if a side fails.
    """
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        running: dict[str, _Running] = {}
        for name, side in sides.items():
            try:
                running[name] = stack.enter_context(_started(name, side, weights, shape))
            except NotMeasured as error:
                missing[name] = str(error)
        answers = _turns(running, rounds)
        return Rounds(
            {name: [answer["cpu_s"] for answer in given[WARM_UP:]] for name, given in answers.items()},
            {name: [answer["loss"] for answer in given] for name, given in answers.items()},
            {name: given[-1]["peak_bytes"] - running[name].ready["peak_bytes"] for name, given in answers.items()},
            {name: side.ready["version"] for name, side in running.items()},
            missing,
        )


def _turns(running: Mapping[str, _Running], rounds: int) -> dict[str, list[dict[str, Any]]]:
    names = list(running)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(WARM_UP + rounds):
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            answers[name].append(running[name].ask("step"))
    return answers


class _Running:
    """A side's process."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.name, self.process, self.log = name, process, log
        self.ready: dict[str, Any] = {}

    def ask(self, line: str) -> dict[str, Any]:
        """Return the answer to one line. Raises RuntimeError, with the end of what it printed, if it has died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answered = self.process.stdout.readline()
        except BrokenPipeError:
            answered = ""
        if not answered:
            self.process.wait()
            self.log.seek(0)
            raise RuntimeError(f"{self.name} failed: " + (self.log.read().strip().splitlines() or ["no output"])[-1])
        answer: dict[str, Any] = json.loads(answered)
        return answer


@contextmanager
def _started(name: str, side: Side, weights: Path, shape: Mapping[str, Any]) -> Iterator[_Running]:
    """Yield the running side. Raises NotMeasured if its library is missing."""
    request = {
        "module": f"benchmarks.{side.module}",
        "bf16": side.bf16,
        "products": side.products,
        "weights": str(weights),
        "shape": {**shape, **side.shape},
    }
    with (
        (weights.parent / f"{name}.log").open("w+") as log,
        subprocess.Popen(
            [side.python, "-c", _START, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **dict.fromkeys(_POOLS, "1"), "HF_HUB_OFFLINE": "1"},
        ) as process,
    ):
        running = _Running(name, process, log)
        try:
            running.ready = running.ask(json.dumps(request))
            if MISSING in running.ready:
                raise NotMeasured(running.ready[MISSING])
            yield running
        finally:
            process.kill()
