"""What `herd up` does when one of its servers or its worker ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.flows import children
from herd.flows.children import LONGEST_PAUSE_S, MOST, SPAN_S, Child, Children, GaveUp, cause, pause_s
from herd.storage.root import Root

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_the_pause_doubles_and_the_fifth_death_in_ten_minutes_is_the_last() -> None:
    deaths = [10.0 * number for number in range(1, MOST + 1)]
    assert [pause_s(deaths[:count], True) for count in range(1, MOST + 1)] == [1, 2, 4, 8, None]
    assert pause_s(deaths, False) == 16
    assert pause_s([*deaths, deaths[-1] + SPAN_S], True) == 1, "what is long ago does not count"


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=40))
def test_mlflow_is_always_started_again_within_a_minute(times: list[float]) -> None:
    pause = pause_s(sorted(times), False)
    assert pause is not None
    assert 0 < pause <= LONGEST_PAUSE_S


def test_a_cause_has_the_name_of_the_signal() -> None:
    assert (cause(-9), cause(3)) == ("ended by SIGKILL", "ended with status 3")


class Told(list[str]):
    """What was printed, and what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    made = Told()
    monkeypatch.setattr(children, "child_ended", lambda name, text, root: made.sent.append((name, text)))
    monkeypatch.setattr(children, "SEND_S", 0.0)
    return made


@pytest.fixture
def up(tmp_path: Path, told: Told) -> Iterator[Children]:
    with Children(Root.parse(tmp_path), dict(os.environ), told.append) as made:
        yield made


def kill(up: Children, dead: Child, number: int = signal.SIGKILL) -> None:
    """End a child and let `up` see that."""
    assert dead.process is not None
    dead.process.send_signal(number)
    dead.process.wait()
    up.look(0.0 if not dead.deaths else dead.deaths[-1] + 1)


def test_who_ends_is_started_again_and_named_with_its_cause(up: Children, told: Told) -> None:
    worker, other = Child("worker", SLEEPS), Child("mlflow", SLEEPS, vital=False)
    first, untouched = up.start(worker), up.start(other)
    kill(up, worker)
    assert told == ["worker ended by SIGKILL; it starts again in 1 s"]
    up.look(0.5)
    assert worker.process is None, "before its pause is over"
    up.look(1.5)
    assert worker.process is not None
    assert worker.process.pid != first.pid
    assert told.sent == [("worker", "worker ended by SIGKILL; started again")]
    up.look(2.0)
    assert len(told.sent) == 1
    assert untouched.poll() is None


def test_five_deaths_of_the_worker_end_it_with_the_name_of_the_log(up: Children, told: Told, tmp_path: Path) -> None:
    worker = Child("worker", SLEEPS)
    up.start(worker)
    for _ in range(MOST - 1):
        kill(up, worker)
        up.look(worker.due)
    with pytest.raises(GaveUp) as error:
        kill(up, worker, signal.SIGTERM)
    assert str(error.value) == (
        f"worker ended by SIGTERM, 5 times within 10 minutes; its log is {tmp_path / 'logs' / 'worker.log'}"
    )
    assert told.sent[-1] == ("worker", f"{error.value}; herd up ends")


def test_however_often_mlflow_dies_the_worker_works(up: Children, told: Told) -> None:
    worker, mlflow = Child("worker", SLEEPS), Child("mlflow", SLEEPS, vital=False)
    process = up.start(worker)
    up.start(mlflow)
    for _ in range(MOST + 2):
        kill(up, mlflow)
        up.look(mlflow.due)
    assert process.poll() is None
    assert mlflow.process is not None


def test_people_are_told_once_prefect_answers_again(up: Children, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []
    monkeypatch.setattr(children, "failed_answer", lambda url, _: "" if url in answers else "status 503")
    prefect = Child("prefect", SLEEPS, "http://prefect/health")
    up.start(prefect)
    kill(up, prefect)
    up.look(prefect.due)
    assert told.sent == []
    answers.append(prefect.health)
    up.look(prefect.due)
    assert [name for name, _ in told.sent] == ["prefect"]


def test_what_is_left_of_a_dead_server_ends_before_the_next_one(up: Children, told: Told, tmp_path: Path) -> None:
    """A killed uvicorn or MLflow leaves processes that hold its port."""
    file = tmp_path / "pid"
    code = f"import os, time\nif os.fork() == 0: open({str(file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    server = Child("prefect", [sys.executable, "-S", "-c", code])
    up.start(server)
    while not file.exists() or not file.read_text():
        time.sleep(0.01)
    kill(up, server)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{file.read_text()}/stat").exists() and " Z " not in _stat(file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _stat(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "
