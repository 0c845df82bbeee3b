"""Noise of a gain over a control that was measured in several repeats on the same documents: interval and p.

A repeat is a seed, or a draw of data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from herd.llama3.statistics.significance import LEVEL

Array = NDArray[np.float64]
STEPS = 60
"""Bisections of log p, to the last digit of a double."""
LEAST = 1e-16
"""Smallest p that is distinguished from 0."""

# All repeats use the same documents, so the two cross: gain[r, i] = effect + document[i] + repeat[r] + rest[r, i]. The
# variance of the mean is at most the sum of two estimates (Owen 2007, Annals of Applied Statistics 1:386-411), each
# with the quantile of its own degrees of freedom: half^2 = t(n - 1)^2 V_documents + t(repeats)^2 V_repeats covers at
# least 95 % at any ratio of the two (Banerjee 1960, Sankhya 22:357-358).


@dataclass(frozen=True)
class RepeatNoise:
    """Noise of the repeats in m mean gains: from a variant's own repeats, and pooled over all variants."""

    variances: Array
    """[m, 2] of the mean gain: own, pooled; NaN with a single repeat."""
    dof: Array
    """[m, 2] degrees of freedom; 0 with a single repeat."""


def repeat_noise(gains: Array) -> RepeatNoise:
    """Return the noise of each variant's mean gain from its repeats; `gains` [variants, repeats] are relative to the
    control.

    The residuals are pooled over the variants and the control, as in a randomized block design: (variants) (repeats -
    1) degrees of freedom instead of repeats - 1.
    """
    variants, repeats = gains.shape
    if repeats < 2:
        return RepeatNoise(np.full((variants, 2), np.nan), np.zeros((variants, 2)))
    block = np.vstack([np.zeros(repeats), gains])
    rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
    pooled = 2 * float((rest**2).sum()) / (variants * (repeats - 1)) / repeats
    own = gains.var(axis=1, ddof=1) / repeats
    dof = np.tile([repeats - 1.0, variants * (repeats - 1.0)], (variants, 1))
    return RepeatNoise(np.stack([own, np.full(variants, pooled)], axis=1), dof)


def half_width(p: Array, documents: Array, n: Array, repeats: RepeatNoise) -> Array:
    """Return half the width of the 1 - p interval, [m]; `documents` are variances over `n` documents.

    With one repeat (`dof` 0) only the documents count; a single document gives an infinite interval.
    """
    # The wider of two intervals, each with its own quantile. The pooled quantile on a variant's own variance would miss
    # the truth in up to a quarter of cases where this variant scatters more than the others (`coverage`). The pooled
    # estimate prevents narrow intervals from repeats that agree by chance. The price is power: add a repeat.
    known = np.where(repeats.dof > 0, repeats.variances, 0.0)
    wider = (_student_quantile(p[:, None], repeats.dof) ** 2 * known).max(axis=1)
    return np.where(n > 1, np.sqrt(_student_quantile(p, n - 1) ** 2 * documents + wider), np.inf)


def two_sided_p(gain: Array, documents: Array, n: Array, repeats: RepeatNoise) -> Array:
    """Return the p at which the interval ends at 0, [m]: below 5 % exactly if the 95 % interval excludes 0.

    NaN with one repeat: the noise of training is unknown.
    """
    low, high = np.full(gain.shape, np.log(LEAST)), np.zeros(gain.shape)
    for _ in range(STEPS):
        middle = (low + high) / 2
        wide = half_width(np.exp(middle), documents, n, repeats) >= np.abs(gain)
        low, high = np.where(wide, middle, low), np.where(wide, high, middle)
    return np.where(repeats.dof[:, 0] > 0, np.exp((low + high) / 2), np.nan)


def interval(gain: Array, documents: Array, n: Array, repeats: RepeatNoise) -> tuple[Array, Array]:
    """Return the ends of the 95 % interval, [m] each."""
    half = half_width(np.full(gain.shape, LEVEL), documents, n, repeats)
    return gain - half, gain + half


def coverage(variants: int, repeats: int, scatter: float, tries: int = 2000, seed: int = 0) -> float:
    """Return how often the interval of the last of `variants`, which scatters `scatter` x as widely, covers its true
    gain.

    All true gains are 0, and the documents add no noise.
    """
    rng, covered = np.random.default_rng(seed), 0
    for _ in range(tries):
        runs = rng.standard_normal((variants + 1, repeats))
        runs[-1] *= scatter
        gains = runs[1:] - runs[0]
        low, high = interval(gains.mean(axis=1), np.zeros(variants), np.full(variants, np.inf), repeat_noise(gains))
        covered += bool(low[-1] <= 0 <= high[-1])
    return covered / tries


def _student_quantile(p: Array, dof: Array) -> Array:
    """Return the two-sided quantile of Student's t."""
    return np.asarray(-special.stdtrit(np.maximum(dof, 1), p / 2), np.float64)
