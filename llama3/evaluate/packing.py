"""Plan the forward passes that score many sequences so that common beginnings are read once.

Two things are shared. The choices after one question form one row: the question once (the trunk), then each choice as a
branch that attends to the question and itself. Rows with a common beginning (solved examples) form a group: the prefix
is read once into the KV cache. Five examples of 700 tokens before 14,000 questions of 60 tokens with four one-letter
choices then take a fiftieth of the positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

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
class Scored:
    """Tokens of one sequence that a row scores."""

    sequence: int
    places: tuple[int, ...]
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
    scored: tuple[Scored, ...]

    @property
    def free(self) -> int:
        """Tokens at the beginning after which nothing is scored: what other rows may share."""
        return min(span.places[0] for span in self.scored)


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one forward pass. All begin with `prefix`, which is already in the KV cache."""

    prefix: list[int]
    rows: list[PackedRow]

    @property
    def longest(self) -> int:
        """Positions of the longest row after the prefix."""
        return max(len(row.tokens) for row in self.rows) - len(self.prefix)


def plan(sequences: Sequence[Scorable], window: int, budget: BatchLimits, share: bool = True) -> list[PackedBatch]:
    """Return batches that score each token to be scored of `sequences` exactly once.

    No token is read at position `window` or later. Batches with the same prefix are adjacent. Without `share` each
    sequence is read whole. A plan depends on the tokens alone, not on their order or on the process that reads them, so
    equal work gives equal bits. Raises ValueError as `windows` does.
    """
    if window < 2:
        raise ValueError(f"window {window} must be at least 2")
    rows = list(_rows(sequences, window, share))
    groups: list[tuple[list[int], list[PackedRow]]] = []
    plain: list[PackedRow] = []
    branched: list[PackedRow] = []
    for shared, group in _groups_by_prefix(rows) if share else [(0, rows)]:
        # a prefix costs passes of its own: it must save half a batch or more
        if share and (len(group) - 1) * shared >= max(1, budget.positions // 2):
            groups.append((group[0].tokens[:shared], group))
            continue
        for row in group:
            (branched if row.branches else plain).append(row)
    groups += [([], rest) for rest in (plain, branched) if rest]
    groups.sort(key=lambda item: -max(len(row.tokens) for row in item[1]))  # too large a batch fails at once
    return [PackedBatch(prefix, batch) for prefix, group in groups for batch in _batches(group, len(prefix), budget)]


def windows(tokens: Sequence[int], start: int, window: int) -> Iterator[ScoringWindow]:
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
            yield from (_plain_row(index, tokens, span) for span in windows(tokens, start, window))
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
    places = tuple(range(span.scored - 1 - span.begin, span.end - span.begin))
    read, targets = tokens[span.begin : span.end], tuple(tokens[span.scored : span.end + 1])
    return PackedRow(read, len(read), (), (Scored(index, places, targets),))


def _row(group: Sequence[int], sequences: Sequence[Scorable]) -> PackedRow:
    """Return the row of sequences with one context: plain for a single one, else with a branch for each."""
    tokens, start = sequences[group[0]]
    if len(group) == 1:
        return _plain_row(group[0], tokens, ScoringWindow(0, len(tokens) - 1, start))
    row, lengths, scored = tokens[:start], [], []
    for index in group:
        branch = sequences[index][0][start:]
        places = (start - 1, *range(len(row), len(row) + len(branch) - 1))
        scored.append(Scored(index, places, tuple(branch)))
        lengths.append(len(branch) - 1)
        row += branch[:-1]
    return PackedRow(row, start, tuple(length for length in lengths if length), tuple(scored))


def _groups_by_prefix(rows: Iterable[PackedRow]) -> Iterator[tuple[int, list[PackedRow]]]:
    """Cut sorted rows into groups; yield each with the number of tokens that all of its rows share.

    A row joins if the group then saves at least as much: the saving is shared x (rows - 1).
    """
    group: list[PackedRow] = []
    shared = 0
    for row in sorted(rows, key=_order):
        common = row.free
        if group:
            common = min(shared, row.free, _common_prefix(group[-1].tokens, row.tokens))
            if common < ALIKE or common * len(group) < shared * (len(group) - 1):
                yield shared, group
                group, common = [], row.free
        group.append(row)
        shared = common
    if group:
        yield shared, group


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many tokens two rows begin with in common, by bisection: slices compare faster than a loop."""
    lengths = range(1, min(len(a), len(b)) + 1)
    return bisect_left(lengths, True, key=lambda length: a[:length] != b[:length])


def _order(row: PackedRow) -> tuple[bytes, tuple[tuple[int, ...], ...]]:
    """Sort key that puts equal beginnings side by side; bytes compare faster than lists."""
    return np.array(row.tokens, np.uint32).tobytes(), tuple(span.targets for span in row.scored)


def _batches(rows: Iterable[PackedRow], prefix: int, budget: BatchLimits) -> Iterator[list[PackedRow]]:
    """Group rows of similar length, longest first."""
    batch: list[PackedRow] = []
    for row in sorted(rows, key=lambda row: (-len(row.tokens), _order(row))):
        longest = len(batch[0].tokens) if batch else 0
        more = len(batch) + 1
        if batch and (more * (longest - prefix) > budget.positions or more * longest > budget.held):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
