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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from llama3.bench.measure import ROOT, NotMeasured

_START = "import sys; sys.path.append(sys.argv[1]); from llama3.bench.train_side import main; main()"
_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class Side:
    """Which step is measured, and by which interpreter."""

    module: str
    """Below llama3.bench."""
    python: str = sys.executable
    bf16: bool = False
    products: str = "highest"
    """torch's float32_matmul_precision."""


@dataclass(frozen=True)
class Ratio:
    """CPU time of one side over another's."""

    value: float
    noise: float
    """Half-width of its 95 % interval, as a share of the value."""


@dataclass(frozen=True)
class Rounds:
    """CPU seconds and losses of each side, one of each per round."""

    cpu_s: Mapping[str, Sequence[float]]
    losses: Mapping[str, Sequence[float]]

    def ratio(self, side: str, over: str) -> Ratio:
        """Return the median over rounds of the CPU time of `side` over that of `over`."""
        ratios = sorted(one / other for one, other in zip(self.cpu_s[side], self.cpu_s[over], strict=True))
        below = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
        value = median(ratios)
        return Ratio(value, (ratios[len(ratios) - 1 - below] - ratios[below]) / 2 / value)

    def seconds(self, side: str) -> float:
        """Return the median CPU time of a step of `side`."""
        return median(self.cpu_s[side])


def take_rounds(sides: Mapping[str, Side], request: Mapping[str, Any], rounds: int, warm_up: int = 2) -> Rounds:
    """Return `rounds` rounds of the sides, after some steps that are not counted.

    `request` has the keys `weights`, `shape` and `lr` (see `train_side`). A side whose library is missing is left out.
    Raises RuntimeError if a side fails.
    """
    with ExitStack() as stack:
        running = {}
        for name, side in sides.items():
            try:
                running[name] = stack.enter_context(_started(name, side, request))
            except NotMeasured:
                continue
        names = list(running)
        cpu: dict[str, list[float]] = {name: [] for name in names}
        losses: dict[str, list[float]] = {name: [] for name in names}
        for number in range(warm_up + rounds):
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                answer = running[name].step()
                losses[name].append(answer["loss"])
                if number >= warm_up:
                    cpu[name].append(answer["cpu_s"])
    return Rounds(cpu, losses)


class _Running:
    """A side's process."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.name, self.process, self.log = name, process, log

    def ask(self, line: str) -> dict[str, Any]:
        """Return the answer to one line. Raises RuntimeError, with the end of what it printed, if it has died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answered = self.process.stdout.readline()
        if not answered:
            self.process.wait()
            self.log.seek(0)
            raise RuntimeError(f"{self.name} failed: {self.log.read().strip().splitlines()[-1:]}")
        answer: dict[str, Any] = json.loads(answered)
        return answer

    def step(self) -> dict[str, Any]:
        return self.ask("step")


@contextmanager
def _started(name: str, side: Side, request: Mapping[str, Any]) -> Iterator[_Running]:
    """Yield the running side. Raises NotMeasured if its library is missing."""
    with (Path(request["weights"]).parent / f"{name.replace('/', '-')}.log").open("w+") as log:
        with subprocess.Popen(
            [side.python, "-c", _START, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **dict.fromkeys(_POOLS, "1"), "HF_HUB_OFFLINE": "1"},
        ) as process:
            running = _Running(name, process, log)
            try:
                about = {"module": f"llama3.bench.{side.module}", "bf16": side.bf16, "products": side.products}
                answer = running.ask(json.dumps({**request, **about}))
                if "missing" in answer:
                    raise NotMeasured(answer["missing"])
                yield running
            finally:
                process.kill()
