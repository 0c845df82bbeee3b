"""Bits per byte of held-out documents, scored by the trainer between two steps with its own weights and layout.

A few documents per domain, always the same, in windows of the recipe's shortest sequence, so that points of all stages
compare. The supervising process packs them, without torch. Shapes: N sequences, S tokens of each, D domains.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from herd.llama3.evaluate.held_out import ValidationDocument
from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Share
from herd.llama3.train import metrics
from herd.llama3.train.callbacks import Callback, StepResult
from herd.storage.filesystem import write_atomic

if TYPE_CHECKING:  # the supervising process works without torch
    from torch import Tensor

    from herd.llama3.parallel.mesh import ParallelContext
    from herd.llama3.train.data_loader import LocalBatch, Step

    Nll = Callable[[LocalBatch], Tensor | None]

FILE = "held-out.safetensors"
DOCUMENT_BYTES = "document_bytes"
COLUMNS = ("tokens_BS", "targets_BS", "documents_BS", "numbers_BS")
NO_TARGET = -100
"""herd.llama3.model.loss.NO_TARGET, torch's own choice."""
FORWARD = 1 / 3
"""Cost of scoring a token relative to training on it: one of the three matrix products of a step."""
AUTO_SHARE = 0.01
"""Share of the training time that `evaluate.val_interval: auto` may cost."""


class PackingTokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    @property
    def start(self) -> int: ...
    def text_of(self, token: int) -> bytes: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class ValidationSequences:
    """Held-out documents, packed into the sequences of a batch."""

    columns: dict[str, np.ndarray]
    """The fields of a TokenBatch, int64[N, S] each, but the number of the document for the domain; for what fills a
    sequence, how many documents there are."""
    document_bytes: list[tuple[int, int]]
    """Index in DOMAINS and UTF-8 bytes of the scored tokens of each document, in the order of the sequences."""

    def write(self, folder: Path) -> None:
        write_atomic(folder / FILE, save(self.columns, {DOCUMENT_BYTES: json.dumps(self.document_bytes)}))

    @classmethod
    def read(cls, folder: Path) -> ValidationSequences | None:
        """Return the sequences in `folder`, or None without the file."""
        if not (folder / FILE).is_file():
            return None
        with safe_open(folder / FILE, framework="np") as file:
            documents = json.loads(file.metadata()[DOCUMENT_BYTES])
            return cls(
                {name: file.get_tensor(name) for name in COLUMNS}, [(domain, size) for domain, size in documents]
            )

    @property
    def bytes(self) -> dict[Domain, int]:
        """UTF-8 bytes of the scored tokens of each domain."""
        counts: dict[Domain, int] = {}
        for index, size in self.document_bytes:
            counts[DOMAINS[index]] = counts.get(DOMAINS[index], 0) + size
        return counts

    def compare(self, bits: np.ndarray, other: np.ndarray, shares: Mapping[Domain, Share]) -> tuple[float, float]:
        """Return the 95 % interval of how many bits per byte `bits` are above `other`, paired by document.

        Domains are averaged by `shares`; the ends are not finite for too few documents.
        """
        from herd.llama3.statistics.estimates import combine, interval, resample

        domains, sizes = np.array(self.document_bytes, np.float64).T
        weights = {index: float(shares.get(DOMAINS[int(index)], 0)) for index in np.unique(domains[sizes > 0]).tolist()}
        parts = {
            index: resample((bits - other)[domains == index], sizes[domains == index], int(index))
            for index, weight in weights.items()
            if weight
        }
        if not parts:
            return math.nan, math.nan
        low, high, _ = interval(combine(list(parts.values()), [weights[index] for index in parts]))
        return low, high


def pack_sequences(
    documents: Iterable[ValidationDocument], tokenizer: PackingTokenizer, seq_len: int
) -> ValidationSequences:
    """Pack `documents` into sequences of `seq_len` tokens; a longer document is truncated, none is split."""
    sequences: list[list[tuple[list[int], int]]] = []
    room = 0
    sizes: list[tuple[int, int]] = []
    for document in documents:
        ids = [tokenizer.start, *tokenizer.encode(document.text)][: seq_len + 1]
        domain = next(name for name in DOMAINS if name == document.domain)
        sizes.append((DOMAINS.index(domain), sum(len(tokenizer.text_of(token)) for token in ids[1:])))
        if len(ids) - 1 > room:
            sequences.append([])
            room = seq_len
        sequences[-1].append((ids, len(sizes) - 1))
        room -= len(ids) - 1
    packed_N4S = []
    for sequence in sequences:
        columns: list[list[int]] = [[], [], [], []]
        for place, (ids, number) in enumerate(sequence):
            size = len(ids) - 1
            for column, values in zip(columns, (ids[:-1], ids[1:], [place] * size, [number] * size), strict=True):
                column += values
        fillers = (0, NO_TARGET, len(sequence), len(sizes))  # a document without targets
        for column, filler in zip(columns, fillers, strict=True):
            column += [filler] * (seq_len - len(column))
        packed_N4S.append(columns)
    packed = np.array(packed_N4S, np.int64)
    columns_NS = {name: np.ascontiguousarray(packed[:, n]) for n, name in enumerate(COLUMNS)}
    return ValidationSequences(columns_NS, sizes)


def validation_interval(recipe: Recipe, tokens: int) -> int:
    """Return the positions between two scorings of `tokens` tokens."""
    every = recipe.evaluate.val_interval
    return math.ceil(tokens * FORWARD / AUTO_SHARE) if isinstance(every, str) else int(every)


class Validator(Callback):
    """Scores the held-out documents of a stage at regular positions, on all processes at the same step."""

    def __init__(
        self,
        sequences: ValidationSequences,
        recipe: Recipe,
        always: Collection[int],
        world: ParallelContext,
        unit: int,
        nll: Nll,
    ) -> None:
        """Pads to a multiple of `unit` sequences a process. `always` are positions that are scored in any case.

        `nll` is the forward pass of the present weights.
        """
        import torch
        from torch.nn import functional as F

        from herd.llama3.train.data_loader import TokenBatch, local_batch

        self.sequences, self.recipe, self.always, self.world, self.nll = sequences, recipe, always, world, nll
        total, seq_len = sequences.columns[COLUMNS[0]].shape
        self.interval = validation_interval(recipe, total * seq_len)
        # This data-parallel process's sequences, as many as its peers', padded to a length that the layout divides.
        dp = world.axis("dp")
        count = math.ceil(total / dp.size / unit) * unit
        padding = 0, -seq_len % world.layout.pieces, 0, count * dp.size - total
        share = slice(dp.rank * count, (dp.rank + 1) * count)
        fillers = zip(COLUMNS, (0, NO_TARGET, seq_len, len(sequences.document_bytes)), strict=True)
        columns = [F.pad(torch.from_numpy(sequences.columns[name]), padding, value=n)[share] for name, n in fillers]
        self.batch = local_batch(TokenBatch(*columns), world)

    def due(self, step: Step) -> bool:
        """Return whether the documents are scored after `step`: past multiples of the interval, and at `always`."""
        return step.start // self.interval != step.end // self.interval or step.end in self.always

    def on_step_end(self, step: Step, result: StepResult) -> None:
        if result.decision.kind == "continue" and self.due(step):
            began = time.perf_counter()
            result.metrics.update(self.scores())
            result.metrics[metrics.HELD_OUT_S] = time.perf_counter() - began

    def scores(self, bits: np.ndarray | None = None) -> dict[str, float]:
        """Return the metrics of the present weights, or those of the `document_bits`. Every process calls it."""
        bits = self.document_bits() if bits is None else bits
        of_domain = np.array([index for index, _ in self.sequences.document_bytes])
        bpb = {
            domain: float(bits[of_domain == DOMAINS.index(domain)].sum()) / count
            for domain, count in self.sequences.bytes.items()
            if count
        }
        mix = self.recipe.first_mix
        weights = {domain: float(mix.get(domain, 0)) for domain in bpb}
        total = math.fsum(weights.values())
        values = {metrics.held_out(domain): value for domain, value in bpb.items()}
        if total:
            values[metrics.HELD_OUT] = math.fsum(weights[domain] * bpb[domain] for domain in bpb) / total
        return values

    def document_bits(self) -> np.ndarray:
        """Return the bits of each document with the present weights, fp64 [documents]. Every process calls it."""
        from herd.llama3.train.train_step import tally

        count = len(self.sequences.document_bytes)
        nll_D = self.world.sum(tally(self.nll(self.batch), self.batch, self.world, count + 1))[:count, 0]
        return nll_D.cpu().numpy() / math.log(2)
