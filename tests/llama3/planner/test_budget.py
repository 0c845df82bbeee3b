"""Sums over stages: they add up, and move with prices, goodput and speed as they must."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.hardware.prices import Prices
from herd.llama3.planner.budget import Budget, StageTime, StorageUse, total_days_and_gpu_hours

MAIN = StageTime("main", 2**24 * 1000, 1000, 16_384, 10.0, 0.9, products_s=6.0, messages_s=2.0)
STORED = StorageUse(60e12, 60e12, 5e12, 10)
PLAN = Budget((MAIN, StageTime("anneal", 2**20 * 50, 50, 1024, 4.0, 0.95)), Prices(), STORED)
factors = st.floats(0.5, 2.0)


@st.composite
def stage_times(draw: st.DrawFn) -> StageTime:
    step_s = draw(st.floats(1e-3, 100))
    products_s = draw(st.floats(0, 1)) * step_s
    return StageTime(
        "a stage",
        draw(st.integers(1, 10**13)),
        draw(st.integers(1, 10**6)),
        draw(st.integers(1, 10**5)),
        step_s,
        draw(st.floats(0.01, 1.0)),
        products_s,
        draw(st.floats(0, 1)) * (step_s - products_s),
    )


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    prices = Prices(gpu_hour=draw(st.floats(0.1, 10)), spare_share=draw(st.floats(0, 0.1)))
    sizes = st.floats(0, 1e15)
    stored = StorageUse(draw(sizes), draw(sizes), draw(sizes), draw(st.floats(0, 100)))
    return Budget(tuple(draw(st.lists(stage_times(), min_size=1, max_size=4))), prices, stored)


def test_a_stage_by_hand() -> None:
    assert MAIN.seconds == pytest.approx(10_000 / 0.9)
    assert MAIN.gpu_hours == pytest.approx(16_384 * 10_000 / 0.9 / 3600)


def test_a_budget_by_hand() -> None:
    one = Budget((StageTime("all", 100, 3600, 1000, 24.0, 1.0),), Prices(), StorageUse(1e12, 1e12, 1e12, 8))
    assert one.days == 1
    assert one.gpu_hours == 24_000
    assert one.gpu_money == 60_000
    assert one.storage_money == pytest.approx(10_000 * 0.02 * 24 / 730)  # 10 TB for a day
    assert one.mwh == pytest.approx(24_000 * (700 * 0.9 + 300) * 1.1 / 1e6)
    spared = one.with_price(spare_share=0.05)
    assert spared.gpu_money == pytest.approx(63_000)
    same = ("days", "gpu_hours", "storage_money", "mwh")  # a spare waits, and its power is not counted
    assert [getattr(spared, name) for name in same] == [getattr(one, name) for name in same]


@given(budgets())
def test_everything_adds_up(budget: Budget) -> None:
    each = [replace(budget, stages=(stage,)) for stage in budget.stages]
    for name in ("days", "gpu_hours", "gpu_money", "storage_money", "money", "mwh"):
        assert getattr(budget, name) == pytest.approx(sum(getattr(one, name) for one in each))
    assert budget.money == pytest.approx(budget.gpu_money + budget.storage_money)
    assert total_days_and_gpu_hours(budget.stages) == pytest.approx((budget.days, budget.gpu_hours))


@given(budgets(), factors)
def test_money_is_linear_in_the_price_and_nothing_else_is(budget: Budget, factor: float) -> None:
    dearer = budget.with_price(gpu_hour=factor * budget.prices.gpu_hour)
    assert dearer.gpu_money == pytest.approx(factor * budget.gpu_money)
    same = ("days", "gpu_hours", "mwh", "storage_money")
    assert [getattr(dearer, name) for name in same] == [getattr(budget, name) for name in same]
    shelf = budget.with_price(gb_month=factor * budget.prices.gb_month)
    assert shelf.storage_money == pytest.approx(factor * budget.storage_money)
    assert shelf.gpu_money == budget.gpu_money


@given(budgets(), st.floats(0.1, 1.0))
def test_all_go_inversely_with_goodput(budget: Budget, factor: float) -> None:
    worse = budget.with_goodput(factor)
    for name in ("days", "gpu_hours", "money", "mwh"):
        assert getattr(worse, name) == pytest.approx(getattr(budget, name) / factor)


@given(budgets(), factors)
def test_products_and_messages_move_their_part_of_a_step_and_no_more(budget: Budget, factor: float) -> None:
    for change, part in (("with_products", "products_s"), ("with_messages", "messages_s")):
        found = getattr(budget, change)(factor)
        for before, after in zip(budget.stages, found.stages, strict=True):
            mine = getattr(before, part)
            assert after.step_s == pytest.approx(before.step_s - mine + mine / factor)
            assert replace(after, step_s=before.step_s) == before
        assert (found.prices, found.stored) == (budget.prices, budget.stored)


def test_a_step_of_products_alone_goes_inversely_with_their_speed() -> None:
    one = Budget((replace(MAIN, products_s=10.0, messages_s=0.0),), Prices(), STORED)
    for name in ("days", "gpu_hours", "money", "mwh"):
        assert getattr(one.with_products(1.25), name) == pytest.approx(getattr(one, name) / 1.25)
        assert getattr(one.with_messages(1.25), name) == getattr(one, name)


def test_goodput_ends_at_one() -> None:
    assert [stage.goodput for stage in PLAN.with_goodput(1.08).stages] == pytest.approx([0.972, 1.0])


def test_energy_has_each_of_its_factors() -> None:
    base = PLAN.mwh
    assert PLAN.with_price(pue=2.2).mwh == pytest.approx(2 * base)
    assert PLAN.with_price(gpu_load=0.0).mwh == pytest.approx(base * 300 / 930)
    assert PLAN.with_price(server_watts=0.0).mwh == pytest.approx(base * 630 / 930)
    assert PLAN.with_price(gpu_watts=1400.0).mwh == pytest.approx(base * 1560 / 930)


def test_storage_holds_text_tokens_and_the_kept_checkpoints() -> None:
    assert STORED.total == 60e12 + 60e12 + 50e12


def test_every_figure_is_told() -> None:
    told = PLAN.as_dict()
    assert sum(stage["days"] for stage in told["stages"]) == pytest.approx(told["days"])
    assert sum(stage["gpu_hours"] for stage in told["stages"]) == pytest.approx(told["gpu_hours"])
    assert told["gpu_money"] + told["storage_money"] == told["money"] == PLAN.money
    assert told["stored"]["total"] == STORED.total
    assert told["prices"].keys() == {field.name for field in fields(Prices)}
    assert [stage["name"] for stage in told["stages"]] == ["main", "anneal"]


def test_a_price_that_cannot_be_is_told() -> None:
    for field in [field.name for field in fields(Prices)]:
        for value in [-1.0, nan, inf]:
            with pytest.raises(ValueError, match=f"^{field}: {value:g} is not an amount; write a number of 0 or more"):
                Prices(**{field: value})


def test_shares_and_factors_have_bounds() -> None:
    with pytest.raises(ValueError, match=r"pue: 0.9 is below 1; a site draws"):
        PLAN.with_price(pue=0.9)
    with pytest.raises(ValueError, match=r"gpu_load: 1.1 is above 1; write the share"):
        Prices(gpu_load=1.1)


def test_a_step_takes_time() -> None:
    for step_s in [0.0, -1.0, inf, nan]:
        with pytest.raises(ValueError, match=f"main: step_s: {step_s:g} is not a time; write seconds above 0"):
            replace(MAIN, step_s=step_s)


def test_a_job_that_never_trains_has_no_budget() -> None:
    for goodput in [0.0, -0.1, 1.01, nan]:
        with pytest.raises(
            ValueError, match=rf"main: goodput: {goodput:g} on 16,384 GPUs is not in \(0, 1\]; use fewer"
        ):
            replace(MAIN, goodput=goodput)
