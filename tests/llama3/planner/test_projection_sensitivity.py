"""Elasticities have the sign and size of the formulas, and the tornado is in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.hardware.prices import Prices
from herd.llama3.planner.budget import Budget, StageTime, StorageUse
from herd.llama3.planner.projection import UNKNOWNS, Quantity, Sensitivity, sensitivities

PLAN = Budget(
    (
        StageTime("main", 2**24 * 1000, 1000, 16_384, 10.0, 0.9, products_s=6.0, messages_s=2.0),
        StageTime("end", 2**24 * 50, 50, 8_192, 30.0, 0.95, products_s=18.0, messages_s=6.0),
    ),
    Prices(spare_share=0.02),
    StorageUse(60e12, 60e12, 5e12, 10),
)
QUANTITIES: tuple[Quantity, ...] = ("days", "gpu_hours", "money", "mwh")
TIME = {"goodput": -1.0, "speed of matrix products": -0.6, "speed of the network": -0.2}
"""Elasticities of time: products are 6, messages 2 of 10 seconds."""


def by_name(quantity: Quantity, budget: Budget = PLAN) -> dict[str, Sensitivity]:
    return {one.name: one for one in sensitivities(budget, quantity, most=len(UNKNOWNS))}


def test_more_speed_and_more_goodput_are_less_of_everything() -> None:
    for quantity in QUANTITIES:
        found = by_name(quantity)
        for name, elasticity in TIME.items():
            assert found[name].elasticity == pytest.approx(elasticity, abs=1e-4)
            assert found[name].low > found[name].planned > found[name].high


def test_days_and_gpu_hours_hang_on_time_alone() -> None:
    assert by_name("days").keys() == by_name("gpu_hours").keys() == TIME.keys()


def test_money_grows_with_prices_by_their_parts_of_it() -> None:
    found = by_name("money")
    assert found.keys() == TIME.keys() | {"price of a GPU-hour", "price of storage"}
    parts = {"price of a GPU-hour": PLAN.gpu_money, "price of storage": PLAN.storage_money}
    for name, part in parts.items():
        assert found[name].elasticity == pytest.approx(part / PLAN.money, rel=1e-4)
        assert found[name].low < found[name].planned < found[name].high


def test_energy_grows_with_power_and_pue() -> None:
    found = by_name("mwh")
    assert found.keys() == TIME.keys() | {"power drawn by a GPU", "PUE"}
    assert found["PUE"].elasticity == pytest.approx(1)
    assert found["power drawn by a GPU"].elasticity == pytest.approx(630 / 930)


def test_the_largest_come_first_and_three_of_them() -> None:
    for quantity in QUANTITIES:
        found = sensitivities(PLAN, quantity)
        swings = [one.swing for one in found]
        assert swings == sorted(swings, reverse=True)
        assert [one.name for one in found] == [*by_name(quantity)][:3]
        assert len(found) == min(3, len(by_name(quantity)))


def test_a_swing_is_the_difference_over_the_planned_value() -> None:
    price = by_name("money")["price of a GPU-hour"]
    assert price.low == pytest.approx(0.6 * PLAN.gpu_money + PLAN.storage_money)
    assert price.high == pytest.approx(1.6 * PLAN.gpu_money + PLAN.storage_money)
    assert price.swing == pytest.approx(PLAN.gpu_money / PLAN.money)
    assert price.as_dict() | {"swing": price.swing} == price.as_dict()


@given(goodput=st.sampled_from([0.5, 0.99, 1.0]), pue=st.sampled_from([1.0, 1.3]), load=st.sampled_from([0.5, 1.0]))
def test_bounds_are_kept_and_the_side_that_can_move_counts(goodput: float, pue: float, load: float) -> None:
    stages = (StageTime("main", 2**24, 1, 8, 10.0, goodput),)
    found = by_name("mwh", Budget(stages, Prices(pue=pue, gpu_load=load), StorageUse(0, 0, 0, 0)))
    assert found["goodput"].elasticity == pytest.approx(-1, abs=1e-4)
    assert found["goodput"].high == pytest.approx(found["goodput"].planned * goodput / min(1.0, 1.04 * goodput))
    assert found["PUE"].elasticity == pytest.approx(1, abs=1e-4)
    assert found["power drawn by a GPU"].elasticity == pytest.approx(700 * load / (700 * load + 300), abs=1e-4)


def test_what_costs_nothing_moves_nothing() -> None:
    free = PLAN.with_price(gpu_hour=0.0, gb_month=0.0)
    assert sensitivities(free, "money") == []
    assert "price of storage" not in by_name("money", PLAN.with_price(gb_month=0.0))


def test_every_range_holds_the_plan_and_says_where_it_comes_from() -> None:
    assert len({one.name for one in UNKNOWNS}) == len(UNKNOWNS)
    for one in UNKNOWNS:
        assert one.low <= 1 <= one.high
        assert one.low < one.high
        assert one.why
