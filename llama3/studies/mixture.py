"""Which mix gives the fewest weighted bits per byte: a regression over shares of small runs, and what it proposes.

W(r) = c + sum_i b_i log r_i, with W the bits per byte of the domains by the weights that the user gives and r the
shares of the tokens: each domain's loss falls with the logarithm of its own share and rises as others crowd it out, to
first order the mixing laws of arXiv 2403.16952. One coefficient a domain, so nine arms fit it with four to spare; where
all b are below 0 the best mix is in proportion to them. Runs of one seed share what chance decides, so each is taken
less its seed's mean where noise is measured.

The noise is what seeds leave unexplained, or what arms leave unexplained by the form, whichever is more. A proposal is
the lowest point among blends of the arms that were tried (nothing outside of them is believed), and the interval of its
gain is Scheffe's (Biometrika 40:87-104, 1953), which holds for every mix at once and so for one chosen by looking. What
this gives up: interactions of domains; a search that finds a mix which only a richer form would show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from llama3.evaluate.suite import BPB
from llama3.studies.expand import check_mixes, domains_of, logs, share_table
from llama3.studies.forecast import Interval
from llama3.studies.results import RunResult

DRAWS = 400
"""Coefficients drawn for the spread of the proposed shares."""
BLENDS = 4000
Array = NDArray[np.float64]


@dataclass(frozen=True)
class MixTrial:
    """One finished run of a mix."""

    name: str
    """Of the arm."""
    repeat: int
    shares: Mapping[str, float]
    losses: Mapping[str, float]
    """Bits per byte on held-out text, by domain."""


@dataclass(frozen=True)
class Mixture:
    """The regression through the arms of a search."""

    domains: tuple[str, ...]
    arms: tuple[str, ...]
    shares: Array
    """[arms, domains]"""
    losses: Array
    """[arms, domains] bits per byte, means over repeats."""
    weights: Array
    """[domains] what a domain's bits count for; they sum to 1."""
    coefficients: Array
    """[domains] b of W, per natural logarithm of a share."""
    covariance: Array
    """[domains, domains]"""
    spare: int
    """Degrees of freedom of the noise."""
    by_seeds: bool
    """Whether the noise is that between seeds; else the form's own misfit."""
    predicted: Array
    """[arms] weighted bits per byte of each arm by the fit through all others."""

    @property
    def totals(self) -> Array:
        """[arms] weighted bits per byte."""
        return np.asarray(self.losses @ self.weights)

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predictions by the fit through all other arms with what was measured."""
        return float(stats.spearmanr(self.predicted, self.totals).statistic)

    def gain(self, shares: Array, base: Array) -> Interval:
        """Return how many bits per byte fewer `shares` needs than `base`, both [domains], with Scheffe's interval."""
        row = logs(base) - logs(shares)
        value = float(row @ self.coefficients)
        size = len(self.domains)
        half = math.sqrt(size * stats.f.ppf(0.95, size, self.spare) * float(row @ self.covariance @ row))
        return Interval(value, value - half, value + half)


@dataclass(frozen=True)
class Proposal:
    shares: dict[str, Interval]
    """With the spread that the noise leaves."""
    gain: Interval
    """Weighted bits per byte fewer than the base mix."""

    @property
    def significant(self) -> bool:
        return self.gain.low > 0


def mix_trials(outcomes: Sequence[RunResult], shares: Mapping[str, Mapping[str, float]]) -> list[MixTrial]:
    """Return the runs of the arms in `shares`; each must have bits per byte of every domain. Raises ValueError."""
    trials, domains = [], domains_of(shares.values())
    for one in outcomes:
        if one.arm in shares:
            losses = {domain: one.scores[key].value for domain in domains if (key := f"{BPB}/{domain}") in one.scores}
            if lacking := sorted(set(domains) - set(losses)):
                raise ValueError(f"mix: {one.run} has no {BPB}/{lacking[0]}; hold out documents of every domain")
            trials.append(MixTrial(one.arm, one.repeat, shares[one.arm], losses))
    return trials


def fit_mixture(trials: Sequence[MixTrial], weights: Mapping[str, float]) -> Mixture:
    """Return the regression through `trials`.

    Raises ValueError for too few mixes, mixes that do not tell the domains apart, and runs without a measure of noise.
    """
    arms = tuple(dict.fromkeys(trial.name for trial in trials))
    by_arm = {arm: [trial for trial in trials if trial.name == arm] for arm in arms}
    mixes = [by_arm[arm][0].shares for arm in arms]
    check_mixes(mixes)
    domains = domains_of(mixes)
    shares = share_table(mixes, domains)
    weighted = np.array([weights.get(domain, 0.0) for domain in domains])
    if not weighted.sum() > 0:
        raise ValueError(f"mix.weights: {dict(weights)} weigh no domain of the mixes; they have {', '.join(domains)}")
    weighted = weighted / weighted.sum()
    losses = np.array([[np.mean([t.losses[d] for t in by_arm[arm]]) for d in domains] for arm in arms])
    rows = np.column_stack([np.ones(len(arms)), logs(shares)])
    inverse = np.linalg.pinv(rows)
    totals = losses @ weighted
    found = inverse @ totals
    variance, spare, by_seeds = _noise(
        trials, by_arm, weighted, domains, totals - rows @ found, len(rows) - rows.shape[1]
    )
    covariance = variance * (inverse @ inverse.T)[1:, 1:]
    leverage = np.einsum("ij,ji->i", rows, inverse)
    left_out = totals - (totals - rows @ found) / np.maximum(1 - leverage, 1e-9)
    return Mixture(domains, arms, shares, losses, weighted, found[1:], covariance, spare, by_seeds, left_out)


def _noise(
    trials: Sequence[MixTrial],
    by_arm: Mapping[str, Sequence[MixTrial]],
    weights: Array,
    domains: Sequence[str],
    misfit: Array,
    spare: int,
) -> tuple[float, int, bool]:
    """Return the variance of an arm's mean, its degrees of freedom, and whether it is the seeds'."""
    repeats = sorted({trial.repeat for trial in trials})
    totals = {(t.name, t.repeat): sum(w * t.losses[d] for w, d in zip(weights, domains, strict=True)) for t in trials}
    form = float((misfit**2).sum()) / spare
    if len(repeats) < 2 or len(totals) < len(by_arm) * len(repeats):
        return form, spare, False
    table = np.array([[totals[arm, repeat] for repeat in repeats] for arm in by_arm])
    rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    free = (len(by_arm) - 1) * (len(repeats) - 1)
    seeds = float((rest**2).sum()) / free / len(repeats)
    return (seeds, free, True) if seeds >= form else (form, spare, False)


def propose(made: Mixture, base: Array, bounds: Mapping[str, tuple[float, float]]) -> Proposal:
    """Return the best blend of the arms within `bounds`, against the base mix [domains]."""
    blends = _blends(made, base, bounds)
    log_blends = logs(blends)
    best = blends[int((log_blends @ made.coefficients).argmin())]
    dice = np.random.default_rng(0)
    scale = np.sqrt(made.spare / dice.chisquare(made.spare, DRAWS))
    normal = dice.multivariate_normal(np.zeros(len(best)), made.covariance, DRAWS, method="svd")
    chosen = blends[(log_blends @ (made.coefficients + normal * scale[:, None]).T).argmin(axis=0)]
    low, high = np.quantile(chosen, (0.025, 0.975), axis=0)
    spread = zip(made.domains, best, np.minimum(low, best), np.maximum(high, best), strict=True)
    shares = {domain: Interval(float(value), float(a), float(b)) for domain, value, a, b in spread}
    return Proposal(shares, made.gain(best, base))


def _blends(made: Mixture, base: Array, bounds: Mapping[str, tuple[float, float]]) -> Array:
    """Return blends of the arms, the arms themselves and the base mix, those within the bounds: [n, domains]."""
    dice = np.random.default_rng(0)
    parts = dice.dirichlet(np.full(len(made.arms), 0.3), BLENDS)
    blends = np.vstack([base, made.shares, parts @ made.shares])
    limits = np.array([bounds.get(domain, (0.0, 1.0)) for domain in made.domains])
    inside = ((blends >= limits[:, 0] - 1e-9) & (blends <= limits[:, 1] + 1e-9)).all(axis=1)
    return np.asarray(blends[inside]) if inside.any() else base[None]


def pareto(made: Mixture) -> list[str]:
    """Return the arms that no other arm beats on every domain."""
    beaten = [bool(((made.losses <= row).all(axis=1) & (made.losses < row).any(axis=1)).any()) for row in made.losses]
    return [arm for arm, worse in zip(made.arms, beaten, strict=True) if not worse]
