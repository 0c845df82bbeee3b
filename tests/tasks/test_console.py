from __future__ import annotations

import io

from rich.console import Console as RichConsole

from tasks.console import TerminalConsole


def shown(terminal: bool) -> str:
    file = io.StringIO()
    console = TerminalConsole(RichConsole(file=file, force_terminal=terminal, width=100, highlight=False))
    with console.progress("main", 100_000) as line:
        for position in range(10_000, 110_000, 10_000):
            line.update(position, 5.0 - position / 1e6, 9000.0)
    return file.getvalue()


def test_without_a_terminal_progress_is_few_plain_lines() -> None:
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 2, "the first and the last; those between came within the interval"
    assert "10K / 100K tokens  loss 4.990  9K tok/s" in lines[0]
    assert lines[1].split()[:4] == ["main", "100K", "/", "100K"]


def test_a_terminal_gets_a_bar() -> None:
    assert "━" in shown(terminal=True)
