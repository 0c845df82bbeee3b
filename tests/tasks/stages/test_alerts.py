"""Each incident is told of once: on the console, in the run's folder."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from herd.llama3.recipe.sections import Spikes
from herd.llama3.train import metrics
from herd.llama3.train.journal import Record, Rewind
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.stages.alerts import CALM_STEPS, FILE, STALL_S, START_S, Alerts, alert_gate_failed, read_alerts


class Watched:
    """Alerts of one stage on a root of their own, and what they said."""

    def __init__(self, folder: Path, now: float = 0.0) -> None:
        self.root, self.now = Root.parse(folder), now
        self.printed = io.StringIO()
        console = TerminalConsole(RichConsole(file=self.printed, width=200))
        work = folder / "work" / "main-1"
        self.alerts = Alerts(self.root, "tiny-1", "main", console, Spikes(sigma=6), work, lambda: self.now)
        self.position = 0

    def step(self, count: int = 1, **values: float) -> None:
        for _ in range(count):
            self.position += 1000
            named = {"loss": metrics.LOSS, "score": metrics.SPIKE_SCORE, "skipped": metrics.SKIPPED}
            named |= {"slow": metrics.SLOWEST_RANK_S, "median": metrics.MEDIAN_RANK_S, "seconds": metrics.STEP_S}
            given = {"loss": 5.0, "score": 0.1, "seconds": 0.5, **values}
            record = {named[name]: value for name, value in given.items() if value >= 0}
            self.alerts.observe(Record(0.0, self.position, record))

    @property
    def kinds(self) -> list[str]:
        return [alert.kind for alert in read_alerts(self.root, "tiny-1")]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_spike_is_one_alert_until_it_has_been_calm_for_a_while(watched: Watched) -> None:
    watched.step(10)
    watched.step(3, score=9.0, loss=7.5)
    watched.step(5)
    watched.step(1, score=8.0)
    assert watched.kinds == ["loss-spike"]
    watched.step(CALM_STEPS)
    watched.step(1, score=8.0)
    assert watched.kinds == ["loss-spike", "loss-spike"]
    alert = read_alerts(watched.root, "tiny-1")[0]
    assert (alert.run, alert.stage, alert.position) == ("tiny-1", "main", 11_000)
    assert "9.0 times the usual spread" in alert.text
    assert watched.printed.getvalue().count("alert loss-spike") == 2


def test_a_loss_that_is_not_finite_and_a_rollback_are_spikes(tmp_path: Path) -> None:
    one, other = Watched(tmp_path / "a"), Watched(tmp_path / "b")
    one.step(1, loss=-1, skipped=1.0)  # a number that is not finite is left out of the record
    other.alerts.observe(Rewind(0.0, 5000, 9000))
    assert one.kinds == other.kinds == ["loss-spike"]


def test_batches_that_are_passed_over_after_a_rollback_are_no_spikes(watched: Watched) -> None:
    watched.step(1, loss=-1, score=-1, skipped=1.0)
    assert watched.kinds == []


def test_silence_is_told_of_once_and_again_only_after_progress(watched: Watched) -> None:
    watched.alerts.observe_silence(START_S - 1)
    watched.step(5)
    watched.alerts.observe_silence(STALL_S - 1)
    assert watched.kinds == []
    for seconds in (STALL_S + 1, STALL_S + 2):
        watched.alerts.observe_silence(seconds)
    assert watched.kinds == ["no-progress"]
    watched.step(1)
    watched.alerts.observe_silence(STALL_S + 1)
    assert watched.kinds == ["no-progress"] * 2
    assert "no step for 2:01 min, after 6K" in read_alerts(watched.root, "tiny-1")[-1].text


def test_slow_steps_may_take_longer(watched: Watched) -> None:
    watched.step(5, seconds=60.0)
    watched.alerts.observe_silence(1000)
    assert watched.kinds == []
    watched.step(40, seconds=0.5)
    watched.alerts.observe_silence(STALL_S + 1)
    assert watched.kinds == ["no-progress"], "they were long ago"


def test_a_start_that_never_comes_to_a_step_is_told_of(watched: Watched) -> None:
    watched.alerts.observe_silence(START_S + 1)
    watched.alerts.restarted()
    watched.alerts.observe_silence(START_S + 1)
    assert watched.kinds == ["no-progress"] * 2


def test_a_straggler_is_slow_three_times_in_a_row(watched: Watched) -> None:
    for ratio in (1.3, 1.3, 1.0, 1.3, 1.3):
        watched.step(1, slow=ratio, median=1.0)
    assert watched.kinds == []
    watched.step(3, slow=1.25, median=1.0)
    assert watched.kinds == ["straggler"]
    assert "1.25x" in read_alerts(watched.root, "tiny-1")[0].text
    watched.step(1, slow=1.1, median=1.0)
    watched.step(3, slow=1.3, median=1.0)
    assert watched.kinds == ["straggler"] * 2, "a measurement that is not slow ends the incident"


def test_a_disk_that_fills_is_told_of_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = watched.root.local / "work" / "main-1" / "checkpoints" / "000000000000001000"
    folder.mkdir(parents=True)
    with (folder / "model").open("wb") as file:
        file.truncate(10**9)  # three of them are more than the least that should be free
    free = iter([3.5e9, 2.9e9, 2.8e9, 3.5e9, 2.9e9, 9e9, 2.9e9])
    usage = lambda path: type("Usage", (), {"free": next(free)})  # noqa: E731
    monkeypatch.setattr("herd.tasks.stages.alerts.shutil.disk_usage", usage)
    counts = []
    for _ in range(7):
        watched.now += 31
        watched.alerts.observe_silence(0)
        counts.append(len(watched.kinds))
    assert counts == [0, 1, 1, 1, 1, 1, 2]
    watched.alerts.observe_silence(0)  # too early to look again: the iterator would end


def test_a_journal_that_is_read_again_tells_nothing_twice(tmp_path: Path) -> None:
    for count in (1, 1, 2):
        watched = Watched(tmp_path)
        watched.step(3)
        watched.step(1, score=9.0)
        watched.step(CALM_STEPS)
        if count == 2:
            watched.step(1, score=9.0)
        assert watched.kinds == ["loss-spike"] * count


def test_a_failed_gate_is_an_alert(watched: Watched) -> None:
    alert_gate_failed(watched.root, watched.alerts.console, "tiny-1", "promote", "eval/bpb is worse", 98_304)
    assert watched.kinds == ["gate"]


def test_an_alert_that_cannot_be_kept_is_still_said(watched: Watched) -> None:
    watched.root.file("runs", "tiny-1").mkdir(parents=True)
    watched.root.file("runs", "tiny-1", FILE).mkdir()
    watched.step(1, score=9.0)
    assert "alert loss-spike" in watched.printed.getvalue()


def test_a_torn_line_hides_no_other(watched: Watched) -> None:
    watched.step(1, score=9.0)
    with watched.root.file("runs", "tiny-1", FILE).open("a") as file:
        file.write('{"time": 1, "ki')
    assert watched.kinds == ["loss-spike"]


@given(st.lists(st.floats(0, 20), max_size=200))
def test_two_alerts_of_a_kind_have_a_calm_between_them(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float]
) -> None:
    watched = Watched(tmp_path_factory.mktemp("scores"))
    for score in scores:
        watched.step(1, score=score)
    told = [alert.position // 1000 - 1 for alert in read_alerts(watched.root, "tiny-1")]
    assert all(scores[place] > 6 for place in told)
    assert bool(told) == any(score > 6 for score in scores)
    for before, after in itertools.pairwise(told):
        assert any(
            all(score <= 6 for score in scores[place : place + CALM_STEPS])
            for place in range(before + 1, after - CALM_STEPS + 1)
        )


def test_a_failed_attempt_is_an_alert_that_begins_with_its_cause(watched: Watched) -> None:
    watched.step(3)
    watched.alerts.attempt_failed("out of memory", "rank 1 was killed by SIGKILL\nmore")
    watched.alerts.attempt_failed("hang", "")
    assert [(alert.kind, alert.text, alert.position) for alert in read_alerts(watched.root, "tiny-1")] == [
        ("attempt", "out of memory: rank 1 was killed by SIGKILL", 3000),
        ("attempt", "hang: the trainer ended", 3000),
    ]
    assert watched.printed.getvalue() == ""
