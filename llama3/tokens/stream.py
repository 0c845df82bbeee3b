"""The training stream: token i of a run as a pure function of (recipe, token shards, i).

Batch size, sequence length, number of ranks and restarts do not appear in that sentence, so none of them can repeat,
skip or reorder a token. The run is cut into spans where the mix changes; in a span, units of positions are dealt to
leaves (`deal.py`); each leaf is an endless stream of shuffled documents (`leaf.py`) that goes on from span to span.
A document cut at a unit's edge goes on in the leaf's next unit as a segment of its own. What this gives up: documents
are not packed to fit sequences, so one is cut at every unit's edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS, Domain
from llama3.tokens.deal import Ints, Units
from llama3.tokens.leaf import Documents, LeafStream, ramps
from llama3.tokens.mix import leaves_of
from llama3.tokens.shards import read_index
from llama3.tokens.spans import mix_spans


@dataclass(frozen=True)
class Window:
    """The tokens at positions [start, start + n)."""

    start: int
    tokens: Ints
    """int64[n]."""
    segments: Ints
    """int64[n]: position at which the token's segment starts; attention stays inside a segment."""
    domains: npt.NDArray[np.int8]
    """int8[n]: index in DOMAINS; -1 past the end of the run."""


class DocumentUse(NamedTuple):
    """A stretch of one document that is trained on as one segment."""

    document: str
    leaf: str
    epoch: int
    first: int
    """First token of the stretch, counted in the document (0 is the begin token)."""
    last: int
    """Its last token."""
    position: int
    """Position of the first token in the run."""


@dataclass(frozen=True)
class _Part:
    """What one leaf gives to a window: its tokens [first, stop), cut into segments."""

    leaf: int
    first: int
    stop: int
    places: Ints
    """Place in the window of each token."""
    segments: Ints
    """First token of each segment, counted along the leaf; the first segment may begin before `first`."""
    positions: Ints
    """Position of that token."""
    documents: Documents

    @property
    def lengths(self) -> Ints:
        """Tokens of each segment inside the window."""
        return np.diff(np.append(np.maximum(self.segments, self.first), self.stop))


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
        dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self._streams = [
            LeafStream(leaf.name, folder / leaf.name, index["leaves"][leaf.name]["shards"], dtype, recipe.seed)
            for leaf in self.leaves
        ]
        self.spans = tuple(mix_spans(recipe, self.leaves, self.unit))
        self._refuse_empty()

    @property
    def tokens(self) -> int:
        """Positions of the run."""
        return self.spans[-1].end

    def read(self, start: int, stop: int) -> Window:
        """Return the tokens at positions [start, stop); `stop` may be one past the run's end.

        The token there (an end token in a segment of its own) only serves as the last target. Raises ValueError for
        positions outside the run.
        """
        self._check_range(start, stop, self.tokens + 1)
        tokens = np.full(stop - start, self._end_token, np.int64)
        segments = np.full(stop - start, self.tokens, np.int64)
        domains = np.full(stop - start, -1, np.int8)
        for part in self._parts(start, min(stop, self.tokens)):
            tokens[part.places] = self._streams[part.leaf].read(part.first, part.stop, part.documents)
            segments[part.places] = np.repeat(part.positions, part.lengths)
            domains[part.places] = DOMAINS.index(self.leaves[part.leaf].domain)
        return Window(start, tokens, segments, domains)

    def documents(self, start: int, stop: int) -> list[DocumentUse]:
        """Return which stretches of which documents lie at positions [start, stop), in that order."""
        self._check_range(start, stop, self.tokens)
        uses = [use for part in self._parts(start, stop) for use in self._uses(part)]
        return sorted(uses, key=lambda use: use.position)

    def planned(self, start: int, stop: int) -> dict[Domain, Fraction]:
        """Return the tokens of each domain that the recipe asks for at positions [start, stop), exactly."""
        asked = {leaf.domain: Fraction(0) for leaf in self.leaves}
        for span in self.spans:
            overlap = max(0, min(stop, span.end) - max(start, span.start))
            for domain, share in span.shares.items():
                asked[domain] += share * overlap
        return asked

    def realised(self, position: int) -> dict[Domain, int]:
        """Return the tokens of each domain at positions [0, `position`), counted without reading them."""
        totals = {leaf.domain: 0 for leaf in self.leaves}
        for leaf, count in zip(self.leaves, self.consumed(position), strict=True):
            totals[leaf.domain] += int(count)
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
                faults.append(
                    f"tokens.max_epochs: the run takes {asked:,} tokens from {field}, which holds {stream.tokens:,}: "
                    f"{asked / stream.tokens:.2f} epochs, at most {limit:g}; add text there, lower its share in mix, "
                    "shorten the run, or raise tokens.max_epochs"
                )
        if faults:
            raise ValueError("\n".join(faults))

    def _refuse_empty(self) -> None:
        for leaf, stream, asked in zip(self.leaves, self._streams, self.consumed(self.tokens), strict=True):
            if asked and not stream.tokens:
                raise ValueError(
                    f"mix: {asked:,} tokens of {leaf.name} asked, but sources.{leaf.domain} gave it no training "
                    "document; add text, loosen curate, or set its share to 0%"
                )

    def _check_range(self, start: int, stop: int, limit: int) -> None:
        if not 0 <= start <= stop <= limit:
            raise ValueError(f"positions [{start}, {stop}) are not in the run of {self.tokens} tokens")

    def _units(self, start: int, stop: int) -> Units:
        """Return the units, whole, that overlap [start, stop), their tokens counted along the leaves' whole streams."""
        found = []
        for span in self.spans:
            low, high = max(start, span.start), min(stop, span.end)
            if low < high:
                units = span.deal.units(low - span.start, high - span.start)
                first = units.first + span.before[units.leaf]
                found.append((units.leaf, first, units.start + span.start, units.size))
        return Units(*(np.concatenate(columns) for columns in zip(*found, strict=True)))

    def _parts(self, start: int, stop: int) -> Iterator[_Part]:
        if start >= stop:
            return
        units = self._units(start, stop)
        for leaf in np.unique(units.leaf).tolist():
            mine = units.leaf == leaf
            yield self._part(leaf, Units(*(column[mine] for column in vars(units).values())), start, stop)

    def _part(self, leaf: int, units: Units, start: int, stop: int) -> _Part:
        """Return what the units of one leaf give to [start, stop): consecutive units hold consecutive tokens."""
        low, high = np.maximum(units.start, start), np.minimum(units.start + units.size, stop)
        first = int(units.first[0] + low[0] - units.start[0])
        end = int(units.first[-1] + high[-1] - units.start[-1])
        documents = self._streams[leaf].documents(first, end)
        cuts = np.union1d(units.first, documents.start)
        cuts = cuts[int(np.searchsorted(cuts, first, "right")) - 1 : int(np.searchsorted(cuts, end, "left"))]
        unit = np.searchsorted(units.first, cuts, "right") - 1
        positions = units.start[unit] + cuts - units.first[unit]
        return _Part(leaf, first, end, ramps(low - start, high - low), cuts, positions, documents)

    def _uses(self, part: _Part) -> Iterator[DocumentUse]:
        firsts = np.maximum(part.segments, part.first)
        number = np.searchsorted(part.documents.start, firsts, "right") - 1
        begin = firsts - part.documents.start[number]
        names = self._streams[part.leaf].ids(part.documents.row[number])
        columns = (
            part.documents.epoch[number],
            begin,
            begin + part.lengths - 1,
            part.positions + firsts - part.segments,
        )
        for name, *rest in zip(names, *(column.tolist() for column in columns), strict=True):
            yield DocumentUse(name, self.leaves[part.leaf].name, *rest)
