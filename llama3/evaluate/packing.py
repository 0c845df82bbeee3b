"""The plan of forward passes that scores many sequences and reads what they share once.

Two things are shared. The choices after one question are one row: the question once, then each choice as a branch that
sees the question and itself. Rows that begin alike (solved examples, the subject of a test) are a run: their beginning
is read once, and the rows stand behind it. Five examples of 700 tokens before 14,000 questions of 60 with a letter of
four to choose are then a fiftieth of the positions that reading each choice whole would take. What is longer than the
window is read in windows, alone, and so is whatever shares too little to fill the passes that sharing adds.

Plans depend on the tokens alone, not on the order in which they are asked for nor on who reads them: equal work gives
equal batches, and so equal bits. What this gives up: branches need a mask, which no kernel takes as fast as plain
causal attention, so long questions are not packed into rows and share by runs alone.

A sequence is (tokens, start): tokens[start:] are scored. The last token is never read, only asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Scorable = tuple[list[int], int]
"""Tokens, and from where on they are scored."""
TRUNK = 1024
"""Longest question, in tokens, whose choices are packed: the mask of a row grows with its square."""
BRANCHES = 256
"""Positions of all choices in a row, unless the question is longer."""
ALIKE = 32
"""Shortest beginning that rows share, in tokens: below, a run saves less than its bookkeeping costs."""


@dataclass(frozen=True)
class BatchLimits:
    """What one forward pass may hold, padding included."""

    positions: int
    """Positions that are read."""
    held: int
    """Positions that are attended to, with the shared beginning of each row."""


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
    """Places in the row whose next token is scored, in order."""
    targets: tuple[int, ...]
    """Those tokens."""


@dataclass(frozen=True)
class PackedRow:
    """What is read together: `trunk` tokens, then branches one after another, which go on from the trunk's end."""

    tokens: list[int]
    trunk: int
    branches: tuple[int, ...]
    """Tokens of each branch; none in a plain row."""
    scored: tuple[Scored, ...]

    @property
    def free(self) -> int:
        """Tokens at the beginning after which nothing is scored: what other rows may share."""
        return min(part.places[0] for part in self.scored)


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one forward pass. All begin with `prefix`, which is read before and not again."""

    prefix: list[int]
    rows: list[PackedRow]

    @property
    def longest(self) -> int:
        """Positions of the longest row behind the prefix."""
        return max(len(row.tokens) for row in self.rows) - len(self.prefix)


def plan(sequences: Sequence[Scorable], window: int, budget: BatchLimits, share: bool = True) -> list[PackedBatch]:
    """Return batches that score every token of `sequences` that is to be scored exactly once.

    No token is read at position `window` or later. Batches of one prefix stand together. Without `share` each sequence
    is read whole. Raises ValueError as `windows` does.
    """
    if window < 2:
        raise ValueError(f"window {window} must be at least 2")
    runs = _runs(list(_rows(sequences, window, share)), budget.positions // 2 if share else None)
    runs.sort(key=lambda run: -max(len(row.tokens) for row in run[1]))  # too large a batch fails at once
    return [PackedBatch(prefix, rows) for prefix, run in runs for rows in _batches(run, len(prefix), budget)]


def windows(tokens: Sequence[int], start: int, window: int) -> Iterator[ScoringWindow]:
    """Cut a sequence into windows of at most `window` positions that score each token from `start` >= 1 on once.

    What is scored stays whole if it fits; else windows advance by half a window. Raises ValueError if `window` is below
    2 or `start` below 1.
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
    """Yield plain rows, and those of the sequences that go on from one context."""
    contexts: dict[tuple[int, ...], list[int]] = {}
    for index, (tokens, start) in enumerate(sequences):
        if share and 1 <= start <= TRUNK and _worth(len(tokens) - 1 - start, start) and len(tokens) - 1 <= window:
            contexts.setdefault(tuple(tokens[:start]), []).append(index)
        else:
            yield from (_plain(index, tokens, span) for span in windows(tokens, start, window))
    for members in contexts.values():
        for group in _filled(sorted(members, key=lambda index: sequences[index][0]), sequences):
            tokens, start = sequences[group[0]]
            alone = _plain(group[0], tokens, ScoringWindow(0, len(tokens) - 1, start))
            yield alone if len(group) == 1 else _branched(group, sequences)


def _worth(branch: int, trunk: int) -> bool:
    """Return whether reading the trunk once would save a third of the positions or more; not for whole documents."""
    return 0 <= branch <= 2 * trunk


def _filled(members: Sequence[int], sequences: Sequence[Scorable]) -> Iterator[list[int]]:
    """Cut the sequences of one context into groups whose branches are as long together as a row may have."""
    group: list[int] = []
    held = 0
    for index in members:
        tokens, start = sequences[index]
        branch = len(tokens) - 1 - start
        if group and held + branch > max(BRANCHES, start):
            yield group
            group, held = [], 0
        group.append(index)
        held += branch
    yield group


def _plain(index: int, tokens: list[int], span: ScoringWindow) -> PackedRow:
    places = tuple(range(span.scored - 1 - span.begin, span.end - span.begin))
    read, targets = tokens[span.begin : span.end], tuple(tokens[span.scored : span.end + 1])
    return PackedRow(read, len(read), (), (Scored(index, places, targets),))


def _branched(group: Sequence[int], sequences: Sequence[Scorable]) -> PackedRow:
    tokens, start = sequences[group[0]]
    row, lengths, scored = tokens[:start], [], []
    for index in group:
        branch = sequences[index][0][start:]
        places = (start - 1, *range(len(row), len(row) + len(branch) - 1))
        scored.append(Scored(index, places, tuple(branch)))
        lengths.append(len(branch) - 1)
        row += branch[:-1]
    return PackedRow(row, start, tuple(length for length in lengths if length), tuple(scored))


def _runs(rows: list[PackedRow], worth: int | None) -> list[tuple[list[int], list[PackedRow]]]:
    """Return (prefix, rows) of each run that saves `worth` positions or more, and of what is left, without a prefix."""
    runs: list[tuple[list[int], list[PackedRow]]] = []
    plain: list[PackedRow] = []
    branched: list[PackedRow] = []
    for shared, run in _alike(rows) if worth is not None else [(0, rows)]:
        if worth is not None and (len(run) - 1) * shared >= max(1, worth):
            runs.append((run[0].tokens[:shared], run))
            continue
        for row in run:
            (branched if row.branches else plain).append(row)
    return runs + [([], left) for left in (plain, branched) if left]


def _alike(rows: Iterable[PackedRow]) -> Iterator[tuple[int, list[PackedRow]]]:
    """Cut sorted rows into runs, and say how many tokens all rows of a run share.

    A row joins if that does not make the run save less: the saving is shared x (rows - 1).
    """
    run: list[PackedRow] = []
    shared = 0
    for row in sorted(rows, key=_order):
        common = min(shared, row.free, _common(run[-1].tokens, row.tokens)) if run else row.free
        if run and (common < ALIKE or common * len(run) < shared * (len(run) - 1)):
            yield shared, run
            run, common = [], row.free
        run.append(row)
        shared = common
    if run:
        yield shared, run


def _order(row: PackedRow) -> tuple[bytes, tuple[tuple[int, ...], ...]]:
    """Sort by what is read and asked, so that equal beginnings stand together; bytes compare faster than lists."""
    return np.array(row.tokens, np.uint32).tobytes(), tuple(part.targets for part in row.scored)


def _common(one: list[int], other: list[int]) -> int:
    """Return how many tokens two rows begin with in common."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])


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
