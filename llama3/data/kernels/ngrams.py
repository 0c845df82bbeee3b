"""Word n-grams as 64-bit hashes: hash table lookup, and how much of an example one document covers.

A gram's hash is a polynomial of its words' hashes, rolled along the text: two multiplications per word for any n. Grams
with equal hashes count as equal: about one chance in 10^13 per word of text against 400,000 grams.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import Bytes, Hashes, Offsets
from herd.llama3.data.kernels.words import find_words, mix64

Positions = NDArray[np.int32]
Flags = NDArray[np.uint8]
_BASE = np.uint64(0x9E3779B97F4A7C15)
_UNDERSCORE = np.uint8(ord("_"))
_BLOCK_KEYS = 4
"""Keys per 64-bit block of the filter: three bits each, so about 1 % false positives."""


class Table(NamedTuple):
    """Open-addressing hash table; `where[slot]` is the index of key `slots[slot]` among the keys of the table.

    A Bloom filter comes first: most grams of a text are not in the table, and 2 bytes per key fit in the cache where 48
    do not.
    """

    slots: Hashes
    where: Positions
    filter: Hashes


def key_table(keys: Hashes) -> Table:
    """Return a table of distinct hashes `keys`, uint64[n]. 0 marks a free slot and is never a key."""
    slots = 1 << max(4, int(4 * len(keys) - 1).bit_length())
    blocks = 1 << max(10, (len(keys) // _BLOCK_KEYS).bit_length())
    table = Table(np.zeros(slots, np.uint64), np.zeros(slots, np.int32), np.zeros(blocks, np.uint64))
    _fill(*table, np.ascontiguousarray(keys))
    return table


@njit(cache=True, nogil=True)
def _block(key: np.uint64) -> np.uint64:
    """Return the three bits of `key` in its block of the filter."""
    one, six, last = np.uint64(1), np.uint64(6), np.uint64(63)
    top = key >> np.uint64(46)
    return one << (top & last) | one << (top >> six & last) | one << (top >> six >> six & last)


@njit(cache=True, nogil=True)
def _fill(slots: Hashes, where: Positions, filters: Hashes, keys: Hashes) -> None:
    last = np.uint64(len(slots) - 1)
    for position in range(len(keys)):
        key = keys[position]
        slot = key & last
        while slots[slot] != 0:
            slot = (slot + np.uint64(1)) & last
        slots[slot], where[slot] = key, position
        filters[key & np.uint64(len(filters) - 1)] |= _block(key)


@njit(cache=True, nogil=True)
def key_index(slots: Hashes, where: Positions, filters: Hashes, key: np.uint64) -> int:
    """Return the index of `key` among the keys of a table, or -1."""
    block = _block(key)
    if filters[key & np.uint64(len(filters) - 1)] & block != block:
        return -1
    last = np.uint64(len(slots) - 1)
    slot = key & last
    while slots[slot] != 0:
        if slots[slot] == key:
            return int(where[slot])
        slot = (slot + np.uint64(1)) & last
    return -1


@njit(cache=True, nogil=True)
def roll(state: np.uint64, hashes: Hashes, at: int, gram: int, top: np.uint64) -> np.uint64:
    """Return the polynomial of the `gram` words that end at word `at` from the previous one; top = BASE^gram."""
    state = state * _BASE + hashes[at]
    return state - hashes[at - gram] * top if at >= gram else state


@njit(cache=True, nogil=True)
def gram_weight(gram: int) -> np.uint64:
    """Return BASE^gram, the weight of the word that leaves the gram."""
    top = np.uint64(1)
    for _ in range(gram):
        top *= _BASE
    return top


@njit(cache=True, nogil=True)
def gram_key(state: np.uint64, gram: int) -> np.uint64:
    """Return the hash of a gram, never 0; it includes the length."""
    key = mix64(state + np.uint64(gram))
    return key if key != 0 else np.uint64(1)


@njit(cache=True, nogil=True)
def text_grams(data: Bytes, offsets: Offsets, gram: int) -> tuple[Hashes, Offsets, Offsets, Hashes]:
    """Return (keys, ends, words, last): text i has words[i] words, last word hash last[i], grams
    keys[ends[i]:ends[i+1]].

    A text of fewer than `gram` words has one gram of all its words; one without words has none.
    """
    room = offsets[-1] - offsets[0] + 1
    starts, stops, hashes = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint64)
    keys, ends = np.empty(room, np.uint64), np.zeros(len(offsets), np.int64)
    words, last = np.zeros(len(offsets) - 1, np.int64), np.zeros(len(offsets) - 1, np.uint64)
    total = 0
    for text in range(len(offsets) - 1):
        words[text] = find_bare_words(data, offsets[text], offsets[text + 1], starts, stops, hashes)
        width, state = min(gram, words[text]), np.uint64(0)
        top = gram_weight(width)
        for at in range(words[text]):
            state = roll(state, hashes, at, width, top)
            if at >= width - 1:
                keys[total] = gram_key(state, width)
                total += 1
        if words[text]:
            last[text] = hashes[words[text] - 1]
        ends[text + 1] = total
    return keys[:total].copy(), ends, words, last


@njit(cache=True, nogil=True)
def find_bare_words(data: Bytes, start: int, stop: int, starts: Offsets, stops: Offsets, hashes: Hashes) -> int:
    """Find words as `find_words`, without the underscores at their ends: the words of `text/words.py`'s BARE_WORD."""
    left, count = 0, find_words(data, start, stop, starts, stops, hashes)
    for word in range(count):
        first, end = starts[word], stops[word]
        if data[first] == _UNDERSCORE or data[end - 1] == _UNDERSCORE:
            while first < end and data[first] == _UNDERSCORE:
                first += 1
            while first < end and data[end - 1] == _UNDERSCORE:
                end -= 1
            left += find_words(data, first, end, starts[left:], stops[left:], hashes[left:])
        else:
            starts[left], stops[left], hashes[left] = first, end, hashes[word]
            left += 1
    return left


class NgramIndex(NamedTuple):
    """Index of the examples. Words are numbered over all examples; a posting is the first word of a gram."""

    table: Table
    gram: int
    """Words per gram; grams of short examples have fewer."""
    endings: Bytes
    """uint8[2^16]: bit n of endings[h] is set if a gram of n < 8 words ends in a word whose hash has the top bits h."""
    postings: Offsets
    """Postings of gram g are positions[postings[g] : postings[g + 1]]."""
    positions: Positions
    widths: Positions
    """Words of gram g."""
    owner: Positions
    """Example of every word."""
    benchmark: Positions
    """Benchmark of every example."""
    need: Positions
    """Words of each example that a document must cover to contain it; above any count if none can."""


class NgramMatches(NamedTuple):
    """Matches so far, and scratch arrays; stamps make clearing them between documents unnecessary."""

    seen: Flags
    """1 for every gram that occurs in a document."""
    best: Positions
    """Most words of each example that one document covers."""
    best_row: Offsets
    gram_stamp: Positions
    word_stamp: Positions
    example_stamp: Positions
    covered: Positions
    hits: Positions
    touched: Positions


def empty_matches(index: NgramIndex) -> NgramMatches:
    """Return the state before the first document."""
    grams, words, examples = len(index.widths), len(index.owner), len(index.need)
    sizes = (examples, grams, words, examples, examples, grams, examples)
    best, gram_stamp, word_stamp, example_stamp, covered, hits, touched = (np.zeros(n, np.int32) for n in sizes)
    rows = np.full(examples, -1, np.int64)
    seen = np.zeros(grams, np.uint8)
    return NgramMatches(seen, best, rows, gram_stamp, word_stamp, example_stamp, covered, hits, touched)


@njit(cache=True, nogil=True)
def scan(
    data: Bytes,
    offsets: Offsets,
    rows: Offsets,
    use: Flags,
    index: NgramIndex,
    matches: NgramMatches,
    stamp: int,
    contains: Flags,
) -> int:
    """Scan the texts with `use` and return the last stamp (a number unique to a document).

    Updates `matches`, where the first of equally good documents stays, and sets contains[document, benchmark].
    """
    room = 0
    for text in range(len(rows)):
        room = max(room, offsets[text + 1] - offsets[text])
    starts, stops, hashes = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint64)
    for text in range(len(rows)):
        if use[text]:
            stamp += 1
            count = find_bare_words(data, offsets[text], offsets[text + 1], starts, stops, hashes)
            hits = _look_up(hashes, count, index, matches, stamp)
            if hits:
                _cover(hits, index, matches, stamp, rows[text], contains[text])
    return stamp


@njit(cache=True, nogil=True)
def _look_up(hashes: Hashes, count: int, index: NgramIndex, matches: NgramMatches, stamp: int) -> int:
    """Write the distinct indexed grams of a document to matches.hits and return their number."""
    slots, where, filters = index.table
    stamps, hit, gram, endings = matches.gram_stamp, matches.hits, index.gram, index.endings
    state, top, hits = np.uint64(0), gram_weight(gram), 0
    for at in range(count):
        state = roll(state, hashes, at, gram, top)
        if at >= gram - 1:
            position = key_index(slots, where, filters, gram_key(state, gram))
            if position >= 0:
                hits = _hit(position, stamps, stamp, hit, hits)
        lengths = endings[hashes[at] >> np.uint64(48)]
        if lengths:
            for width in range(1, min(gram, at + 2)):
                if lengths >> np.uint8(width) & np.uint8(1):
                    position = key_index(slots, where, filters, _short_key(hashes, at, width))
                    if position >= 0:
                        hits = _hit(position, stamps, stamp, hit, hits)
    return hits


@njit(cache=True, nogil=True)
def _short_key(hashes: Hashes, at: int, width: int) -> np.uint64:
    """Return the hash of the gram of `width` words that ends at word `at`."""
    state = np.uint64(0)
    for position in range(at - width + 1, at + 1):
        state = state * _BASE + hashes[position]
    key: np.uint64 = gram_key(state, width)
    return key


@njit(cache=True, nogil=True)
def _hit(position: int, stamps: Positions, stamp: int, hit: Positions, hits: int) -> int:
    if stamps[position] != stamp:
        stamps[position], hit[hits] = stamp, position
        hits += 1
    return hits


def gram_endings(last: Hashes, words: Offsets, gram: int) -> Bytes:
    """Return `NgramIndex.endings` for texts, by the hash of their last word and their number of words."""
    assert gram <= 8  # bits of a byte
    endings = np.zeros(1 << 16, np.uint8)
    short = (words < gram) & (words > 0)
    np.bitwise_or.at(endings, last[short] >> np.uint64(48), (1 << words[short]).astype(np.uint8))
    return endings


@njit(cache=True, nogil=True)
def _cover(hits: int, index: NgramIndex, matches: NgramMatches, stamp: int, row: int, contains: Flags) -> None:
    """Count the words of every example that the document's grams cover, and update `matches` and `contains`."""
    postings, positions, widths, owner = index.postings, index.positions, index.widths, index.owner
    examples, covered, word_stamp = matches.example_stamp, matches.covered, matches.word_stamp
    hit, touched, count = matches.hits, matches.touched, 0
    for gram in hit[:hits]:
        matches.seen[gram] = 1
        for posting in range(postings[gram], postings[gram + 1]):
            first = positions[posting]
            example = owner[first]
            if examples[example] != stamp:
                examples[example], covered[example], touched[count] = stamp, 0, example
                count += 1
            for word in range(first, first + widths[gram]):
                if word_stamp[word] != stamp:
                    word_stamp[word] = stamp
                    covered[example] += 1
    for example in touched[:count]:
        if covered[example] > matches.best[example]:
            matches.best[example], matches.best_row[example] = covered[example], row
        if covered[example] >= index.need[example]:
            contains[index.benchmark[example]] = 1
