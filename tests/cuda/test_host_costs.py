"""The rows of the null device keep their bounds: no wait in a step, few launches, no retry, memory as predicted."""

from __future__ import annotations

from pathlib import Path

from tests.cuda import null_device

null_device.require()

from tests.dist import run  # noqa: E402


def rows() -> dict[str, tuple[float | None, bool | None, str]]:
    """Return value, verdict and note of each row, from a process of its own: the agent of other tests must fork."""
    from benchmarks.null_cuda import null_row
    from benchmarks.rows import TRAIN_TARGETS
    from benchmarks.train_session import TrainSession, TrainSettings

    session = TrainSession(TrainSettings(folder=Path()))
    measured = [null_row(session, name) for name in TRAIN_TARGETS if name.startswith("null-cuda/")]
    return {row.name: (row.value, row.ok, row.note) for row in measured}


def test_a_step_costs_the_host_what_it_may() -> None:
    (found,) = run(1, rows)
    assert found.pop("null-cuda/host")[0]  # a time: its bound is for a machine that does nothing else
    assert {"null-cuda/waits", "null-cuda/launches", "null-cuda/retries", "null-cuda/memory"} == set(found)
    assert all(ok for _, ok, _ in found.values()), found
