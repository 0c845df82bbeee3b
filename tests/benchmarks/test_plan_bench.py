from __future__ import annotations

import sys

import pytest

from benchmarks import plan
from benchmarks.plan import PlanSession, PlanSettings, plan_rows


def session(*only: str, code: str = "pass") -> PlanSession:
    return PlanSession(PlanSettings(only, (sys.executable, "-c", code), "a recipe"))


@pytest.mark.slow
def test_the_search_is_counted_in_layouts_per_cpu_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ROWS_OF_TABLE_4", range(1))
    (row,) = plan_rows(session("search"))
    assert row.detail["layouts"] > 1_000
    assert row.value == pytest.approx(row.detail["layouts"] / row.detail["cpu_s"])


def test_a_command_is_measured_in_its_own_process() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    idle, spinning = (next(plan_rows(session("recipe", code=code))).value for code in ("pass", busy))
    assert idle is not None
    assert spinning is not None
    assert spinning > idle + 0.3


def test_a_command_that_fails_misses() -> None:
    rows = [*plan_rows(session("recipe", "start/status", code="import sys; sys.exit(3)"))]
    assert [row.name for row in rows] == ["recipe/cpu", "start/status"]
    assert [row.ok for row in rows] == [False, False]


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(ValueError, match="--only: nonsense is no row; the rows are search/rate"):
        [*plan_rows(session("nonsense"))]
