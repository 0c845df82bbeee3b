"""Likelihood scoring: how many nats a model needs for a text, given what stands before it.

Conventions. A sequence is the begin token, then the tokens of context and continuation encoded together. Scored are
the tokens after the longest beginning that it shares with the context encoded alone, so a token that straddles the
boundary counts in full. The begin token is context only; no end token is scored. A context that is too long for the
window loses its beginning. A continuation longer than the window is scored in windows that advance by half a window:
every token exactly once, with at least half a window of tokens before it once that many exist; the first window has as
much as fits. This costs up to twice the compute of disjoint windows and avoids their error, which is tokens at a
window's start that see almost nothing.

What sequences share is read once (see `packing`), and logits are made for scored tokens alone: of a question with 700
tokens of examples and one letter to score, that is one position in 760. Padding stands after the tokens, where no
token looks, so results do not depend on the batch beyond rounding.

Shapes: B rows, S positions, T positions attended to, N scored tokens, D model, V vocabulary rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from llama3.evaluate.distributed import Ranks, Single
from llama3.evaluate.packing import BatchLimits, PackedBatch, PackedRow, Scorable, plan
from llama3.evaluate.scores import Likelihood
from llama3.evaluate.task import Request
from llama3.model.attention import AttentionMask
from llama3.model.kv_cache import Cache, PrefixCache, reading
from llama3.model.loss import NO_TARGET, token_nats
from llama3.model.transformer import Head, Transformer

# Requests as tokens: what a model reads and from where on it is scored, by the conventions of `scoring`.
#
# A text is encoded once, however many requests it stands in: an encoder whose tokens end before a space lets a
# question and its choices be encoded apart. Everything else is encoded together, as the model would have read it.


class ScoringTokenizer(Protocol):
    """What scoring needs of a tokenizer: its tokens end before every space that follows something else than a blank.

    Llama 3's cutting pattern makes that so. The two sides of such a place are encoded apart.
    """

    @property
    def begin(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...


def encoded(tokenizer: ScoringTokenizer, requests: Iterable[Request]) -> list[Scorable]:
    """Return (tokens, start) of each request. Raises ValueError for an empty continuation."""
    known: dict[str, list[int]] = {"": []}

    def encode(text: str) -> list[int]:
        if text not in known:
            known[text] = tokenizer.encode(text)
        return known[text]

    sequences = []
    for request in requests:
        if not request.continuation:
            raise ValueError(f"{request.task}: question {request.document} has an empty choice {request.choice}")
        context = encode(request.context)
        if request.context[-1:].strip() and request.continuation.startswith(" "):
            whole, shared = [*context, *encode(request.continuation)], len(context)
        else:
            whole = tokenizer.encode(request.context + request.continuation)
            shared = next((i for i, (a, b) in enumerate(zip(whole, context, strict=False)) if a != b), len(context))
        sequences.append(([tokenizer.begin, *whole], 1 + min(shared, len(whole))))
    return sequences


BUDGETS = {"cpu": BatchLimits(2048, 16384)}
"""By kind of device: on a CPU the activations of few positions still fit its caches."""
BUDGET_ELSEWHERE = BatchLimits(65536, 131072)
LOGITS = 2**26
"""Logits made at a time to see which is largest: 256 MiB of fp32."""


class LanguageModel(Protocol):
    """What scoring needs of a model; tests put closed-form models in its place, which read every sequence whole."""

    def __call__(self, tokens_BS: Tensor, documents_BS: None, targets_BS: Tensor) -> Tensor:
        """Return the nats [B, S] of each target, 0 where it is -100; each row is one document."""
        ...


class RowScore(NamedTuple):
    """What one row says of one sequence."""

    sequence: int
    nats: float
    greedy: bool


def score_requests(
    model: LanguageModel,
    tokenizer: ScoringTokenizer,
    requests: Sequence[Request],
    window: int,
    device: str = "cpu",
    greedy: Collection[str] = frozenset(),
    ranks: Ranks | None = None,
    share: bool = True,
) -> list[Likelihood]:
    """Return the likelihood of each request's continuation given its context, in the order of `requests`.

    `window` is the most positions that the model sees at once; `greedy` has the keys of the tasks whose
    `Likelihood.greedy` is wanted, which only a Transformer can tell. With `ranks` each process takes a share of the
    batches and all return everything. `share` False reads each sequence whole, to measure what sharing saves.
    Raises ValueError for an empty continuation.
    """
    sequences = encoded(tokenizer, requests)
    asked = [index for index, request in enumerate(requests) if request.task in greedy]
    return score_sequences(model, sequences, window, device, asked, ranks, share)


@torch.inference_mode()
def score_sequences(
    model: LanguageModel,
    sequences: Sequence[Scorable],
    window: int,
    device: str = "cpu",
    greedy: Collection[int] = (),
    ranks: Ranks | None = None,
    share: bool = True,
) -> list[Likelihood]:
    """Return the likelihood of the tokens from `start` on of each (tokens, start), given those before them.

    `greedy` has the indices of the sequences whose `Likelihood.greedy` is wanted; the rest as in `score_requests`.
    """
    ranks, asked = ranks or Single(), frozenset(greedy)
    assert isinstance(model, Transformer) or not asked
    share = share and isinstance(model, Transformer)
    budget = BUDGETS.get(torch.device(device).type, BUDGET_ELSEWHERE)
    batches = plan(sequences, window, budget, share)[ranks.rank :: ranks.size]
    found = ranks.gather([list(part) for part in _read(model, batches, device, asked)])
    nats: list[list[float]] = [[] for _ in sequences]
    best = [True] * len(sequences)
    for part in map(RowScore._make, chain.from_iterable(found)):
        nats[part.sequence].append(part.nats)
        best[part.sequence] &= part.greedy
    return [
        Likelihood(math.fsum(parts), max(0, len(tokens) - start), best[index] if index in asked else None)
        for index, (parts, (tokens, start)) in enumerate(zip(nats, sequences, strict=True))
    ]


def _read(
    model: LanguageModel, batches: Iterable[PackedBatch], device: str, greedy: frozenset[int]
) -> Iterator[RowScore]:
    """Yield what the batches say; what batches in a row have in common before them is read once."""
    prefix: list[int] = []
    before: Cache | None = None
    for batch in batches:
        if batch.prefix != prefix:
            prefix = batch.prefix
            before = _cache(cast(Transformer, model), prefix, device) if prefix else None
        if not isinstance(model, Transformer):
            yield from _plain(model, batch, device)
        else:
            yield from _parts(model, batch, before, device, greedy)


def _cache(model: Transformer, prefix: list[int], device: str) -> Cache:
    cache = Cache(len(prefix))
    reading(model, cache)(torch.tensor([prefix], device=device), head=lambda hidden_BSD, _: hidden_BSD)
    return cache


def _parts(
    model: Transformer, batch: PackedBatch, before: Cache | None, device: str, greedy: frozenset[int]
) -> Iterator[RowScore]:
    """Yield what one forward pass says."""
    scored = [part for row in batch.rows for part in row.scored]
    head = _head(batch, device, any(part.sequence in greedy for part in scored))
    tokens_BS = torch.zeros(len(batch.rows), batch.longest, dtype=torch.long)
    for row_S, row in zip(tokens_BS, batch.rows, strict=True):
        row_S[: len(row.tokens) - len(batch.prefix)] = torch.tensor(row.tokens[len(batch.prefix) :])
    if before is None and not any(row.branches for row in batch.rows):
        result_2N = model(tokens_BS.to(device), head=head)
    else:
        positions_BS, mask = (x.to(device) for x in _tree(batch))
        repeated = model.spec.heads // model.spec.kv_heads if mask.is_cuda else 1
        behind = reading(model, PrefixCache(before, positions_BS, repeated))
        result_2N = behind(tokens_BS.to(device), AttentionMask(mask=mask), head=head)
    nats, best = (torch.split(line, [len(part.places) for part in scored]) for line in result_2N.cpu())
    for part, some, likeliest in zip(scored, nats, best, strict=True):
        yield RowScore(part.sequence, math.fsum(some.tolist()), bool(likeliest.all()))


def _head(batch: PackedBatch, device: str, wanted: bool) -> Head:
    """Return what makes [2, N] of hidden states: nats of each scored token, and 1 where it is the likeliest."""
    begins = [index * batch.longest - len(batch.prefix) for index in range(len(batch.rows))]
    pairs = [
        (begin + place, target)
        for begin, row in zip(begins, batch.rows, strict=True)
        for part in row.scored
        for place, target in zip(part.places, part.targets, strict=True)
    ]
    places_N, targets_N = torch.tensor(pairs, device=device).T

    def head(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        hidden_ND = hidden_BSD.flatten(0, 1)[places_N]
        nats_N = token_nats(hidden_ND.unsqueeze(0), weight_VD, targets_N.unsqueeze(0)).squeeze(0)
        best_N = _likeliest(hidden_ND, weight_VD) == targets_N if wanted else torch.zeros_like(targets_N)
        return torch.stack([nats_N.double(), best_N.double()])

    return head


def _likeliest(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the token with the largest logit at each place."""
    chunks = torch.split(hidden_ND, max(1, LOGITS // len(weight_VD)))
    return torch.cat([(chunk @ weight_VD.T).argmax(-1) for chunk in chunks])


def _tree(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return where the tokens of each row stand [B, S], and what they see: bool [B, 1, S, T], the prefix first.

    A token sees the tokens of its branch up to itself, the trunk and the prefix; padding is one more branch.
    """
    size, before = batch.longest, len(batch.prefix)
    lines = [_line(row, before, size) for row in batch.rows]
    positions_BS = torch.tensor([positions for positions, _ in lines])
    branch_BS = torch.tensor([branches for _, branches in lines])
    same = (branch_BS.unsqueeze(2) == branch_BS.unsqueeze(1)) | (branch_BS == 0).unsqueeze(1)
    inside = same & torch.ones(size, size, dtype=torch.bool).tril()
    return positions_BS, torch.cat([inside.new_ones(len(lines), size, before), inside], 2).unsqueeze(1)


def _line(row: PackedRow, before: int, size: int) -> tuple[list[int], list[int]]:
    """Return the position and the branch (0: trunk) of each token behind the prefix and of the padding."""
    left = size - (len(row.tokens) - before)
    parts = [(row.trunk - before, before), *((length, row.trunk) for length in (*row.branches, left))]
    positions = [start + place for length, start in parts for place in range(length)]
    return positions, [branch for branch, (length, _) in enumerate(parts) for _ in range(length)]


def _plain(model: LanguageModel, batch: PackedBatch, device: str) -> Iterator[RowScore]:
    """Yield what a model that is no Transformer says of rows that are one sequence each."""
    tokens_BS = torch.zeros(len(batch.rows), batch.longest, dtype=torch.long)
    targets_BS = torch.full_like(tokens_BS, NO_TARGET)
    for index, row in enumerate(batch.rows):
        (part,) = row.scored
        tokens_BS[index, : len(row.tokens)] = torch.tensor(row.tokens)
        targets_BS[index, list(part.places)] = torch.tensor(part.targets)
    nats_BS = model(tokens_BS.to(device), None, targets_BS.to(device))
    for row, nats_S in zip(batch.rows, nats_BS.double().tolist(), strict=True):
        yield RowScore(row.scored[0].sequence, math.fsum(nats_S), False)


# What a model pays for the right answers: nats per byte of the gold continuation of every question.
#
# Accuracy of small models stands at chance while this falls already, on a straight line in log compute: it is what
# the scaling forecast goes by (`llama3.studies.forecast`, after arXiv 2407.21783, section 3.2.1). Taken from the
# likelihoods that answer the questions, so it costs nothing. Bytes instead of the paper's characters, so that every
# language and tokenizer is measured alike. What this gives up: tasks that are answered in writing have none.
