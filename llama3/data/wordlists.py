"""Word lists: count the words and phrases of a list in a text (arXiv 2407.21783, section 3.1.1, "dirty words").

A line of a list is a word or a phrase of up to 16 words as in `text/words.py`: case, punctuation and spacing do not
matter. Only whole words match ("sex" does not match "Essex"), so a list must contain inflected forms. 190 MB/s per
core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import Hashes, text_buffers
from herd.llama3.data.kernels.histogram import allocate_word_arrays, chain_hash, count_phrases, longest_text
from herd.llama3.data.kernels.words import find_words
from herd.storage.filesystem import filesystem_of, glob, is_local, local_path, version_of

FIELD = "curate.dirty_words"
MOST_WORDS = 16
"""Maximum words in a phrase: a longer line is more likely a mistake."""


class Vocabulary(NamedTuple):
    """Hashes of the phrases of a word list, and of every proper prefix (in words) of a phrase; uint64, sorted."""

    phrases: Hashes
    openings: Hashes


def read_words(files: Sequence[str]) -> Vocabulary:
    """Return the vocabulary of `files` (paths, folders or globs), one word or phrase a line; empty without files.

    Raises ValueError if a pattern matches nothing, or a file is not UTF-8 or has a line with no or too many words.
    """
    stamped = []
    for pattern in files:
        if not (paths := glob(pattern)):
            raise ValueError(
                f"{FIELD}: {pattern!r} matches no file; correct the path (it is relative to where herd runs)"
            )
        for path in paths:
            info = filesystem_of(path).info(str(local_path(path)) if is_local(path) else path)
            stamped.append((path, f"{info['size']} {version_of(info)}"))
    return _read(tuple(stamped))


@lru_cache(maxsize=4)  # by path and stamp (size and time): every batch of documents asks for the list
def _read(files: tuple[tuple[str, str], ...]) -> Vocabulary:
    phrases = []
    for path, _ in files:
        try:
            data = filesystem_of(path).cat_file(str(local_path(path)) if is_local(path) else path)
            lines = [line for raw in data.decode("utf-8-sig").splitlines() if (line := raw.strip())]
            build_vocabulary(lines)
        except ValueError as error:
            raise ValueError(f"{FIELD}: {path}: {error}") from error
        phrases += lines
    return build_vocabulary(phrases)


def count_words_in(texts: Any, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return how often words and phrases of `vocabulary` occur in each text of an Arrow string column: int64[texts].

    At each position the longest phrase counts once, and the search continues after it.
    """
    data, offsets = text_buffers(texts)
    counts = np.zeros(len(offsets) - 1, np.int64)
    if len(vocabulary.phrases):
        phrases, openings = vocabulary
        marks = _marks(phrases), _marks(openings)
        count_phrases(
            data, offsets, *allocate_word_arrays(longest_text(offsets)), phrases, marks[0], openings, marks[1], counts
        )
    return counts


def build_vocabulary(lines: Sequence[str]) -> Vocabulary:
    """Return the vocabulary of words and phrases. Raises ValueError for a line with no words or with too many."""
    phrases, openings = set(), set()
    for line in lines:
        data = np.frombuffer(line.encode(), np.uint8)
        starts, stops, hashes = allocate_word_arrays(len(data))
        prefixes: list[int] = []  # hash of the first word, of the first two, and so on
        for word in hashes[: find_words(data, 0, len(data), starts, stops, hashes)]:
            prefixes.append(int(chain_hash(np.uint64(prefixes[-1]), word)) if prefixes else int(word))
        if not 1 <= len(prefixes) <= MOST_WORDS:
            raise ValueError(f"{line!r} has {len(prefixes)} words; write 1 to {MOST_WORDS} a line")
        phrases.add(prefixes[-1])
        openings.update(prefixes[:-1])
    return Vocabulary(np.array(sorted(phrases), np.uint64), np.array(sorted(openings), np.uint64))


def _marks(hashes: Hashes) -> NDArray[np.bool_]:
    """Return for all lowest 16 bits whether any hash has them: a filter in front of the binary search."""
    marks = np.zeros(1 << 16, np.bool_)
    marks[(hashes & np.uint64(0xFFFF)).astype(np.int64)] = True
    return marks
