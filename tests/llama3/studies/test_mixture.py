"""The search over mixes: a known optimum is found, none is made up where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from benchmarks.simulated_studies import planted_mixes
from herd.llama3.evaluate.scores import Score
from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.units import Share
from herd.llama3.statistics.estimates import normal
from herd.llama3.studies.expand import design_mixes
from herd.llama3.studies.mixture import MixFit, MixTrial, Mixture, fit_mixture, mix_trials, pareto, propose
from herd.llama3.studies.results import NOTHING, RunResult, Samples
from herd.llama3.studies.study import MixDesign
from herd.llama3.studies.verdicts import mix_verdict, round_proposal

BASE: dict[Domain, Fraction] = {
    "general": Fraction(1, 2), "math": Fraction(1, 4), "code": Fraction(17, 100), "multilingual": Fraction(2, 25),
}  # fmt: skip
MIXES = {"base": BASE, **design_mixes(MixDesign(kind="around", step=Share.parse("10%")), BASE)}
WEIGHTS = {domain: float(share) for domain, share in BASE.items()}
ROW = np.array(list(WEIGHTS.values()))
SLOPES = {"general": -0.10, "math": -0.30, "code": -0.20, "multilingual": -0.40}
"""Bits per byte of each domain for an e-fold of its own share."""
FLAT = dict.fromkeys(DOMAINS, 0.0)


def trials(
    seed: int,
    slopes: Mapping[str, float],
    seeds: int = 3,
    noise: float = 0.01,
    mixes: Mapping[str, Mapping[Domain, Fraction]] = MIXES,
) -> list[MixTrial]:
    dice, found = np.random.default_rng(seed), []
    luck = dice.normal(0, 0.05, seeds)
    for name, mix in mixes.items():
        shares = {domain: float(share) for domain, share in mix.items()}
        for repeat in range(seeds):
            losses = {
                domain: 2.5 + slopes[domain] * np.log(shares[domain]) + luck[repeat] + noise * dice.standard_normal()
                for domain in DOMAINS
            }
            found.append(MixTrial(name, repeat + 1, shares, losses))
    return found


def best_of(slopes: Mapping[str, float]) -> np.ndarray:
    pull = np.array([WEIGHTS[domain] * slopes[domain] for domain in DOMAINS])
    return np.asarray(pull / pull.sum())


def log_fit(made: Mixture) -> MixFit:
    """Return the fit of the law by which the tests make losses."""
    return next(fit for fit in made.fits if fit.power == 0)


def fitted(seed: int, slopes: Mapping[str, float], **more: float) -> Mixture:
    return fit_mixture(trials(seed, slopes, **more), WEIGHTS)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_gain_of_any_mix_lies_in_its_interval_in_57_of_60_searches() -> None:
    """Also of the mix that was chosen by looking."""
    held = 0
    for seed in range(60):
        made = fitted(seed, SLOPES)
        found = propose(made, ROW, {})
        shares = np.array([one.value for one in found.shares.values()])
        truth = sum(WEIGHTS[d] * SLOPES[d] * (np.log(ROW[i]) - np.log(shares[i])) for i, d in enumerate(DOMAINS))
        held += found.gain.low <= truth <= found.gain.high
    assert held >= 57


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_fit_is_least_squares_with_scheffes_interval_and_each_variant_left_out_in_turn(seeds: int) -> None:
    """By plain least squares; the noise of seeds is that of a table of variants and seeds without their means."""
    found, weights = trials(6, SLOPES, seeds=seeds, noise=0.03), {**WEIGHTS, "math": 0.6}
    made = fit_mixture(found, weights)
    row = np.array([weights[domain] for domain in made.domains]) / sum(weights.values())
    runs = np.array([[sum(row * [t.losses[d] for d in made.domains]) for t in found if t.name == v] for v in MIXES])
    design = np.array([[1.0, *(np.log(float(mix[domain])) for domain in made.domains)] for mix in MIXES.values()])
    totals = runs.mean(axis=1)
    fit, (squares,), *_ = np.linalg.lstsq(design, totals, rcond=None)
    dof, variance = len(design) - 5, squares / (len(design) - 5)
    if seeds > 1:
        rest = runs - runs.mean(axis=0) - runs.mean(axis=1, keepdims=True) + runs.mean()
        freedom = (len(design) - 1) * (seeds - 1)
        between = (rest**2).sum() / freedom / seeds
        dof, variance = (freedom, between) if between >= variance else (dof, variance)
    covariance = variance * np.linalg.inv(design.T @ design)[1:, 1:]
    assert made.totals == pytest.approx(totals)
    log = log_fit(made)
    assert log.coefficients == pytest.approx(fit[1:])
    assert (log.dof, log.covariance) == (dof, pytest.approx(covariance))
    for place in range(len(design)):
        others = np.arange(len(design)) != place
        without = np.linalg.lstsq(design[others], totals[others], rcond=None)[0]
        assert log.predicted[place] == pytest.approx(design[place] @ without)
    assert made.rank_correlation == pytest.approx(stats.spearmanr(made.best.predicted, totals).statistic)
    shares = np.array([0.3, 0.4, 0.2, 0.1])
    change = np.log(ROW) - np.log(shares)
    half = np.sqrt(4 * stats.f.isf(0.05, 4, dof) * change @ covariance @ change)
    value = change @ fit[1:]
    gain = log.gain(shares, ROW)
    assert (gain.value, gain.low, gain.high) == pytest.approx((value, value - half, value + half))


def test_the_interval_covers_the_forms_that_the_variants_do_not_rule_out() -> None:
    """Of a power law; where noise hides the form, all forms are plausible."""
    held = ruled_out = 0
    for seed in range(8):
        bits, found = planted_mixes("power", BASE, 24, seed)
        made = fit_mixture(found, WEIGHTS)
        shares = np.array([float(share) for share in round_proposal(propose(made, ROW, {})).values()])
        gain, singles = made.gain(shares, ROW), [fit.gain(shares, ROW) for fit in made.plausible]
        assert made.best in made.plausible
        assert (gain.low, gain.high) == (min(one.low for one in singles), max(one.high for one in singles))
        ruled_out += len(made.fits) - len(made.plausible)
        held += gain.low <= float(ROW @ (bits(ROW) - bits(shares))) <= gain.high
    assert held == 8
    assert ruled_out > 0
    noisy = fit_mixture(trials(1, FLAT), WEIGHTS)
    assert len(noisy.plausible) == len(noisy.fits)
    assert noisy.gain(shares, ROW).high > noisy.best.gain(shares, ROW).high


def test_a_large_effect_is_found_and_the_proposal_goes_the_right_way() -> None:
    base = {**WEIGHTS, "math": 0.05, "general": 0.70}
    mixes = {"base": {d: Fraction(str(round(v, 3))) for d, v in base.items()}}
    mixes |= design_mixes(
        MixDesign(kind="around", step=Share.parse("10%")), {d: Fraction(str(round(v, 3))) for d, v in base.items()}
    )  # type: ignore[arg-type, assignment]
    found = 0
    for seed in range(20):
        made = fit_mixture(trials(seed, SLOPES, mixes=mixes), WEIGHTS)  # type: ignore[arg-type]
        best = propose(made, np.array(list(base.values())), {})
        found += best.significant and best.shares["math"].value > 0.08
    assert found >= 18


@pytest.mark.slow
def test_where_no_mix_matters_none_is_proposed_in_57_of_60_searches() -> None:
    assert sum(propose(fitted(seed, FLAT), ROW, {}).significant for seed in range(60)) <= 3


def test_a_proposal_stays_among_what_was_tried_and_within_the_bounds() -> None:
    made = fitted(3, SLOPES)
    free, bound = propose(made, ROW, {}), propose(made, ROW, {"math": (0.2, 0.26)})
    for i, domain in enumerate(made.domains):
        assert made.shares[:, i].min() - 1e-9 <= free.shares[domain].value <= made.shares[:, i].max() + 1e-9
    assert 0.2 <= bound.shares["math"].value <= 0.26
    assert sum(round_proposal(free).values()) == 1


def test_slopes_are_those_of_the_law_whatever_the_level_of_the_losses() -> None:
    """Of a linear law, whose coefficients are determined up to a constant."""
    found = []
    for name, mix in MIXES.items():
        shares = {domain: float(share) for domain, share in mix.items()}
        found.append(MixTrial(name, 1, shares, dict.fromkeys(DOMAINS, 1 - 0.5 * shares["math"] + 0.3 * shares["code"])))
    shifted = [MixTrial(t.name, 1, t.shares, {d: loss + 5 for d, loss in t.losses.items()}) for t in found]
    slopes = fit_mixture(found, WEIGHTS).slopes(ROW)
    assert fit_mixture(shifted, WEIGHTS).slopes(ROW) == pytest.approx(slopes, abs=1e-6)

    def level(row: np.ndarray) -> float:
        return -0.5 * float(row[1]) + 0.3 * float(row[2])

    for place in range(4):
        more = ROW.copy()
        more[place] *= np.exp(1e-6)
        others = np.arange(4) != place
        more[others] *= (1 - more[place]) / (1 - ROW[place])
        assert slopes[place] == pytest.approx((level(more) - level(ROW)) / 1e-6, abs=1e-4)
    assert fit_mixture(found, WEIGHTS).best.power == 1


def test_weights_decide_what_is_best() -> None:
    found = trials(2, SLOPES, noise=0.001)
    math = propose(fit_mixture(found, {**FLAT, "math": 1.0}), ROW, {}).shares["math"].value
    code = propose(fit_mixture(found, {**FLAT, "code": 1.0}), ROW, {}).shares["math"].value
    assert math > 0.33 > 0.24 > code


def test_noise_is_the_larger_of_seeds_and_misfit() -> None:
    assert fitted(1, SLOPES, seeds=1).best.by_seeds is False  # type: ignore[arg-type]
    bent = trials(1, SLOPES, noise=1e-4)
    worse = [
        MixTrial(t.name, t.repeat, t.shares, {**t.losses, "math": t.losses["math"] + 0.2 * (t.name == "more-code")})
        for t in bent
    ]
    made = fit_mixture(worse, WEIGHTS)
    assert all(fit.by_seeds is False for fit in made.fits)
    assert log_fit(made).covariance.max() > 100 * log_fit(fit_mixture(bent, WEIGHTS)).covariance.max()


def test_a_variant_that_is_worse_everywhere_is_not_on_the_front() -> None:
    found = trials(1, SLOPES, noise=0.0)
    worse = [
        MixTrial(t.name, t.repeat, t.shares, {d: v + (t.name == "less-code") for d, v in t.losses.items()})
        for t in found
    ]
    front = pareto(fit_mixture(worse, WEIGHTS))
    assert "less-code" not in front
    assert "more-math" in front


def test_a_mix_without_a_domain_counts_as_a_thousandth_of_it() -> None:
    """Variants may leave out what the base has, and the base what variants have."""
    bare = {"base": {d: s for d, s in BASE.items() if d != "code"}}
    rest = {name: mix for name, mix in MIXES.items() if name != "base"}
    full = {name: {**dict.fromkeys(DOMAINS, Fraction(1, 1000)), **mix} for name, mix in {**bare, **rest}.items()}
    found = trials(1, SLOPES, mixes=full)
    short = [MixTrial(t.name, t.repeat, {d: s for d, s in t.shares.items() if s > 0.001}, t.losses) for t in found]
    made = fit_mixture(short, WEIGHTS)
    assert set(made.domains) == set(DOMAINS)
    assert made.shares[made.variants.index("base"), made.domains.index("code")] == 0
    here = [made.domains.index(domain) for domain in fit_mixture(found, WEIGHTS).domains]
    assert log_fit(made).coefficients[here] == pytest.approx(log_fit(fit_mixture(found, WEIGHTS)).coefficients)


def test_weights_that_weigh_nothing_are_refused() -> None:
    mixes = {name: {d: s for d, s in mix.items() if d != "code"} for name, mix in MIXES.items() if "code" not in name}
    found = [
        MixTrial(t.name, t.repeat, {d: t.shares[d] for d in mixes[t.name]}, t.losses)
        for t in trials(1, SLOPES)
        if t.name in mixes
    ]
    with pytest.raises(ValueError, match=r"mix\.weights: .* weigh no domain"):
        fit_mixture(found, {"code": 1.0})


def test_what_lacks_is_said() -> None:
    few = {name: MIXES[name] for name in list(MIXES)[:5]}
    with pytest.raises(ValueError, match="5 mixes, where a fit over 4 domains takes 6"):
        fit_mixture(trials(1, SLOPES, mixes=few), WEIGHTS)
    same = {f"m{n}": {**BASE, "general": Fraction(50 - n, 100), "math": Fraction(25 + n, 100)} for n in range(7)}
    with pytest.raises(ValueError, match="code has one share in all of them"):
        fit_mixture(trials(1, SLOPES, mixes=same), WEIGHTS)


def outcomes(found: list[MixTrial]) -> list[RunResult]:
    """Return runs whose documents all have their domain's loss, give or take."""
    dice, made = np.random.default_rng(5), []
    effects = {domain: dice.normal(0, 0.1, 32) for domain in DOMAINS}
    for one in found:
        bits = {f"eval/bpb/{d}": 1000 * (one.losses[d] + effects[d]) for d in DOMAINS}
        sizes = np.full(32, 1000.0)
        scores = {
            key: Score.from_estimate(
                key, normal(float(value.mean() / 1000), 0.01, 32), "bits per byte", "lower", "same", None
            )
            for key, value in bits.items()
        }
        samples = {key: Samples(tuple(map(str, range(32))), value, sizes) for key, value in bits.items()}
        made.append(RunResult(one.name, one.repeat, f"{one.name}-{one.repeat}", 1000, 10**6, 6e9, scores, samples))
    return made


def test_the_verdict_names_the_mix_and_its_change_or_keeps_the_base() -> None:
    variants = [name for name in MIXES if name != "base"]
    for slopes, significant in ((SLOPES, None), (FLAT, False)):
        runs = outcomes(trials(4, slopes, noise=0.001))
        made = fit_mixture(
            mix_trials(runs, {n: {d: float(s) for d, s in m.items()} for n, m in MIXES.items()}), WEIGHTS
        )
        found = propose(made, ROW, {})
        verdict = mix_verdict(made, found, runs, "base", variants, "base")
        assert {one.variant for one in verdict.findings} == set(variants)
        if significant is False or not found.significant:
            assert verdict.headline[0].startswith(f"{NOTHING}: keep base")
            assert verdict.change == []
        else:
            shares = [Share.parse(line.partition("=")[2]) for line in verdict.change]
            assert sum(shares) == 1
            assert [line.partition("=")[0] for line in verdict.change] == [f"mix.base.{d}" for d in DOMAINS]


def test_a_run_without_a_domain_is_refused() -> None:
    (one, *_) = outcomes(trials(1, SLOPES))
    bare = RunResult("base", 1, "r", 1, 1, 1.0, {k: v for k, v in one.scores.items() if "math" not in k})
    with pytest.raises(ValueError, match="r has no eval/bpb/math"):
        mix_trials([bare], {"base": WEIGHTS})
