"""Bits per byte of held-out documents, scored by the trainer between two steps with its own weights and layout.

A few documents per domain, always the same, in windows of the recipe's shortest sequence, so that points of all stages
compare. The full evaluations run elsewhere, on checkpoints: in fp32, on longer windows of more documents.

Shapes: N rows, S sequence, D domains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import functional as F

from llama3.model.loss import NO_TARGET
from llama3.parallel.mesh import ParallelContext
from llama3.recipe.base import DOMAINS
from llama3.recipe.schema import Recipe
from llama3.tokens.batch import TokenBatch
from llama3.train import metrics
from llama3.train.data_loader import LocalBatch, Step, local_batch
from llama3.train.validation_rows import COLUMNS, HeldOut

FORWARD = 1 / 3
"""Cost of scoring a token relative to training on it: one of the three matrix products of a step."""
AUTO_SHARE = 0.01
"""Share of the training time that `every: auto` may cost."""
Nats = Callable[[LocalBatch], Tensor | None]


class HeldOutScores:
    """Scores the held-out documents of a stage at regular positions, on all processes at the same step."""

    def __init__(
        self, held: HeldOut, recipe: Recipe, always: Collection[int], world: ParallelContext, unit: int
    ) -> None:
        """Rows are padded to a multiple of `unit` a process. `always` are positions that are scored in any case."""
        self.held, self.recipe, self.always, self.world = held, recipe, always, world
        batch = TokenBatch(**{name: torch.from_numpy(column) for name, column in held.columns.items()})
        self.every = interval(recipe, batch.tokens_BS.numel())
        self.batch = local_batch(_local_rows(batch, world, unit), world)

    def due(self, step: Step) -> bool:
        """Return whether the documents are scored after `step`: past multiples of the interval, and at `always`."""
        return step.start // self.every != step.end // self.every or step.end in self.always

    def scores(self, nats: Nats) -> dict[str, float]:
        """Return the metrics of the present weights; `nats` is the forward pass. Every process calls it."""
        from llama3.train.train_step import tally

        nats_D = self.world.sum(tally(nats(self.batch), self.batch, self.world))[:, 0].tolist()
        bits = {domain: nats_D[DOMAINS.index(domain)] / math.log(2) for domain in self.held.bytes}
        bpb = {domain: bits[domain] / count for domain, count in self.held.bytes.items() if count}
        mix = self.recipe.first_mix
        weights = {domain: float(mix.get(domain, 0)) for domain in bpb}
        total = math.fsum(weights.values())
        values = {metrics.held_out(domain): value for domain, value in bpb.items()}
        if total:
            values[metrics.HELD_OUT] = math.fsum(weights[domain] * bpb[domain] for domain in bpb) / total
        return values


def interval(recipe: Recipe, tokens: int) -> int:
    """Return the positions between two scorings of `tokens` tokens."""
    every = recipe.evaluate.every
    return math.ceil(tokens * FORWARD / AUTO_SHARE) if isinstance(every, str) else int(every)


def _local_rows(batch: TokenBatch, world: ParallelContext, unit: int) -> TokenBatch:
    """Return this data-parallel process's rows, as many as its peers', padded to a length that the layout divides."""
    dp = world.axis("dp")
    rows, seq = batch.tokens_BS.shape
    count = math.ceil(rows / dp.size / unit) * unit
    wide, high = -seq % world.layout.pieces, count * dp.size - rows
    local = slice(dp.rank * count, (dp.rank + 1) * count)

    def padded(column: Tensor, filler: int) -> Tensor:
        return F.pad(column, (0, wide, 0, high), value=filler)[local]

    fillers = zip(COLUMNS, (0, NO_TARGET, seq, 0), strict=True)
    return TokenBatch(**{name: padded(getattr(batch, name), filler) for name, filler in fillers})
