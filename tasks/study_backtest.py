"""The back-test of a forecast as a table: what smaller runs said of larger ones, and what those then scored.

What this gives up: how each fit looked; the figure of the forecast shows the one through all runs.
"""

from __future__ import annotations

from llama3.scaling.backtest import Backtest
from llama3.scaling.forecast import Interval
from tasks.study_page import ViewTable

COLUMNS = (
    *("run", "forecast from", "operations", "beyond", "nats per byte", "measured nats", "nats inside"),
    *("accuracy", "measured accuracy", "accuracy inside"),
)
INSIDE, TONE = 9, 6
"""Columns that say whether accuracy and nats lie inside."""


def backtest_table(name: str, test: Backtest) -> ViewTable:
    """Return the back-test of the benchmark `name`, a row for each run and each fit that it was left out of."""
    rows = [
        [
            *(row.run, f"{row.runs} runs", f"{row.forecast.flops:.3g}", f"{row.forecast.beyond:.3g} x"),
            *(_interval(row.forecast.nats), f"{row.nats:.4f}", _yes(row.nats_inside)),
            *(_interval(row.expected), f"{row.accuracy:.4f}", _yes(row.inside)),
        ]
        for row in test.rows
    ]
    outside = {(place, INSIDE): "bad" for place, row in enumerate(test.rows) if not row.inside}
    outside |= {(place, TONE): "bad" for place, row in enumerate(test.rows) if not row.nats_inside}
    note = (
        f"Each run forecast from those of less compute. Inside their 95 % intervals: {test.inside:.0%} of accuracies, "
        f"{test.nats_inside:.0%} of nats; the luck of the questions is in the interval of the accuracy. "
        f"No further ones left out: {test.stopped}."
    )
    return ViewTable(f"Back-test: {name}", note, COLUMNS, rows, outside)


def _interval(found: Interval) -> str:
    return f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"


def _yes(inside: bool) -> str:
    return "yes" if inside else "no"
