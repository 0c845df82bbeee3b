from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.statistics.significance import Difference, holm, mcnemar, normal_p


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (1, 10, 2 * 12 / 2**11),
        (10, 1, 2 * 12 / 2**11),
        (0, 6, 2 / 2**6),
        (5, 5, 1.0),
        (4, 5, 1.0),
    ],
)
def test_mcnemar_by_hand(gained: int, lost: int, p: float) -> None:
    assert mcnemar(gained, lost) == p


def test_mcnemar_stays_exact_at_the_size_of_mmlu() -> None:
    """Against the normal approximation with continuity correction, which is good at such counts."""
    exact, z = mcnemar(3000, 3180), (180 - 1) / math.sqrt(6180)
    assert exact == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)
    assert mcnemar(0, 1000) == 2 / 2**1000


@pytest.mark.slow
def test_mcnemar_is_seldom_significant_between_equal_models() -> None:
    random = np.random.default_rng(0)
    changes = random.choice([1, -1, 0], (2000, 100), p=[0.15, 0.15, 0.7])
    found = [mcnemar(int((row > 0).sum()), int((row < 0).sum())) < 0.05 for row in changes]
    assert np.mean(found) <= 0.05


@pytest.mark.parametrize(("value", "p"), [(1.959963984540054, 0.05), (-1.959963984540054, 0.05), (0.0, 1.0)])
def test_normal_p(value: float, p: float) -> None:
    assert normal_p(value, 1.0) == pytest.approx(p)
    assert normal_p(value / 100, 0.01) == pytest.approx(p)


def test_normal_p_without_spread() -> None:
    assert (normal_p(0.0, 0.0), normal_p(0.1, 0.0)) == (1.0, 0.0)
    assert math.isnan(normal_p(math.nan, 1.0))
    assert math.isnan(normal_p(1.0, math.nan))


def test_holm_by_hand() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert list(adjusted) == ["a", "b", "c", "d"]


def test_holm_leaves_out_what_is_not_a_number() -> None:
    adjusted = holm({"a": 0.02, "b": math.nan})
    assert adjusted["a"] == 0.02
    assert math.isnan(adjusted["b"])
    assert holm({}) == {}


@given(st.dictionaries(st.integers(), st.floats(0, 1), min_size=1, max_size=30))
def test_holm_never_makes_a_p_smaller_and_keeps_their_order(ps: dict[int, float]) -> None:
    named = {str(name): p for name, p in ps.items()}
    adjusted = holm(named)
    assert all(named[name] <= adjusted[name] <= 1 for name in named)
    assert min(adjusted.values()) == pytest.approx(min(1.0, len(named) * min(named.values())))
    ranked = sorted(named, key=lambda name: (named[name], adjusted[name]))
    assert [adjusted[name] for name in ranked] == sorted(adjusted.values())


def test_holm_keeps_the_chance_of_any_false_finding() -> None:
    """Twenty tasks without any difference: without correction two of three comparisons would find one."""
    ps = np.random.default_rng(1).random((2000, 20))
    any_found = np.mean([min(holm({str(i): float(p) for i, p in enumerate(row)}).values()) < 0.05 for row in ps])
    assert any_found <= 0.06
    assert np.mean(ps.min(axis=1) < 0.05) > 0.6


@given(st.tuples(st.floats(), st.floats(), st.floats(), st.floats()))
def test_differences_survive_json(numbers: tuple[float, float, float, float]) -> None:
    value, low, high, p = numbers
    difference = Difference(value=value, low=low, high=high, p=p, n=3, method="McNemar", better="higher")
    again = Difference.model_validate_json(difference.model_dump_json())
    for name in ("value", "low", "high", "p"):
        ours, theirs = getattr(difference, name), getattr(again, name)
        assert ours == theirs or (math.isnan(ours) and math.isnan(theirs))


def test_worse_is_worse_in_either_direction() -> None:
    base = Difference(value=0.1, low=0.0, high=0.3, p=0.1, n=9, method="McNemar", better="lower")
    assert base.worse == (0.1, 0.0, 0.3)
    assert base.model_copy(update={"better": "higher"}).worse == (-0.1, -0.3, -0.0)
