"""Bad steps: the rule against a plain one, restarts, and what follows from each policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.recipe.sections import Spikes
from herd.llama3.train.callbacks import StepDecision, StepResult
from herd.llama3.train.data_loader import Step, steps_from
from herd.llama3.train.journal import Record, SkippedRange, SkippedRanges
from herd.llama3.train.loss_spikes import History, SpikeDetector, SpikeGuard, history
from tests.llama3.train.train_samples import STEP, recipe, stages

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
VALUES = st.one_of(st.floats(0.5, 2.0), st.sampled_from([NAN, INF, -INF, 1e100, 9.0, 40.0]))
SERIES = st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=60)


@dataclass(frozen=True)
class Given(StepResult):
    loss: float = 2.0
    grad_norm: float = 1.0
    score: float = 7.0
    skipped: bool = True


def flags(guard: SpikeGuard, series: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (bad, score) of each step."""
    found = []
    for loss, norm in series:
        bad = guard.flag(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64))
        found.append((float(bad), float(guard.score)))
    return found


def plain_flags(spikes: Spikes, series: list[tuple[float, float]]) -> list[bool]:
    """The rule as it is written in words."""
    window: list[tuple[float, float]] = []
    found = []
    for values in series:
        bad = not all(math.isfinite(value) for value in values)
        if not bad and len(window) == spikes.window and spikes.policy != "off":
            losses, norms = zip(*window, strict=True)
            for past, value in ((losses, values[0]), (np.log(norms), np.log(values[1]))):
                spread = max(np.std(past, ddof=1), (max(past) - np.mean(past)) / 3, 1e-6 * max(1, abs(np.mean(past))))
                bad = bad or (value - np.mean(past)) / spread > spikes.sigma * (1 + 1e-9)
        found.append(bad)
        if not bad:
            window = [*window, values][-spikes.window :]
    return found


@given(SERIES, st.sampled_from(["off", "skip", "stop", "rollback"]), st.floats(0.5, 8.0))
def test_the_rule(series: list[tuple[float, float]], policy: Any, sigma: float) -> None:
    spikes = Spikes(policy=policy, sigma=sigma, window=8)
    assert [bad == 1.0 for bad, _ in flags(SpikeGuard(spikes, CPU), series)] == plain_flags(spikes, series)


def journal(series: list[tuple[float, float]], found: list[tuple[float, float]]) -> list[Record]:
    """Return the records that a trainer writes of those steps: numbers that are not finite are left out."""
    records = []
    for number, ((loss, norm), (bad, score)) in enumerate(zip(series, found, strict=True)):
        values = {"train/loss": loss, "train/grad_norm": norm, "train/spike_zscore": score}
        values |= {"train/skipped_steps": 1.0} if bad else {}
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        records.append(Record(0.0, (number + 1) * 10, finite))
    return records


@given(SERIES, st.integers(0, 60))
def test_a_restart_decides_with_the_same_bits(series: list[tuple[float, float]], cut: int) -> None:
    spikes = Spikes(policy="skip", sigma=2.0, window=8)
    whole = flags(SpikeGuard(spikes, CPU), series)
    past = history(journal(series, whole), cut * 10, spikes.window)
    assert past.bad == sum(bad == 1.0 for bad, _ in whole[:cut])
    again = SpikeGuard(spikes, CPU)
    flags(again, [(5.0, 5.0)] * 3)  # whatever it saw before is gone
    again.restore(past)
    assert flags(again, series[cut:]) == whole[cut:]


def test_the_window_of_a_recipe_survives_a_restart() -> None:
    generator = np.random.default_rng(0)
    series = [(3 + float(a), 1 + float(b)) for a, b in generator.normal(0, 0.1, (400, 2))]
    spikes = Spikes(policy="skip", sigma=2.0)
    whole = flags(SpikeGuard(spikes, CPU), series)
    assert sum(bad for bad, _ in whole) > 3
    for cut in (100, 128, 250, 333):
        again = SpikeGuard(spikes, CPU)
        again.restore(history(journal(series, whole), cut * 10, spikes.window))
        assert flags(again, series[cut:]) == whole[cut:]


def test_bad_values_never_enter_the_window() -> None:
    quiet = [(1.0 + 0.01 * (step % 3), 1.0) for step in range(20)]
    spikes = Spikes(policy="skip", window=8)
    disturbed = SpikeGuard(spikes, CPU)
    flags(disturbed, quiet[:10])
    assert flags(disturbed, [(50.0, 1.0), (NAN, 1.0), (1.0, INF), (1.0, 3.0)]) == [
        (1.0, pytest.approx(5291.5, rel=1e-4)),
        (1.0, 0.0),
        (1.0, 0.0),
        (1.0, pytest.approx(math.log(3) * 1e6)),
    ]
    untouched = SpikeGuard(spikes, CPU)
    flags(untouched, quiet[:10])
    assert flags(disturbed, quiet[10:]) == flags(untouched, quiet[10:])


def mixed(generator: np.random.Generator, steps: int) -> list[tuple[float, float]]:
    """Return losses and norms distributed as in the quickstart: one batch in ten is of a domain with larger norms."""
    rare = generator.random(steps) < 0.1
    losses = np.where(rare, generator.normal(6.8, 0.4, steps), generator.normal(5.2, 0.3, steps))
    norms = np.where(rare, np.exp(generator.normal(0.3, 0.4, steps)), np.exp(generator.normal(-0.35, 0.15, steps)))
    return list(zip(losses.tolist(), norms.tolist(), strict=True))


def test_batches_of_a_rare_domain_are_no_spikes_and_what_exceeds_them_is() -> None:
    spikes, generator = Spikes(), np.random.default_rng(0)
    for _ in range(5):
        guard = SpikeGuard(spikes, CPU)
        assert max(score for _, score in flags(guard, mixed(generator, 800))) < spikes.sigma
        ((_, score),) = flags(guard, [(20.0, 1.0)])
        assert score > spikes.sigma, "the loss doubles and more"
        ((_, score),) = flags(guard, [(5.0, 30.0)])
        assert score > spikes.sigma, "the norm is twenty times that of a rare batch"


@pytest.mark.slow
def test_plain_noise_is_judged_by_its_standard_deviation() -> None:
    """There the rule is the published one: the largest of 128 normal values rarely lies three deviations out."""
    generator, ratios = np.random.default_rng(1), []
    for _ in range(50):
        window = generator.normal(3.0, 0.1, 128)
        guard = SpikeGuard(Spikes(), CPU)
        ((_, score),) = flags(guard, [*((float(loss), 1.0) for loss in window), (3.65, 1.0)])[-1:]
        ratios.append(score / ((3.65 - window.mean()) / window.std(ddof=1)))
    assert np.quantile(ratios, 0.4) == pytest.approx(1.0)
    assert min(ratios) > 0.7


def test_passed_over_steps_are_no_bad_steps() -> None:
    records = [
        Record(0.0, 10, {"train/loss": 3.0, "train/grad_norm": 1.5, "train/spike_zscore": 0.0}),
        Record(0.0, 20, {"train/skipped_steps": 1.0}),
        Record(
            0.0, 30, {"train/skipped_steps": 1.0, "train/spike_zscore": 9.0, "train/loss": 30.0, "train/grad_norm": 1.0}
        ),
    ]
    assert history(records, 30, 8) == History([3.0], [1.5], 1)


def place(steps: int, number: int) -> tuple[StageSpan, Step]:
    span = Schedule(recipe(stages=stages(steps))).span("main")
    return span, list(steps_from(span, 0))[number]


def judged(
    found: Given, bad: int = 0, skips: SkippedRanges | None = None, step: int = 10, **settings: Any
) -> StepDecision:
    asked = recipe(stages=stages(20), **settings)
    span, at = place(20, step)
    return SpikeDetector(asked, span, History([], [], bad), skips or SkippedRanges()).judge(at, found)


def test_what_follows_from_each_policy() -> None:
    assert judged(Given(skipped=False)) == StepDecision("continue")
    spike = Given(loss=30.0)
    assert judged(spike, spikes={"policy": "skip"}).kind == "skipped"
    stopped = judged(spike, spikes={"policy": "stop"})
    assert stopped.kind == "stop"
    assert stopped.reason == (
        "loss 30, gradient norm 1: 7.0 times the spread above the mean of the 128 good steps before "
        "(spikes.sigma is 6); spikes.policy is stop"
    )
    nothing = Given(loss=NAN, score=0.0)
    assert judged(nothing).kind == "stop"
    assert judged(nothing, spikes={"policy": "rollback"}).kind == "stop"
    assert judged(nothing, non_finite="skip").kind == "skipped"
    assert judged(nothing).reason == "loss nan, gradient norm 1: not finite; non_finite is stop"


@pytest.mark.parametrize(("step", "start", "end"), [(10, 8, 13), (1, 0, 4), (19, 17, 20)])
def test_a_rollback_passes_over_the_batches_around(step: int, start: int, end: int) -> None:
    verdict = judged(Given(loss=30.0), step=step, spikes={"policy": "rollback", "skip_window_steps": 2})
    assert verdict.kind == "roll back"
    assert verdict.skip is not None
    assert (verdict.skip.start, verdict.skip.end, verdict.skip.spike) == (start * STEP, end * STEP, step * STEP)


def test_too_many_bad_steps_end_the_run() -> None:
    spikes = {"policy": "skip", "max_bad_steps": 3}
    assert judged(Given(), bad=1, spikes=spikes).kind == "skipped"
    last = judged(Given(), bad=2, spikes=spikes)
    assert last.kind == "stop"
    assert "bad step 3 of stage main, spikes.max_bad_steps is 3" in last.reason
    rolled_back = SkippedRanges((SkippedRange(start=0, end=STEP, spike=0, reason=""),) * 2)
    assert judged(Given(), skips=rolled_back, spikes={"policy": "rollback", "max_bad_steps": 3}).kind == "stop"


def test_skipped_ranges_are_kept_on_disk(tmp_path: Path) -> None:
    assert SkippedRanges.read(tmp_path) == SkippedRanges()
    skips = (
        SkippedRanges()
        .plus(SkippedRange(start=20, end=50, spike=30, reason="why"))
        .plus(SkippedRange(start=70, end=80, spike=70, reason=""))
    )
    skips.write(tmp_path)
    assert SkippedRanges.read(tmp_path) == skips
    covered = [start for start in range(0, 100, 10) if skips.covers(start)]
    assert covered == [20, 30, 40, 70]
    (tmp_path / "skips.json").write_text('[{"start": 1}]')
    with pytest.raises(ValueError, match=r"skips\.json: is not a list of skipped ranges"):
        SkippedRanges.read(tmp_path)
