"""Likelihood scoring: how many nats a model needs for a text, given what stands before it.

Conventions. A sequence is the begin token, then the tokens of context and continuation encoded together. Scored are
the tokens after the longest beginning that it shares with the context encoded alone, so a token that straddles the
boundary counts in full. The begin token is context only; no end token is scored. A sequence longer than the window
is scored in windows that advance by half a window: every token exactly once, with at least half a window of tokens
before it once that many exist; the first window has as much as fits. This costs up to twice the compute of disjoint
windows and avoids their error, which is tokens at a window's start that see almost nothing.

Work is sorted by length and batched by a budget of positions, padding included. Padding stands after the tokens, where
causal attention never looks, so results do not depend on the batch beyond rounding and no mask is needed.

Shapes: B windows, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llama3.evaluate.task import Request
from llama3.model.loss import NO_TARGET

POSITIONS = {"cpu": 2048}
"""Positions in a batch by kind of device: on a CPU the activations of few of them still fit its caches."""
POSITIONS_ELSEWHERE = 65536


class LanguageModel(Protocol):
    """What scoring needs of a model; tests put closed-form models in its place."""

    def __call__(self, tokens_BS: Tensor, documents_BS: None, targets_BS: Tensor) -> Tensor:
        """Return the nats [B, S] of each target, 0 where it is -100; each row is one document."""
        ...


class Encoder(Protocol):
    """What scoring needs of a tokenizer."""

    @property
    def begin(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Likelihood:
    nats: float
    tokens: int
    greedy: bool | None = None
    """Whether every scored token is the model's likeliest; None where it was not asked for."""


@dataclass(frozen=True)
class Window:
    """One forward pass over positions [begin, end) of a sequence; it scores tokens [scored, end]."""

    begin: int
    end: int
    scored: int


def score_requests(
    model: LanguageModel, tokenizer: Encoder, requests: Sequence[Request], window: int, device: str = "cpu"
) -> list[Likelihood]:
    """Return the likelihood of each request's continuation given its context, in the order of `requests`.

    `window` is the most positions that the model sees at once. Raises ValueError for an empty continuation.
    """
    sequences = [_sequence(tokenizer, request) for request in requests]
    return score_sequences(model, sequences, window, device)


@torch.inference_mode()
def score_sequences(
    model: LanguageModel, sequences: Sequence[tuple[list[int], int]], window: int, device: str = "cpu"
) -> list[Likelihood]:
    """Return the likelihood of the tokens from `start` on of each (tokens, start), given those before them."""
    work = [(index, span) for index, (tokens, start) in enumerate(sequences) for span in windows(tokens, start, window)]
    nats: list[list[float]] = [[] for _ in sequences]
    for batch in _batches(work, POSITIONS.get(torch.device(device).type, POSITIONS_ELSEWHERE)):
        rows = [(sequences[index][0], span) for index, span in batch]
        for (index, _), total in zip(batch, _forward(model, rows, device), strict=True):
            nats[index].append(total)
    return [
        Likelihood(math.fsum(parts), len(tokens) - start)
        for parts, (tokens, start) in zip(nats, sequences, strict=True)
    ]


def windows(tokens: Sequence[int], start: int, window: int) -> Iterator[Window]:
    """Cut a sequence into windows of at most `window` positions that score each token from `start` >= 1 on once.

    Raises ValueError if `window` is below 2 or `start` below 1.
    """
    if window < 2 or start < 1:
        raise ValueError(f"window {window} must be at least 2 and start {start} at least 1")
    last, stride, scored = len(tokens) - 1, window // 2, start
    while scored <= last:
        end = min(last, max(window, scored + stride - 1))
        full = end if scored == start else scored + stride - 1
        yield Window(max(0, full - window), end, scored)
        scored = end + 1


def _sequence(tokenizer: Encoder, request: Request) -> tuple[list[int], int]:
    if not request.continuation:
        raise ValueError(f"{request.task}: question {request.document} has an empty choice {request.choice}")
    whole = tokenizer.encode(request.context + request.continuation)
    context = tokenizer.encode(request.context) if request.context else []
    shared = next((i for i, (a, b) in enumerate(zip(whole, context, strict=False)) if a != b), len(context))
    return [tokenizer.begin, *whole], 1 + min(shared, len(whole))


def _batches(work: Iterable[tuple[int, Window]], positions: int) -> Iterator[list[tuple[int, Window]]]:
    """Group windows of similar length, longest first, so that too large a batch fails at once."""
    batch: list[tuple[int, Window]] = []
    for item in sorted(work, key=lambda item: (item[1].begin - item[1].end, item[0], item[1].begin)):
        longest = batch[0][1] if batch else item[1]
        if (len(batch) + 1) * (longest.end - longest.begin) > positions and batch:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _forward(model: LanguageModel, rows: Sequence[tuple[list[int], Window]], device: str) -> list[float]:
    """Return the nats that each window scores."""
    size = max(span.end - span.begin for _, span in rows)
    tokens_BS = torch.zeros(len(rows), size, dtype=torch.long)
    targets_BS = torch.full((len(rows), size), NO_TARGET)
    for row, (tokens, span) in enumerate(rows):
        width = span.end - span.begin
        tokens_BS[row, :width] = torch.tensor(tokens[span.begin : span.end])
        targets_BS[row, span.scored - 1 - span.begin : width] = torch.tensor(tokens[span.scored : span.end + 1])
    nats_BS = model(tokens_BS.to(device), None, targets_BS.to(device))
    totals: list[float] = nats_BS.double().sum(1).tolist()
    return totals
