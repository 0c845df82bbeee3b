from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from storage.root import Root
from tasks.console import TerminalConsole
from tasks.format import command


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
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.argv", [".venv/bin/herd"])
    assert command(Root.parse("s3://herd/team"), "up") == ".venv/bin/herd up", (
        "what is not on the PATH is named as typed"
    )


def test_a_terminal_gets_a_bar() -> None:
    assert "━" in shown(terminal=True)
