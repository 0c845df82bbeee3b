"""The rows of the null device keep their bounds: waits, launches, retries, memory, and a step by arithmetic."""

from __future__ import annotations

from pathlib import Path

from tests.cuda import null_device

null_device.require(null=True)

from tests.dist import run  # noqa: E402


def rows(group: str) -> dict[str, tuple[float | None, bool | None, str]]:
    """Return value, verdict and note of each row of a group; in a process of its own: other tests' agent must fork."""
    from benchmarks.rows import TRAIN_TARGETS
    from benchmarks.train import MEASURES
    from benchmarks.train_session import TrainSession, TrainSettings

    session = TrainSession(TrainSettings(folder=Path()))
    measured = [MEASURES[name](session, name) for name in TRAIN_TARGETS if name.startswith(group)]
    return {row.name: (row.value, row.ok, row.note) for row in measured}


def test_a_step_costs_the_host_what_it_may() -> None:
    (found,) = run(1, rows, "null-cuda/")
    times = [found.pop(name) for name in list(found) if name.startswith("null-cuda/host")]
    assert len(times) == 5
    assert all(value for value, _, _ in times)  # their bounds are for a machine that does nothing else
    assert {"null-cuda/waits", "null-cuda/launches", "null-cuda/retries", "null-cuda/memory"} == set(found)
    assert all(ok for _, ok, _ in found.values()), found


def test_the_arithmetic_of_a_step_gives_the_8b_what_is_wanted_of_it() -> None:
    (found,) = run(1, rows, "roofline/8b")
    assert {"roofline/8b-eager", "roofline/8b-compile", "roofline/8b-fp8"} == set(found)
    assert all(ok is not False for _, ok, _ in found.values()), found
    eager, compiled = found["roofline/8b-eager"][0], found["roofline/8b-compile"][0]
    assert eager is not None
    assert compiled is not None
    assert 40 < eager < compiled < 60


def test_a_float8_layer_casts_its_operands_in_few_passes_and_keeps_none_of_them() -> None:
    (found,) = run(1, rows, "roofline/layer-fp8-")
    assert {"bytes", "launches", "held"} == {name.removeprefix("roofline/layer-fp8-") for name in found}
    assert all(ok for _, ok, _ in found.values()), found
