"""Find the process that holds up the others: each one's own work in a step, compared with its peers'.

Synchronous training makes every rank's step equally long, so a step's time says nothing about who is slow. Here each
rank measures the forward passes of its layers, from after the weights are gathered to the layer's output, and what it
waited for data; waiting for gradients, weights and pipeline neighbours lies outside. Layers have CUDA events around
them on a GPU (nothing waits for those) and clock readings on a CPU. Every `EVERY` steps one step is
measured; the figures are summed over processes a window later (8 bytes a rank), when they are surely there. A rank
that is over 10 % slower than the median of its peers (the ranks of the same pipeline position: the others have other
layers) for 3 windows in a row is named with its host.

What this gives up: backward passes, the optimizer and host code between layers are not looked at (a slow device is slow
in the forward pass too); tensor- and context-parallel groups exchange inside a layer, so such a group looks slow as a
whole; and a rank without peers (one data-parallel copy) is compared with nobody.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from llama3.parallel.mesh import ParallelContext
from llama3.train import metrics
from llama3.train.train_step import PendingTensor

EVERY = 50
"""Steps from one measured step to the next."""
SLOW = 1.1
"""Own time against the median of the peers above which a rank counts as slow."""
WINDOWS = 3
"""Measured steps in a row after which it is named."""


class Stopwatch:
    """Sums the time in the forward passes of `layers`, when `armed`. They must be sharded already, if they will be.

    A hook that is registered after FSDP's runs after it, so gathering is over when the time begins. Hooks are kept out
    of torch.compile, as FSDP's are.
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        self.armed = False
        self.device = device
        self._spans: list[tuple[Any, Any]] = []
        self._began: Any = None
        for layer in layers:
            layer.register_forward_pre_hook(_uncompiled(self._begin))
            layer.register_forward_hook(_uncompiled(self._end))

    def seconds(self) -> float:
        """Return the time since the call before, and forget it. Waits for the device if it is not done yet."""
        spans, self._spans = self._spans, []
        if self.device.type != "cuda":
            return float(sum(end - begin for begin, end in spans))
        if spans:
            spans[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1000

    def _begin(self, *_: object) -> None:
        if self.armed:
            self._began = self._now()

    def _end(self, *_: object) -> None:
        if self.armed and self._began is not None:
            self._spans.append((self._began, self._now()))
            self._began = None

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class StragglerSample(NamedTuple):
    """What one measured step found."""

    slowest: int
    """The rank that is slowest against its peers."""
    slowest_s: float
    median_s: float
    """Of its peers."""
    named: list[str]
    """A line for each rank that has been slow for long, when there is something new to say."""

    def metrics(self) -> dict[str, float]:
        return {metrics.SLOWEST_RANK_S: self.slowest_s, metrics.MEDIAN_RANK_S: self.median_s}


class Stragglers:
    """One process's part in the comparison; every process must make the same calls for the same steps."""

    def __init__(
        self, watch: Stopwatch, world: ParallelContext, peers: Sequence[int], hosts: Sequence[str], every: int = EVERY
    ) -> None:
        """`peers` and `hosts` tell, by rank, the group of ranks with equal work, and the host."""
        self.watch, self.world, self.peers, self.hosts, self.every = watch, world, peers, hosts, every
        self.windows = [0] * len(peers)
        """Windows in a row for which each rank has been slow."""
        self._measured = False
        self._waited = 0.0
        self._coming: PendingTensor | None = None

    @classmethod
    def among(cls, parts: Iterable[nn.Module], world: ParallelContext, every: int = EVERY) -> Stragglers | None:
        """Return the comparison for this process's `parts` of the model (each with `layers`), sharded and compiled.

        None if there is one data-parallel copy only. Every process must call it.
        """
        if world.axis("dp").size == 1:
            return None
        layers: list[nn.Module] = [layer for part in parts for layer in cast(Any, part).layers.values()]
        known = world.gathered((world.axis("pp").rank, socket.gethostname()))
        peers, hosts = zip(*known, strict=True)
        return cls(Stopwatch(layers, world.device), world, peers, hosts, every)

    def begin(self, number: int, data_wait: float) -> None:
        """Call before step `number` (of the run), which had to wait `data_wait` seconds for its data, is handed over.

        Every `every` steps this sends the figures of the window before and measures the step.
        """
        turn = number % self.every == 0
        if turn:
            own = self.watch.seconds() + self._waited if self._measured else 0.0
            self._coming = PendingTensor(self.world.sum(self._row(own)))
            self._measured, self._waited = True, data_wait
        self.watch.armed = turn

    def window(self) -> StragglerSample | None:
        """Return the figures that came since the call before, if any; call it when a step has been waited for."""
        if self._coming is None:
            return None
        coming, self._coming = self._coming, None
        return self.compare(coming.read())

    def compare(self, seconds: Sequence[float]) -> StragglerSample | None:
        """Return what the figures of all ranks say; None for the first window, which has none yet."""
        if not all(seconds):
            return None
        ratios = [own / self._median(rank, seconds) for rank, own in enumerate(seconds)]
        self.windows = [count + 1 if ratio > SLOW else 0 for count, ratio in zip(self.windows, ratios, strict=True)]
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        named = [self._line(rank, ratios[rank]) for rank, count in enumerate(self.windows) if _tells(count)]
        return StragglerSample(slowest, seconds[slowest], self._median(slowest, seconds), named)

    def _row(self, own: float) -> Tensor:
        """Return this rank's figure at its place, zero at all others: summed, it is everybody's."""
        row = torch.zeros(len(self.peers), dtype=torch.float64)
        row[self.world.rank] = own
        return row.to(self.world.device, non_blocking=True)

    def _median(self, rank: int, seconds: Sequence[float]) -> float:
        return statistics.median(
            own for own, group in zip(seconds, self.peers, strict=True) if group == self.peers[rank]
        )

    def _line(self, rank: int, ratio: float) -> str:
        return f"rank {rank} ({self.hosts[rank]}): {ratio:.2f}x the median step for {self.windows[rank]} windows"


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _tells(windows: int) -> bool:
    """Return whether a rank that has been slow for so many windows is named now: after 3, 6, 12, 24, ..."""
    parts, rest = divmod(windows, WINDOWS)
    return windows > 0 and rest == 0 and parts & (parts - 1) == 0
