"""Regression of weighted bits per byte on the shares of the domains, and the mix that it proposes.

W(r) = c + sum_i b_i log r_i, with W the weighted bits per byte and r the shares of the tokens: to first order the
mixing laws of arXiv 2403.16952, without interactions of domains. It has one coefficient per domain, so nine variants
leave four degrees of freedom. Where all b are below 0 the best mix is proportional to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from herd.llama3.evaluate.suite import BPB
from herd.llama3.studies.expand import check_mixes, log_shares, mixed_domains, share_table
from herd.llama3.studies.forecast import Interval
from herd.llama3.studies.results import RunResult

DRAWS = 400
"""Draws of the coefficients for the interval of the proposed shares."""
BLENDS = 4000
Array = NDArray[np.float64]


@dataclass(frozen=True)
class MixTrial:
    """One finished run of a mix."""

    name: str
    """Name of the variant."""
    repeat: int
    shares: Mapping[str, float]
    losses: Mapping[str, float]
    """Bits per byte on held-out text, by domain."""


@dataclass(frozen=True)
class Mixture:
    """The regression through the variants of a search."""

    domains: tuple[str, ...]
    variants: tuple[str, ...]
    shares: Array
    """[variants, domains]"""
    losses: Array
    """[variants, domains] bits per byte, means over repeats."""
    weights: Array
    """[domains] weight of each domain's bits; they sum to 1."""
    coefficients: Array
    """[domains] b of W, per natural logarithm of a share."""
    covariance: Array
    """[domains, domains]"""
    dof: int
    """Degrees of freedom of the noise."""
    by_seeds: bool
    """Whether the noise is estimated from seeds; else from the residuals of the fit."""
    predicted: Array
    """[variants] weighted bits per byte of each variant, predicted by the fit through all others."""

    @property
    def totals(self) -> Array:
        """[variants] weighted bits per byte."""
        return np.asarray(self.losses @ self.weights)

    @property
    def rank_correlation(self) -> float:
        """Spearman's, between the predictions from all other variants and the measurements."""
        return float(stats.spearmanr(self.predicted, self.totals).statistic)

    def gain(self, shares: Array, base: Array) -> Interval:
        """Return how many bits per byte fewer `shares` needs than `base`, both [domains], with Scheffe's interval.

        It holds for all mixes at once (Biometrika 40:87-104, 1953), so also for a mix chosen by its predicted loss.
        """
        row = log_shares(base) - log_shares(shares)
        value = float(row @ self.coefficients)
        size = len(self.domains)
        half = math.sqrt(size * stats.f.ppf(0.95, size, self.dof) * float(row @ self.covariance @ row))
        return Interval(value, value - half, value + half)


@dataclass(frozen=True)
class Proposal:
    """The best blend of the variants."""

    shares: dict[str, Interval]
    """With the interval due to noise."""
    gain: Interval
    """Weighted bits per byte fewer than the base mix."""

    @property
    def significant(self) -> bool:
        return self.gain.low > 0


def mix_trials(outcomes: Sequence[RunResult], shares: Mapping[str, Mapping[str, float]]) -> list[MixTrial]:
    """Return the runs of the variants in `shares`; each must have bits per byte of every domain. Raises ValueError."""
    trials, domains = [], mixed_domains(shares.values())
    for run in outcomes:
        if run.variant in shares:
            losses = {domain: run.scores[key].value for domain in domains if (key := f"{BPB}/{domain}") in run.scores}
            if missing := sorted(set(domains) - set(losses)):
                raise ValueError(f"mix: {run.run} has no {BPB}/{missing[0]}; hold out documents of every domain")
            trials.append(MixTrial(run.variant, run.repeat, shares[run.variant], losses))
    return trials


def fit_mixture(trials: Sequence[MixTrial], weights: Mapping[str, float]) -> Mixture:
    """Return the regression through `trials`.

    Raises ValueError for too few mixes, mixes that do not separate the domains, and runs without a measure of noise.
    """
    variants = tuple(dict.fromkeys(trial.name for trial in trials))
    by_variant = {variant: [trial for trial in trials if trial.name == variant] for variant in variants}
    mixes = [by_variant[variant][0].shares for variant in variants]
    check_mixes(mixes)
    domains = mixed_domains(mixes)
    shares = share_table(mixes, domains)
    weighted = np.array([weights.get(domain, 0.0) for domain in domains])
    if not weighted.sum() > 0:
        raise ValueError(f"mix.weights: {dict(weights)} weigh no domain of the mixes; they have {', '.join(domains)}")
    weighted = weighted / weighted.sum()
    losses = np.array([[np.mean([t.losses[d] for t in by_variant[variant]]) for d in domains] for variant in variants])
    design_matrix = np.column_stack([np.ones(len(variants)), log_shares(shares)])
    inverse = np.linalg.pinv(design_matrix)
    totals = losses @ weighted
    solution = inverse @ totals
    residuals = totals - design_matrix @ solution
    # The noise is that between seeds or that of the residuals, whichever is larger.
    dof, by_seeds = len(design_matrix) - design_matrix.shape[1], False
    variance = float((residuals**2).sum()) / dof
    repeats = sorted({trial.repeat for trial in trials})
    by_run = {(t.name, t.repeat): sum(w * t.losses[d] for w, d in zip(weighted, domains, strict=True)) for t in trials}
    if len(repeats) >= 2 and len(by_run) >= len(variants) * len(repeats):
        # Runs of one seed share part of their noise, so the means of seeds are removed as well as those of variants.
        table = np.array([[by_run[variant, repeat] for repeat in repeats] for variant in variants])
        rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        freedom = (len(variants) - 1) * (len(repeats) - 1)
        between_seeds = float((rest**2).sum()) / freedom / len(repeats)
        if between_seeds >= variance:
            variance, dof, by_seeds = between_seeds, freedom, True
    covariance = variance * (inverse @ inverse.T)[1:, 1:]
    leverage = np.einsum("ij,ji->i", design_matrix, inverse)
    left_out = totals - residuals / np.maximum(1 - leverage, 1e-9)
    return Mixture(domains, variants, shares, losses, weighted, solution[1:], covariance, dof, by_seeds, left_out)


def propose(mixture: Mixture, base: Array, bounds: Mapping[str, tuple[float, float]]) -> Proposal:
    """Return the best blend of the variants within `bounds`, compared with the base mix [domains].

    Only blends of the variants are candidates: the fit is not trusted outside of them.
    """
    rng = np.random.default_rng(0)
    parts = rng.dirichlet(np.full(len(mixture.variants), 0.3), BLENDS)
    blends = np.vstack([base, mixture.shares, parts @ mixture.shares])
    limits = np.array([bounds.get(domain, (0.0, 1.0)) for domain in mixture.domains])
    inside = ((blends >= limits[:, 0] - 1e-9) & (blends <= limits[:, 1] + 1e-9)).all(axis=1)
    blends = np.asarray(blends[inside]) if inside.any() else base[None]
    log_blends = log_shares(blends)
    best = blends[int((log_blends @ mixture.coefficients).argmin())]
    rng = np.random.default_rng(0)
    scale = np.sqrt(mixture.dof / rng.chisquare(mixture.dof, DRAWS))
    normal = rng.multivariate_normal(np.zeros(len(best)), mixture.covariance, DRAWS, method="svd")
    chosen = blends[(log_blends @ (mixture.coefficients + normal * scale[:, None]).T).argmin(axis=0)]
    low, high = np.quantile(chosen, (0.025, 0.975), axis=0)
    spread = zip(mixture.domains, best, np.minimum(low, best), np.maximum(high, best), strict=True)
    shares = {domain: Interval(float(value), float(a), float(b)) for domain, value, a, b in spread}
    return Proposal(shares, mixture.gain(best, base))


def pareto(mixture: Mixture) -> list[str]:
    """Return the variants that no other variant beats on every domain."""
    beaten = [
        bool(((mixture.losses <= row).all(axis=1) & (mixture.losses < row).any(axis=1)).any()) for row in mixture.losses
    ]
    return [variant for variant, worse in zip(mixture.variants, beaten, strict=True) if not worse]
