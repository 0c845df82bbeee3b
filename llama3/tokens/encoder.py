"""Text to ids, many texts at a time: gigatoken where its ids are proven equal (parity.py), tiktoken otherwise.

Both get the same pieces (a run of blanks is cut after 100,000 of them) and neither knows a special token, so no text
can produce one. The flat form is what a shard writer wants: one array of ids, one of offsets, no Python integer. On
one core gigatoken makes 20-45 million tokens per second (slower while words are new), tiktoken 3, `tokenizers` 0.5.
What gigatoken gives up: work on one instance is serial, so with `threads` it takes the library's own pool, one thread
per core of the machine.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tiktoken
from numpy.typing import NDArray

from llama3.tokens.adversarial_strings import hostile
from llama3.tokens.hf_tokenizer import byte_level_json
from llama3.tokens.vocabulary import PATTERN
from storage.filesystem import cache_folder, write_atomic

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


# The gate before a fast encoder: its ids must equal tiktoken's, or tiktoken encodes.
#
# A tokenizer that is wrong on one document in a thousand gives no error, only a slightly worse model. So a fast
# encoder is compared on text of the corpus and on more than 30,000 hostile strings, alone and joined to long texts,
# once per tokenizer, library version and machine (code for another processor is other code). The verdict is kept in
# the user's cache. It costs about a second, and what it gives up is proof: equality on these strings is strong
# evidence, no more.

GATE_VERSION = 1
"""Raise it when the strings change: old verdicts are then not believed."""
SAMPLE_CHARACTERS = 2_000_000
"""Text of the corpus that is compared, at most."""
JOINED = 200
"""Hostile strings per long text."""
SHOWN = 120
"""Characters of a differing text that a warning shows."""


class RankedVocabulary(Protocol):
    """What the choice of an encoder needs of a tokenizer."""

    @property
    def base(self) -> Sequence[bytes]: ...
    @property
    def digest(self) -> str: ...


def encoder_for(
    tokenizer: RankedVocabulary, texts: pa.Array | Sequence[str] = (), fast: type[Encoder] = GigatokenEncoder
) -> Encoder:
    """Return an encoder of type `fast` if its ids are those of tiktoken, else tiktoken's.

    `texts` are of the corpus; about 2 MB of them, spread evenly, are compared if no verdict is stored. A library that
    is not installed is passed over in silence, one that differs with a warning that shows the first text.
    """
    reference = TiktokenEncoder(tokenizer.base)
    try:
        subject = _subject(tokenizer.digest, fast.version(), reference.version())
        verdict = _stored(subject)
        if verdict is None or verdict["differs"] is None:
            candidate = fast(tokenizer.base)
    except ImportError:
        return reference
    if verdict is None:
        verdict = {**subject, "differs": first_difference(candidate, reference, texts)}
        _store(subject, verdict)
    if verdict["differs"] is None:
        return candidate
    warnings.warn(
        f"{subject['library']} is not used, tiktoken encodes (slower, right): {verdict['differs']}", stacklevel=2
    )
    return reference


def first_difference(candidate: Encoder, reference: Encoder, texts: pa.Array | Sequence[str] = ()) -> str | None:
    """Return what `candidate` does wrong on the first text where its ids are not those of `reference`, or None."""
    strings = list(hostile())
    joined = ("".join(strings[start : start + JOINED]) for start in range(0, len(strings), JOINED))
    for kind, group in (("hostile string", strings), ("joined strings", joined), ("text", _sample(texts))):
        differs = _compare(candidate, reference, text_array(list(group)))
        if differs is not None:
            return f"{kind} {differs}"
    return None


def _compare(candidate: Encoder, reference: Encoder, texts: pa.Array) -> str | None:
    expected, bounds = reference.encode_flat(texts)
    try:
        ids, offsets = candidate.encode_flat(texts)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        return f"fails: {error!r}"[:SHOWN]
    if np.array_equal(offsets, bounds) and np.array_equal(ids, expected):
        return None
    for row, text in enumerate(texts.to_pylist()):
        right = expected[bounds[row] : bounds[row + 1]]
        if not np.array_equal(ids[offsets[row] : offsets[row + 1]], right):
            return f"differs on {repr(_halved(candidate, reference, text))[:SHOWN]}"
    return "returns wrong offsets"


def _halved(candidate: Encoder, reference: Encoder, text: str) -> str:
    """Return the part of `text` that is left when halves on which the encoders agree are thrown away."""
    while True:
        halves = [text[: len(text) // 2], text[len(text) // 2 :]]
        pairs = zip(halves, candidate.encode_batch(halves), reference.encode_batch(halves), strict=True)
        wrong = [half for half, ids, expected in pairs if half != text and not np.array_equal(ids, expected)]
        if not wrong:
            return text
        text = wrong[0]


def _sample(texts: pa.Array | Sequence[str]) -> Iterator[str]:
    """Yield texts at even distances, about SAMPLE_CHARACTERS in all."""
    array = text_array(texts)
    step = max(1, -(-array.nbytes // SAMPLE_CHARACTERS))
    left = SAMPLE_CHARACTERS
    for row in range(0, len(array), step):
        if left <= 0:
            return
        text = array[row].as_py()[:left]
        left -= len(text)
        yield text


def _subject(digest: str, library: str, reference: str) -> dict[str, Any]:
    """Return all that a verdict holds for."""
    return {
        "gate": GATE_VERSION,
        "tokenizer": digest,
        "library": library,
        "reference": reference,
        "machine": [platform.system(), platform.machine(), _processor(), platform.python_version()],
    }


@cache
def _processor() -> str:
    """Return the processor's name and a digest of its features, by which libraries choose their code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    about: Iterable[str] = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    named = [line.split(":", 1)[1].strip() for line in about if line.startswith("model name")]
    return f"{' '.join(named)} {hashlib.sha256(chr(10).join(about).encode()).hexdigest()[:8]}".strip()


def _path(subject: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "parity" / f"{key[:32]}.json"


def _stored(subject: dict[str, Any]) -> dict[str, Any] | None:
    try:
        verdict = json.loads(_path(subject).read_text())
    except (OSError, ValueError):
        return None
    return (
        verdict if isinstance(verdict, dict) and subject.items() <= verdict.items() and "differs" in verdict else None
    )


def _store(subject: dict[str, Any], verdict: dict[str, Any]) -> None:
    try:
        write_atomic(_path(subject), json.dumps(verdict, indent=2) + "\n")
    except OSError as error:
        warnings.warn(f"the verdict on {subject['library']} cannot be kept ({error}); set XDG_CACHE_HOME", stacklevel=3)
