"""Bits per byte of held-out documents, scored by the trainer itself between two steps.

The full evaluations run elsewhere, on checkpoints; this is the curve between them: a few documents per domain, always
the same ones, in windows of the recipe's shortest sequence, so that points of all stages compare. A forward pass costs
a third of a step over as many tokens, so with `every: auto` the interval is chosen for a hundredth of the training
time. Scores come from the very weights, layout and number format that train; what this gives up: they differ from the
evaluation's, which reads longer windows of more documents in fp32.

The documents are rows of tokens (`held_out_rows`), not touched by the trainer's layout: rows are dealt to data-parallel
processes and columns padded to what tensor and context parallelism divide.

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
from llama3.train.data_loader import LocalBatch, Step, share_of
from llama3.train.validation_rows import COLUMNS, HeldOut

FORWARD = 1 / 3
"""Cost of scoring a token, in tokens trained on: one of the three products of a step."""
AUTO_SHARE = 0.01
"""Share of the training time that `every: auto` may cost."""
Nats = Callable[[LocalBatch], Tensor | None]


class HeldOutScores:
    """Scores the held-out documents of a stage every so many tokens, on all processes in step."""

    def __init__(
        self, held: HeldOut, recipe: Recipe, always: Collection[int], world: ParallelContext, unit: int
    ) -> None:
        """Take the documents; rows come in multiples of `unit` a process. `always` are positions that are scored."""
        self.held, self.recipe, self.always, self.world = held, recipe, always, world
        batch = TokenBatch(**{name: torch.from_numpy(column) for name, column in held.columns.items()})
        self.every = interval(recipe, batch.tokens_BS.numel())
        self.share = share_of(_dealt(batch, world, unit), world)

    def due(self, step: Step) -> bool:
        """Return whether the documents are scored after `step`: past multiples of the interval, and where always."""
        return step.start // self.every != step.end // self.every or step.end in self.always

    def scores(self, nats: Nats) -> dict[str, float]:
        """Return the metrics of the weights as they are; `nats` is the forward pass. Every process calls it."""
        from llama3.train.train_step import tally

        found = self.world.sum(tally(nats(self.share), self.share, self.world))[:, 0].tolist()
        bits = {domain: found[DOMAINS.index(domain)] / math.log(2) for domain in self.held.bytes}
        parts = {domain: bits[domain] / count for domain, count in self.held.bytes.items() if count}
        shares = self.recipe.first_mix
        weights = {domain: float(shares.get(domain, 0)) for domain in parts}
        total = math.fsum(weights.values())
        values = {metrics.held_out(domain): value for domain, value in parts.items()}
        if total:
            values[metrics.HELD_OUT] = math.fsum(weights[domain] * parts[domain] for domain in parts) / total
        return values


def interval(recipe: Recipe, tokens: int) -> int:
    """Return the positions between two scorings of `tokens` tokens."""
    every = recipe.evaluate.every
    return math.ceil(tokens * FORWARD / AUTO_SHARE) if isinstance(every, str) else int(every)


def _dealt(batch: TokenBatch, world: ParallelContext, unit: int) -> TokenBatch:
    """Return this data-parallel process's rows, columns padded to what the layout divides; all have equally many."""
    dp = world.axis("dp")
    rows, seq = batch.tokens_BS.shape
    count = math.ceil(rows / dp.size / unit) * unit
    wide, high = -seq % world.layout.pieces, count * dp.size - rows
    mine = slice(dp.rank * count, (dp.rank + 1) * count)

    def padded(column: Tensor, filler: int) -> Tensor:
        return F.pad(column, (0, wide, 0, high), value=filler)[mine]

    fillers = zip(COLUMNS, (0, NO_TARGET, seq, 0), strict=True)
    return TokenBatch(**{name: padded(getattr(batch, name), filler) for name, filler in fillers})
