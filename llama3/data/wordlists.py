"""Word lists: how many of their words and phrases a text holds (arXiv 2407.21783, section 3.1.1, "dirty words").

A line of a list is a word or a phrase of up to 16 words in the sense of `words.py`: case, punctuation and blanks make
no difference, and a Chinese or Thai word, whose characters are words by themselves, is a phrase. Whole words only: a
list with "sex" does not find "Essex". 190 MB/s on one core. What this gives up: inflected forms must be written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama3.data.kernels.arrow import Hashes, text_buffers
from llama3.data.kernels.histogram import chained, count_phrases, longest, room
from llama3.data.kernels.words import find_words
from storage.filesystem import changed, filesystem_of, glob, is_local, local_path

FIELD = "curate.dirty_words"
MOST_WORDS = 16
"""Words in a phrase at most: a longer line is more likely a mistake than a phrase."""


class Vocabulary(NamedTuple):
    """Hashes of the phrases of a word list, and of every shorter run with which one begins; uint64, sorted."""

    phrases: Hashes
    openings: Hashes


def read_words(files: Sequence[str]) -> Vocabulary:
    """Return what stands in `files` (paths, folders or globs), one word or phrase a line; none for no files.

    Raises ValueError if one matches nothing, is not UTF-8, or has a line without a word or with too many.
    """
    found = [path for pattern in files for path in _matches(pattern)]
    return _read(tuple((path, _stamp(path)) for path in found))


def count_words_in(texts: Any, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return how often words and phrases of `vocabulary` stand in each text of an Arrow string column: int64[texts].

    At each place the longest phrase counts, once, and counting goes on behind it.
    """
    data, offsets = text_buffers(texts)
    counts = np.zeros(len(offsets) - 1, np.int64)
    if len(vocabulary.phrases):
        phrases, openings = vocabulary
        marks = _marks(phrases), _marks(openings)
        count_phrases(data, offsets, *room(longest(offsets)), phrases, marks[0], openings, marks[1], counts)
    return counts


def vocabulary_of(lines: Sequence[str]) -> Vocabulary:
    """Return the vocabulary of these words and phrases. Raises ValueError for one without words or with too many."""
    phrases, openings = set(), set()
    for line in lines:
        runs = _runs(line)
        if not 1 <= len(runs) <= MOST_WORDS:
            raise ValueError(f"{line!r} has {len(runs)} words; write 1 to {MOST_WORDS} a line")
        phrases.add(runs[-1])
        openings.update(runs[:-1])
    return Vocabulary(_sorted(phrases), _sorted(openings))


def _runs(line: str) -> list[int]:
    """Return the hash of the first word of `line`, of its first two, and so on."""
    data = np.frombuffer(line.encode(), np.uint8)
    starts, stops, hashes = room(len(data))
    runs: list[int] = []
    for word in hashes[: find_words(data, 0, len(data), starts, stops, hashes)]:
        runs.append(int(chained(np.uint64(runs[-1]), word)) if runs else int(word))
    return runs


def _sorted(hashes: set[int]) -> Hashes:
    return np.array(sorted(hashes), np.uint64)


def _marks(hashes: Hashes) -> NDArray[np.bool_]:
    marks = np.zeros(1 << 16, np.bool_)
    marks[(hashes & np.uint64(0xFFFF)).astype(np.int64)] = True
    return marks


def _matches(pattern: str) -> list[str]:
    found = glob(pattern)
    if not found:
        raise ValueError(f"{FIELD}: {pattern!r} matches no file; correct the path (it is relative to where herd runs)")
    return found


def _stamp(path: str) -> str:
    """Return what changes with a file, so that every batch of documents may ask for the list without reading it."""
    info = filesystem_of(path).info(str(local_path(path)) if is_local(path) else path)
    return f"{info['size']} {changed(info)}"


@lru_cache(maxsize=4)
def _read(files: tuple[tuple[str, str], ...]) -> Vocabulary:
    lines = []
    for path, _ in files:
        try:
            data = filesystem_of(path).cat_file(str(local_path(path)) if is_local(path) else path)
            found = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
            vocabulary_of(lines_here := [line for line in found if line])
        except ValueError as error:
            raise ValueError(f"{FIELD}: {path}: {error}") from error
        lines += lines_here
    return vocabulary_of(lines)
