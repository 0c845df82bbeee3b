"""Measuring this machine: what is counted is what the planner counts, sizes grow with the time there is."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load
from herd.llama3.planner import calibrate as module
from herd.llama3.planner.calibrate import (
    FEATURES,
    HEADS,
    LEAST,
    REACH,
    DeviceBenchmark,
    attention_cases,
    attention_op,
    calibrate,
    elementwise_cases,
    elementwise_op,
    gemm_cases,
    measure_case,
    measure_groups,
)
from herd.llama3.planner.device_curves import BACK, ELEMENTWISE, FORWARD, GEMM
from herd.llama3.planner.step_time import layer_work
from herd.llama3.recipe.sections import Model

CPU = torch.device("cpu")
SMALL = replace(REACH["cpu"], rows=64, sides=(8, 16), lengths=(16, 32), widths=(32, 64))


@pytest.mark.slow
def test_this_machine_is_measured_in_the_shortest_time() -> None:
    seen = []
    found = calibrate("cpu", 0.01, seen.append)
    assert tuple(seen) == found.points
    kinds = {what: [one for one in found.points if one.what == what] for what in (GEMM, FORWARD, BACK, ELEMENTWISE)}
    assert {what: len(points) for what, points in kinds.items()} == {GEMM: 8, FORWARD: 2, BACK: 2, ELEMENTWISE: 2}
    assert all(one.seconds > 0 and one.spread >= 0 and one.repeats >= LEAST for one in found.points)
    assert found.curves.gemm.measured == ((512, 2048), (64, 128), (64, 1024))
    assert found.curves.attention.lengths == REACH["cpu"].lengths[:2]
    assert (found.threads, found.torch) == (torch.get_num_threads(), torch.__version__)
    assert found.curves.extrapolates([(2048, 4096, 4096)], [8192])


def test_attention_is_counted_as_the_planner_counts_it() -> None:
    (forward, backward), *_ = attention_cases(SMALL, CPU)
    batch, length = forward.shape[:2]
    config = Model(layers=1, dim=HEADS[0] * FEATURES, heads=HEADS[0], kv_heads=HEADS[1], ffn=64, max_seq_len=64)
    work = layer_work(config, Layout(), Load(length, batch, 1, "bf16"))
    assert forward.amount == work.attention
    assert backward.amount == 2.5 * work.attention


def test_elementwise_work_is_counted_as_the_planner_counts_it() -> None:
    """The planner's count less the rotation of queries and keys, which is not measured; three times for both passes."""
    for (case,) in elementwise_cases(SMALL, CPU):
        rows, width = case.shape
        config = Model(layers=1, dim=width, heads=1, kv_heads=1, ffn=width * 7 // 2, max_seq_len=64)
        work = layer_work(config, Layout(), Load(rows, 1, 1, "bf16"))
        rotation = 2 * (width + width) * rows * 2
        assert case.amount == 3 * (work.moved - rotation)


def test_products_are_those_of_a_linear_layer_and_counted_once() -> None:
    for group in gemm_cases(SMALL, CPU):
        for case in group:
            assert case.amount == 2.0 * case.shape[0] * case.shape[1] * case.shape[2]
            assert case.parts == 3


def test_attention_s_backward_pass_gives_gradients_of_all_that_went_in() -> None:
    gradients = attention_op(2, 16, HEADS, FEATURES, True, CPU)()
    assert [tuple(one.shape) for one in gradients] == [(2, 16, 16, 128), (2, 16, 1, 128), (2, 16, 1, 128)]  # type: ignore[attr-defined]
    assert all(one.abs().sum() > 0 for one in gradients)  # type: ignore[attr-defined]


def test_elementwise_work_gives_gradients_of_all_that_went_in() -> None:
    gradients = elementwise_op(4, 8, 28, CPU)()
    assert [tuple(one.shape) for one in gradients] == [(4, 8), (8,), (4, 28), (4, 28)]  # type: ignore[attr-defined]


class Clock:
    """A clock that only its own `sleep` moves: what is measured does not depend on how busy the machine is."""

    def __init__(self) -> None:
        self.now, self.sleeps = 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1

    def benchmark(self, seconds: float, parts: int = 1) -> DeviceBenchmark:
        return DeviceBenchmark("sleep", (1, 1), 1.0, lambda: lambda: self.sleep(seconds), parts)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_point_is_the_time_of_one_part_of_a_call(clock: Clock) -> None:
    point = measure_case(clock.benchmark(0.012, parts=3), 0.0, CPU)
    assert point.seconds == pytest.approx(0.004)
    assert point.repeats == LEAST


def test_short_calls_are_timed_several_at_once(clock: Clock) -> None:
    point = measure_case(clock.benchmark(1e-4), 0.0, CPU)
    assert point.seconds == pytest.approx(1e-4)
    assert clock.sleeps == 2 + LEAST * 20  # 20 calls last SHORT_S


def test_sizes_grow_while_there_is_time(clock: Clock) -> None:
    def points(seconds: float, limit_s: float) -> int:
        groups = ([clock.benchmark(seconds * 2**step)] for step in range(4))
        return len(list(measure_groups(groups, limit_s, CPU)))

    assert points(0.002, 60.0) == 4
    assert points(0.002, 0.0) == 2
    assert points(0.03, 1.2) == 2


def test_no_time_and_no_such_device_are_refused() -> None:
    with pytest.raises(ValueError, match="seconds: 0 leaves no time"):
        calibrate("cpu", 0)
    with pytest.raises(ValueError, match="seconds: nan leaves no time"):
        calibrate("cpu", float("nan"))
    with pytest.raises(ValueError, match=r"device: 'tpu' is not available, this machine has cpu"):
        calibrate("tpu", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="this machine has cpu alone"):
        calibrate("cuda", 1)


def test_who_reads_curves_does_without_torch() -> None:
    code = "import sys, herd.tasks.plan.calibrate, herd.llama3.planner.device_curves; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
