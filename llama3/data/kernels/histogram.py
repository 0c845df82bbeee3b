"""Kernels over hashed words: KL divergence, word lists, linear classifiers.

The lowest bits of a word hash are its bucket. Two words that share one of 2^18 buckets count as one word, which hardly
ever matters, and a table of fixed size needs no dictionary that depends on the order of documents. Sums run over a text
from first to last word in float64, so a result depends on the text alone, not on threads or other texts.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import Bytes, Hashes, Offsets
from herd.llama3.data.kernels.words import find_words, mix64

Floats = NDArray[np.float64]
Weights = NDArray[np.float32]
PIECE = 8192
"""Bytes of a long text that a classifier reads: this many at the beginning, and this many around the middle."""
_CHAIN = np.uint64(0x9E3779B97F4A7C15)


def allocate_word_arrays(size: int) -> tuple[Offsets, Offsets, Hashes]:
    """Allocate the arrays that `find_words` fills, for a text of at most `size` bytes."""
    return np.empty(size + 1, np.int64), np.empty(size + 1, np.int64), np.empty(size + 1, np.uint64)


def longest_text(offsets: Offsets) -> int:
    """Return the size of the longest text in bytes."""
    return int(np.diff(offsets).max(initial=0))


@njit(cache=True, nogil=True)
def chain_hash(before: np.uint64, word: np.uint64) -> np.uint64:
    """Return the hash of a run of words from the hash of the run `before` and the next `word`. Order matters."""
    return np.uint64(mix64(before * _CHAIN ^ word))


@njit(cache=True, nogil=True)
def add_counts(
    data: Bytes, offsets: Offsets, starts: Offsets, stops: Offsets, hashes: Hashes, counts: NDArray[np.int64]
) -> None:
    """Add the words of all texts to `counts`, int64[power of two]."""
    mask = np.uint64(len(counts) - 1)
    for text in range(len(offsets) - 1):
        for word in range(find_words(data, offsets[text], offsets[text + 1], starts, stops, hashes)):
            counts[np.int64(hashes[word] & mask)] += 1


@njit(cache=True, nogil=True)
def measure_divergence(
    data: Bytes, offsets: Offsets, starts: Offsets, stops: Offsets, hashes: Hashes, log_shares: Floats, out: Floats,
    sizes: NDArray[np.int64],
) -> None:  # fmt: skip
    """Write for each text the KL divergence of its words from exp(`log_shares`), in nats per word, and its word count.

    The sum over buckets of c/n ln(c/n / q): c of the n words of the text are in a bucket with `log_shares` ln q.
    """
    mask = np.uint64(len(log_shares) - 1)
    counts = np.zeros(len(log_shares), np.int32)
    for text in range(len(offsets) - 1):
        size = find_words(data, offsets[text], offsets[text + 1], starts, stops, hashes)
        for word in range(size):
            counts[np.int64(hashes[word] & mask)] += 1
        total = 0.0
        for word in range(size):
            bucket = np.int64(hashes[word] & mask)
            count = counts[bucket]
            if count:
                counts[bucket] = 0
                total += count * (math.log(count) - log_shares[bucket])
        out[text] = total / size - math.log(size) if size else 0.0
        sizes[text] = size


@njit(cache=True, nogil=True)
def contains(table: Hashes, marks: NDArray[np.bool_], value: np.uint64) -> bool:
    """Return whether sorted `table` contains `value`; `marks` has all lowest 16 bits that occur in it."""
    if not marks[np.int64(value & np.uint64(0xFFFF))]:
        return False
    at = np.searchsorted(table, value)
    return bool(at < len(table) and table[at] == value)


@njit(cache=True, nogil=True)
def count_phrases(
    data: Bytes, offsets: Offsets, starts: Offsets, stops: Offsets, hashes: Hashes, phrases: Hashes,
    phrase_marks: NDArray[np.bool_], openings: Hashes, opening_marks: NDArray[np.bool_], out: NDArray[np.int64],
) -> None:  # fmt: skip
    """Write how many `phrases` occur in each text: the longest at each word, then the search continues after it.

    `phrases` are sorted hashes by `chain_hash`; `openings` those of every proper prefix of a phrase.
    """
    for text in range(len(offsets) - 1):
        size = find_words(data, offsets[text], offsets[text + 1], starts, stops, hashes)
        count, word = 0, 0
        while word < size:
            run, last, after = hashes[word], word, 0
            while True:
                if contains(phrases, phrase_marks, run):
                    after = last + 1
                last += 1
                if last == size or not contains(openings, opening_marks, run):
                    break
                run = chain_hash(run, hashes[last])
            count += after > 0
            word = max(after, word + 1)
        out[text] = count


@njit(cache=True, nogil=True)
def character_start(data: Bytes, at: np.int64) -> np.int64:
    """Return the first byte at or after `at` that begins a character."""
    while at < len(data) and data[at] & np.uint8(0xC0) == np.uint8(0x80):
        at += 1
    return np.int64(at)


@njit(cache=True, nogil=True)
def find_features(
    data: Bytes, start: int, stop: int, starts: Offsets, stops: Offsets, hashes: Hashes, features: NDArray[np.int64],
    mask: np.uint64,
) -> int:  # fmt: skip
    """Write the buckets of the words and word pairs of a text, and return how many there are.

    A text longer than two pieces is read in its first and its middle piece. `features` has room for two per word.
    """
    if stop - start <= 2 * PIECE:
        words = find_words(data, start, stop, starts, stops, hashes)
    else:
        words = find_words(data, start, character_start(data, start + PIECE), starts, stops, hashes)
        middle = max(start + PIECE, (start + stop - PIECE) // 2)
        low, high = character_start(data, middle), character_start(data, middle + PIECE)
        words += find_words(data, low, high, starts[words:], stops[words:], hashes[words:])
    for word in range(words):
        features[2 * word] = np.int64(hashes[word] & mask)
        if word:
            features[2 * word - 1] = np.int64(chain_hash(hashes[word - 1], hashes[word]) & mask)
    return max(2 * words - 1, 0)


@njit(cache=True, nogil=True)
def to_probabilities(features: NDArray[np.int64], size: int, weights: Weights, out: Floats) -> None:
    """Write the softmax of the mean of the rows `features[:size]` of `weights`."""
    out[:] = 0.0
    for position in range(size):
        row = features[position]
        for label in range(len(out)):
            out[label] += weights[row, label]
    high = -np.inf
    for label in range(len(out)):
        out[label] = out[label] / size if size else 0.0
        high = max(high, out[label])
    total = 0.0
    for label in range(len(out)):
        out[label] = math.exp(out[label] - high)
        total += out[label]
    for label in range(len(out)):
        out[label] /= total


@njit(cache=True, nogil=True)
def classify(
    data: Bytes, offsets: Offsets, starts: Offsets, stops: Offsets, hashes: Hashes, weights: Weights, out: Floats
) -> None:
    """Write the probability of each label for each text: float64[texts, labels]."""
    mask = np.uint64(len(weights) - 1)
    features = np.empty(2 * len(hashes), np.int64)
    for text in range(len(offsets) - 1):
        size = find_features(data, offsets[text], offsets[text + 1], starts, stops, hashes, features, mask)
        to_probabilities(features, size, weights, out[text])


@njit(cache=True, nogil=True)
def train_epoch(
    data: Bytes, offsets: Offsets, starts: Offsets, stops: Offsets, hashes: Hashes, labels: NDArray[np.int64],
    importance: Floats, order: NDArray[np.int64], rate: float, last_rate: float, weights: Weights,
) -> None:  # fmt: skip
    """Train one epoch over the texts in `order`: one SGD step on the cross-entropy per text.

    `importance`, float64[labels], scales the steps of a label; the rate falls linearly from `rate` to `last_rate`.
    """
    mask = np.uint64(len(weights) - 1)
    features = np.empty(2 * len(hashes), np.int64)
    slope = np.empty(weights.shape[1], np.float64)
    for step in range(len(order)):
        text = order[step]
        size = find_features(data, offsets[text], offsets[text + 1], starts, stops, hashes, features, mask)
        to_probabilities(features, size, weights, slope)
        slope[labels[text]] -= 1.0
        slope *= importance[labels[text]] * (rate + (last_rate - rate) * step / len(order))
        for position in range(size):
            row = features[position]
            for label in range(len(slope)):
                weights[row, label] -= np.float32(slope[label])
