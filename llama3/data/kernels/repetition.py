"""Repeated n-grams of words: how much text the most frequent one covers, and how much text repeats what stood before.

An n-gram is the pair of the two (n-1)-grams that it begins and ends with, so each length is counted from the one before
and only where both halves occur more than once: in prose few positions are left after the pairs of words. An n-gram
carries the place of its first occurrence as its number; two such numbers make an exact 64-bit key, so that beyond the
hashes of single words no collision is possible. Time is linear in the words whatever the text is.

Source: Gopher, arXiv 2112.11446, appendix A.1.1 ("repetition removal") and table A1.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llama3.data.kernels.arrow import Hashes, Offsets
from llama3.data.kernels.words import mixed

Places = NDArray[np.int32]
"""Numbers of words in a document; a document of 2^32 bytes has at most 2^31 words."""
SHORTEST, LONGEST_TOP, LONGEST = 2, 4, 10
"""Words in an n-gram: the most frequent one is looked for up to LONGEST_TOP, repetitions are added up from there."""
_EMPTY = np.int32(-1)


@njit(cache=True, nogil=True)
def repetition(
    count: int, keys: Hashes, before: Offsets, first: Places, times: Places, places: Places, found: Offsets
) -> None:
    """Add up the characters of repeated n-grams of `count` words; `found[n]` for n from 2 to 10, int64[11].

    n up to 4: characters of the most frequent n-gram (of several, the first in the text), blanks between its words
    counted, times its occurrences; 0 if none occurs twice. n from 5: characters, blanks not counted, of n-grams that
    began earlier too, read from the left, each word counted once.

    `keys`: hash of each word, overwritten. `before`: characters in the words before each word, int64[count + 1].
    `first`, `times`, `places`: scratch for `count` elements.
    """
    found[:] = 0
    for place in range(count):
        places[place] = place
    left = _group(places, count, keys, first, times)
    for size in range(SHORTEST, LONGEST + 1):
        left = _lengthened(places, left, keys, first)
        left = _group(places, left, keys, first, times)
        if size <= LONGEST_TOP:
            found[size] = _most_frequent(places, left, first, times, before, size)
        else:
            found[size] = _repeated(places, left, first, times, before, size)


@njit(cache=True, nogil=True)
def _lengthened(places: Places, count: int, keys: Hashes, first: Places) -> int:
    """Keep the places where two repeated n-grams follow each other, set the key of the longer one, return how many."""
    left = 0
    for at in range(count - 1):
        place = places[at]
        if places[at + 1] == place + 1:
            keys[place] = np.uint64(first[place]) << np.uint64(32) | np.uint64(first[place + 1])
            places[left] = place
            left += 1
    return left


@njit(cache=True, nogil=True)
def _group(places: Places, count: int, keys: Hashes, first: Places, times: Places) -> int:
    """Set `first` and `times` of all places with equal keys, keep those that occur twice, return how many.

    `times[f]` holds the occurrences of the n-gram that is first at f.
    """
    slots = 1
    while slots < 2 * count:
        slots *= 2
    table = np.full(slots, _EMPTY, np.int32)
    last = np.uint64(slots - 1)
    for at in range(count):
        place = places[at]
        slot = mixed(keys[place]) & last
        while table[slot] != _EMPTY and keys[table[slot]] != keys[place]:
            slot = (slot + np.uint64(1)) & last
        if table[slot] == _EMPTY:
            table[slot] = place
            times[place] = 0
        first[place] = table[slot]
        times[table[slot]] += 1
    left = 0
    for at in range(count):
        place = places[at]
        if times[first[place]] > 1:
            places[left] = place
            left += 1
    return left


@njit(cache=True, nogil=True)
def _most_frequent(places: Places, count: int, first: Places, times: Places, before: Offsets, size: int) -> np.int64:
    most, chars = np.int64(0), np.int64(0)
    for at in range(count):
        place = places[at]
        if first[place] == place and times[place] > most:
            most = np.int64(times[place])
            chars = before[place + size] - before[place] + size - 1
    return most * chars


@njit(cache=True, nogil=True)
def _repeated(places: Places, count: int, first: Places, times: Places, before: Offsets, size: int) -> np.int64:
    """Return the characters of repetitions, skipping all words of each; `times` marks the n-grams seen, with 0.

    A place within a repetition is skipped and does not count as seen.
    """
    chars, free = np.int64(0), np.int64(0)
    for at in range(count):
        place = places[at]
        if place < free:
            continue
        if times[first[place]] == 0:
            chars += before[place + size] - before[place]
            free = np.int64(place) + size
        else:
            times[first[place]] = 0
    return chars
