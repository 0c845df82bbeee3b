"""How sure a difference of two arms is, from two noises: of the repeats, and of the documents it was measured on.

The documents are the same in all repeats, so the two cross: gain[r, i] = effect + document[i] + repeat[r] + rest[r, i].
The variance of the mean is at most the sum of two estimates, one of the documents' means over repeats, one of the
repeats' means over documents; both hold the rest, so the sum counts it twice and errs on the safe side (Owen 2007, The
pigeonhole bootstrap, Annals of Applied Statistics 1:386-411). Two to five repeats know their own noise badly, which a
normal quantile would hide; so each estimate gets the quantile of its own degrees of freedom,

    half^2 = t(n - 1)^2 V_documents + t(repeats)^2 V_repeats,

which covers at least 95 % whatever the ratio of the two (Banerjee 1960, Sankhya 22:357-358), where Welch's degrees of
freedom fall short of that if the repeats happen to agree. What this gives up: power. Two repeats of a single arm find
next to nothing, as t(1) is 12.7; the remedy is a third repeat, not a bolder formula.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

from llama3.evaluate.significance import LEVEL

Array = NDArray[np.float64]
STEPS = 60
"""Halvings of log p; the last digit of a double."""
LEAST = 1e-16
"""Smallest p told apart from 0."""


def between(gains: Array) -> tuple[Array, int]:
    """Return the variance of each arm's mean gain by its repeats, and its degrees of freedom.

    `gains` is [arms, repeats], each minus the control in that repeat. What repeats leave unexplained is pooled over the
    arms and the control, as in a randomised block design: (arms) (repeats - 1) degrees of freedom instead of
    repeats - 1. An arm that scatters more than that keeps its own variance, as training without warm-up may; an arm
    that scatters less does not. NaN and 0 with a single repeat.
    """
    arms, repeats = gains.shape
    if repeats < 2:
        return np.full(arms, np.nan), 0
    block = np.vstack([np.zeros(repeats), gains])
    rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
    pooled = 2 * float((rest**2).sum()) / (arms * (repeats - 1)) / repeats
    own = gains.var(axis=1, ddof=1) / repeats
    return np.maximum(own, pooled), arms * (repeats - 1)


def half_width(p: Array, documents: Array, n: Array, repeats: Array, spare: Array) -> Array:
    """Return half the width of the 1 - p interval.

    `documents` and `repeats` are variances, of `n` documents and of `spare` degrees of freedom; all arrays are [m].
    One repeat (`spare` 0) leaves the documents' alone; a single document leaves no interval (infinite).
    """
    known = np.where(spare > 0, repeats, 0.0)
    squares = _quantile(p, n - 1) ** 2 * documents + _quantile(p, np.maximum(spare, 1)) ** 2 * known
    return np.where(n > 1, np.sqrt(squares), np.inf)


def two_sided(gain: Array, documents: Array, n: Array, repeats: Array, spare: Array) -> Array:
    """Return the p at which the interval ends at 0, [m]: below 5 % exactly where the 95 % interval leaves 0 out.

    NaN with one repeat: then chance of training is unknown, and so is p.
    """
    low, high = np.full(gain.shape, np.log(LEAST)), np.zeros(gain.shape)
    for _ in range(STEPS):
        middle = (low + high) / 2
        wide = half_width(np.exp(middle), documents, n, repeats, spare) >= np.abs(gain)
        low, high = np.where(wide, middle, low), np.where(wide, high, middle)
    return np.where(spare > 0, np.exp((low + high) / 2), np.nan)


def interval(gain: Array, documents: Array, n: Array, repeats: Array, spare: Array) -> tuple[Array, Array]:
    """Return the ends of the 95 % interval, [m] each."""
    half = half_width(np.full(gain.shape, LEVEL), documents, n, repeats, spare)
    return gain - half, gain + half


def _quantile(p: Array, spare: Array) -> Array:
    """Return the two-sided quantile of Student's t."""
    return np.asarray(-special.stdtrit(np.maximum(spare, 1), p / 2), np.float64)
