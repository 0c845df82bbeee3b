"""Bits per byte of held-out documents, scored by the trainer itself between two steps.

The full evaluations run elsewhere, on checkpoints; this is the curve between them: a few documents per domain, always
the same ones, in windows of the recipe's shortest sequence, so that points of all stages compare. A forward pass costs
a third of a step over as many tokens, so with `every: auto` the interval is chosen for a hundredth of the training
time. Scores come from the very weights, layout and number format that train; what this gives up: they differ from the
evaluation's, which reads longer windows of more documents in fp32.

The documents are written as tokens, packed into rows, by whoever starts the trainer, and not touched by its layout:
rows are dealt to data-parallel processes and columns padded to what tensor and context parallelism divide.

Shapes: N rows, S sequence, D domains.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from llama3.evaluate.held_out import Document
from llama3.model.loss import NO_TARGET
from llama3.parallel.mesh import World
from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS, Domain
from llama3.tokens.batch import Batch
from llama3.train import metrics
from llama3.train.reader import Share, Step, share_of

FILE = "held-out.safetensors"
BYTES = "bytes"
COLUMNS = ("tokens_BS", "targets_BS", "documents_BS", "domains_BS")
FORWARD = 1 / 3
"""Cost of scoring a token, in tokens trained on: one of the three products of a step."""
AUTO_SHARE = 0.01
"""Share of the training time that `every: auto` may cost."""
Nats = Callable[[Share], Tensor | None]


class Coder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def begin(self) -> int: ...
    @property
    def base(self) -> Sequence[bytes]: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class HeldOut:
    """Documents as the rows of a batch."""

    batch: Batch
    bytes: dict[Domain, int]
    """UTF-8 bytes of the scored tokens of each domain."""

    def write(self, folder: Path) -> None:
        """Write one file into `folder`."""
        columns = {name: getattr(self.batch, name).contiguous() for name in COLUMNS}
        save_file(columns, folder / FILE, {BYTES: json.dumps(self.bytes)})

    @classmethod
    def read(cls, folder: Path) -> HeldOut | None:
        """Return what was written into `folder`, None if nothing was."""
        if not (folder / FILE).is_file():
            return None
        with safe_open(folder / FILE, framework="pt") as file:
            counts = json.loads(file.metadata()[BYTES])
            return cls(Batch(**{name: file.get_tensor(name) for name in COLUMNS}), counts)


def pack(documents: Iterable[Document], coder: Coder, seq: int) -> HeldOut:
    """Return `documents` in rows of `seq` tokens, each cut to a row and whole in one; a short row is filled up."""
    rows: list[list[tuple[list[int], int]]] = []
    room = 0
    counts: dict[Domain, int] = {}
    for document in documents:
        ids = [coder.begin, *coder.encode(document.text)][: seq + 1]
        domain = next(name for name in DOMAINS if name == document.domain)
        counts[domain] = counts.get(domain, 0) + sum(len(coder.base[token]) for token in ids[1:])
        if len(ids) - 1 > room:
            rows.append([])
            room = seq
        rows[-1].append((ids, DOMAINS.index(domain)))
        room -= len(ids) - 1
    return HeldOut(Batch(*torch.tensor([_row(row, seq) for row in rows]).unbind(1)), counts)


def _row(pieces: Sequence[tuple[list[int], int]], seq: int) -> list[list[int]]:
    """Return tokens, targets, document numbers and domains of one row; what fills it is a document without targets."""
    columns: list[list[int]] = [[], [], [], []]
    for number, (ids, domain) in enumerate(pieces):
        size = len(ids) - 1
        for column, values in zip(columns, (ids[:-1], ids[1:], [number] * size, [domain] * size), strict=True):
            column += values
    for column, filler in zip(columns, (0, NO_TARGET, len(pieces), 0), strict=True):
        column += [filler] * (seq - len(column))
    return columns


class HeldOutScores:
    """Scores the held-out documents of a stage every so many tokens, on all processes in step."""

    def __init__(self, held: HeldOut, recipe: Recipe, always: Collection[int], world: World, unit: int) -> None:
        """Take the documents; rows come in multiples of `unit` a process. `always` are positions that are scored."""
        self.held, self.recipe, self.always, self.world = held, recipe, always, world
        self.every = interval(recipe, held.batch.tokens_BS.numel())
        self.share = share_of(_dealt(held.batch, world, unit), world)

    def due(self, step: Step) -> bool:
        """Return whether the documents are scored after `step`: past multiples of the interval, and where always."""
        return step.start // self.every != step.end // self.every or step.end in self.always

    def scores(self, nats: Nats) -> dict[str, float]:
        """Return the metrics of the weights as they are; `nats` is the forward pass. Every process calls it."""
        from llama3.train.step import tally

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


def _dealt(batch: Batch, world: World, unit: int) -> Batch:
    """Return this data-parallel process's rows, columns padded to what the layout divides; all have equally many."""
    dp = world.axis("dp")
    rows, seq = batch.tokens_BS.shape
    count = math.ceil(rows / dp.size / unit) * unit
    wide, high = -seq % world.layout.pieces, count * dp.size - rows
    mine = slice(dp.rank * count, (dp.rank + 1) * count)

    def padded(column: Tensor, filler: int) -> Tensor:
        return F.pad(column, (0, wide, 0, high), value=filler)[mine]

    fillers = zip(COLUMNS, (0, NO_TARGET, seq, 0), strict=True)
    return Batch(**{name: padded(getattr(batch, name), filler) for name, filler in fillers})
