"""Likelihood scoring: the negative log-likelihood (nats) of a text given its context.

A sequence is the begin token, then the tokens of context and continuation encoded together; scored are the tokens after
the longest beginning shared with the context encoded alone. A context too long for the window loses its beginning; a
longer continuation is scored in windows that advance by half a window, each token once (see `packing`).

Shapes: B rows, S positions, T positions attended to, N scored tokens, D model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from herd.llama3.evaluate.distributed import EvalRanks
from herd.llama3.evaluate.generate import LOGITS, common_prefix
from herd.llama3.evaluate.task import Likelihood, Request
from herd.llama3.model.attention import AttentionMask
from herd.llama3.model.comms import Comms
from herd.llama3.model.kv_cache import Cache, PrefixCache, with_cache
from herd.llama3.model.loss import NO_TARGET, token_nll
from herd.llama3.model.transformer import Head, Transformer
from herd.llama3.parallel.memory import POSITIONS

# Plan the forward passes that score many sequences so that common beginnings are read once.
#
# Two things are shared. The choices after one question form one row: the question once (the trunk), then each
# choice as a branch that attends to the question and itself. Rows with a common beginning (solved examples) form a
# group: the prefix is read once into the KV cache. Five examples of 700 tokens before 14,000 questions of 60 tokens
# with four one-letter choices then take a fiftieth of the positions.

Scorable = tuple[list[int], int]
"""(tokens, start): tokens[start:] are scored. The last token is only predicted, never read."""
TRUNK = 1024
"""Longest question, in tokens, whose choices are packed: the mask of a row grows with its square."""
BRANCHES = 256
"""Positions of all choices in a row, unless the question is longer."""
ALIKE = 32
"""Shortest shared prefix, in tokens: a shorter one saves less than its bookkeeping costs."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits of one forward pass, padding included."""

    positions: int
    """Positions that are read."""
    held: int
    """Positions that are attended to, with the shared prefix of each row."""


@dataclass(frozen=True)
class ScoringWindow:
    """One forward pass over positions [begin, end) of a sequence; it scores tokens [scored, end]."""

    begin: int
    end: int
    scored: int


@dataclass(frozen=True)
class ScoredSpan:
    """Tokens of one sequence that a row scores."""

    sequence: int
    positions: tuple[int, ...]
    """Positions in the row whose next token is scored, in order."""
    targets: tuple[int, ...]
    """Those next tokens."""


@dataclass(frozen=True)
class PackedRow:
    """One row of a batch: `trunk` tokens, then branches one after another, each of which continues the trunk."""

    tokens: list[int]
    trunk: int
    branches: tuple[int, ...]
    """Tokens of each branch; empty in a plain row."""
    scored: tuple[ScoredSpan, ...]

    @property
    def free(self) -> int:
        """Tokens at the beginning after which nothing is scored: what other rows may share."""
        return min(span.positions[0] for span in self.scored)


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one forward pass. All begin with `prefix`, which is already in the KV cache."""

    prefix: list[int]
    rows: list[PackedRow]

    @property
    def longest(self) -> int:
        """Positions of the longest row after the prefix."""
        return max(len(row.tokens) for row in self.rows) - len(self.prefix)


def plan_batches(
    sequences: Sequence[Scorable], window: int, budget: BatchLimits, share: bool = True
) -> list[PackedBatch]:
    """Return batches that score each token to be scored of `sequences` exactly once.

    No token is read at position `window` or later. Batches with the same prefix are adjacent. Without `share` each
    sequence is read whole. A plan depends on the tokens alone, not on their order or on the process that reads them, so
    equal work gives equal bits. Raises ValueError as `sliding_windows` does.
    """
    if window < 2:
        raise ValueError(f"window {window} must be at least 2")
    rows = list(_rows(sequences, window, share))
    groups: list[tuple[list[int], list[PackedRow]]] = []
    plain: list[PackedRow] = []
    branched: list[PackedRow] = []
    for shared, group in _groups_by_prefix(rows) if share else [(0, rows)]:
        # a prefix costs extra passes: it must save half a batch or more
        if share and (len(group) - 1) * shared >= max(1, budget.positions // 2):
            groups.append((group[0].tokens[:shared], group))
            continue
        for row in group:
            (branched if row.branches else plain).append(row)
    groups += [([], rest) for rest in (plain, branched) if rest]
    groups.sort(key=lambda item: -max(len(row.tokens) for row in item[1]))  # too large a batch fails at once
    return [PackedBatch(prefix, batch) for prefix, group in groups for batch in _batches(group, len(prefix), budget)]


def sliding_windows(tokens: Sequence[int], start: int, window: int) -> Iterator[ScoringWindow]:
    """Cut a sequence into windows of at most `window` positions that score each token from `start` >= 1 on once.

    If all scored tokens fit into one window they are not cut; else windows advance by half a window. Raises ValueError
    if `window` is below 2 or `start` below 1.
    """
    if window < 2 or start < 1:
        raise ValueError(f"window {window} must be at least 2 and start {start} at least 1")
    last, stride, scored = len(tokens) - 1, window // 2, start
    if 0 <= last - start < window:
        yield ScoringWindow(max(0, last - window), last, start)
        return
    while scored <= last:
        end = min(last, max(window, scored + stride - 1))
        full = end if scored == start else scored + stride - 1
        yield ScoringWindow(max(0, full - window), end, scored)
        scored = end + 1


def _rows(sequences: Sequence[Scorable], window: int, share: bool) -> Iterator[PackedRow]:
    """Yield plain rows, and rows with the sequences that continue one context."""
    contexts: dict[tuple[int, ...], list[int]] = {}
    for index, (tokens, start) in enumerate(sequences):
        # branches need a mask, which is slower than causal attention: pack only what saves a third of the positions
        worth = 1 <= start <= TRUNK and 0 <= len(tokens) - 1 - start <= 2 * start
        if share and worth and len(tokens) - 1 <= window:
            contexts.setdefault(tuple(tokens[:start]), []).append(index)
        else:
            yield from (_plain_row(index, tokens, span) for span in sliding_windows(tokens, start, window))
    for members in contexts.values():
        group: list[int] = []
        branches = 0
        for index in sorted(members, key=lambda index: sequences[index][0]):
            tokens, start = sequences[index]
            branch = len(tokens) - 1 - start
            if group and branches + branch > max(BRANCHES, start):
                yield _row(group, sequences)
                group, branches = [], 0
            group.append(index)
            branches += branch
        yield _row(group, sequences)


def _plain_row(index: int, tokens: list[int], span: ScoringWindow) -> PackedRow:
    positions = tuple(range(span.scored - 1 - span.begin, span.end - span.begin))
    read, targets = tokens[span.begin : span.end], tuple(tokens[span.scored : span.end + 1])
    return PackedRow(read, len(read), (), (ScoredSpan(index, positions, targets),))


def _row(group: Sequence[int], sequences: Sequence[Scorable]) -> PackedRow:
    """Return the row of sequences with one context: plain for a single one, else with a branch for each."""
    tokens, start = sequences[group[0]]
    if len(group) == 1:
        return _plain_row(group[0], tokens, ScoringWindow(0, len(tokens) - 1, start))
    row, lengths, scored = tokens[:start], [], []
    for index in group:
        branch = sequences[index][0][start:]
        positions = (start - 1, *range(len(row), len(row) + len(branch) - 1))
        scored.append(ScoredSpan(index, positions, tuple(branch)))
        lengths.append(len(branch) - 1)
        row += branch[:-1]
    return PackedRow(row, start, tuple(length for length in lengths if length), tuple(scored))


def _groups_by_prefix(rows: Iterable[PackedRow]) -> Iterator[tuple[int, list[PackedRow]]]:
    """Cut sorted rows into groups; yield each with the number of tokens that all of its rows share.

    A row joins if the group then saves at least as much: the saving is shared x (rows - 1).
    """
    group: list[PackedRow] = []
    shared = 0
    for row in sorted(rows, key=_sort_key):
        common = row.free
        if group:
            common = min(shared, row.free, common_prefix(group[-1].tokens, row.tokens))
            if common < ALIKE or common * len(group) < shared * (len(group) - 1):
                yield shared, group
                group, common = [], row.free
        group.append(row)
        shared = common
    if group:
        yield shared, group


def _sort_key(row: PackedRow) -> tuple[bytes, tuple[tuple[int, ...], ...]]:
    """Sort key that puts equal beginnings side by side; bytes compare faster than lists."""
    return np.array(row.tokens, np.uint32).tobytes(), tuple(span.targets for span in row.scored)


def _batches(rows: Iterable[PackedRow], prefix: int, budget: BatchLimits) -> Iterator[list[PackedRow]]:
    """Group rows of similar length, longest first."""
    batch: list[PackedRow] = []
    for row in sorted(rows, key=lambda row: (-len(row.tokens), _sort_key(row))):
        longest = len(batch[0].tokens) if batch else 0
        more = len(batch) + 1
        if batch and (more * (longest - prefix) > budget.positions or more * longest > budget.held):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


BUDGETS = {"cpu": BatchLimits(POSITIONS["cpu"], 16384)}
"""By kind of device: on a CPU the activations of few positions still fit its caches."""
BUDGET_ELSEWHERE = BatchLimits(POSITIONS["cuda"], 131072)
TOGETHER = 256
"""Batches of all replicas between two exchanges of results; a killed evaluation repeats as many."""


class ScoringTokenizer(Protocol):
    """What scoring needs of a tokenizer: its tokens end before every space that does not follow white space.

    Llama 3's split pattern guarantees that. The two sides of such a space are encoded apart.
    """

    @property
    def begin(self) -> int | None: ...
    @property
    def start(self) -> int: ...
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
    ranks: EvalRanks | None = None,
    share: bool = True,
) -> list[Likelihood]:
    """Return the likelihood of each request's continuation given its context, in the order of `requests`.

    `window` is the most positions that the model sees at once; `greedy` has the keys of the tasks that need
    `Likelihood.greedy`, which only a Transformer can compute. With `ranks` each process takes a share of the batches
    and all return everything. `share` False reads each sequence whole, to measure what sharing saves.
    Raises ValueError for an empty continuation.
    """
    sequences = encode_requests(tokenizer, requests)
    indices = [index for index, request in enumerate(requests) if request.task in greedy]
    return score_sequences(model, sequences, window, device, indices, ranks, share)


def encode_requests(tokenizer: ScoringTokenizer, requests: Iterable[Request]) -> list[Scorable]:
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
        shared = min(shared, len(whole))
        if tokenizer.begin is None and shared:
            sequences.append((whole, shared))
        else:  # the first token is scored, so something must stand before it
            sequences.append(([tokenizer.start, *whole], 1 + shared))
    return sequences


class RowScore(NamedTuple):
    """The result of one row for one sequence."""

    sequence: int
    nll: float
    greedy: bool


@torch.inference_mode()
def score_sequences(
    model: LanguageModel,
    sequences: Sequence[Scorable],
    window: int,
    device: str = "cpu",
    greedy: Collection[int] = (),
    ranks: EvalRanks | None = None,
    share: bool = True,
) -> list[Likelihood]:
    """Return the likelihood of the tokens from `start` on of each (tokens, start), given those before them.

    `greedy` has the indices of the sequences that need `Likelihood.greedy`; the rest as in `score_requests`.
    """
    ranks, greedy = ranks or EvalRanks(), frozenset(greedy)
    assert isinstance(model, Transformer) or not greedy
    share = share and isinstance(model, Transformer)
    budget = BUDGETS.get(torch.device(device).type, BUDGET_ELSEWHERE)
    prefix: list[int] = []
    cache: Cache | None = None

    def score(batches: Sequence[PackedBatch]) -> list[RowScore]:
        nonlocal prefix, cache
        rows: list[RowScore] = []
        for batch in batches:
            if batch.prefix != prefix:  # the prefix of consecutive batches is read once
                prefix, cache = batch.prefix, None
                if prefix:
                    cache = Cache(len(prefix))
                    reader = with_cache(cast(Transformer, model), cache)
                    reader(torch.tensor([prefix], device=device), head=lambda hidden_BSD, _: hidden_BSD)
            if isinstance(model, Transformer):
                rows += _score_packed(model, batch, cache, device, greedy)
            else:
                rows += _score_plain(model, batch, device)
        return rows

    batches = plan_batches(sequences, window, budget, share)
    gathered: list[list[Any]] = []
    for start in range(0, len(batches), TOGETHER):
        own = batches[start : start + TOGETHER][ranks.rank :: ranks.size]
        gathered += ranks.gather(partial(score, own))
    nll: list[list[float]] = [[] for _ in sequences]
    likeliest = [True] * len(sequences)
    for row in map(RowScore._make, chain.from_iterable(gathered)):
        nll[row.sequence].append(row.nll)
        likeliest[row.sequence] &= row.greedy
    return [
        Likelihood(math.fsum(terms), max(0, len(tokens) - start), likeliest[index] if index in greedy else None)
        for index, (terms, (tokens, start)) in enumerate(zip(nll, sequences, strict=True))
    ]


def _score_plain(model: LanguageModel, batch: PackedBatch, device: str) -> Iterator[RowScore]:
    """Yield the scores of rows that are one sequence each, from a model that is not a Transformer."""
    tokens_BS = torch.zeros(len(batch.rows), batch.longest, dtype=torch.long)
    targets_BS = torch.full_like(tokens_BS, NO_TARGET)
    for index, row in enumerate(batch.rows):
        (span,) = row.scored
        tokens_BS[index, : len(row.tokens)] = torch.tensor(row.tokens)
        targets_BS[index, list(span.positions)] = torch.tensor(span.targets)
    nll_BS = model(tokens_BS.to(device), None, targets_BS.to(device))
    for row, nll_S in zip(batch.rows, nll_BS.double().tolist(), strict=True):
        yield RowScore(row.scored[0].sequence, math.fsum(nll_S), False)


def _score_packed(
    model: Transformer, batch: PackedBatch, cache: Cache | None, device: str, greedy: frozenset[int]
) -> Iterator[RowScore]:
    """Yield the scores of one forward pass over packed rows, whose prefix is in `cache`."""
    spans = [span for row in batch.rows for span in row.scored]
    head = _scoring_head(batch, device, any(span.sequence in greedy for span in spans), model.comms)
    # padding comes after the tokens, where no token attends to it
    tokens_BS = torch.zeros(len(batch.rows), batch.longest, dtype=torch.long)
    for row_S, row in zip(tokens_BS, batch.rows, strict=True):
        row_S[: len(row.tokens) - len(batch.prefix)] = torch.tensor(row.tokens[len(batch.prefix) :])
    if cache is None and not any(row.branches for row in batch.rows):
        result_2N = model(tokens_BS.to(device), head=head)
    else:
        positions_BS, mask = (x.to(device) for x in _tree_mask(batch))
        repeated = model.config.heads // model.config.kv_heads if mask.is_cuda else 1
        reader = with_cache(model, PrefixCache(cache, positions_BS, repeated))
        result_2N = reader(tokens_BS.to(device), AttentionMask(mask=mask), head=head)
    if model.norm is None:  # a pipeline stage whose output went to the next one
        return
    nll, likeliest = (torch.split(line, [len(span.positions) for span in spans]) for line in result_2N.cpu())
    for span, span_nll, span_likeliest in zip(spans, nll, likeliest, strict=True):
        yield RowScore(span.sequence, math.fsum(span_nll.tolist()), bool(span_likeliest.all()))


def _scoring_head(batch: PackedBatch, device: str, greedy: bool, comms: Comms) -> Head:
    """Return a head that maps hidden states to [2, N]: nats of each scored token, and 1 if it is the likeliest.

    Only scored tokens get logits: of a question with 700 tokens of examples and one letter, one position in 760.
    """
    begins = [index * batch.longest - len(batch.prefix) for index in range(len(batch.rows))]
    pairs = [
        (begin + place, target)
        for begin, row in zip(begins, batch.rows, strict=True)
        for span in row.scored
        for place, target in zip(span.positions, span.targets, strict=True)
    ]
    places_N, targets_N = torch.tensor(pairs, device=device).T

    def head(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        hidden_ND = hidden_BSD.flatten(0, 1)[places_N]
        nll_N = token_nll(hidden_ND.unsqueeze(0), weight_VD, targets_N.unsqueeze(0), comms=comms).squeeze(0)
        likeliest_N = torch.zeros_like(targets_N)
        if greedy:
            chunks = torch.split(hidden_ND, max(1, LOGITS // len(weight_VD)))
            logits = (comms.all_gather_logits(chunk @ weight_VD.T) for chunk in chunks)
            likeliest_N = torch.cat([logits_CV.argmax(-1) for logits_CV in logits]) == targets_N
        return torch.stack([nll_N.double(), likeliest_N.double()])

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
