"""Rounds of steps: what counts as the ratio and its noise, and what becomes of a side that cannot take part."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.train_rounds import WARM_UP, Ratio, Rounds, Side, take_rounds

seconds = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=30)


def rounds(pairs: list[tuple[float, float]]) -> Rounds:
    cpu_s = {"a": [one for one, _ in pairs], "b": [other for _, other in pairs]}
    return Rounds(cpu_s, {}, {}, {}, {})


@given(pairs=seconds, factor=st.floats(0.5, 2))
def test_a_ratio_is_of_steps_of_one_round(pairs: list[tuple[float, float]], factor: float) -> None:
    """A round on a machine that is busier by any factor changes nothing."""
    ratio = rounds(pairs).ratio("a", "b")
    slower = [(one * factor**place, other * factor**place) for place, (one, other) in enumerate(pairs)]
    again = rounds(slower).ratio("a", "b")
    assert again.value == pytest.approx(ratio.value)
    assert again.noise == pytest.approx(ratio.noise)
    assert min(a / b for a, b in pairs) <= ratio.value <= max(a / b for a, b in pairs)


def test_noise_is_the_interval_of_the_median() -> None:
    """Of 25 rounds the 8th and the 18th smallest ratio; equal rounds have none."""
    assert rounds([(2.0, 1.0)] * 9).ratio("a", "b") == Ratio(2.0, 0.0)
    found = rounds([(float(number), 1.0) for number in range(1, 26)]).ratio("a", "b")
    assert (found.value, found.noise) == (13, pytest.approx((18 - 8) / 2 / 13))


@pytest.mark.slow
def test_sides_take_turns_and_say_what_they_have(tmp_path: Path) -> None:
    """A library that is not installed leaves its side out."""
    shape = {"vocab_size": 32, "tokens": 8, "dim": 8, "plain": True}
    sides = {
        "plain": Side("train_loss"),
        "bf16": Side("train_loss", bf16=True, shape={"plain": False}),
        "absent": Side("peers.train_torchtitan"),
    }
    found = take_rounds(sides, tmp_path / "none", shape, 3)
    assert set(found.missing) == {"absent"}
    assert "torchtitan" in found.missing["absent"]
    assert all(len(found.cpu_s[name]) == 3 and len(found.losses[name]) == 3 + WARM_UP for name in found.cpu_s)
    assert found.losses["plain"][0] != found.losses["bf16"][0] == pytest.approx(found.losses["plain"][0], abs=0.02)


@pytest.mark.slow
def test_a_side_that_fails_ends_the_rounds(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken failed: KeyError: 'tokens'"):
        take_rounds({"broken": Side("train_loss")}, tmp_path / "none", {"vocab_size": 32}, 1)
