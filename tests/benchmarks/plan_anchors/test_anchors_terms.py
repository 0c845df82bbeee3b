"""A21 to A23: each term of the step is pinned by a figure, or the row says that none is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_anchors import step
from benchmarks.plan_anchors.published import Anchor, fitted_h100_curves, step_model, table4_query
from benchmarks.plan_anchors.step import OUT_OF_REACH, TERMS, term_anchors
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load
from herd.llama3.planner.step_time import StepModel, StepTime


@pytest.fixture(scope="module")
def rows() -> list[Anchor]:
    return term_anchors()


def test_rates_hold_and_their_ablations_miss(rows: list[Anchor]) -> None:
    told = [row for row in rows if row.number in ("A21", "A22")]
    assert [row.verdict for row in told] == ["ok", "misses", "misses", "misses", "ok", "misses", "misses"]
    assert not any(row.wrong for row in rows)
    assert all(row.note for row in told if not row.ablation)


def test_terms_that_nothing_pins_are_said_to_be_not_caught(rows: list[Anchor]) -> None:
    verdicts = {name: row.verdict for name, row in zip(TERMS, (r for r in rows if r.number == "A23"), strict=True)}
    assert [name for name, verdict in verdicts.items() if verdict == "misses"] == [
        "messages of context parallelism",
        "the bubble",
    ]
    assert set(verdicts.values()) == {"misses", "NOT CAUGHT"}
    assert all(row.note for row in rows if row.verdict == "NOT CAUGHT")
    assert [why for _, why in TERMS.values()].count(OUT_OF_REACH) == 3


def test_a_term_is_one_of_the_step_s_and_makes_it_shorter() -> None:
    layout = Layout(tp=8, pp=16, vpp=8, microbatch_group_size=16)
    step = step_model(fitted_h100_curves()).predict(layout, 8192, Load(table4_query(0).seq_len, 1, 32))
    for name, (seconds, _) in TERMS.items():
        assert seconds(step) in vars(step).values(), name
        assert name.startswith("messages of context") or seconds(step) > 0, name


def test_a_model_with_ten_times_the_optimizer_s_bytes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = StepModel.predict

    def predict(model: StepModel, layout: Layout, world: int, load: Load) -> StepTime:
        step = plain(model, layout, world, load)
        return replace(step, optimizer=10 * step.optimizer)

    monkeypatch.setattr(StepModel, "predict", predict)
    assert next(step._scaling()).wrong
