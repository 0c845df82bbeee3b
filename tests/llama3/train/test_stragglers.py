"""Slow ranks: named where they are, although all ranks' steps take equally long."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.train.callbacks import StepResult
from herd.llama3.train.data_loader import Step
from herd.llama3.train.device import DeviceTime
from herd.llama3.train.stragglers import Stopwatch, Stragglers
from tests.dist import run
from tests.llama3.parallel.layout_samples import build_parts

SLEEP = 0.1
CPU = torch.device("cpu")


def comparison(peers: list[int]) -> Stragglers:
    hosts = [f"node-{rank // 2}" for rank in range(len(peers))]
    return Stragglers(Stopwatch([], CPU), ParallelContext(0, 1, CPU), peers, hosts, int)


def test_a_rank_is_named_after_three_windows_in_a_row_and_then_ever_more_rarely() -> None:
    seen = comparison([0] * 4)
    lines = []
    for _ in range(12):
        window = seen.compare([1.0, 1.02, 1.31, 0.98])
        assert window is not None
        assert (window.slowest_s, window.median_s) == (1.31, pytest.approx(1.01))
        lines.append(window.named)
    assert [number for number, named in enumerate(lines, 1) if named] == [3, 6, 12]
    assert lines[2] == ["rank 2 (node-1): 1.30x the median step for 3 windows"]


def test_a_good_window_between_begins_the_count_anew() -> None:
    seen = comparison([0] * 3)
    named = [seen.compare([1.0, 1.0, slow]) for slow in (2.0, 2.0, 1.05, 2.0, 2.0, 2.0)]
    assert [window is not None and bool(window.named) for window in named] == [False] * 5 + [True]


def test_ranks_are_compared_with_those_that_hold_the_same_layers() -> None:
    seen = comparison([0, 0, 0, 1, 1, 1])
    for _ in range(3):
        window = seen.compare([1.0, 1.0, 1.0, 2.0, 2.0, 2.6])
    assert window is not None
    assert (window.slowest, window.median_s) == (5, 2.0)
    assert window.named == ["rank 5 (node-2): 1.30x the median step for 3 windows"]


def test_figures_come_with_the_next_window() -> None:
    layer = nn.Identity()
    seen = Stragglers(Stopwatch([layer], CPU), ParallelContext(0, 1, CPU), [0], ["a"], int, every=4)
    found = {}
    for number in range(3, 13):
        seen.on_step_start(Step(number, 1, 1), data_wait_s=float(number))
        layer(torch.zeros(1))
        if measured := ended(seen, number):
            found[number] = measured["time/slowest_rank_s"]
        assert not ended(seen, number)
    assert list(found) == [8, 12]
    for number, own in found.items():
        assert number - 4 < own < number - 3  # the data wait of the step measured before, and a little work


class Event:
    """An event of a GPU whose clock advances by 250 ms from one to the next."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.made += 1
        self.at = Event.made

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        """Return milliseconds, as torch's does."""
        return 250.0 * (later.at - self.at)


def test_times_of_a_gpu_are_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    began, ended = (DeviceTime(torch.device("cuda")) for _ in range(2))
    assert ended.seconds_since(began) == 0.25
    layers = [nn.Identity(), nn.Identity()]
    watch = Stopwatch(layers, torch.device("cuda"))
    watch.armed = True
    for layer in layers:
        layer(torch.zeros(1))
    assert watch.seconds() == 0.5, "that of both layers, without the time between them"


def ended(stragglers: Stragglers, number: int) -> dict[str, float]:
    """Return the metrics that the comparison adds at the end of a step."""
    result = StepResult(1.0, 1.0)
    stragglers.on_step_end(Step(number, 1, 1), result)
    return result.metrics


def slow_rank(slow: int, layout: Layout) -> tuple[list[float], list[str], list[float]]:
    """Train a little on each rank, `slow` of which sleeps in its layers; return figures, lines and wall seconds."""
    from herd.llama3.parallel.mesh import init_distributed
    from herd.llama3.recipe.sections import Model

    config = Model(layers=2, dim=32, ffn=64, heads=4, kv_heads=2, max_seq_len=64)
    with init_distributed("cpu", 240, layout) as world:
        parts = build_parts(config, 64, 0, world, torch.float32, None)
        model: Any = parts[0]
        if world.rank == slow:
            for layer in model.layers.values():
                layer.ffn.register_forward_pre_hook(lambda *_: time.sleep(SLEEP))
        seen: Any = Stragglers.among(parts.values(), world, int, every=1)
        compare = seen.compare
        wall: list[float] = []
        windows: list[Any] = []
        seen.compare = lambda seconds: windows.append(compare(seconds)) or windows[-1]
        tokens = torch.arange(16).view(1, 16)
        for number in range(5):
            began = time.perf_counter()
            seen.on_step_start(Step(number, 1, 1), 0.0)
            model(tokens, None, tokens).sum().backward()
            ended(seen, number)
            wall.append(time.perf_counter() - began)
        *_, last = windows = [window for window in windows if window is not None]
        named = [line for window in windows for line in window.named]
        return [float(last.slowest), last.slowest_s, last.median_s], named, wall[1:]


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.fault("F10")
def test_the_rank_that_sleeps_is_named_and_the_ranks_that_wait_for_it_are_not(zero: Any) -> None:
    """Every rank's step takes as long as the slow one's; waiting is not counted as work."""
    results = run(3, slow_rank, 1, Layout(zero=zero))
    for figures, named, wall in results:
        assert min(wall) >= 2 * SLEEP
        slowest, slowest_s, median_s = figures
        assert (slowest, slowest_s >= 2 * SLEEP, median_s < SLEEP) == (1, True, True)
        assert len(named) == 1
        assert named[0].startswith("rank 1 (")
        assert named[0].endswith("x the median step for 3 windows")
