"""Encode batches of texts: with gigatoken if its ids pass the parity check against a reference, else with that.

The reference is tiktoken for the Llama 3 format, `tokenizers` for other tokenizers. No encoder knows special tokens, so
no text can produce one. The result is one array of ids and one of offsets. On one core gigatoken encodes 20-45 million
tokens per second, tiktoken 3 million, `tokenizers` 0.5 million.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import unicodedata
import warnings
from abc import abstractmethod
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
from tokenizers import Tokenizer as HuggingFaceTokenizer

from herd.llama3.tokens.adversarial_strings import adversarial_strings
from herd.llama3.tokens.hf_tokenizer import byte_level_json
from herd.llama3.tokens.vocabulary import PATTERN
from herd.storage.filesystem import cache_folder, write_atomic

Ids = NDArray[np.uint32]
Flat = tuple[Ids, NDArray[np.int64]]
"""Ids of all texts (uint32[n]) and where each text begins among them (int64[texts + 1])."""
Vocabulary = Sequence[bytes] | str
"""The tokens of all ranks in the Llama 3 format, or a `tokenizer.json` without special tokens."""
LONGEST_SPACE = 100_000
"""Longest run of blanks in a piece of text; tiktoken's regular expression fails on about a million blanks."""
RENEWED_AFTER = 2**29
"""Bytes of text after which gigatoken is rebuilt (0.2-0.7 s), because its cache of words grows without limit.

72 MB of real text cost 0.1 GB, 500 MB of random words 5 GB.
"""
BLANKS = re.compile(r"\s+")
PICTURES = (0x1F300, 0x1FAFF)
"""Code points that are symbols or reserved for them, so that split patterns treat known and unknown ones alike."""
GATE_VERSION = 1
"""Version of the parity check; raise it when the test strings change, to invalidate stored verdicts."""
SAMPLE_CHARACTERS = 2_000_000
"""Largest number of characters of the corpus that the check encodes."""
JOINED = 200
"""Adversarial strings per long text."""
SHOWN = 120
"""Characters of a differing text that a warning shows."""


class Encoder(Protocol):
    """Encodes texts as ids of text. A subclass implements `version` and `encode_pieces`."""

    def __init__(self, vocabulary: Any) -> None: ...

    @staticmethod
    def version() -> str:
        """Return library name and version. Raises ImportError if the library is not installed."""
        ...

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        """Return ids and offsets of `texts` (large_string, no nulls, blank runs of at most LONGEST_SPACE)."""
        ...

    def encode_flat(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> Flat:
        """Return the concatenated ids of all texts and len(texts) + 1 offsets into them."""
        pieces, ends = _split_blank_runs(text_array(texts))
        ids, offsets = self.encode_pieces(pieces, threads)
        return ids, offsets if ends is None else offsets[ends]

    def encode_batch(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> list[Ids]:
        """Return the ids of each text (views of one array)."""
        ids, offsets = self.encode_flat(texts, threads=threads)
        return [ids[start:stop] for start, stop in pairwise(offsets.tolist())]


class ReferenceEncoder(Encoder):
    """The ids of every other encoder must equal its ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        ids: list[int] = []
        for start, stop in pairwise([0, *blank_cuts(text), len(text)]):
            ids += self._encode_piece(text[start:stop])
        return ids

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of one text, and the character in which each begins."""
        ids: list[int] = []
        starts: list[int] = []
        for start, stop in pairwise([0, *blank_cuts(text), len(text)]):
            tokens, offsets = self._starts(text[start:stop])
            ids += tokens
            starts += [start + offset for offset in offsets]
        return ids, starts

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        def encode(text: str) -> Ids:
            return np.array(self._encode_piece(text), np.uint32)

        pieces = texts.to_pylist()
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                arrays = list(pool.map(encode, pieces))
        else:
            arrays = [encode(piece) for piece in pieces]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        return np.concatenate([np.empty(0, np.uint32), *arrays]), offsets

    @abstractmethod
    def _encode_piece(self, text: str) -> list[int]: ...
    @abstractmethod
    def _starts(self, text: str) -> tuple[list[int], list[int]]: ...


class TiktokenEncoder(ReferenceEncoder):
    """The reference for tokenizers in the Llama 3 format."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._base = vocabulary

    @cached_property
    def _encoding(self) -> Any:
        ranks = {token: rank for rank, token in enumerate(self._base)}
        return tiktoken.Encoding("herd", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    @staticmethod
    def version() -> str:
        return f"tiktoken {version('tiktoken')}"

    def _encode_piece(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def _starts(self, text: str) -> tuple[list[int], list[int]]:
        ids = self._encode_piece(text)
        sizes = np.array([len(self._base[token]) for token in ids], np.int64)
        ends = np.cumsum([len(character.encode("utf-8", "replace")) for character in paired(text)])
        return ids, np.searchsorted(ends, np.cumsum(sizes) - sizes, "right").tolist()


class HuggingFaceEncoder(ReferenceEncoder):
    """The reference for other byte-level BPE tokenizers: the `tokenizers` library."""

    def __init__(self, vocabulary: str) -> None:
        self._document = vocabulary

    @cached_property
    def _encoding(self) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer.from_str(self._document)

    @staticmethod
    def version() -> str:
        return f"tokenizers {version('tokenizers')}"

    def _encode_piece(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode(paired(text), add_special_tokens=False).ids
        return ids

    def _starts(self, text: str) -> tuple[list[int], list[int]]:
        encoding = self._encoding.encode(paired(text), add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]


def reference_encoder(vocabulary: Vocabulary) -> ReferenceEncoder:
    """Return the reference for `vocabulary`."""
    return HuggingFaceEncoder(vocabulary) if isinstance(vocabulary, str) else TiktokenEncoder(vocabulary)


class GigatokenEncoder(Encoder):
    """gigatoken on Arrow buffers. It gets no added tokens, because text could then spell one.

    gigatoken 0.10 follows Unicode 17, tiktoken 0.14 Unicode 16, so they split newer digits differently. A text with a
    code point that this Python does not know (Unicode 14 to 15.1, older than both) is encoded by the reference; the
    search for such code points costs 2 ms per megabyte.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises RuntimeError for a vocabulary without some byte or with a split pattern that it does not have."""
        import awkward
        import gigatoken

        self._from_arrow, self._from_json = awkward.from_arrow, gigatoken.Tokenizer.from_json
        # gigatoken's tiktoken reader panics on tokens that are not a merge of two other tokens, which the published
        # vocabulary has; the Hugging Face format lists every merge.
        self._vocabulary = vocabulary if isinstance(vocabulary, str) else byte_level_json(vocabulary, PATTERN)
        self._reference = reference_encoder(vocabulary)
        self._renew()

    @staticmethod
    def version() -> str:
        return f"gigatoken {version('gigatoken')}"

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        if not len(texts):
            return np.empty(0, np.uint32), np.zeros(1, np.int64)
        new = pc.match_substring_regex(texts, unassigned_pattern())
        if not pc.any(new).as_py():
            return self._encode(texts, threads)
        # Encode texts with new code points as empty texts, then insert their ids from the reference.
        ids, offsets = self._encode(pc.if_else(new, pa.scalar("", pa.large_string()), texts), threads)
        new_ids, bounds = self._reference.encode_pieces(texts.filter(new), threads)
        new_texts = np.flatnonzero(new)
        pieces: list[Ids] = []
        for number, (start, stop) in enumerate(pairwise([0, *new_texts.tolist(), len(texts)])):
            end = min(number + 1, len(new_texts))
            pieces += [ids[offsets[start] : offsets[stop]], new_ids[bounds[number] : bounds[end]]]
        lengths = np.diff(offsets)
        lengths[new_texts] = np.diff(bounds)
        return np.concatenate(pieces), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def _renew(self) -> None:
        self._tokenizer, self._seen = self._from_json(self._vocabulary), 0

    def _encode(self, texts: pa.Array, threads: int) -> Flat:
        if self._seen > RENEWED_AFTER:
            self._renew()
        self._seen += texts.nbytes
        # None: gigatoken's pool with a thread per core, except in a forked process, where the pool would hang.
        layout = self._tokenizer.encode_batch(self._from_arrow(texts), parallel=None if threads > 1 else False).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data)


@cache
def unassigned_pattern() -> str:
    """Return a regular expression for the code points but PICTURES that this Python does not know (0.2 s, once)."""
    points = sys.maxunicode + 1
    new = np.zeros(points + 2, np.int8)
    new[1:-1] = np.fromiter((unicodedata.category(chr(point)) == "Cn" for point in range(points)), np.int8, points)
    new[1 + PICTURES[0] : 2 + PICTURES[1]] = 0
    edges = np.flatnonzero(np.diff(new))
    return "[" + "".join(f"\\x{{{first:X}}}-\\x{{{after - 1:X}}}" for first, after in edges.reshape(-1, 2)) + "]"


def text_array(texts: pa.Array | Sequence[str]) -> pa.Array:
    """Return `texts` as large_string; unpaired surrogates become U+FFFD. Raises ValueError if one is null."""
    if not isinstance(texts, pa.Array):
        try:
            texts = pa.array(texts, pa.large_string())
        except UnicodeEncodeError:
            texts = pa.array(map(paired, texts), pa.large_string())
    if texts.null_count:
        raise ValueError(f"text: {texts.null_count} of {len(texts)} texts are null; write them as empty strings")
    return texts.cast(pa.large_string())


def paired(text: str) -> str:
    """Return `text` with U+FFFD in place of unpaired surrogates."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def blank_cuts(text: str) -> Iterator[int]:
    """Yield the character offsets at which `text` is cut: after each LONGEST_SPACE blanks of one run.

    Such a run covers at least one multiple of LONGEST_SPACE, so only these characters of ordinary text are read.
    """
    floor = 0
    for probe in range(LONGEST_SPACE - 1, len(text), LONGEST_SPACE):
        if probe >= floor and text[probe].isspace():
            start = floor + len(text[floor:probe].rstrip())
            match = BLANKS.match(text, start)
            floor = match.end() if match else start
            yield from range(start + LONGEST_SPACE, floor + 1, LONGEST_SPACE)
        floor = max(floor, probe + 1)


def _split_blank_runs(array: pa.Array) -> tuple[pa.Array, NDArray[np.int64] | None]:
    """Return the pieces of all texts and, if any text was cut, each text's first piece: int64[texts + 1]."""
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


# The parity check of a fast encoder against the reference.
# It runs once per tokenizer, library version and machine (about a second); the verdict is stored in the user's cache.


class Encodable(Protocol):
    """The attributes of a tokenizer that `encoder_for` reads."""

    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def digest(self) -> str: ...


def encoder_for(
    tokenizer: Encodable, texts: pa.Array | Sequence[str] = (), fast: type[Encoder] = GigatokenEncoder
) -> Encoder:
    """Return an encoder of type `fast` if its ids equal those of the reference, else the reference.

    Without a stored verdict, the check also compares about 2 MB of the corpus `texts`, spread evenly. Falls back
    silently if the library is not installed or does not have the split pattern, and with a warning that shows the first
    differing text otherwise.
    """
    reference = reference_encoder(tokenizer.vocabulary)
    try:
        subject: dict[str, Any] = {
            "gate": GATE_VERSION,
            "tokenizer": tokenizer.digest,
            "library": fast.version(),
            "reference": reference.version(),
            "machine": [platform.system(), platform.machine(), _processor(), platform.python_version()],
        }
        key = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
        path = cache_folder() / "parity" / f"{key[:32]}.json"
        verdict = _read_verdict(path, subject)
        if verdict is None or verdict["differs"] is None:
            candidate = fast(tokenizer.vocabulary)
    except (ImportError, RuntimeError):
        return reference
    if verdict is None:
        verdict = {**subject, "differs": first_difference(candidate, reference, texts)}
        try:
            write_atomic(path, json.dumps(verdict, indent=2) + "\n")
        except OSError as error:
            library = subject["library"]
            warnings.warn(f"the verdict on {library} cannot be kept ({error}); set XDG_CACHE_HOME", stacklevel=2)
    if verdict["differs"] is None:
        return candidate
    name = reference.version().partition(" ")[0]
    warnings.warn(
        f"{subject['library']} is not used, {name} encodes (slower, right): {verdict['differs']}", stacklevel=2
    )
    return reference


def first_difference(candidate: Encoder, reference: Encoder, texts: pa.Array | Sequence[str] = ()) -> str | None:
    """Describe the first text on which the ids of `candidate` and `reference` differ; None if there is none."""
    strings = list(adversarial_strings())
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
    except BaseException as error:  # a panic in Rust is not an Exception
        return f"fails: {error!r}"[:SHOWN]
    if np.array_equal(offsets, bounds) and np.array_equal(ids, expected):
        return None
    for index, text in enumerate(texts.to_pylist()):
        expected_ids = expected[bounds[index] : bounds[index + 1]]
        if not np.array_equal(ids[offsets[index] : offsets[index + 1]], expected_ids):
            return f"differs on {repr(_bisect(candidate, reference, text))[:SHOWN]}"
    return "returns wrong offsets"


def _bisect(candidate: Encoder, reference: Encoder, text: str) -> str:
    """Shorten `text` by halves for as long as the encoders differ on a half."""
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
    for index in range(0, len(array), step):
        if left <= 0:
            return
        text = array[index].as_py()[:left]
        left -= len(text)
        yield text


@cache
def _processor() -> str:
    """Return the processor's name and a digest of its features, because libraries choose code by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    about: Iterable[str] = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    named = [line.split(":", 1)[1].strip() for line in about if line.startswith("model name")]
    return f"{' '.join(named)} {hashlib.sha256(chr(10).join(about).encode()).hexdigest()[:8]}".strip()


def _read_verdict(path: Path, subject: dict[str, Any]) -> dict[str, Any] | None:
    try:
        verdict = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    valid = isinstance(verdict, dict) and subject.items() <= verdict.items() and "differs" in verdict
    return verdict if valid else None
