"""IsoFLOP ladders: a known law is found again, its interval holds what it promises, weak ladders are named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated_studies import BUDGETS, PlantedLaw, made_up, recovery
from herd.llama3.studies import chinchilla
from herd.llama3.studies.chinchilla import fit_chinchilla
from herd.llama3.studies.isoflop import IsoflopFit, NoLawError, Quadratic, Trial, fit_ladder, noise_from_scatter
from herd.llama3.studies.verdicts import format_count, ladder_verdict, no_law_verdict

CLUSTER = tuple(float(flops) for flops in np.geomspace(6e18, 1e22, 10))
HOFFMANN = PlantedLaw(1.69, 406.4, 410.7, 0.34, 0.28)
"""As printed in arXiv 2203.15556, appendix D.3."""
ALPHA, A = 0.53, 2.0


def parabolic(
    budgets: Sequence[float] = BUDGETS, sizes: int = 5, alpha: float = ALPHA, bend: float = 0.5, shift: float = 0.0
) -> list[Trial]:
    """Return runs whose losses are parabolas with minima on the law, `shift` decades below the grid's middle."""
    found = []
    for flops in budgets:
        best = math.log10(A) + alpha * math.log10(flops)
        for index in range(sizes):
            tokens = round(10 ** (best + 0.3 * (index - (sizes - 1) / 2) + shift))
            parameters = round(flops / 6 / tokens)
            loss = 3.0 - 0.05 * math.log(flops) + bend * (math.log10(tokens) - best) ** 2
            found.append(Trial(parameters, tokens, flops, loss, f"{flops:.3g}-{index}"))
    return found


def moved(trials: Sequence[Trial], budget: float, **shape: float) -> list[Trial]:
    """Return trials with those of one budget replaced by others of another shape."""
    return [one for one in trials if one.flops != budget] + parabolic((budget,), **shape)  # type: ignore[arg-type]


def noisy(trials: Sequence[Trial], seed: int, share: float = 0.002) -> list[Trial]:
    dice = np.random.default_rng(seed)
    return [replace(one, loss=one.loss * (1 + share * dice.normal())) for one in trials]


def test_an_exact_law_is_found_again() -> None:
    for sizes in [3, 4, 5, 7]:
        for alpha in [0.4, 0.537]:
            law = fit_ladder(parabolic(sizes=sizes, alpha=alpha), BUDGETS).law
            assert law.alpha.value == pytest.approx(alpha, abs=1e-4)
            assert law.coefficient.value == pytest.approx(A, rel=1e-2)
            best = law.optimum(1e14)
            assert best.tokens.value == pytest.approx(A * 1e14**alpha, rel=1e-3)
            assert best.parameters.value * best.tokens.value * 6 == pytest.approx(1e14, rel=1e-3)
            assert best.beyond == pytest.approx(1e14 / BUDGETS[-1])
            assert (law.min_flops, law.max_flops) == (BUDGETS[0], BUDGETS[-1])


def test_alpha_lies_in_its_interval_in_93_of_100_ladders() -> None:
    assert recovery(100) >= 93


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0005, 0.005])
@pytest.mark.parametrize(("budgets", "sizes"), [(BUDGETS, 5), (BUDGETS, 4), (BUDGETS[:3], 5), (CLUSTER, 7)])
@pytest.mark.parametrize("truth", [PlantedLaw(), HOFFMANN])
def test_so_it_does_at_other_noise_and_ladders(
    truth: PlantedLaw, budgets: Sequence[float], sizes: int, noise: float
) -> None:
    assert recovery(100, budgets, sizes, noise, truth) >= 93


def test_intervals_are_no_wider_than_they_need_to_be() -> None:
    ladders = [fit_ladder(made_up(PlantedLaw(), CLUSTER, 7, 0.002, seed), CLUSTER) for seed in range(40)]
    spread = float(np.std([one.law.alpha.value for one in ladders], ddof=1))
    width = float(np.median([one.law.alpha.high - one.law.alpha.low for one in ladders]))
    assert 2 * spread < width < 8 * spread


def test_minima_of_budgets_lie_in_their_intervals() -> None:
    held = 0
    for seed in range(100):
        for one in fit_ladder(noisy(parabolic(bend=0.8), seed, 0.004), BUDGETS).parabolas:
            held += one.tokens.low <= A * one.budget**ALPHA <= one.tokens.high
    assert held >= 0.9 * 400


@pytest.mark.parametrize("off", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.slow
def test_the_law_weighs_minima_by_precision_only_where_noise_explains_their_scatter(off: float) -> None:
    """One budget bends five times as much: by precision alone, intervals hold alpha in 77 % where all are off."""
    dice, found = np.random.default_rng(5), []
    for _ in range(100):
        trials = [
            trial
            for place, flops in enumerate(CLUSTER)
            for trial in parabolic((flops,), 7, bend=2.5 if place == 8 else 0.5)
        ]
        shifts = {flops: 10 ** (off * dice.standard_normal()) for flops in CLUSTER}
        trials = [
            replace(one, tokens=round(one.tokens * shifts[one.flops]), loss=one.loss * (1 + 0.002 * dice.normal()))
            for one in trials
        ]
        ladder = fit_ladder(trials, CLUSTER)
        used = [one for one in ladder.parabolas if one.used]
        z, lowest = np.log10([one.budget for one in used]), np.log10([one.tokens.value for one in used])
        spread = np.array([np.log(one.tokens.high / one.tokens.low) for one in used])
        alpha = ladder.law.alpha
        plain, precise = np.polyfit(z, lowest, 1)[0], np.polyfit(z, lowest, 1, w=1 / spread)[0]
        found.append((alpha.value - ALPHA, plain - ALPHA, precise - ALPHA, alpha.low <= ALPHA <= alpha.high))
    law, plain, precise, held = np.array(found).T
    assert held.mean() >= 0.9
    errors = [float(np.sqrt((one**2).mean())) for one in (law, plain, precise)]
    assert errors[0] < 1.1 * min(errors[1:])
    assert off == 0 or errors[2] > 1.2 * errors[0]


@pytest.mark.slow
def test_budgets_that_are_off_together_widen_the_interval() -> None:
    """Each budget's minimum is off by a quarter, which its own runs do not show."""
    held = 0
    for seed in range(60):
        dice = np.random.default_rng(seed)
        trials = [
            replace(one, tokens=round(one.tokens * factor))
            for flops in CLUSTER
            for factor in [math.exp(0.25 * dice.normal())]
            for one in made_up(PlantedLaw(), (flops,), 5, 0.001, seed)
        ]
        ladder = fit_ladder(trials, CLUSTER)
        assert any("scatter" in flag for flag in ladder.flags)
        held += ladder.law.alpha.low <= PlantedLaw().alpha <= ladder.law.alpha.high
    assert held >= 54


@given(st.integers(0, 1000), st.floats(1.5, 50.0), st.floats(0.5, 20.0))
def test_units_of_tokens_and_of_loss_move_nothing_in_alpha(seed: int, tokens: float, loss: float) -> None:
    trials = made_up(PlantedLaw(), BUDGETS, 5, 0.002, seed)
    scaled = [replace(one, tokens=round(one.tokens * tokens), loss=one.loss * loss) for one in trials]
    one, other = fit_ladder(trials, BUDGETS).law, fit_ladder(scaled, BUDGETS).law
    for name in ("value", "low", "high"):
        assert getattr(other.alpha, name) == pytest.approx(getattr(one.alpha, name), rel=1e-3)
    assert other.coefficient.value == pytest.approx(tokens * one.coefficient.value, rel=1e-2)


def test_order_of_runs_moves_nothing() -> None:
    trials = made_up(PlantedLaw(), BUDGETS, 5, 0.002, 3)
    found = [fit_ladder(runs, BUDGETS).law.alpha for runs in (trials, trials[::-1])]
    assert found[0].value == pytest.approx(found[1].value, abs=1e-9)


def test_the_same_runs_give_the_same_interval() -> None:
    trials = made_up(PlantedLaw(), BUDGETS, 5, 0.002, 3)
    assert fit_ladder(trials, BUDGETS).law.alpha == fit_ladder(trials, BUDGETS).law.alpha


def test_farther_is_less_sure() -> None:
    law = fit_ladder(made_up(PlantedLaw(), BUDGETS, 5, 0.004, 3), BUDGETS).law
    widths = [math.log(law.optimum(flops).tokens.high / law.optimum(flops).tokens.low) for flops in (2e12, 1e15, 1e20)]
    assert widths == sorted(widths)
    assert widths[2] > 3 * widths[0]


def flags_of(trials: Sequence[Trial], budgets: Sequence[float] = BUDGETS) -> tuple[IsoflopFit, str]:
    ladder = fit_ladder(trials, budgets)
    return ladder, "\n".join(ladder.flags)


def test_a_minimum_outside_the_grid_does_not_enter_the_law() -> None:
    for shift, edge, advice in [
        (0.9, "fewest tokens", "budget 8e+11: the best size is the largest; add a larger one"),
        (-0.9, "most tokens", "budget 8e+11: the best size is the smallest; add a smaller one"),
    ]:
        trials = moved(noisy(parabolic(), 0), BUDGETS[1], shift=shift)
        ladder, flags = flags_of(trials)
        assert f"{advice}; it does not enter the law" in flags
        found = ladder.parabolas[1]
        assert (found.used, found.edge) == (False, edge)
        without = fit_ladder([one for one in trials if one.flops != BUDGETS[1]], [*BUDGETS[:1], *BUDGETS[2:]])
        # not to the last digit: its residuals still tell the size of the noise
        assert ladder.law.alpha.value == pytest.approx(without.law.alpha.value, rel=1e-4)


def test_a_minimum_just_inside_enters_and_is_flagged() -> None:
    ladder, flags = flags_of(moved(parabolic(), BUDGETS[1], shift=0.55))
    assert ladder.parabolas[1].used
    assert "budget 8e+11: the best size is the largest; add a larger one" in flags
    assert "enter" not in flags


def test_a_parabola_that_opens_downwards_is_left_out() -> None:
    ladder, flags = flags_of(moved(parabolic(), BUDGETS[2], bend=-0.5))
    assert "budget 3.2e+12: the parabola opens downwards" in flags
    assert not ladder.parabolas[2].used
    assert math.isnan(ladder.parabolas[2].tokens.value)
    assert ladder.parabolas[2].loss_at(1e7) > 0


def test_a_flat_budget_is_left_out() -> None:
    trials = noisy(moved(parabolic(), BUDGETS[0], bend=1e-4), 4)
    try:
        flags = fit_ladder(trials, BUDGETS).flags
    except NoLawError as error:
        flags = error.flags
    assert any(flag.startswith("budget 2e+11") and "does not enter" in flag for flag in flags)


def test_nothing_but_noise_is_no_law() -> None:
    refused = 0
    for seed in range(20):
        try:
            fit_ladder(noisy(parabolic(bend=0.0), seed), BUDGETS)
        except NoLawError:
            refused += 1
    assert refused >= 18


def test_three_sizes_are_flagged_and_two_refused() -> None:
    _, flags = flags_of(parabolic(sizes=3))
    assert flags.count("3 sizes leave no residual") == 4
    with pytest.raises(NoLawError, match=r"2 size\(s\), where a parabola takes 3; add sizes"):
        fit_ladder(parabolic(sizes=2), BUDGETS)


def test_four_sizes_cannot_tell_a_parabola() -> None:
    words = "it cannot be tested whether the curves are parabolas"
    assert words in flags_of(parabolic(sizes=4))[1]
    assert words not in flags_of(parabolic(sizes=5))[1]


def test_three_budgets_are_flagged_and_two_refused() -> None:
    _, flags = flags_of(parabolic(BUDGETS[:3]), BUDGETS[:3])
    assert "one degree of freedom; add a fourth" in flags
    with pytest.raises(
        NoLawError, match=r"2 budget\(s\) with a usable minimum, where a law takes 3: add budgets"
    ) as caught:
        fit_ladder(parabolic(BUDGETS[:2]), BUDGETS[:2])
    assert [one.used for one in caught.value.parabolas] == [True, True]
    assert no_law_verdict(caught.value).headline == ["no law: 2 budget(s) with a usable minimum"]


def test_noise_from_scatter_is_chi_squared_of_a_weighted_line() -> None:
    dice, z = np.random.default_rng(1), np.arange(5.0)
    steps = np.linspace(-2, 2, 6)
    fits = [Quadratic(at + steps, (1 + at) * steps**2 + 0.3 * dice.standard_normal(6)) for at in z]
    minima, spreads = np.array([fit.minimum for fit in fits]), np.array([fit.spread for fit in fits])
    assert spreads.max() > 3 * spreads.min()
    slope, level = np.polyfit(z, minima, 1, w=1 / spreads)
    chi = (((minima - slope * z - level) / spreads) ** 2).sum()
    assert noise_from_scatter(z, fits).size == pytest.approx(np.sqrt(chi / 3))


def test_three_by_three_has_the_interval_of_one_degree_of_freedom() -> None:
    """The interval is wide, and still holds the truth as often as it says."""
    assert recovery(100, BUDGETS[:3], 3, 0.002) >= 90
    few = fit_ladder(made_up(PlantedLaw(), BUDGETS[:3], 3, 0.002, 1), BUDGETS[:3]).law.alpha
    many = fit_ladder(made_up(PlantedLaw(), BUDGETS[:3], 7, 0.002, 1), BUDGETS[:3]).law.alpha
    assert few.high - few.low > many.high - many.low


def test_runs_that_are_off_their_budget() -> None:
    trials = parabolic()
    _, flags = flags_of([replace(trials[0], flops=trials[0].flops * 1.06), *trials[1:]])
    assert "budget 2e+11: run 2e+11-0 is off by +6% operations" in flags
    with pytest.raises(ValueError, match="run 2e\\+11-0 took 4e\\+11 operations, which match no budget"):
        fit_ladder([replace(trials[0], flops=4e11), *trials[1:]], BUDGETS)


def test_what_is_no_measurement_is_refused() -> None:
    for fault in [{"loss": math.nan}, {"loss": math.inf}, {"tokens": 0}, {"flops": 0.0}]:
        trials = parabolic()
        with pytest.raises(ValueError, match=r"2e\+11-0.* is not a valid measurement; run it again"):
            fit_ladder([replace(trials[0], **fault), *trials[1:]], BUDGETS)  # type: ignore[arg-type]


def test_budgets_must_be_numbers_above_zero() -> None:
    for budgets in [[], [0.0, 1e12]]:
        with pytest.raises(ValueError, match="give numbers of operations above 0"):
            fit_ladder(parabolic(), budgets)


def test_the_verdict_names_range_interval_and_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chinchilla, "DRAWS", 10)
    trials = made_up(PlantedLaw(), BUDGETS, 5, 0.002, 0)
    ladder, other = fit_ladder(trials, BUDGETS), fit_chinchilla(trials)
    said = ladder_verdict(ladder, 1.28e15, other).headline
    assert len(said) == 4
    assert said[0].startswith("N*(C) = ")
    assert "95 % of alpha" in said[0]
    assert "fitted on 2e+11..1.28e+13 FLOPs" in said[0]
    assert "at 1.28e+15 FLOPs: " in said[2]
    assert "100 x beyond the range fitted (2e+11..1.28e+13 FLOPs)" in said[2]
    assert "inside the range" in ladder_verdict(ladder, 1e12).headline[1]
    assert "2 x below the range" in ladder_verdict(ladder, 1e11).headline[1]
    assert len(ladder_verdict(ladder).headline) == 1


def test_an_interval_too_wide_to_choose_by_is_flagged() -> None:
    ladder = fit_ladder(made_up(PlantedLaw(), BUDGETS, 5, 0.01, 0), BUDGETS)
    assert any("more than a factor of 10; add larger budgets" in flag for flag in ladder_verdict(ladder, 1e26).flags)
    assert not any("factor of 10" in flag for flag in ladder_verdict(ladder, 3e12).flags)


def test_two_forms_that_disagree_are_flagged() -> None:
    """One grid for all budgets and terms of unequal exponents: the parabolas are off, and the sum of powers is not.

    The interval of the law is wide enough to hold the truth all the same; a form fitted to other runs lies outside.
    """
    truth = PlantedLaw(1.0, 60.0, 3000.0, 0.25, 0.45)
    dice, trials = np.random.default_rng(0), []
    for flops in CLUSTER:
        for index in range(9):
            size = truth.parameters(1e20) * 2.0 ** (index - 4)
            loss = truth.loss(size, flops / 6 / size) * (1 + 1e-4 * dice.normal())
            trials.append(Trial(round(size), round(flops / 6 / size), flops, loss, f"{flops:.3g}-{index}"))
    ladder = fit_ladder(trials, CLUSTER)
    assert ladder.law.alpha.low <= truth.alpha <= ladder.law.alpha.high
    verdict = ladder_verdict(ladder, 3.8e25, fit_chinchilla(made_up(HOFFMANN, CLUSTER, 5, 0.0, 0)))
    assert any("two forms disagree" in flag for flag in verdict.flags)
    assert any("bend more on one side" in flag for flag in verdict.flags)


@pytest.mark.slow
def test_true_parabolas_are_seldom_called_lopsided() -> None:
    ladders = [fit_ladder(noisy(parabolic(sizes=7), seed), BUDGETS) for seed in range(100)]
    assert sum(any("one side" in flag for flag in one.flags) for one in ladders) <= 5


def test_counts_are_said_as_people_do() -> None:
    for number, text in [
    (16.31e12, "16.3T"), (21e6, "21M"), (812_345, "812K"), (999_999, "1000K"), (7.0, "7"), (3e20, "3e+20"),
]:  # fmt: skip
        assert format_count(number) == text


def test_flops_must_be_a_number_above_zero() -> None:
    law = fit_ladder(parabolic(), BUDGETS).law
    for flops in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="give a number above 0"):
            law.optimum(flops)


def test_the_spread_of_a_minimum_is_that_of_minima_of_noisy_points() -> None:
    x = np.linspace(-1.0, 1.5, 7)
    found = Quadratic(x, 3 * (x - 0.6) ** 2 + 1)
    noise = 1e-3 * np.random.default_rng(0).standard_normal((4000, 7))
    assert found.minima(noise).std() / 1e-3 == pytest.approx(found.spread, rel=0.05)
