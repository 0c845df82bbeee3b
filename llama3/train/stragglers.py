"""Find the process that slows down the others: compare each rank's own work in a step with that of its peers.

All ranks' steps take equally long, so each rank measures the forward passes of its layers and its wait for data.
Waiting for gradients, weights and pipeline neighbors is not included, nor are backward passes and the optimizer: a slow
device is slow in the forward pass too. Tensor- and context-parallel groups exchange inside a layer and look slow as a
whole.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from llama3.parallel.mesh import ParallelContext
from llama3.train import metrics
from llama3.train.train_step import PendingTensor

EVERY = 50
"""Steps from one measured step to the next."""
SLOW = 1.1
"""Ratio of a rank's own time to the median of its peers above which it counts as slow."""
WINDOWS = 3
"""Measured steps in a row after which a slow rank is named."""


class Stopwatch:
    """Sums the time in the forward passes of `layers` while `armed`, by CUDA events or clock readings.

    Shard the layers before: a hook that is registered after FSDP's runs after it, so gathering is over when the time
    begins. Hooks are kept out of torch.compile, as FSDP's are.
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        self.armed = False
        self.device = device
        self._spans: list[tuple[Any, Any]] = []
        self._began: Any = None
        for layer in layers:
            layer.register_forward_pre_hook(torch.compiler.disable(self._begin))  # type: ignore[no-untyped-call]
            layer.register_forward_hook(torch.compiler.disable(self._end))  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """Return the time since the previous call and reset it. Waits for the device if it is not done yet."""
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
    """The comparison of one measured step."""

    slowest: int
    """The rank that is slowest against its peers."""
    slowest_s: float
    median_s: float
    """Of its peers."""
    named: list[str]
    """A line for each rank that is named now (see `compare`)."""

    def metrics(self) -> dict[str, float]:
        return {metrics.SLOWEST_RANK_S: self.slowest_s, metrics.MEDIAN_RANK_S: self.median_s}


class Stragglers:
    """One process's part in the comparison; every process must make the same calls for the same steps.

    Figures are summed over processes (8 bytes a rank) and read a window later, when they have surely arrived.
    """

    def __init__(
        self, watch: Stopwatch, world: ParallelContext, peers: Sequence[int], hosts: Sequence[str], every: int = EVERY
    ) -> None:
        """`peers` has by rank the number of its group, whose ranks have equal work; `hosts` the host."""
        self.watch, self.world, self.peers, self.hosts, self.every = watch, world, peers, hosts, every
        self.windows = [0] * len(peers)
        """Windows in a row for which each rank has been slow."""
        self._measured = False
        self._waited = 0.0
        self._pending: PendingTensor | None = None

    @classmethod
    def among(cls, parts: Iterable[nn.Module], world: ParallelContext, every: int = EVERY) -> Stragglers | None:
        """Return the comparison for this process's `parts` of the model (each with `layers`), sharded and compiled.

        Peers are the ranks of the same pipeline position. None with a single data-parallel copy, which has no peers.
        Every process must call it.
        """
        if world.axis("dp").size == 1:
            return None
        layers: list[nn.Module] = [layer for part in parts for layer in cast(Any, part).layers.values()]
        peers, hosts = zip(*world.gathered((world.axis("pp").rank, socket.gethostname())), strict=True)
        return cls(Stopwatch(layers, world.device), world, peers, hosts, every)

    def begin(self, number: int, data_wait: float) -> None:
        """Call before step `number` (of the run), which waited `data_wait` seconds for its data, is enqueued.

        Every `every` steps this sends the figures of the previous window and measures the step.
        """
        measure = number % self.every == 0
        if measure:
            own = self.watch.seconds() + self._waited if self._measured else 0.0
            # This rank's figure at its index, zero at all others: the sum has the figures of all ranks.
            figures = torch.zeros(len(self.peers), dtype=torch.float64)
            figures[self.world.rank] = own
            self._pending = PendingTensor(self.world.sum(figures.to(self.world.device, non_blocking=True)))
            self._measured, self._waited = True, data_wait
        self.watch.armed = measure

    def window(self) -> StragglerSample | None:
        """Return the comparison that arrived since the previous call, if any; call it after a step was waited for."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return self.compare(pending.read())

    def compare(self, seconds: Sequence[float]) -> StragglerSample | None:
        """Compare the figures of all ranks; return None for the first window, which has none yet.

        A rank is named after 3, 6, 12, 24, ... slow windows in a row.
        """
        if not all(seconds):
            return None
        groups: dict[int, list[float]] = {}
        for own, peer in zip(seconds, self.peers, strict=True):
            groups.setdefault(peer, []).append(own)
        medians = {peer: statistics.median(group) for peer, group in groups.items()}
        ratios = [own / medians[peer] for own, peer in zip(seconds, self.peers, strict=True)]
        self.windows = [count + 1 if ratio > SLOW else 0 for count, ratio in zip(self.windows, ratios, strict=True)]
        named = []
        for rank, (count, ratio) in enumerate(zip(self.windows, ratios, strict=True)):
            multiple, rest = divmod(count, WINDOWS)
            if count > 0 and rest == 0 and multiple & (multiple - 1) == 0:  # a power of 2
                named.append(f"rank {rank} ({self.hosts[rank]}): {ratio:.2f}x the median step for {count} windows")
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        return StragglerSample(slowest, seconds[slowest], medians[self.peers[slowest]], named)
