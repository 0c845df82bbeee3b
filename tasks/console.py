"""What a person sees while a run works: lines, tables, a progress line per stage.

In a terminal that is rich output with a moving bar; without one (CI, a log file) the same facts come as plain lines
every few seconds; on a Prefect worker they go to the flow run's log. One interface, so tasks need not know where
they run. The choice is made by who starts the process: the command line sets HERD_CONSOLE.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from llama3.recipe.units import tokens

PLAIN_INTERVAL_S = 10.0


class ProgressLine(Protocol):
    def update(
        self, position: int, loss: float | None, tokens_per_s: float | None, bits_per_byte: float | None = None
    ) -> None:
        """Show that the stage has trained on `position` of its tokens, with its last score on held-out text."""


class Console(Protocol):
    def say(self, text: str) -> None:
        """Print one line; rich markup is allowed."""

    def table(self, table: Table) -> None: ...

    def progress(self, name: str, total: int) -> AbstractContextManager[ProgressLine]:
        """Return a context manager that yields a ProgressLine for a stage of `total` tokens."""
        ...


class TerminalConsole:
    """Rich output; a moving bar only on a real terminal."""

    def __init__(self, rich: RichConsole | None = None) -> None:
        self.rich = rich or RichConsole(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.rich.print(text)

    def table(self, table: Table) -> None:
        self.rich.print(table)

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[ProgressLine]:
        if not self.rich.is_terminal:
            yield PlainProgress(self, name, total)
            return
        columns = (TextColumn("  {task.description:<18}"), BarColumn(30), TextColumn("{task.fields[facts]}"))
        with Progress(*columns, console=self.rich) as bar:
            yield _BarProgress(bar, name, total)


class FileConsole:
    """Lines in a file, for one run of many; its progress still goes to the console of them all."""

    def __init__(self, path: Path, label: str, shared: Console) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.label, self.shared = path, label, shared

    def say(self, text: str) -> None:
        self._print(text)

    def table(self, table: Table) -> None:
        self._print(table)

    def progress(self, name: str, total: int) -> AbstractContextManager[ProgressLine]:
        return self.shared.progress(f"{self.label} {name}", total)

    def _print(self, thing: str | Table) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            RichConsole(file=file, width=140, highlight=False, soft_wrap=True).print(thing)


class LoggerConsole:
    """Lines in the log of the Prefect flow run."""

    def say(self, text: str) -> None:
        from prefect import get_run_logger
        from rich.text import Text

        get_run_logger().info(Text.from_markup(text).plain)

    def table(self, table: Table) -> None:
        rich = RichConsole(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        rich.print(table)
        self.say(escape("\n" + rich.export_text()))

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[ProgressLine]:
        yield PlainProgress(self, name, total)


class PlainProgress:
    """One line every few seconds and one at the end."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        self.console, self.name, self.total = console, name, total
        self.pace = _Pace()
        self.next_line = 0.0

    def update(
        self, position: int, loss: float | None, tokens_per_s: float | None, bits_per_byte: float | None = None
    ) -> None:
        if time.monotonic() < self.next_line and position < self.total:
            return
        self.next_line = time.monotonic() + PLAIN_INTERVAL_S
        self.console.say(
            f"  {self.name:<18}" + self.pace.describe(position, self.total, loss, tokens_per_s, bits_per_byte)
        )


class _BarProgress:
    def __init__(self, bar: Progress, name: str, total: int) -> None:
        self.bar, self.total, self.pace = bar, total, _Pace()
        self.task = bar.add_task(name, total=total, facts="starting")

    def update(
        self, position: int, loss: float | None, tokens_per_s: float | None, bits_per_byte: float | None = None
    ) -> None:
        facts = self.pace.describe(position, self.total, loss, tokens_per_s, bits_per_byte)
        self.bar.update(self.task, completed=position, facts=facts)


class _Pace:
    """Time left, from the tokens trained since this attempt's first step (start-up would make it a guess)."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None

    def describe(
        self,
        position: int,
        total: int,
        loss: float | None,
        tokens_per_s: float | None,
        bits_per_byte: float | None = None,
    ) -> str:
        self.first = self.first or (position, time.monotonic())
        text = f"{tokens(position):>6} / {tokens(total)} tokens"
        if loss is not None:
            text += f"  mean loss {loss:.3f}"
        if bits_per_byte is not None:
            text += f"  held out {bits_per_byte:.3f} bits/byte"
        if tokens_per_s is not None:
            text += f"  {tokens(tokens_per_s)} tok/s"
        return text + self._left(position, total)

    def _left(self, position: int, total: int) -> str:
        assert self.first is not None
        done, seconds = position - self.first[0], time.monotonic() - self.first[1]
        if position >= total or done <= 0:
            return ""
        left = round((total - position) * seconds / done)
        return f"  {left // 60}:{left % 60:02d} left"


_ASIDE: ContextVar[Console | None] = ContextVar("aside", default=None)


@contextmanager
def aside(console: Console) -> Iterator[None]:
    """Have all that begins in the block speak to `console`."""
    token = _ASIDE.set(console)
    try:
        yield
    finally:
        _ASIDE.reset(token)


def current_console() -> Console:
    """Return the console of this process: the terminal for the command line, else the flow run's log."""
    if (other := _ASIDE.get()) is not None:
        return other
    return TerminalConsole() if os.environ.get("HERD_CONSOLE") == "terminal" else LoggerConsole()
