"""Published figures of the ladder: printed answers follow from printed constants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.studies import expand
from herd.llama3.studies.expand import FIGURE, TEXT, batch_tokens, peak_lr
from herd.llama3.studies.isoflop import Trial, fit_ladder


def test_the_constants_of_figure_3_give_16_3_trillion_tokens() -> None:
    assert FIGURE.tokens(expand.FLAGSHIP_FLOPS) == pytest.approx(16.3e12, rel=5e-3)


def test_the_rounded_pair_gives_10_5_trillion_tokens() -> None:
    assert TEXT.tokens(expand.FLAGSHIP_FLOPS) == pytest.approx(10.5e12, rel=5e-3)


def test_a_ladder_on_the_published_budgets_finds_the_published_law() -> None:
    """Losses with their minima on Figure 3's line, at the published budgets: the fit gives the published tokens."""
    trials = []
    for flops in expand.BUDGETS:
        for step in range(-3, 4):
            tokens = round(FIGURE.tokens(flops) * 1.7**step)
            size = round(flops / 6 / tokens)
            trials.append(Trial(size, tokens, flops, 2.0 + 0.01 * step**2, f"{flops:.0e}-{step}"))
    law = fit_ladder(trials, expand.BUDGETS).law
    assert law.alpha.value == pytest.approx(0.537, abs=1e-6)
    assert law.coefficient.value == pytest.approx(0.299, rel=1e-4)
    assert law.optimum(3.8e25).tokens.value == pytest.approx(16.3e12, rel=5e-3)
    assert law.optimum(3.8e25).beyond == pytest.approx(3800)


def test_ten_budgets_rise_from_end_to_end() -> None:
    assert len(expand.BUDGETS) == 10
    assert list(expand.BUDGETS) == sorted(expand.BUDGETS)
    assert (expand.BUDGETS[0], expand.BUDGETS[-1]) == (6e18, 1e22)


def test_ends_are_the_published_ones() -> None:
    assert (peak_lr(40e6), peak_lr(16e9)) == pytest.approx((4e-4, 2e-4))
    assert (batch_tokens(6e18), batch_tokens(1e22)) == pytest.approx((250e3, 4e6))
    assert (peak_lr(1e3), batch_tokens(1e30)) == pytest.approx((4e-4, 4e6))


def test_other_ends_and_the_middle() -> None:
    assert peak_lr(1e6, (1e5, 1e7), (8e-3, 2e-3)) == pytest.approx(4e-3)
    assert batch_tokens(1e12, (1e11, 1e13), (1024, 4096)) == pytest.approx(2048)
    assert peak_lr(5.0, (5.0, 5.0), (1e-3, 1e-4)) == 1e-3


@given(st.floats(1e6, 1e12), st.floats(1e6, 1e12))
def test_larger_models_never_get_a_larger_peak(one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert peak_lr(large) <= peak_lr(small) * (1 + 1e-12)


def test_ends_must_make_sense() -> None:
    for x, ends, values in [
    (0.0, (1.0, 2.0), (1.0, 2.0)), (1.0, (2.0, 1.0), (1.0, 2.0)), (1.0, (1.0, 2.0), (0.0, 1.0)),
]:  # fmt: skip
        with pytest.raises(ValueError, match="give numbers above 0, the lower end first"):
            peak_lr(x, ends, values)
