"""The training stream: token i of a run as a pure function of (recipe, token shards, i).

Batch size, sequence length, number of ranks and restarts do not appear in that sentence, so none of them can repeat,
skip or reorder a token. The run is cut into spans where the mix changes; in a span, units of positions are dealt to
leaves (`deal.py`); each leaf is an endless stream of shuffled documents (`leaf.py`) that goes on from span to span.
A document cut at a unit's edge goes on in the leaf's next unit as a segment of its own. What this gives up: documents
are not packed to fit sequences, so one is cut at every unit's edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llama3.recipe.base import DOMAINS, Domain
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.tokens.interleave import MixtureInterleaver, Units
from llama3.tokens.kernels import Ints
from llama3.tokens.mix import Leaf, leaf_shares, leaves_of
from llama3.tokens.shards import COUNTED, Counts, add_counts, read_index
from llama3.tokens.source_stream import Documents, LeafStream

# The spans of a run in which the mix stays the same, laid end to end on the axis of positions.
#
# Stages that draw alike form one span, so that a batch ramp or a longer sequence changes nothing in the order of
# tokens. A stage that takes a later helping of data is a span of its own: how far on it begins follows from its own
# need. What this gives up: a stage's own shares are exact to the token only where its mix ends with it.


@dataclass(frozen=True)
class MixPhase:
    """Consecutive stages that draw alike."""

    start: int
    deal: MixtureInterleaver
    before: Ints
    """Tokens of each leaf that earlier spans took."""
    first: Ints
    """Where the span begins in each leaf's stream: behind what earlier spans took, and what it passes over."""

    @property
    def end(self) -> int:
        return self.start + self.deal.tokens

    def identity(self, leaves: Sequence[Leaf], stop: int) -> dict[str, Any]:
        """Return, as plain data, what decides which tokens lie in the span before the position `stop`."""
        columns = zip(leaves, self.deal.shares, self.first.tolist(), strict=True)
        mix = {leaf.name: {"share": str(share), "from": first} for leaf, share, first in columns if share}
        settled = stop <= self.start + self.deal.settled
        return {"start": self.start, "end": None if settled else self.end, "mix": mix}


def mix_spans(recipe: Recipe, leaves: Sequence[Leaf], unit: int) -> Iterator[MixPhase]:
    """Yield the spans of `recipe`, positions cut in units of `unit` tokens."""
    before: Ints = np.zeros(len(leaves), np.int64)
    ahead: Ints = np.zeros(len(leaves), np.int64)
    for (shares, added, draw, _), group in groupby(Schedule(recipe).spans, key=lambda span: _drawn(recipe, span)):
        stages = list(group)
        deal = MixtureInterleaver(leaf_shares(leaves, shares, added), stages[-1].end - stages[0].start, unit)
        first = ahead + draw * deal.totals
        yield MixPhase(stages[0].start, deal, before, first)
        before, ahead = before + deal.totals, first + deal.totals


def _drawn(recipe: Recipe, span: StageSpan) -> tuple[dict[Domain, Fraction], dict[str, Fraction], int, str]:
    """Return what decides which documents a stage reads: shares of its mix, what it adds, which helping, and whose."""
    stage = span.stage
    shares = {domain: Fraction(share) for domain, share in recipe.mix[stage.mix].items() if share}
    added = {name: Fraction(share) for name, share in stage.add.items() if share}
    return shares, added, stage.draw, stage.name if stage.draw else ""


# What a read of the training stream returns: tokens with the bounds of their segments, or the documents behind
# them.
#
# Bounds are kept per segment and spread over tokens only when asked: at 1,000 tokens a document that is a
# thousandth of the memory. What this gives up: a caller that wants a column per token pays for it once.

PAST_END = -1
"""Domain of the token after the run's last."""


@dataclass(frozen=True)
class TokenWindow:
    """The tokens at positions [start, start + n), in s segments; attention stays inside a segment."""

    start: int
    tokens: Ints
    """int64[n]."""
    cu_seqlens: Ints
    """int64[s + 1]: place in the window at which each segment begins, and n."""
    origins: Ints
    """int64[s]: position at which each segment begins; that of the first may be before the window."""
    kinds: npt.NDArray[np.int8]
    """int8[s]: domain of each segment as an index in DOMAINS; -1 past the end of the run."""

    @cached_property
    def segments(self) -> Ints:
        """int64[n]: position at which the token's segment begins."""
        return np.repeat(self.origins, np.diff(self.cu_seqlens))

    @cached_property
    def domains(self) -> npt.NDArray[np.int8]:
        """int8[n]: domain of each token."""
        return np.repeat(self.kinds, np.diff(self.cu_seqlens))


class DocumentUse(NamedTuple):
    """A stretch of one document that is trained on as one segment."""

    document: str
    leaf: str
    source: str
    language: str
    licence: str
    epoch: int
    first: int
    """First token of the stretch, counted in the document (0 is the begin token)."""
    last: int
    """Its last token."""
    position: int
    """Position of the first token in the run."""


@dataclass(frozen=True)
class _Part:
    """What one leaf gives to a window: p stretches, each of one document and one segment; int64[p] each."""

    leaf: int
    documents: Documents
    skipped: Ints
    """First token of the stretch, counted in its document."""
    lengths: Ints
    positions: Ints
    """Position of that token in the run."""
    origins: Ints
    """Position at which its segment begins."""


class TokenStream:
    """The tokens of a run of `recipe`, over the shards that `tokenise` wrote into `folder`.

    Raises ValueError if the shards are not those of the recipe's sources, or a leaf with a share is empty.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.recipe = recipe
        self.leaves = leaves_of(recipe)
        self.unit = int(recipe.tokens.unit or max(max(stage.lengths) for stage in recipe.stages))
        """Tokens taken from one leaf in a row."""
        index = read_index(folder, [leaf.name for leaf in self.leaves])
        self._end_token = int(index["end"])
        self._streams = [
            LeafStream(leaf.name, folder / leaf.name, index["leaves"][leaf.name], recipe.seed) for leaf in self.leaves
        ]
        self.spans = tuple(mix_spans(recipe, self.leaves, self.unit))
        self._refuse_empty()

    @property
    def tokens(self) -> int:
        """Positions of the run."""
        return self.spans[-1].end

    @property
    def block_bytes(self) -> int:
        """Bytes that a cache of token pages must hold, or every batch brings whole blocks again; 0 for a plain folder.

        Twice as much for each leaf lets the next block be brought while one is read; small shares want more (`paged`).
        """
        return sum(stream.block_bytes for stream in self._streams)

    def read(self, start: int, stop: int) -> TokenWindow:
        """Return the tokens at positions [start, stop); `stop` may be one past the run's end.

        The token there (an end token in a segment of its own) only serves as the last target. Raises ValueError for
        positions outside the run.
        """
        self._check_range(start, stop, self.tokens + 1)
        tokens = np.empty(stop - start, np.int64)
        tokens[self.tokens - start :] = self._end_token
        bounds = [(_NOTHING, _NOTHING, np.zeros(0, np.int8))]
        for part in self._parts(start, min(stop, self.tokens)):
            self._streams[part.leaf].copy(part.documents, part.skipped, part.lengths, part.positions - start, tokens)
            bounds.append((part.positions, part.origins, np.full(len(part.origins), self._kind(part.leaf), np.int8)))
        if start <= self.tokens < stop:
            end = np.array([self.tokens])
            bounds.append((end, end, np.array([PAST_END], np.int8)))
        positions, origins, kinds = (np.concatenate(columns) for columns in zip(*bounds, strict=True))
        order = np.argsort(positions)
        return TokenWindow(start, tokens, np.append(positions[order], stop) - start, origins[order], kinds[order])

    def documents(self, start: int, stop: int, limit: int | None = None) -> list[DocumentUse]:
        """Return which stretches of which documents lie at positions [start, stop), in that order; at most `limit`."""
        self._check_range(start, stop, self.tokens)
        parts = list(self._parts(start, stop))
        positions = np.sort(np.concatenate([_NOTHING, *(part.positions for part in parts)]))[:limit]
        uses = [use for part in parts for use in self._uses(part, int(positions.max(initial=0)))]
        return sorted(uses, key=lambda use: use.position)

    def planned(self, start: int, stop: int) -> dict[Domain, Fraction]:
        """Return the tokens of each domain that the recipe asks for at positions [start, stop), exactly."""
        asked = {leaf.domain: Fraction(0) for leaf in self.leaves}
        for leaf, tokens in zip(self.leaves, self._planned(start, stop), strict=True):
            asked[leaf.domain] += tokens
        return asked

    def planned_sources(self, start: int, stop: int) -> dict[str, Fraction]:
        """Return the same by source ("domain/source"); a domain's pooled sources get what their tokens weigh."""
        asked: dict[str, Fraction] = {}
        for leaf, stream, of_leaf in zip(self.leaves, self._streams, self._planned(start, stop), strict=True):
            for name, (tokens, _) in stream.by["source"].items():
                known = asked.get(f"{leaf.domain}/{name}", Fraction(0))
                asked[f"{leaf.domain}/{name}"] = known + of_leaf * Fraction(tokens, stream.tokens)
        return asked

    def _planned(self, start: int, stop: int) -> list[Fraction]:
        """Return the tokens of each leaf that the recipe asks for at positions [start, stop)."""
        asked = [Fraction(0)] * len(self.leaves)
        for span in self.spans:
            overlap = max(0, min(stop, span.end) - max(start, span.start))
            asked = [known + share * overlap for known, share in zip(asked, span.deal.shares, strict=True)]
        return asked

    def realised(self, position: int) -> dict[Domain, int]:
        """Return the tokens of each domain at positions [0, `position`), counted without reading them."""
        totals = {leaf.domain: 0 for leaf in self.leaves}
        for leaf, count in zip(self.leaves, self.consumed(position), strict=True):
            totals[leaf.domain] += int(count)
        return totals

    def sources(self, start: int, stop: int) -> dict[str, int]:
        """Return the tokens of each source ("domain/source") at positions [start, stop), counted without reading them.

        A domain's pooled sources are told apart by the shards' tables: 0.1 s per million documents in the range, or a
        fifth of that once the tables are in memory; whole epochs are free. So ask for what is new and add it up.
        """
        totals: dict[str, int] = {}
        for leaf, first, last in self._ranges(start, stop):
            domain, stream = self.leaves[leaf].domain, self._streams[leaf]
            for name in stream.by["source"]:
                totals.setdefault(f"{domain}/{name}", 0)
            if len(stream.by["source"]) == 1:
                totals[f"{domain}/{next(iter(stream.by['source']))}"] += last - first
                continue
            for name, (tokens, _) in stream.tally(["source"], first, last)["source"].items():
                totals[f"{domain}/{name}"] += tokens
        return totals

    def tally(self, columns: list[str], start: int, stop: int) -> dict[Domain, dict[str, Counts]]:
        """Return, by domain, column of the tables and value, [tokens, documents] of positions [start, stop).

        A document counts once per epoch in which some of it is read.
        """
        totals: dict[Domain, dict[str, Counts]] = {}
        for leaf, first, last in self._ranges(start, stop):
            of_domain = totals.setdefault(self.leaves[leaf].domain, {column: {} for column in columns})
            for column, found in self._streams[leaf].tally(columns, first, last).items():
                for value, counts in found.items():
                    add_counts(of_domain[column], value, counts)
        return totals

    def epochs(self, position: int) -> dict[str, float]:
        """Return how often each leaf has been read through at `position` (a pooled domain is a leaf of its name)."""
        pairs = zip(self._streams, self.consumed(position), strict=True)
        return {stream.name: float(count / stream.tokens) if stream.tokens else 0.0 for stream, count in pairs}

    def consumed(self, position: int) -> Ints:
        """Return the tokens of each leaf, int64[leaves], at positions [0, `position`)."""
        self._check_range(0, position, self.tokens)
        span = next(span for span in reversed(self.spans) if span.start <= position)
        return span.before + span.deal.consumed(position - span.start)

    def identity(self, start: int, stop: int) -> dict[str, Any]:
        """Return, as plain data, all that decides the tokens at positions [start, stop) besides the shards.

        Two recipes with equal identities train on the same tokens there. What comes after `stop` does not appear,
        unless it moves a unit before it (the last units of a mix depend on where the mix ends).
        """
        spans = [span.identity(self.leaves, stop) for span in self.spans if span.start < stop and span.end > start]
        return {"seed": self.recipe.seed, "unit": self.unit, "spans": spans}

    def check(self) -> None:
        """Raise ValueError, one line per leaf, if the run would read a leaf more than `tokens.max_epochs` times."""
        limit = self.recipe.tokens.max_epochs
        faults = []
        for leaf, stream, asked in zip(self.leaves, self._streams, self.consumed(self.tokens), strict=True):
            if asked > limit * stream.tokens:
                field = f"sources.{leaf.domain}" + ("" if leaf.source is None else f".{leaf.source}")
                shares = "add" if leaf.apart else "mix"
                faults.append(
                    f"tokens.max_epochs: the run takes {asked:,} tokens from {field}, which holds {stream.tokens:,}: "
                    f"{asked / stream.tokens:.2f} epochs, at most {limit:g}; add text there, lower its share in "
                    f"{shares}, shorten the run, or raise tokens.max_epochs"
                )
        if faults:
            raise ValueError("\n".join(faults))

    def overlapping_helpings(self) -> list[str]:
        """Return a line per leaf that is too short for the helpings up to the run's, which then share documents."""
        lines, ahead = [], np.zeros(len(self.leaves), np.int64)
        for span in self.spans:
            passed, ahead = span.first - ahead, span.first + span.deal.totals
            for stream, over, end in zip(self._streams, passed.tolist(), ahead.tolist(), strict=True):
                if over and end > stream.tokens:
                    lines.append(
                        f"{stream.name} holds {stream.tokens:,} tokens, and this helping ends at {end:,}: it shares "
                        "documents with earlier ones; add text, or read fewer helpings"
                    )
        return lines

    def _refuse_empty(self) -> None:
        for leaf, stream, asked in zip(self.leaves, self._streams, self.consumed(self.tokens), strict=True):
            if asked and not stream.tokens:
                field = f"add.{leaf.apart}" if leaf.apart else "mix"
                raise ValueError(
                    f"{field}: {asked:,} tokens of {leaf.name} asked, but sources.{leaf.domain} gave it no training "
                    "document; add text, loosen curate, or set its share to 0%"
                )

    def _check_range(self, start: int, stop: int, limit: int) -> None:
        if not 0 <= start <= stop <= limit:
            raise ValueError(f"positions [{start}, {stop}) are not in the run of {self.tokens} tokens")

    def _parts(self, start: int, stop: int) -> Iterator[_Part]:
        """Yield what each leaf gives, span by span: between two of them its stream may pass over tokens."""
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.end)
            if low < high:
                units = _along(span, span.deal.units(low - span.start, high - span.start))
                for leaf in np.unique(units.leaf).tolist():
                    mine = units.leaf == leaf
                    yield self._part(leaf, Units(*(column[mine] for column in vars(units).values())), low, high)

    def _part(self, leaf: int, units: Units, start: int, stop: int) -> _Part:
        """Return what the units of one leaf give to [start, stop): consecutive units hold consecutive tokens."""
        low, high = np.maximum(units.start, start), np.minimum(units.start + units.size, stop)
        first = int(units.first[0] + low[0] - units.start[0])
        end = int(units.first[-1] + high[-1] - units.start[-1])
        documents = self._streams[leaf].overlapping(first, end)
        cuts = np.union1d(units.first, documents.start)
        cuts = cuts[int(np.searchsorted(cuts, first, "right")) - 1 : int(np.searchsorted(cuts, end, "left"))]
        unit = np.searchsorted(units.first, cuts, "right") - 1
        origins = units.start[unit] + cuts - units.first[unit]
        firsts = np.maximum(cuts, first)
        read = documents[np.searchsorted(documents.start, firsts, "right") - 1]
        lengths = np.diff(np.append(firsts, end))
        return _Part(leaf, read, firsts - read.start, lengths, origins + firsts - cuts, origins)

    def _uses(self, part: _Part, last: int) -> Iterator[DocumentUse]:
        """Yield the stretches of `part` that begin at positions up to `last`."""
        count = int(np.searchsorted(part.positions, last, "right"))
        documents = part.documents[:count]
        labels = (self._streams[part.leaf].labels(name, documents) for name in ("id", *COUNTED))
        numbers = (documents.epoch, part.skipped[:count], (part.skipped + part.lengths - 1)[:count], part.positions)
        for document, *rest in zip(*labels, *(column[:count].tolist() for column in numbers), strict=True):
            yield DocumentUse(document, self.leaves[part.leaf].name, *rest)

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield each leaf with the tokens [first, last) of its stream that lie at positions [start, stop)."""
        self._check_range(start, stop, self.tokens)
        ranges: list[list[tuple[int, int]]] = [[] for _ in self.leaves]
        for span in self.spans:
            low, high = (min(max(position, span.start), span.end) - span.start for position in (start, stop))
            ends = (span.first + span.deal.consumed(low), span.first + span.deal.consumed(high))
            for known, first, last in zip(ranges, *(end.tolist() for end in ends), strict=True):
                if known and known[-1][1] == first:  # a document at the edge of two spans counts once
                    first = known.pop()[0]
                known.append((first, last))
        for leaf, known in enumerate(ranges):
            yield from ((leaf, first, last) for first, last in known)

    def _kind(self, leaf: int) -> int:
        return DOMAINS.index(self.leaves[leaf].domain)


def _along(span: MixPhase, units: Units) -> Units:
    """Return units of a span with their tokens counted along the leaves' whole streams, and positions in the run."""
    return Units(units.leaf, units.first + span.first[units.leaf], units.start + span.start, units.size)


_NOTHING: Ints = np.zeros(0, np.int64)
