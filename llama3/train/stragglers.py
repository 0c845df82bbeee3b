"""Find the process that slows down the others: compare each rank's own work in a step with that of its peers.

All ranks' steps take equally long, so each rank measures the forward passes of its layers and its wait for data.
Not measured: waiting for gradients, weights and pipeline neighbors, backward passes, the optimizer. Tensor- and
context-parallel groups communicate inside a layer, so all of a group looks slow.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.train import metrics
from herd.llama3.train.callbacks import Callback, StepResult, log
from herd.llama3.train.data_loader import Step
from herd.llama3.train.train_step import PendingTensor

EVERY = 50
"""Steps from one measured step to the next."""
SLOW = 1.1
"""Ratio of a rank's own time to the median of its peers above which it counts as slow."""
WINDOWS = 3
"""Measured steps in a row after which a slow rank is named."""


class Stopwatch:
    """Sums the time in the forward passes of `layers` while `armed`, by CUDA events or clock readings.

    Shard the layers before: a hook that is registered after FSDP's runs after its gather.
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


class Stragglers(Callback):
    """Compares the ranks' figures, summed over processes (8 bytes a rank) and read one window later."""

    def __init__(
        self,
        watch: Stopwatch,
        world: ParallelContext,
        peers: Sequence[int],
        hosts: Sequence[str],
        step_at: Callable[[int], int],
        every: int = EVERY,
    ) -> None:
        """`peers` has by rank the number of its group, whose ranks have equal work; `hosts` the host.

        `step_at` returns the number, in the run, of the step that begins at a position.
        """
        self.watch, self.world, self.peers, self.hosts = watch, world, peers, hosts
        self.step_at, self.every = step_at, every
        self.windows = [0] * len(peers)
        """Windows in a row for which each rank has been slow."""
        self._measured = False
        self._waited = 0.0
        self._pending: PendingTensor | None = None

    @classmethod
    def among(
        cls, models: Iterable[nn.Module], world: ParallelContext, step_at: Callable[[int], int], every: int = EVERY
    ) -> Stragglers:
        """Return the comparison of the ranks of each pipeline position, one of each data-parallel copy.

        `models` are this process's pipeline stages, sharded and compiled. Every process must call it.
        """
        layers: list[nn.Module] = [layer for model in models for layer in cast(Any, model).layers.values()]
        peers, hosts = zip(*world.all_gather_object((world.axis("pp").rank, socket.gethostname())), strict=True)
        return cls(Stopwatch(layers, world.device), world, peers, hosts, step_at, every)

    def on_step_start(self, step: Step, data_wait_s: float) -> None:
        """Every `every` steps, send the figures of the previous window and measure the step."""
        measure = self.step_at(step.start) % self.every == 0
        if measure:
            seconds = self.watch.seconds() + self._waited if self._measured else 0.0
            # This rank's figure at its index, zero at all others: the sum has the figures of all ranks.
            figures = torch.zeros(len(self.peers), dtype=torch.float64)
            figures[self.world.rank] = seconds
            self._pending = PendingTensor(self.world.sum(figures.to(self.world.device, non_blocking=True)))
            self._measured, self._waited = True, data_wait_s
        self.watch.armed = measure

    def on_step_end(self, step: Step, result: StepResult) -> None:
        """Read the comparison that arrived since the previous step, if any."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if (sample := self.compare(pending.read())) is None:
            return
        result.metrics.update({metrics.SLOWEST_RANK_S: sample.slowest_s, metrics.MEDIAN_RANK_S: sample.median_s})
        for line in sample.named if self.world.is_rank0 else ():
            log(line)

    def compare(self, seconds: Sequence[float]) -> StragglerSample | None:
        """Compare the figures of all ranks; None for the first window. Name ranks after 3, 6, 12, ... slow windows."""
        if not all(seconds):
            return None
        groups: dict[int, list[float]] = {}
        for rank_s, peer in zip(seconds, self.peers, strict=True):
            groups.setdefault(peer, []).append(rank_s)
        medians = {peer: statistics.median(group) for peer, group in groups.items()}
        ratios = [rank_s / medians[peer] for rank_s, peer in zip(seconds, self.peers, strict=True)]
        self.windows = [count + 1 if ratio > SLOW else 0 for count, ratio in zip(self.windows, ratios, strict=True)]
        named = []
        for rank, (count, ratio) in enumerate(zip(self.windows, ratios, strict=True)):
            multiple, rest = divmod(count, WINDOWS)
            if count > 0 and rest == 0 and multiple & (multiple - 1) == 0:  # a power of 2
                named.append(f"rank {rank} ({self.hosts[rank]}): {ratio:.2f}x the median step for {count} windows")
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        return StragglerSample(slowest, seconds[slowest], medians[self.peers[slowest]], named)
