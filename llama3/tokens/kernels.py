"""Compiled loops over single tokens: frame documents with special tokens, gather a window, fold it into sequences.

NumPy needs an index array of eight bytes per token (measured: 39 to 94 million tokens per second); a compiled loop
copies runs (more than 300 million). Each loop compiles once per machine and element type (about 1 s) and is cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

import herd.llama3.data.kernels  # noqa: F401  (one folder of machine code: without it, some processes compile these again)

Ints = NDArray[np.int64]
IGNORED = -100
"""Target of a token without a target; `torch.nn.functional.cross_entropy` ignores it by default."""
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@njit(cache=True, nogil=True)
def add_begin_end(ids: Any, offsets: Ints, chosen: Ints, begin: int, end: int, out: Any) -> None:
    """Write the `chosen` texts, each as begin + ids + end, one after another into `out`.

    Text t is `ids[offsets[t] : offsets[t + 1]]`; `out` has room for all ids of the chosen texts and two more for each.
    """
    at = 0
    for text in chosen:
        first, size = offsets[text], offsets[text + 1] - offsets[text]
        out[at] = begin
        for index in range(size):
            out[at + 1 + index] = ids[first + index]
        out[at + 1 + size] = end
        at += size + 2


@njit(cache=True, nogil=True)
def gather_tokens(tokens: Any, sources: Ints, targets: Ints, lengths: Ints, out: Any) -> None:
    """Copy `tokens[source : source + length]` to `out[target : target + length]` for each run."""
    for run in range(len(sources)):
        source, target = sources[run], targets[run]
        for step in range(lengths[run]):
            out[target + step] = tokens[source + step]


@njit(cache=True, nogil=True)
def fold_window(
    tokens: Ints, cu_seqlens: Ints, domains: Any, seq_len: int, targets: Ints, numbers: Ints, out: Ints
) -> None:
    """Write targets, segment numbers and domains of a window that is folded into sequences of `seq_len` tokens.

    `tokens` has one more element than the three results; segment s is tokens [cu_seqlens[s], cu_seqlens[s + 1]) with
    domain `domains[s]`. The target of a token is the next token of its segment or IGNORED; segments are numbered from 0
    in each sequence.
    """
    size, number, edge = len(targets), -1, 0
    for segment in range(len(domains)):
        at, stop = cu_seqlens[segment], cu_seqlens[segment + 1]
        last, stop, domain = stop - 1, min(stop, size), domains[segment]
        while at < stop:
            if at == edge:
                number, edge = -1, edge + seq_len
            number += 1
            until = min(stop, edge)
            for position in range(at, until):
                targets[position] = tokens[position + 1]
                numbers[position] = number
                out[position] = domain
            at = until
        if last < size:
            targets[last] = IGNORED


@njit(cache=True, nogil=True)
def permute(first: int, stop: int, count: int, half: int, keys: NDArray[np.uint64]) -> Ints:
    """Return the images of first, ..., stop - 1 under a keyed permutation of range(count).

    A Feistel network over 2 x `half` bits, a round per key, walked until it lands below `count` (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains", cycle walking); 4^half is at least `count`.
    """
    mapped = np.empty(stop - first, np.int64)
    for number in range(first, stop):
        value = np.uint64(number)
        while True:
            value = _feistel(value, np.uint64(half), keys)
            if value < np.uint64(count):
                break
        mapped[number - first] = value
    return mapped


@njit(cache=True, nogil=True)
def _feistel(value: np.uint64, half: np.uint64, keys: NDArray[np.uint64]) -> np.uint64:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


@njit(cache=True, nogil=True)
def _mixed(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def interleave_into(counts: Ints, turns: Ints) -> None:
    """Write the dataset of each turn, and its number of earlier turns, into `turns` (int64[2, sum(counts)]).

    Earliest deadline first: turn m of a dataset with share w is at floor(m/w) or later, and before ceil((m+1)/w).
    """
    total, dealt = turns.shape[1], np.zeros(len(counts), np.int64)
    for turn in range(total):
        chosen, earliest = -1, 0
        for dataset in range(len(counts)):
            count = counts[dataset]
            if dealt[dataset] < count and dealt[dataset] * total // count <= turn:
                deadline = ((dealt[dataset] + 1) * total + count - 1) // count
                if chosen < 0 or deadline < earliest:
                    chosen, earliest = dataset, deadline
        turns[0, turn], turns[1, turn] = chosen, dealt[chosen]
        dealt[chosen] += 1
