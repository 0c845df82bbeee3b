"""Likelihood scoring: the negative log-likelihood (nats) of a text given its context.

A sequence is the begin token, then the tokens of context and continuation encoded together; scored are the tokens after
the longest beginning shared with the context encoded alone. A context too long for the window loses its beginning; a
longer continuation is scored in windows that advance by half a window, each token once (see `packing`).

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
from llama3.evaluate.packing import BatchLimits, PackedBatch, Scorable, plan
from llama3.evaluate.scores import Likelihood
from llama3.evaluate.task import Request
from llama3.model.attention import AttentionMask
from llama3.model.kv_cache import Cache, PrefixCache, reading
from llama3.model.loss import NO_TARGET, token_nats
from llama3.model.transformer import Head, Transformer

BUDGETS = {"cpu": BatchLimits(2048, 16384)}
"""By kind of device: on a CPU the activations of few positions still fit its caches."""
BUDGET_ELSEWHERE = BatchLimits(65536, 131072)
LOGITS = 2**26
"""Logits computed at a time to find the largest: 256 MiB of fp32."""


class ScoringTokenizer(Protocol):
    """What scoring needs of a tokenizer: its tokens end before every space that does not follow white space.

    Llama 3's split pattern guarantees that. The two sides of such a space are encoded apart.
    """

    @property
    def begin(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...


class LanguageModel(Protocol):
    """What scoring needs of a model; tests use closed-form models, which read every sequence whole."""

    def __call__(self, tokens_BS: Tensor, documents_BS: None, targets_BS: Tensor) -> Tensor:
        """Return the nats [B, S] of each target, 0 where the target is -100; each row is one document."""
        ...


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

    `window` is the most positions that the model sees at once; `greedy` has the keys of the tasks that need
    `Likelihood.greedy`, which only a Transformer can compute. With `ranks` each process takes a share of the batches
    and all return everything. `share` False reads each sequence whole, to measure what sharing saves.
    Raises ValueError for an empty continuation.
    """
    sequences = encoded(tokenizer, requests)
    indices = [index for index, request in enumerate(requests) if request.task in greedy]
    return score_sequences(model, sequences, window, device, indices, ranks, share)


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
            # a token that straddles the boundary counts in full
            shared = next((i for i, (a, b) in enumerate(zip(whole, context, strict=False)) if a != b), len(context))
        sequences.append(([tokenizer.begin, *whole], 1 + min(shared, len(whole))))
    return sequences


class RowScore(NamedTuple):
    """The result of one row for one sequence."""

    sequence: int
    nats: float
    greedy: bool


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

    `greedy` has the indices of the sequences that need `Likelihood.greedy`; the rest as in `score_requests`.
    """
    ranks, greedy = ranks or Single(), frozenset(greedy)
    assert isinstance(model, Transformer) or not greedy
    share = share and isinstance(model, Transformer)
    budget = BUDGETS.get(torch.device(device).type, BUDGET_ELSEWHERE)
    local: list[RowScore] = []
    prefix: list[int] = []
    cache: Cache | None = None
    for batch in plan(sequences, window, budget, share)[ranks.rank :: ranks.size]:
        if batch.prefix != prefix:  # the prefix of consecutive batches is read once
            prefix, cache = batch.prefix, None
            if prefix:
                cache = Cache(len(prefix))
                reader = reading(cast(Transformer, model), cache)
                reader(torch.tensor([prefix], device=device), head=lambda hidden_BSD, _: hidden_BSD)
        if isinstance(model, Transformer):
            local += _score_packed(model, batch, cache, device, greedy)
        else:
            local += _score_plain(model, batch, device)
    gathered = ranks.gather([list(row) for row in local])
    nats: list[list[float]] = [[] for _ in sequences]
    likeliest = [True] * len(sequences)
    for row in map(RowScore._make, chain.from_iterable(gathered)):
        nats[row.sequence].append(row.nats)
        likeliest[row.sequence] &= row.greedy
    return [
        Likelihood(math.fsum(terms), max(0, len(tokens) - start), likeliest[index] if index in greedy else None)
        for index, (terms, (tokens, start)) in enumerate(zip(nats, sequences, strict=True))
    ]


def _score_plain(model: LanguageModel, batch: PackedBatch, device: str) -> Iterator[RowScore]:
    """Yield the scores of rows that are one sequence each, from a model that is no Transformer."""
    tokens_BS = torch.zeros(len(batch.rows), batch.longest, dtype=torch.long)
    targets_BS = torch.full_like(tokens_BS, NO_TARGET)
    for index, row in enumerate(batch.rows):
        (span,) = row.scored
        tokens_BS[index, : len(row.tokens)] = torch.tensor(row.tokens)
        targets_BS[index, list(span.places)] = torch.tensor(span.targets)
    nats_BS = model(tokens_BS.to(device), None, targets_BS.to(device))
    for row, nats_S in zip(batch.rows, nats_BS.double().tolist(), strict=True):
        yield RowScore(row.scored[0].sequence, math.fsum(nats_S), False)


def _score_packed(
    model: Transformer, batch: PackedBatch, cache: Cache | None, device: str, greedy: frozenset[int]
) -> Iterator[RowScore]:
    """Yield the scores of one forward pass over packed rows, whose prefix is in `cache`."""
    spans = [span for row in batch.rows for span in row.scored]
    head = _scoring_head(batch, device, any(span.sequence in greedy for span in spans))
    # padding comes after the tokens, where no token attends to it
    tokens_BS = torch.zeros(len(batch.rows), batch.longest, dtype=torch.long)
    for row_S, row in zip(tokens_BS, batch.rows, strict=True):
        row_S[: len(row.tokens) - len(batch.prefix)] = torch.tensor(row.tokens[len(batch.prefix) :])
    if cache is None and not any(row.branches for row in batch.rows):
        result_2N = model(tokens_BS.to(device), head=head)
    else:
        positions_BS, mask = (x.to(device) for x in _tree_mask(batch))
        repeated = model.spec.heads // model.spec.kv_heads if mask.is_cuda else 1
        reader = reading(model, PrefixCache(cache, positions_BS, repeated))
        result_2N = reader(tokens_BS.to(device), AttentionMask(mask=mask), head=head)
    nats, likeliest = (torch.split(line, [len(span.places) for span in spans]) for line in result_2N.cpu())
    for span, span_nats, span_likeliest in zip(spans, nats, likeliest, strict=True):
        yield RowScore(span.sequence, math.fsum(span_nats.tolist()), bool(span_likeliest.all()))


def _scoring_head(batch: PackedBatch, device: str, greedy: bool) -> Head:
    """Return a head that maps hidden states to [2, N]: nats of each scored token, and 1 if it is the likeliest.

    Only scored tokens get logits: of a question with 700 tokens of examples and one letter, one position in 760.
    """
    begins = [index * batch.longest - len(batch.prefix) for index in range(len(batch.rows))]
    pairs = [
        (begin + place, target)
        for begin, row in zip(begins, batch.rows, strict=True)
        for span in row.scored
        for place, target in zip(span.places, span.targets, strict=True)
    ]
    places_N, targets_N = torch.tensor(pairs, device=device).T

    def head(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        hidden_ND = hidden_BSD.flatten(0, 1)[places_N]
        nats_N = token_nats(hidden_ND.unsqueeze(0), weight_VD, targets_N.unsqueeze(0)).squeeze(0)
        likeliest_N = torch.zeros_like(targets_N)
        if greedy:
            chunks = torch.split(hidden_ND, max(1, LOGITS // len(weight_VD)))
            likeliest_N = torch.cat([(chunk @ weight_VD.T).argmax(-1) for chunk in chunks]) == targets_N
        return torch.stack([nats_N.double(), likeliest_N.double()])

    return head


def _tree_mask(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the position of each token of each row [B, S], and what it attends to: bool [B, 1, S, T], prefix first.

    A token attends to its branch up to itself, the trunk and the prefix; padding is one more branch.
    """
    size, before = batch.longest, len(batch.prefix)
    positions: list[list[int]] = []
    branches: list[list[int]] = []
    for row in batch.rows:
        padding = size - (len(row.tokens) - before)
        spans = [(row.trunk - before, before), *((length, row.trunk) for length in (*row.branches, padding))]
        positions.append([start + offset for length, start in spans for offset in range(length)])
        branches.append([branch for branch, (length, _) in enumerate(spans) for _ in range(length)])  # 0: trunk
    branch_BS = torch.tensor(branches)
    same = (branch_BS.unsqueeze(2) == branch_BS.unsqueeze(1)) | (branch_BS == 0).unsqueeze(1)
    inside = same & torch.ones(size, size, dtype=torch.bool).tril()
    mask = torch.cat([inside.new_ones(len(batch.rows), size, before), inside], 2).unsqueeze(1)
    return torch.tensor(positions), mask
