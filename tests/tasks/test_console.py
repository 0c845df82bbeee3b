from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole

from herd.storage.root import Root
from herd.tasks import console as consoles
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole, count_items, working
from herd.tasks.executors import data_runner
from herd.tasks.format import command, format_change


def shown(terminal: bool) -> str:
    file = io.StringIO()
    console = TerminalConsole(RichConsole(file=file, force_terminal=terminal, width=100, highlight=False))
    with console.progress("main", 100_000) as line:
        for position in range(10_000, 110_000, 10_000):
            line.update(position, 5.0 - position / 1e6, 9000.0, 2.7)
    return file.getvalue()


def test_without_a_terminal_progress_is_few_plain_lines() -> None:
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 2, "the first and the last; those between came within the interval"
    assert "10K / 100K tokens  mean loss 4.990  held out 2.700 bits/byte  9K tok/s" in lines[0]
    assert lines[1].split()[:4] == ["main", "100K", "/", "100K"]


def test_the_time_left_is_at_the_rate_since_the_first_step_of_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(consoles, "time", SimpleNamespace(monotonic=lambda: now))
    progress = consoles._Progress(100_000)
    ends = []
    for seconds, position in ((0, 40_000), (10, 60_000), (100, 70_000), (5, 100_000)):
        now += seconds
        ends.append(progress.text(position, None, None).split("tokens")[1].strip())
    assert ends == ["", "0:20 left", "1:50 left", ""]


def test_a_printed_command_names_the_root_unless_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HERD_ROOT", raising=False)
    monkeypatch.setattr("sys.argv", ["herd"])
    assert command(Root.parse("herd-data"), "up") == "herd up"
    assert command(Root.parse("s3://herd/team"), "rerun", "x-1") == "herd rerun x-1 --root s3://herd/team"
    assert command(Root.parse(tmp_path / "a b"), "up") == f"herd up --root '{tmp_path}/a b'"
    monkeypatch.setenv("HERD_ROOT", "s3://herd/team")
    assert command(Root.parse("s3://herd/team"), "up") == "herd up"
    assert command(Root.parse("herd-data"), "up") == f"herd up --root {tmp_path}/herd-data"
    page = command(Root.parse("s3://herd/team"), "up", page=True)
    assert page == "herd up --root s3://herd/team", "read in a shell without the variable"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.argv", [".venv/bin/herd"])
    assert command(Root.parse("s3://herd/team"), "up") == ".venv/bin/herd up", (
        "what is not on the PATH is named as typed"
    )


@pytest.mark.parametrize(
    ("value", "before", "points", "text"),
    [
        (4.337, 4.338, False, "-0.023 %"),
        (26_090, 9673, False, "+169.7 %"),
        (0.4167, 0.35, True, "+6.7 points"),
        (0.1 + 0.2, 0.3, False, "no change"),
        (0.5, 0, False, "+0.5"),
    ],
)
def test_a_change_has_a_sign_or_is_none(value: float, before: float, points: bool, text: str) -> None:
    assert format_change(value, before, points) == text


def test_a_terminal_gets_a_bar() -> None:
    assert "━" in shown(terminal=True)


def test_silent_work_says_that_it_lasts_and_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consoles, "QUIET_S", 0.05)
    monkeypatch.setattr(consoles, "REPEAT_S", 0.1)
    file = io.StringIO()
    console = TerminalConsole(RichConsole(file=file, width=100, highlight=False))

    def await_lines(count: int) -> None:
        deadline = time.monotonic() + 10
        while file.getvalue().count("\n") < count and time.monotonic() < deadline:
            time.sleep(0.01)

    with working(console, "collect"):
        await_lines(1)
        with data_runner(Cluster(threads=2)) as runner:
            runner(None, "shuffle/minhash/bands/4-1/0", lambda job, item: None, range(7))
        await_lines(file.getvalue().count("\n") + 1)
    ended = file.getvalue()
    assert ended.splitlines()[0].split() == ["collect", "after", "0", "s"]
    assert "collect           minhash/bands 7 of 7 after 0 s" in ended
    time.sleep(0.2)
    assert file.getvalue() == ended
    count_items("web", 5)(1)  # nothing is shown: no error
    with working(console, "main", bar=False), console.progress("main", 10) as line:
        await_lines(ended.count("\n") + 1)
        line.update(5, None, None)
        time.sleep(0.1)  # for a line on its way
        begun = file.getvalue()
        time.sleep(0.2)
        assert file.getvalue() == begun
    assert begun.splitlines()[ended.count("\n")].split() == ["main", "after", "0", "s"]


def test_a_terminal_shows_a_bar_of_the_items_and_clears_it() -> None:
    file = io.StringIO()
    console = TerminalConsole(RichConsole(file=file, force_terminal=True, width=100, highlight=False))
    with working(console, "collect"), console.progress("main", 10) as line:  # one inside another
        count_items("web", 4)(3)
        line.update(5, None, None)
    assert "collect" in file.getvalue()
    assert "web 3 of 4" in file.getvalue()
    file.truncate(0)
    with working(console, "main", bar=False):
        count_items("web", 4)(3)
    assert not file.getvalue()
