"""When an attempt counts as hanging: a table of events and verdicts, in seconds of a clock that the test holds."""

from __future__ import annotations

import pytest

from herd.llama3.train.job import SAVE_TIMEOUT_S
from herd.tasks.stages.hang_detector import HangDetector

IDLE_START = "it did nothing for 10 s before its first step"
NO_STEP = "no step for 10 s"
NO_LOG = "no step and no line of log for 100 s"
NO_SAVE = "no step for 3,600 s while it saves a checkpoint"
LATE = 12 + SAVE_TIMEOUT_S
Event = tuple[str, float] | tuple[str, float, float | None]


def busy(until: int) -> list[Event]:
    """A trainer that uses a processor, observed every 5 s."""
    return [("processor_time", now, float(now)) for now in range(5, until, 5)]


@pytest.mark.parametrize(
    ("events", "now", "saving", "verdict"),
    [
        ([], 10, False, ""),
        ([], 11, False, IDLE_START),
        ([("processor_time", 9, 0.05)], 11, False, IDLE_START),  # its threads only wake now and then
        ([("processor_time", 9, 1.0)], 11, False, ""),
        ([("processor_time", 9, 1.0), ("processor_time", 18, 1.01)], 20, False, IDLE_START),
        ([("processor_time", 9, None)], 11, False, ""),  # on another machine: not known to be idle
        (busy(101), 100, False, ""),
        (busy(102), 101, False, NO_LOG),
        ([*busy(151), ("log_size", 60, 80)], 151, False, ""),
        ([*busy(201), ("log_size", 60, 80), ("log_size", 150, 80)], 161, False, NO_LOG),
        ([("record", 5)], 15, False, ""),
        ([("record", 5)], 16, False, NO_STEP),
        ([("record", 5), ("record", 15)], 16, False, ""),
        ([*busy(201), ("record", 200)], 210, False, ""),  # log lines do not matter once it trains
        ([("record", 5), ("queued", 12)], 22, False, ""),
        ([("record", 5), ("queued", 12)], 23, False, NO_STEP),
        ([*busy(101), ("queued", 101)], 111, False, ""),
        ([("record", 5), ("rollback", 10)], 21, False, IDLE_START),
        ([("record", 5), ("rollback", 10), ("processor_time", 19, 1.0)], 21, False, ""),
        ([("record", 5), ("rollback", 10), ("record", 20)], 31, False, NO_STEP),
        ([("record", 12)], LATE, False, NO_STEP),
        ([("record", 12)], LATE, True, ""),
        ([("record", 12)], LATE + 1, True, NO_SAVE),
        ([("record", 12)], 13, True, ""),
        (busy(102), 101, True, ""),
    ],
)
def test_events_decide_the_verdict(events: list[Event], now: float, saving: bool, verdict: str) -> None:
    detector = HangDetector(0.0, step_timeout_s=10.0, startup_s=100.0)
    for name, at, *value in sorted(events, key=lambda event: event[1]):
        getattr(detector, f"observe_{name}")(at, *value)
    assert detector.verdict(now, saving) == verdict


def test_logs_are_measured_a_hundred_times_in_the_startup_time_and_only_before_a_record() -> None:
    detector = HangDetector(0.0, step_timeout_s=10.0, startup_s=100.0)
    assert [now for now in (0.5, 1.0, 1.5) if detector.log_size_due(now)] == [1.5]
    detector.observe_log_size(1.5, 80)
    assert [now for now in (2.0, 2.5, 3.0) if detector.log_size_due(now)] == [3.0]
    detector.observe_record(3.0)
    assert not detector.log_size_due(50.0)
    detector.observe_rollback(60.0)
    assert detector.log_size_due(60.5)
