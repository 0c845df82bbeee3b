"""Regressions of weighted bits per byte on the shares of the domains, and the mix that they propose.

W(r) = c + sum_i b_i (r_i^p - 1) / p, with W the weighted bits per byte and r the shares of the tokens; p = 0 is ln r_i,
to first order the mixing laws of arXiv 2403.16952, and p = 1 the linear law of RegMix (arXiv 2407.01492). Which p is
true is unknown: the one with the smallest error on left-out variants predicts, and the interval of a prediction covers
those that the variants do not rule out. Without interactions of domains there is one coefficient per domain, so nine
variants leave four degrees of freedom. At p = 0 with all b below 0 the best mix is proportional to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from herd.llama3.evaluate.suite import BPB
from herd.llama3.studies.expand import LEAST_SHARE, check_mixes, log_shares, mixed_domains, share_table
from herd.llama3.studies.forecast import Interval
from herd.llama3.studies.results import RunResult

DRAWS = 400
"""Draws of the coefficients for the interval of the proposed shares."""
BLENDS = 4000
POWERS = (-1.0, -0.5, 0.0, 0.5, 1.0)
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
class MixFit:
    """The regression with one power of the shares."""

    power: float
    coefficients: Array
    """[domains] b of W."""
    covariance: Array
    """[domains, domains]"""
    dof: int
    """Degrees of freedom of the noise."""
    by_seeds: bool
    """Whether the noise is estimated from seeds; else from the residuals of the fit."""
    predicted: Array
    """[variants] weighted bits per byte of each variant, predicted by the fit through all others."""
    residual: float
    """Mean square of the residuals, per degree of freedom."""
    tolerance: float
    """How many times that of another fit it may be."""
    size: int
    """Coefficients that the shares determine: linear ones are one fewer, as shares sum to 1."""

    def gain(self, shares: Array, base: Array) -> Interval:
        """Return how many bits per byte fewer `shares` needs than `base`, both [domains], with Scheffe's interval.

        It holds for all mixes at once (Biometrika 40:87-104, 1953), so also for a mix chosen by its predicted loss.
        """
        row = transformed(base, self.power) - transformed(shares, self.power)
        value = float(row @ self.coefficients)
        variance = max(0.0, float(row @ self.covariance @ row))
        half = math.sqrt(self.size * stats.f.ppf(0.95, self.size, self.dof) * variance)
        return Interval(value, value - half, value + half)


@dataclass(frozen=True)
class Mixture:
    """The regressions through the variants of a search."""

    domains: tuple[str, ...]
    variants: tuple[str, ...]
    shares: Array
    """[variants, domains]"""
    losses: Array
    """[variants, domains] bits per byte, means over repeats."""
    weights: Array
    """[domains] weight of each domain's bits; they sum to 1."""
    fits: tuple[MixFit, ...]
    """One for each of POWERS, the smallest error on left-out variants first."""

    @property
    def best(self) -> MixFit:
        return self.fits[0]

    @property
    def plausible(self) -> list[MixFit]:
        """The best fit and those whose residuals are not significantly larger than the smallest (F test, 95 %)."""
        least = min(fit.residual for fit in self.fits)
        return [fit for fit in self.fits if fit is self.best or fit.residual <= least * fit.tolerance]

    @property
    def totals(self) -> Array:
        """[variants] weighted bits per byte."""
        return np.asarray(self.losses @ self.weights)

    @property
    def rank_correlation(self) -> float:
        """Spearman's, between the predictions from all other variants and the measurements."""
        return float(stats.spearmanr(self.best.predicted, self.totals).statistic)

    def gain(self, shares: Array, base: Array) -> Interval:
        """Return how many bits per byte fewer `shares` needs than `base`, both [domains], as the best fit predicts.

        The interval is the hull of those of the plausible fits.
        """
        gains = [fit.gain(shares, base) for fit in self.plausible]
        return Interval(
            self.best.gain(shares, base).value, min(gain.low for gain in gains), max(gain.high for gain in gains)
        )

    def slopes(self, shares: Array) -> Array:
        """Return the change of W for an e-fold of each domain's share, at `shares` [domains].

        The other domains shrink in proportion; without that a linear law has no slope of its own.
        """
        own = np.maximum(shares, LEAST_SHARE)
        gradient = self.best.coefficients * own ** (self.best.power - 1)
        return np.asarray(own * (gradient - float(own @ gradient)) / np.maximum(1 - own, LEAST_SHARE))


@dataclass(frozen=True)
class Proposal:
    """The best blend of the variants."""

    shares: dict[str, Interval]
    """With the interval due to noise."""
    gain: Interval
    """Weighted bits per byte fewer than the base mix, as predicted."""

    @property
    def significant(self) -> bool:
        return self.gain.low > 0


def transformed(shares: Array, power: float) -> Array:
    """Return (r^p - 1) / p; at p of 0 or below, at least that of `LEAST_SHARE`."""
    if power > 0:
        return np.asarray((shares**power - 1) / power)
    logs = log_shares(shares)
    return np.asarray(np.expm1(power * logs) / power) if power else logs


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
    totals = losses @ weighted
    repeats = sorted({trial.repeat for trial in trials})
    by_run = {(t.name, t.repeat): sum(w * t.losses[d] for w, d in zip(weighted, domains, strict=True)) for t in trials}
    seeds: tuple[float, int] = 0.0, 0
    if len(repeats) >= 2 and len(by_run) >= len(variants) * len(repeats):
        # Runs of one seed share part of their noise, so the means of seeds are removed as well as those of variants.
        table = np.array([[by_run[variant, repeat] for repeat in repeats] for variant in variants])
        rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        freedom = (len(variants) - 1) * (len(repeats) - 1)
        seeds = float((rest**2).sum()) / freedom / len(repeats), freedom
    fits = [_fit(power, shares, totals, *seeds) for power in POWERS]
    fits.sort(key=lambda fit: float(((fit.predicted - totals) ** 2).sum()))
    return Mixture(domains, variants, shares, losses, weighted, tuple(fits))


def _fit(power: float, shares: Array, totals: Array, between_seeds: float, freedom: int) -> MixFit:
    """Return the least-squares fit; its noise is that between seeds or that of the residuals, whichever is larger."""
    design_matrix = np.column_stack([np.ones(len(shares)), transformed(shares, power)])
    inverse, rank = np.linalg.pinv(design_matrix), int(np.linalg.matrix_rank(design_matrix))
    solution = inverse @ totals
    residuals = totals - design_matrix @ solution
    dof = len(shares) - rank
    residual = float((residuals**2).sum()) / dof
    by_seeds = freedom > 0 and between_seeds >= residual
    covariance = (between_seeds if by_seeds else residual) * (inverse @ inverse.T)[1:, 1:]
    leverage = np.einsum("ij,ji->i", design_matrix, inverse)
    left_out = totals - residuals / np.maximum(1 - leverage, 1e-9)
    noise_dof, tolerance = freedom if by_seeds else dof, float(stats.f.ppf(0.95, dof, dof))
    return MixFit(power, solution[1:], covariance, noise_dof, by_seeds, left_out, residual, tolerance, rank - 1)


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
    fit = mixture.best
    rows = transformed(blends, fit.power)
    best = blends[int((rows @ fit.coefficients).argmin())]
    rng = np.random.default_rng(0)
    scale = np.sqrt(fit.dof / rng.chisquare(fit.dof, DRAWS))
    normal = rng.multivariate_normal(np.zeros(len(best)), fit.covariance, DRAWS, method="svd")
    chosen = blends[(rows @ (fit.coefficients + normal * scale[:, None]).T).argmin(axis=0)]
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
