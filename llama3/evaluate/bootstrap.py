"""The studentised bootstrap of a ratio over documents, such as bits over bytes: its interval and its p.

Documents are drawn again with replacement many times, and each time the ratio and its standard error are computed
anew. The interval is that of bootstrap-t (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 12):
at 32 documents of uneven length it misses 5 % of the time where the percentile interval misses 6 to 7 %, and it is not
symmetric where the documents are not. The random numbers have a fixed seed, so equal samples give equal numbers. What
this gives up: 0.1 s for 256 documents, and below four documents every interval is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama3.evaluate.significance import LEVEL
from llama3.evaluate.statistics import ratio

RESAMPLES = 10_000
CHUNK = 2**20
"""Documents drawn at once, over all resamples of a chunk: 8 MB an array."""
ROUNDING = 1e-10
"""Relative size below which a sum of squares that cancel is 0."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Resampled:
    """A number and its standard error, and in each resample its shift from that number and its standard error."""

    value: float
    stderr: float
    shifts: Array
    """[resamples]"""
    stderrs: Array
    """[resamples]"""
    n: int
    """Documents."""


def resample(numerators: Array, denominators: Array, seed: int, resamples: int = RESAMPLES) -> Resampled:
    """Return sum(y) / sum(x) over documents, both [n], drawn again `resamples` times. Raises ValueError as `ratio`."""
    whole = ratio(numerators.tolist(), denominators.tolist())
    n, random = len(numerators), np.random.default_rng(seed)
    residuals = numerators - whole.value * denominators
    columns = (residuals, denominators, residuals**2, residuals * denominators, denominators**2)
    shifts, stderrs = [], []
    for size in _chunks(resamples, max(1, CHUNK // n)):
        drawn = random.integers(0, n, (size, n))
        r, x, rr, rx, xx = (column[drawn].sum(axis=1) for column in columns)
        shift = r / x
        squares, scale = rr - 2 * shift * rx + shift**2 * xx, rr + shift**2 * xx
        squares = np.where(squares > ROUNDING * scale, squares, 0.0)  # one document drawn every time
        shifts.append(shift)
        stderrs.append(np.sqrt(n / max(1, n - 1) * squares) / x)
    return Resampled(whole.value, whole.stderr, np.concatenate(shifts), np.concatenate(stderrs), n)


def combine(parts: Sequence[Resampled], weights: Sequence[float]) -> Resampled:
    """Return the mean of parts that were drawn independently of each other; `weights` need not sum to 1."""
    shares = np.asarray(weights, np.float64) / sum(weights)
    pairs = list(zip(shares, parts, strict=True))
    return Resampled(
        value=float(sum(share * part.value for share, part in pairs)),
        stderr=float(np.sqrt(sum((share * part.stderr) ** 2 for share, part in pairs))),
        shifts=np.sum([share * part.shifts for share, part in pairs], axis=0),
        stderrs=np.sqrt(np.sum([(share * part.stderrs) ** 2 for share, part in pairs], axis=0)),
        n=sum(part.n for part in parts),
    )


def interval(found: Resampled) -> tuple[float, float, float]:
    """Return the ends of the 95 % interval and the two-sided p of a value of 0; the two always agree.

    NaN where the value is, or of a single document; infinite ends of fewer than four.
    """
    if not (np.isfinite(found.value) and np.isfinite(found.stderr)):
        return np.nan, np.nan, np.nan
    count = len(found.shifts)
    if found.stderr == 0:
        return found.value, found.value, 1.0 if found.value == 0 else 1 / (count + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.sort(np.nan_to_num(found.shifts / found.stderrs, nan=0.0, posinf=np.inf, neginf=-np.inf))
    tail = int(LEVEL / 2 * (count + 1))
    ends = found.value - t[count - tail] * found.stderr, found.value - t[tail - 1] * found.stderr
    measured = found.value / found.stderr
    beyond = min(int((t <= measured).sum()), int((t >= measured).sum()))
    return float(ends[0]), float(ends[1]), min(1.0, 2 * (1 + beyond) / (count + 1))


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
