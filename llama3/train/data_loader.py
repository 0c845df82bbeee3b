"""Data loading: this process's part of every step, read by a thread one step ahead.

Data-parallel processes read equal, contiguous runs of sequences, context-parallel ones their chunks of each sequence,
tensor- and pipeline-parallel ones the same. All tensors are int64, because torch indexes with int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.tokens.conversations import ConversationStream
from herd.llama3.tokens.stream import TokenStream


@dataclass(frozen=True)
class TokenBatch:
    """Sequences of one step, int64[B, S] each: B sequences of S tokens."""

    tokens_BS: Tensor
    targets_BS: Tensor
    """The next token, or -100 if it belongs to another segment or is not a target (a user's message)."""
    documents_BS: Tensor
    """Number of the segment inside its sequence: 0, 1, 2, ...; attention stays inside a segment."""
    domains_BS: Tensor
    """Index in DOMAINS; conversations have the index after the last."""


class Batches:
    """The steps of a run."""

    def __init__(self, stream: TokenStream | ConversationStream) -> None:
        self.stream = stream

    def sequences(self, start: int, seq_len: int, first: int, count: int) -> TokenBatch:
        """Return sequences [first, first + count) of `seq_len` tokens of the step that starts at position `start`.

        Equal arguments give equal tensors on every machine. Raises ValueError for positions outside the run.
        """
        return TokenBatch(*map(torch.from_numpy, self.stream.sequences(start + first * seq_len, seq_len, count)))


@dataclass(frozen=True)
class Step:
    """One optimizer step: `batch` tokens from `start` on, in sequences of `seq_len`."""

    start: int
    seq_len: int
    batch: int

    @property
    def end(self) -> int:
        return self.start + self.batch


@dataclass(frozen=True)
class LocalBatch:
    """What one process trains on in one step. B sequences, S of their tokens, L whole length."""

    tokens_BS: Tensor
    targets_BS: Tensor
    domains_BS: Tensor
    documents_BS: Tensor | None
    """Document number of every token of the whole sequences [B, L], on the host, where attention counts their lengths;
    None if each sequence is one document."""


def steps_from(span: StageSpan, position: int) -> Iterator[Step]:
    """Yield the steps of a stage from `position` on. Raises ValueError if no step starts there."""
    expected = position
    for segment in span.segments:
        done = max(0, position - segment.start)
        if done < segment.tokens and done % segment.batch:
            raise ValueError(
                f"stage {span.name}: position {position} is inside a step of {segment.batch} tokens that starts at "
                f"{position - done % segment.batch}; it was saved with another batch size: remove the checkpoints"
            )
        for start in range(segment.start + done, segment.end, segment.batch):
            assert start == expected
            expected = start + segment.batch
            yield Step(start, segment.seq_len, segment.batch)


def read_ahead(batches: Batches, steps: Iterator[Step], world: ParallelContext) -> Iterator[tuple[Step, LocalBatch]]:
    """Yield each step with this process's part of it, in order of positions."""
    dp = world.axis("dp")

    def read(step: Step) -> tuple[Step, LocalBatch]:
        count = step.batch // step.seq_len // dp.size
        return step, local_batch(batches.sequences(step.start, step.seq_len, dp.rank * count, count), world)

    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        ahead = None
        for step in steps:
            ready, ahead = ahead, pool.submit(read, step)
            if ready is not None:
                yield ready.result()
        if ahead is not None:
            yield ahead.result()


def local_batch(batch: TokenBatch, world: ParallelContext) -> LocalBatch:
    """Return the tokens of `batch` that a context-parallel process holds, on its device."""
    context, device = world.axis("cp"), world.device
    documents = batch.documents_BS if batch.documents_BS.any() else None  # numbered from 0
    columns = [batch.tokens_BS, batch.targets_BS, batch.domains_BS]
    if context.size > 1:
        from herd.llama3.parallel.comms import cp_positions

        positions = cp_positions(batch.tokens_BS.shape[1], context.size)[context.rank]
        columns = [column[:, positions] for column in columns]
    if device.type != "cpu":  # pinned memory is copied to the device without waiting
        columns = [column.pin_memory().to(device, non_blocking=True) for column in columns]
        documents = None if documents is None else documents.pin_memory()  # some masks need them on the device
    tokens, targets, domains = columns
    return LocalBatch(tokens, targets, domains, documents)
