"""The form L(N, D): known constants are found again, intervals hold, and what fixes no form is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize

from benchmarks.simulated_studies import BUDGETS, PlantedLaw, made_up
from herd.llama3.studies import chinchilla
from herd.llama3.studies.chinchilla import Chinchilla, fit_chinchilla
from herd.llama3.studies.isoflop import Trial

HOFFMANN = PlantedLaw(1.69, 406.4, 410.7, 0.34, 0.28)
"""As printed in arXiv 2203.15556, appendix D.3."""
WIDE_BUDGETS = (1e18, 1e19, 1e20, 1e21, 1e22)


def best_size(truth: PlantedLaw, flops: float, ratio: float) -> float:
    """Return the size with the lowest loss at `ratio` operations per token and parameter, by plain search."""
    found = optimize.minimize_scalar(
        lambda log: truth.loss(math.exp(log), flops / ratio / math.exp(log)),
        bounds=(1.0, 40.0),
        method="bounded",
        options={"xatol": 1e-8},
    )
    return math.exp(found.x)


@pytest.fixture(scope="module")
def exact() -> Chinchilla:
    return fit_chinchilla(made_up(HOFFMANN, WIDE_BUDGETS, 5, 0.0, 0))


def test_exact_constants_are_found_again(exact: Chinchilla) -> None:
    assert exact.irreducible.value == pytest.approx(1.69, rel=1e-4)
    assert exact.size.value == pytest.approx(0.34, rel=1e-3)
    assert exact.data.value == pytest.approx(0.28, rel=1e-3)
    assert exact.scales == pytest.approx((406.4, 410.7), rel=2e-2)
    assert exact.alpha.value == pytest.approx(HOFFMANN.alpha, rel=1e-3)
    assert exact.loss(70e9, 1.4e12) == pytest.approx(HOFFMANN.loss(70e9, 1.4e12), rel=1e-4)


def test_the_optimum_is_where_the_loss_is_lowest(exact: Chinchilla) -> None:
    for flops in [1e17, 5.76e23, 3.8e25]:
        best = exact.optimum(flops)
        assert best.parameters.value == pytest.approx(best_size(HOFFMANN, flops, 6.0), rel=0.02)
        assert best.tokens.value * best.parameters.value * 6 == pytest.approx(flops, rel=1e-3)
        assert best.beyond == pytest.approx(flops / 1e22, rel=1e-3)


def test_the_cost_of_a_token_is_that_of_the_runs() -> None:
    """Attention and embeddings: 9 operations per token and parameter instead of 6."""
    trials = [replace(one, flops=one.flops * 1.5) for one in made_up(HOFFMANN, WIDE_BUDGETS, 5, 0.0, 0)]
    best = fit_chinchilla(trials).optimum(1e24)
    assert best.parameters.value == pytest.approx(best_size(HOFFMANN, 1e24, 9.0), rel=0.02)
    assert best.tokens.value * best.parameters.value * 9 == pytest.approx(1e24, rel=1e-3)


@pytest.mark.slow
def test_alpha_and_the_optimum_lie_in_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chinchilla, "DRAWS", 40)
    truth, held = PlantedLaw(), [0, 0]
    tokens = 1e15 / 6 / truth.parameters(1e15)
    for seed in range(12):
        found = fit_chinchilla(made_up(truth, BUDGETS, 5, 0.002, seed))
        best = found.optimum(1e15).tokens
        held[0] += found.alpha.low <= truth.alpha <= found.alpha.high
        held[1] += best.low <= tokens <= best.high
    assert min(held) >= 10


def test_one_bad_run_moves_it_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Huber loss: a run that diverged to half as much loss again."""
    monkeypatch.setattr(chinchilla, "DRAWS", 20)
    trials = made_up(PlantedLaw(), BUDGETS, 6, 0.0005, 0)
    spoilt = [*trials[:8], replace(trials[8], loss=trials[8].loss * 1.5), *trials[9:]]
    found = fit_chinchilla(trials)
    assert fit_chinchilla(spoilt).alpha.value == pytest.approx(found.alpha.value, abs=0.01)
    assert found.alpha.low <= PlantedLaw().alpha <= found.alpha.high


def test_gradient_is_that_of_the_objective() -> None:
    dice = np.random.default_rng(0)
    x, y, target = dice.normal(size=(3, 12))
    values = np.array([0.1, -0.2, 0.3, 0.4, 0.5])
    _, gradient = chinchilla._objective(values, x, y, target)
    numeric = optimize.approx_fprime(values, lambda one: chinchilla._objective(one, x, y, target)[0], 1e-7)
    assert gradient == pytest.approx(numeric, rel=1e-4)


def one_size(trials: Sequence[Trial]) -> list[Trial]:
    return [replace(one, parameters=10**6) for one in trials]


def test_what_fixes_no_form_is_refused() -> None:
    trials = made_up(PlantedLaw(), BUDGETS, 5, 0.002, 0)
    with pytest.raises(ValueError, match="6 runs; the form takes 7, of 3 sizes and 3 numbers of tokens"):
        fit_chinchilla(trials[:6])
    with pytest.raises(ValueError, match="add runs"):
        fit_chinchilla([])
    with pytest.raises(ValueError, match="add runs"):
        fit_chinchilla(one_size(trials))
    with pytest.raises(ValueError, match="run it again, or leave it out"):
        fit_chinchilla([replace(trials[0], loss=math.nan), *trials[1:]])
    with pytest.raises(ValueError, match="do not fix E, A, B, a and b"):
        fit_chinchilla([replace(one, loss=2.0 + 1e-9 * index) for index, one in enumerate(trials)])


def test_flops_must_be_a_number_above_zero(exact: Chinchilla) -> None:
    with pytest.raises(ValueError, match="give a number above 0"):
        exact.optimum(0.0)
