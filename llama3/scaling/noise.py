"""How sure a difference of two arms is, from two noises: of the repeats, and of the documents it was measured on.

The documents are the same in all repeats, so the two cross: gain[r, i] = effect + document[i] + repeat[r] + rest[r, i].
The variance of the mean is at most the sum of two estimates (Owen 2007, Annals of Applied Statistics 1:386-411), each
with the quantile of its own degrees of freedom: half^2 = t(n - 1)^2 V_documents + t(repeats)^2 V_repeats covers at
least 95 % whatever the ratio of the two (Banerjee 1960, Sankhya 22:357-358).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from llama3.evaluate.significance import LEVEL

Array = NDArray[np.float64]
STEPS = 60
"""Halvings of log p; the last digit of a double."""
LEAST = 1e-16
"""Smallest p told apart from 0."""


@dataclass(frozen=True)
class Between:
    """Noise of the repeats in m mean gains, estimated twice: from an arm's own repeats, and pooled over all arms."""

    variances: Array
    """[m, 2] of the mean gain: own, pooled; NaN with a single repeat."""
    spare: Array
    """[m, 2] degrees of freedom; 0 with a single repeat."""

    @property
    def stderr(self) -> Array:
        """[m] standard errors, by the larger of the two."""
        return np.asarray(np.sqrt(self.variances.max(axis=1)))


def between(gains: Array) -> Between:
    """Return the noise of each arm's mean gain by its repeats; `gains` is [arms, repeats], each minus the control.

    What repeats leave unexplained is pooled over the arms and the control, as in a randomised block design: (arms)
    (repeats - 1) degrees of freedom instead of repeats - 1.
    """
    arms, repeats = gains.shape
    if repeats < 2:
        return Between(np.full((arms, 2), np.nan), np.zeros((arms, 2)))
    block = np.vstack([np.zeros(repeats), gains])
    rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
    pooled = 2 * float((rest**2).sum()) / (arms * (repeats - 1)) / repeats
    own = gains.var(axis=1, ddof=1) / repeats
    spare = np.tile([repeats - 1.0, arms * (repeats - 1.0)], (arms, 1))
    return Between(np.stack([own, np.full(arms, pooled)], axis=1), spare)


def half_width(p: Array, documents: Array, n: Array, repeats: Between) -> Array:
    """Return half the width of the 1 - p interval, [m].

    `documents` are variances over `n` documents. Of the two estimates by the repeats the wider interval counts, each
    with its own quantile: the pooled quantile on an arm's own variance leaves out the truth in up to a quarter of cases
    where this arm scatters more than the others (`coverage`). The pooled estimate keeps repeats that agree by luck from
    saying too much. This costs power: the remedy is a further repeat.
    One repeat (`spare` 0) leaves the documents' alone; a single document leaves no interval (infinite).
    """
    known = np.where(repeats.spare > 0, repeats.variances, 0.0)
    wider = (_quantile(p[:, None], repeats.spare) ** 2 * known).max(axis=1)
    return np.where(n > 1, np.sqrt(_quantile(p, n - 1) ** 2 * documents + wider), np.inf)


def two_sided(gain: Array, documents: Array, n: Array, repeats: Between) -> Array:
    """Return the p at which the interval ends at 0, [m]: below 5 % exactly where the 95 % interval leaves 0 out.

    NaN with one repeat: then chance of training is unknown, and so is p.
    """
    low, high = np.full(gain.shape, np.log(LEAST)), np.zeros(gain.shape)
    for _ in range(STEPS):
        middle = (low + high) / 2
        wide = half_width(np.exp(middle), documents, n, repeats) >= np.abs(gain)
        low, high = np.where(wide, middle, low), np.where(wide, high, middle)
    return np.where(repeats.spare[:, 0] > 0, np.exp((low + high) / 2), np.nan)


def interval(gain: Array, documents: Array, n: Array, repeats: Between) -> tuple[Array, Array]:
    """Return the ends of the 95 % interval, [m] each."""
    half = half_width(np.full(gain.shape, LEVEL), documents, n, repeats)
    return gain - half, gain + half


def coverage(arms: int, repeats: int, scatter: float, tries: int = 2000, seed: int = 0) -> float:
    """Return how often the interval of the last of `arms`, which scatters `scatter` x as widely, holds its true gain.

    All true gains are 0, and the documents add no noise.
    """
    dice, held = np.random.default_rng(seed), 0
    for _ in range(tries):
        runs = dice.standard_normal((arms + 1, repeats))
        runs[-1] *= scatter
        gains = runs[1:] - runs[0]
        low, high = interval(gains.mean(axis=1), np.zeros(arms), np.full(arms, np.inf), between(gains))
        held += bool(low[-1] <= 0 <= high[-1])
    return held / tries


def _quantile(p: Array, spare: Array) -> Array:
    """Return the two-sided quantile of Student's t."""
    return np.asarray(-special.stdtrit(np.maximum(spare, 1), p / 2), np.float64)
