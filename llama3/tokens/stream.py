"""The training stream: token i of a run is a pure function of (recipe, token shards, i).

It does not depend on batch size, sequence length, number of ranks or restarts. The run is divided into phases of
constant mix; `MixtureInterleaver` assigns the units of a phase to datasets, and each dataset is an endless stream of
shuffled documents (`SourceStream`) that continues across phases. A document cut at the end of a unit continues in the
dataset's next unit as a new segment. A stage of kind `sft` takes only its replayed tokens from here.
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

from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.interleave import MixtureInterleaver, UnitAssignment
from herd.llama3.tokens.kernels import Ints, fold_window
from herd.llama3.tokens.mix import MixDataset, dataset_shares, mix_datasets
from herd.llama3.tokens.shards import COUNTED, Counts, add_counts, read_index
from herd.llama3.tokens.source_stream import Documents, SourceStream

PAST_END = -1
"""Domain of the token after the run's last token."""
_NOTHING: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True)
class MixPhase:
    """Consecutive stages with equal mix, extra sources and data offset."""

    start: int
    interleaver: MixtureInterleaver
    before: Ints
    """Tokens of each dataset that earlier phases read."""
    first: Ints
    """First token of the phase in each dataset's stream: `before` plus the tokens that phases skipped."""

    @property
    def end(self) -> int:
        return self.start + self.interleaver.tokens

    def identity(self, datasets: Sequence[MixDataset], stop: int) -> dict[str, Any]:
        """Return, as plain data, what determines the tokens of the phase before the position `stop`."""
        columns = zip(datasets, self.interleaver.shares, self.first.tolist(), strict=True)
        mix = {dataset.name: {"share": str(share), "from": first} for dataset, share, first in columns if share}
        settled = stop <= self.start + self.interleaver.fixed_positions
        return {"start": self.start, "end": None if settled else self.end, "mix": mix}


def mix_phases(recipe: Recipe, datasets: Sequence[MixDataset], unit: int) -> Iterator[MixPhase]:
    """Yield the phases of `recipe`; positions are divided into units of `unit` tokens."""

    def phase_key(span: StageSpan) -> tuple[dict[Domain, Fraction], dict[str, Fraction], int, str]:
        # A batch ramp or a longer sequence must not change the order of tokens, so neither is in the key. A stage with
        # `data_offset` is a phase by itself: its offset depends on its own number of tokens.
        stage = span.stage
        shares = {domain: Fraction(share) for domain, share in recipe.mix[stage.mix].items() if share}
        added = {name: Fraction(share) for name, share in stage.extra_sources.items() if share}
        own = bool(stage.data_offset) or stage.kind == "sft"
        return shares, added, stage.data_offset, stage.name if own else ""

    before: Ints = np.zeros(len(datasets), np.int64)
    ahead: Ints = np.zeros(len(datasets), np.int64)
    start = 0
    for (shares, added, draw, _), group in groupby(recipe.schedule.spans, key=phase_key):
        if not (tokens := sum(span.mix_tokens for span in group)):
            continue
        interleaver = MixtureInterleaver(dataset_shares(datasets, shares, added), tokens, unit)
        first = ahead + draw * interleaver.totals
        yield MixPhase(start, interleaver, before, first)
        before, ahead, start = before + interleaver.totals, first + interleaver.totals, start + tokens


@dataclass(frozen=True)
class TokenWindow:
    """The tokens at positions [start, start + n), in s segments; attention stays inside a segment."""

    # Columns are per segment: at 1,000 tokens per document this takes a thousandth of the memory of per-token columns.

    start: int
    tokens: Ints
    """int64[n]."""
    cu_seqlens: Ints
    """int64[s + 1]: index in the window at which each segment begins, and n."""
    origins: Ints
    """int64[s]: position at which each segment begins; the first may begin before the window."""
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
    """A range of one document that is trained on as one segment."""

    document: str
    dataset: str
    source: str
    language: str
    license: str
    epoch: int
    first: int
    """First token of the range, counted in the document (0 is the begin token)."""
    last: int
    """Its last token."""
    position: int
    """Position of the first token in the run."""


@dataclass(frozen=True)
class _DatasetRanges:
    """The tokens that one dataset contributes to a window: p ranges, each of one document and one segment; int64[p]."""

    dataset: int
    documents: Documents
    skipped: Ints
    """First token of the range, counted in its entry of `documents`."""
    lengths: Ints
    positions: Ints
    """Position of that token in the run."""
    origins: Ints
    """Position at which its segment begins."""


class TokenStream:
    """The tokens of a run of `recipe`, from the shards that `tokenize` wrote into `folder`.

    Raises ValueError if the shards do not match the recipe's sources, or a dataset with a share is empty.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.recipe = recipe
        self.datasets = mix_datasets(recipe)
        self.unit = int(recipe.chunk_tokens)
        """Consecutive tokens from one dataset."""
        index = read_index(folder, [dataset.name for dataset in self.datasets])
        self._end_token = int(index["end"])
        chunk = self.unit if recipe.tokens.shuffle == "chunks" else None
        self._streams = [
            SourceStream(dataset.name, folder / dataset.name, index["datasets"][dataset.name], recipe.seed, chunk)
            for dataset in self.datasets
        ]
        self.phases = tuple(mix_phases(recipe, self.datasets, self.unit))
        for dataset, stream, needed in zip(self.datasets, self._streams, self.consumed(self.tokens), strict=True):
            if needed and not stream.tokens:
                field = f"extra_sources.{dataset.source_name}" if dataset.source_name else "mix"
                raise ValueError(
                    f"{field}: the run needs {needed:,} tokens of {dataset.name}, but sources.{dataset.domain} has no "
                    "training document for it; add text, loosen curate, or set its share to 0%"
                )

    @property
    def tokens(self) -> int:
        """Positions of the run, of which stages of kind `sft` count with their replayed tokens only."""
        return self.phases[-1].end if self.phases else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of every dataset: a smaller page cache reloads whole blocks at every batch; 0 if not lazy.

        Prefetching needs about twice as much per dataset, and more for datasets with small shares (see PREFETCH_ROOM).
        """
        return sum(stream.block_bytes for stream in self._streams)

    def read(self, start: int, stop: int) -> TokenWindow:
        """Return the tokens at positions [start, stop); `stop` may be one past the run's end.

        The token past the end (an end token in a separate segment) is only used as the last target. Raises ValueError
        for positions outside the run.
        """
        self._check_range(start, stop, self.tokens + 1)
        tokens = np.empty(stop - start, np.int64)
        tokens[self.tokens - start :] = self._end_token
        bounds = [(_NOTHING, _NOTHING, np.zeros(0, np.int8))]
        for ranges in self._dataset_ranges(start, min(stop, self.tokens)):
            stream = self._streams[ranges.dataset]
            stream.copy(ranges.documents, ranges.skipped, ranges.lengths, ranges.positions - start, tokens)
            kind = DOMAINS.index(self.datasets[ranges.dataset].domain)
            bounds.append((ranges.positions, ranges.origins, np.full(len(ranges.origins), kind, np.int8)))
        if start <= self.tokens < stop:
            end = np.array([self.tokens])
            bounds.append((end, end, np.array([PAST_END], np.int8)))
        positions, origins, kinds = (np.concatenate(columns) for columns in zip(*bounds, strict=True))
        order = np.argsort(positions)
        return TokenWindow(start, tokens, np.append(positions[order], stop) - start, origins[order], kinds[order])

    def sequences(self, begin: int, seq_len: int, count: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return tokens, targets, segments and domains of the tokens at [begin, begin + count x seq_len).

        int64[count, seq_len] each: the target is the next token or IGNORED at the end of a segment; segments are
        numbered from 0 in each sequence; domains are indices in DOMAINS. Raises ValueError as `read`.
        """
        window = self.read(begin, begin + count * seq_len + 1)
        result = window.tokens[:-1], *(np.empty(count * seq_len, np.int64) for _ in range(3))
        fold_window(window.tokens, window.cu_seqlens, window.kinds, seq_len, *result[1:])
        tokens, targets, segments, domains = (column.reshape(count, seq_len) for column in result)
        return tokens, targets, segments, domains

    def documents(self, start: int, stop: int, limit: int | None = None) -> list[DocumentUse]:
        """Return the document ranges at positions [start, stop) in order, at most `limit` of them."""
        self._check_range(start, stop, self.tokens)
        dataset_ranges = list(self._dataset_ranges(start, stop))
        positions = np.sort(np.concatenate([_NOTHING, *(ranges.positions for ranges in dataset_ranges)]))[:limit]
        last = int(positions.max(initial=0))
        uses = []
        for ranges in dataset_ranges:
            count = int(np.searchsorted(ranges.positions, last, "right"))
            documents = ranges.documents[:count]
            labels = (self._streams[ranges.dataset].labels(name, documents) for name in ("id", *COUNTED))
            firsts = ranges.documents.begin + ranges.skipped
            ends = firsts + ranges.lengths - 1
            numbers = (column[:count].tolist() for column in (documents.epoch, firsts, ends, ranges.positions))
            for document, *values in zip(*labels, *numbers, strict=True):
                uses.append(DocumentUse(document, self.datasets[ranges.dataset].name, *values))
        return sorted(uses, key=lambda use: use.position)

    def planned(self, start: int, stop: int) -> dict[str, Fraction]:
        """Return the exact number of tokens of each domain that the recipe plans for positions [start, stop)."""
        planned: dict[str, Fraction] = {dataset.domain: Fraction(0) for dataset in self.datasets}
        for dataset, tokens in zip(self.datasets, self._planned(start, stop), strict=True):
            planned[dataset.domain] += tokens
        return planned

    def planned_sources(self, start: int, stop: int) -> dict[str, Fraction]:
        """Return the same by source ("domain/source"); the pooled sources of a domain count in proportion to tokens."""
        planned: dict[str, Fraction] = {}
        for dataset, stream, dataset_tokens in zip(
            self.datasets, self._streams, self._planned(start, stop), strict=True
        ):
            for name, (tokens, _) in stream.by["source"].items():
                key = f"{dataset.domain}/{name}"
                planned[key] = planned.get(key, Fraction(0)) + dataset_tokens * Fraction(tokens, stream.tokens)
        return planned

    def _planned(self, start: int, stop: int) -> list[Fraction]:
        """Return the tokens of each dataset that the recipe plans for positions [start, stop)."""
        planned = [Fraction(0)] * len(self.datasets)
        for phase in self.phases:
            overlap = max(0, min(stop, phase.end) - max(start, phase.start))
            planned = [
                tokens + share * overlap for tokens, share in zip(planned, phase.interleaver.shares, strict=True)
            ]
        return planned

    def realized(self, position: int) -> dict[str, int]:
        """Return the tokens of each domain at positions [0, `position`), computed without reading tokens."""
        totals: dict[str, int] = {dataset.domain: 0 for dataset in self.datasets}
        for dataset, count in zip(self.datasets, self.consumed(position), strict=True):
            totals[dataset.domain] += int(count)
        return totals

    def sources(self, start: int, stop: int) -> dict[str, int]:
        """Return the tokens of each source ("domain/source") at positions [start, stop), counted from the index.

        Pooled sources are counted from the shards' tables: 0.1 s per million documents, a fifth of that once the tables
        are in memory; whole epochs are free. So request only new positions and sum the results.
        """
        totals: dict[str, int] = {}
        for dataset, first, last in self._ranges(start, stop):
            domain, stream = self.datasets[dataset].domain, self._streams[dataset]
            for name in stream.by["source"]:
                totals.setdefault(f"{domain}/{name}", 0)
            if len(stream.by["source"]) == 1:
                totals[f"{domain}/{next(iter(stream.by['source']))}"] += last - first
                continue
            for name, (tokens, _) in stream.tally(["source"], first, last)["source"].items():
                totals[f"{domain}/{name}"] += tokens
        return totals

    def tally(self, columns: list[str], start: int, stop: int) -> dict[Domain, dict[str, Counts]]:
        """Return [tokens, documents] of positions [start, stop) by domain, table column and value.

        A document counts once per epoch in which any of it is read.
        """
        totals: dict[Domain, dict[str, Counts]] = {}
        for dataset, first, last in self._ranges(start, stop):
            domain_totals = totals.setdefault(self.datasets[dataset].domain, {column: {} for column in columns})
            for column, values in self._streams[dataset].tally(columns, first, last).items():
                for value, counts in values.items():
                    add_counts(domain_totals[column], value, counts)
        return totals

    def epochs(self, position: int) -> dict[str, float]:
        """Return the epochs of each dataset at `position` (a pooled domain is the dataset named after it)."""
        pairs = zip(self._streams, self.consumed(position), strict=True)
        return {stream.name: float(count / stream.tokens) if stream.tokens else 0.0 for stream, count in pairs}

    def consumed(self, position: int) -> Ints:
        """Return the tokens of each dataset, int64[datasets], at positions [0, `position`)."""
        self._check_range(0, position, self.tokens)
        phase = next((phase for phase in reversed(self.phases) if phase.start <= position), None)
        if phase is None:  # conversations alone
            return np.zeros(len(self.datasets), np.int64)
        return phase.before + phase.interleaver.consumed(position - phase.start)

    def identity(self, start: int, stop: int) -> dict[str, Any]:
        """Return, as plain data, everything but the shards that determines the tokens at positions [start, stop).

        Two recipes with equal identities train on the same tokens there. The recipe after `stop` is left out unless it
        moves a unit before `stop` (the last units of a mix depend on where the mix ends).
        """
        phases = [
            phase.identity(self.datasets, stop) for phase in self.phases if phase.start < stop and phase.end > start
        ]
        shuffle = self.recipe.tokens.model_dump(include={"shuffle"})  # empty by default
        return {"seed": self.recipe.seed, "unit": self.unit, **shuffle, "spans": phases}

    def check(self) -> None:
        """Raise ValueError, one line per dataset that the run would read more than `tokens.max_epochs` times."""
        limit = self.recipe.tokens.max_epochs
        faults = []
        for dataset, stream, needed in zip(self.datasets, self._streams, self.consumed(self.tokens), strict=True):
            if needed > limit * stream.tokens:
                field = f"sources.{dataset.domain}" + (
                    "" if dataset.source_index is None else f".{dataset.source_index}"
                )
                shares = "extra_sources" if dataset.source_name else "mix"
                faults.append(
                    f"tokens.max_epochs: the run takes {needed:,} tokens from {field}, which holds {stream.tokens:,}: "
                    f"{needed / stream.tokens:.2f} epochs, at most {limit:g}; add text there, lower its share in "
                    f"{shares}, shorten the run, or raise tokens.max_epochs"
                )
        if faults:
            raise ValueError("\n".join(faults))

    def overlapping_offsets(self) -> list[str]:
        """Return a line per dataset too short for its data offset: the stage repeats documents of earlier offsets."""
        lines, ahead = [], np.zeros(len(self.datasets), np.int64)
        for phase in self.phases:
            skipped, ahead = phase.first - ahead, phase.first + phase.interleaver.totals
            for stream, offset, end in zip(self._streams, skipped.tolist(), ahead.tolist(), strict=True):
                if offset and end > stream.tokens:
                    lines.append(
                        f"{stream.name} holds {stream.tokens:,} tokens, and this data offset ends at {end:,}: it "
                        "shares documents with earlier ones; add text, or lower data_offset"
                    )
        return lines

    def _check_range(self, start: int, stop: int, limit: int) -> None:
        if not 0 <= start <= stop <= limit:
            raise ValueError(f"positions [{start}, {stop}) are not in the run of {self.tokens} tokens")

    def _dataset_ranges(self, start: int, stop: int) -> Iterator[_DatasetRanges]:
        """Yield the ranges of each dataset, phase by phase, because a dataset may skip tokens between two phases."""
        for phase in self.phases:
            low, high = max(start, phase.start), min(stop, phase.end)
            if low < high:
                units = phase.interleaver.units(low - phase.start, high - phase.start)
                # Count tokens along the dataset's whole stream, and positions in the run.
                first, position = units.first + phase.first[units.dataset], units.start + phase.start
                for dataset in np.unique(units.dataset).tolist():
                    own = units.dataset == dataset
                    dataset_units = UnitAssignment(units.dataset[own], first[own], position[own], units.size[own])
                    yield self._ranges_of(dataset, dataset_units, low, high)

    def _ranges_of(self, dataset: int, units: UnitAssignment, start: int, stop: int) -> _DatasetRanges:
        """Return the ranges of one dataset at [start, stop): its consecutive units hold consecutive tokens."""
        low, high = np.maximum(units.start, start), np.minimum(units.start + units.size, stop)
        first = int(units.first[0] + low[0] - units.start[0])
        end = int(units.first[-1] + high[-1] - units.start[-1])
        documents = self._streams[dataset].overlapping(first, end)
        cuts = np.union1d(units.first, documents.start)
        cuts = cuts[int(np.searchsorted(cuts, first, "right")) - 1 : int(np.searchsorted(cuts, end, "left"))]
        unit = np.searchsorted(units.first, cuts, "right") - 1
        origins = units.start[unit] + cuts - units.first[unit]
        firsts = np.maximum(cuts, first)
        read = documents[np.searchsorted(documents.start, firsts, "right") - 1]
        lengths = np.diff(np.append(firsts, end))
        return _DatasetRanges(dataset, read, firsts - read.start, lengths, origins + firsts - cuts, origins)

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield each dataset with the tokens [first, last) of its stream that lie at positions [start, stop)."""
        self._check_range(start, stop, self.tokens)
        ranges: list[list[tuple[int, int]]] = [[] for _ in self.datasets]
        for phase in self.phases:
            low, high = (min(max(position, phase.start), phase.end) - phase.start for position in (start, stop))
            ends = (phase.first + phase.interleaver.consumed(low), phase.first + phase.interleaver.consumed(high))
            for dataset_ranges, first, last in zip(ranges, *(end.tolist() for end in ends), strict=True):
                if dataset_ranges and dataset_ranges[-1][1] == first:  # count a document at the edge of two phases once
                    first = dataset_ranges.pop()[0]
                dataset_ranges.append((first, last))
        for dataset, dataset_ranges in enumerate(ranges):
            yield from ((dataset, first, last) for first, last in dataset_ranges)
