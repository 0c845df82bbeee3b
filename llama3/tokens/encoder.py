"""Text to ids, many texts at a time: gigatoken where its ids are proven equal (parity.py), tiktoken otherwise.

Both get the same pieces (a run of blanks is cut after 100,000 of them) and neither knows a special token, so no text
can produce one. The flat form is what a shard writer wants: one array of ids, one of offsets, no Python integer. On
one core gigatoken makes 20-45 million tokens per second (slower while words are new), tiktoken 3, `tokenizers` 0.5.
What gigatoken gives up: work on one instance is serial, so with `threads` it takes the library's own pool, one thread
per core of the machine.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from importlib.metadata import version
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tiktoken
from numpy.typing import NDArray

from llama3.tokens.huggingface import byte_level_json
from llama3.tokens.vocabulary import PATTERN

Ids = NDArray[np.uint32]
Flat = tuple[Ids, NDArray[np.int64]]
"""Ids of all texts (uint32[n]) and where each text begins among them (int64[texts + 1])."""
LONGEST_SPACE = 100_000
"""tiktoken's regular expressions give up on about a million blanks in a row; text is cut after this many."""
RENEWED_AFTER = 2**29
"""Bytes of text after which gigatoken is built anew (0.2-0.7 s): it keeps every distinct word it has met, without end.

72 MB of real text cost 0.1 GB, 500 MB of random words 5 GB.
"""
BLANKS = re.compile(r"\s+")


class Encoder(Protocol):
    """Turns texts into base ids. A subclass needs `version` and `encode_pieces`."""

    def __init__(self, base: Sequence[bytes]) -> None: ...

    @staticmethod
    def version() -> str:
        """Return library and version, on which the ids may depend. Raises ImportError if it is not installed."""
        ...

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        """Return ids and offsets of `texts` (large_string, no null, no endless run of blanks)."""
        ...

    def encode_flat(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> Flat:
        """Return the ids of all texts, one after another, and len(texts) + 1 offsets into them."""
        array = text_array(texts)
        pieces, ends = _cut(array)
        ids, offsets = self.encode_pieces(pieces, threads)
        return ids, offsets if ends is None else offsets[ends]

    def encode_batch(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> list[Ids]:
        """Return the ids of each text (views of one array)."""
        ids, offsets = self.encode_flat(texts, threads=threads)
        return [ids[start:stop] for start, stop in pairwise(offsets.tolist())]


class TiktokenEncoder(Encoder):
    """The reference: every other encoder must equal it."""

    def __init__(self, base: Sequence[bytes]) -> None:
        self._base = base

    @cached_property
    def _encoding(self) -> Any:
        ranks = {token: rank for rank, token in enumerate(self._base)}
        return tiktoken.Encoding("herd", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    @staticmethod
    def version() -> str:
        return f"tiktoken {version('tiktoken')}"

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        cuts = [0, *blank_cuts(text), len(text)]
        ids: list[int] = []
        for start, stop in pairwise(cuts):
            ids += self._encoding.encode_ordinary(text[start:stop])
        return ids

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        pieces = texts.to_pylist()
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                parts = list(pool.map(self._ids, pieces))
        else:
            parts = [self._ids(piece) for piece in pieces]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return np.concatenate([np.empty(0, np.uint32), *parts]), offsets

    def _ids(self, text: str) -> Ids:
        return np.array(self._encoding.encode_ordinary(text), np.uint32)


class GigatokenEncoder(Encoder):
    """gigatoken on Arrow buffers. Built from a vocabulary without added tokens: with them, text could spell one.

    Version 0.10 cuts by Unicode 17, tiktoken 0.14 by Unicode 16: digits added since then come out otherwise. So a text
    with a code point that this Python does not know as assigned (Unicode 14 to 15.1, older than both) goes to tiktoken;
    finding them costs 2 ms per megabyte.
    """

    def __init__(self, base: Sequence[bytes]) -> None:
        import awkward
        import gigatoken

        self._from_arrow, self._from_json = awkward.from_arrow, gigatoken.Tokenizer.from_json
        # Its reader of tiktoken files panics on tokens that are not a merge of two others, as the published
        # vocabulary has; the Hugging Face form spells every merge out.
        self._vocabulary = byte_level_json(base, PATTERN)
        self._reference = TiktokenEncoder(base)
        self._renew()

    @staticmethod
    def version() -> str:
        return f"gigatoken {version('gigatoken')}"

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        if not len(texts):
            return np.empty(0, np.uint32), np.zeros(1, np.int64)
        new = pc.match_substring_regex(texts, unassigned())
        if not pc.any(new).as_py():
            return self._encode(texts, threads)
        known = self._encode(pc.if_else(new, pa.scalar("", pa.large_string()), texts), threads)
        return _replaced(known, np.flatnonzero(new), self._reference.encode_pieces(texts.filter(new), threads))

    def _renew(self) -> None:
        self._tokenizer, self._seen = self._from_json(self._vocabulary), 0

    def _encode(self, texts: pa.Array, threads: int) -> Flat:
        if self._seen > RENEWED_AFTER:
            self._renew()
        self._seen += texts.nbytes
        # None lets the library choose: its thread pool, but never in a forked process, where the pool would hang.
        layout = self._tokenizer.encode_batch(self._from_arrow(texts), parallel=None if threads > 1 else False).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data)


def _replaced(flat: Flat, rows: NDArray[np.int64], others: Flat) -> Flat:
    """Return `flat` with the texts of `rows`, empty there, put in from `others`."""
    (ids, offsets), (more, bounds) = flat, others
    parts: list[Ids] = []
    for place, (start, stop) in enumerate(pairwise([0, *rows.tolist(), len(offsets) - 1])):
        parts += [ids[offsets[start] : offsets[stop]], more[bounds[place] : bounds[min(place + 1, len(rows))]]]
    lengths = np.diff(offsets)
    lengths[rows] = np.diff(bounds)
    return np.concatenate(parts), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


@cache
def unassigned() -> str:
    """Return a regular expression for the code points that Python's Unicode table does not know (0.2 s, once)."""
    points = sys.maxunicode + 1
    new = np.zeros(points + 2, np.int8)
    new[1:-1] = np.fromiter((unicodedata.category(chr(point)) == "Cn" for point in range(points)), np.int8, points)
    edges = np.flatnonzero(np.diff(new))
    return "[" + "".join(f"\\x{{{first:X}}}-\\x{{{after - 1:X}}}" for first, after in edges.reshape(-1, 2)) + "]"


def text_array(texts: pa.Array | Sequence[str]) -> pa.Array:
    """Return `texts` as large_string; unpaired surrogates become U+FFFD. Raises ValueError if one is null."""
    if not isinstance(texts, pa.Array):
        try:
            texts = pa.array(texts, pa.large_string())
        except UnicodeEncodeError:
            texts = pa.array([_paired(text) for text in texts], pa.large_string())
    if texts.null_count:
        raise ValueError(f"text: {texts.null_count} of {len(texts)} texts are null; write them as empty strings")
    return texts.cast(pa.large_string())


def blank_cuts(text: str) -> Iterator[int]:
    """Yield the places where `text` is cut: after each 100,000 blanks of one run.

    Any such run covers one of the characters looked at, so ordinary text costs a look at each 100,000th.
    """
    floor = 0
    for probe in range(LONGEST_SPACE - 1, len(text), LONGEST_SPACE):
        if probe >= floor and text[probe].isspace():
            start = floor + len(text[floor:probe].rstrip())
            floor = _blanks_end(text, start)
            yield from range(start + LONGEST_SPACE, floor + 1, LONGEST_SPACE)
        floor = max(floor, probe + 1)


def _blanks_end(text: str, start: int) -> int:
    found = BLANKS.match(text, start)
    return found.end() if found else start


def _cut(array: pa.Array) -> tuple[pa.Array, NDArray[np.int64] | None]:
    """Return the pieces of all texts and, if any was cut, how many pieces end before each text and after the last."""
    if not len(array):
        return array, None
    sizes = np.diff(np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1])
    cuts = {int(row): list(blank_cuts(array[int(row)].as_py())) for row in np.flatnonzero(sizes > LONGEST_SPACE)}
    if not any(cuts.values()):
        return array, None
    pieces: list[str] = []
    ends = [0]
    for row, text in enumerate(array.to_pylist()):
        pieces += (text[start:stop] for start, stop in pairwise([0, *cuts.get(row, []), len(text)]))
        ends.append(len(pieces))
    return pa.array(pieces, pa.large_string()), np.array(ends)


def _paired(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
