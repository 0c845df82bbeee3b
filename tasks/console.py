"""Console output of a run: lines, tables, a progress line per stage.

A terminal gets rich output with a moving bar; without one (CI, a log file) progress is a plain line every few seconds;
on a Prefect worker it goes to the flow run's log. The command line sets HERD_CONSOLE to choose the terminal.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Protocol

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from herd.llama3.recipe.units import tokens
from herd.storage.processes import in_background
from herd.tasks.format import format_duration

PLAIN_INTERVAL_S = 5.0
QUIET_S = 5.0
"""Without a terminal: from the begin of silent work to its first line. A wait says by then what it waits for."""
REPEAT_S = 60.0
"""Between two lines of one wait."""


class ProgressLine(Protocol):
    def update(
        self, position: int, loss: float | None, tokens_per_s: float | None, bits_per_byte: float | None = None
    ) -> None:
        """Show the position in tokens of the stage; `bits_per_byte` is its last score on held-out text."""


class Console(Protocol):
    @property
    def rich(self) -> RichConsole | None:
        """Where a person may read along and answer; None: a log."""

    def log(self, text: str) -> None:
        """Print one line; rich markup is allowed."""

    def table(self, table: Table) -> None: ...

    def progress(self, name: str, total: int) -> AbstractContextManager[ProgressLine]:
        """Return a context manager that yields a ProgressLine for a stage of `total` tokens."""
        ...


class TerminalConsole:
    """Rich output; the moving bar needs a real terminal."""

    def __init__(self, rich: RichConsole | None = None) -> None:
        self.rich = rich or RichConsole(highlight=False, soft_wrap=True)

    def log(self, text: str) -> None:
        self.rich.print(text)

    def table(self, table: Table) -> None:
        self.rich.print(table)

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[ProgressLine]:
        if not self.rich.is_terminal:
            yield PlainProgress(self, name, total)
            return
        columns = (TextColumn("  {task.description:<18}"), BarColumn(30), TextColumn("{task.fields[status]}"))
        with Progress(*columns, console=self.rich) as bar:
            yield _BarProgress(bar, name, total)


class FileConsole:
    """Lines in a file, for one run of several; its progress still goes to the shared console."""

    rich = None

    def __init__(self, path: Path, label: str, shared: Console) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.label, self.shared = path, label, shared

    def log(self, text: str | Table) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            RichConsole(file=file, width=140, highlight=False, soft_wrap=True).print(text)

    def table(self, table: Table) -> None:
        self.log(table)

    def progress(self, name: str, total: int) -> AbstractContextManager[ProgressLine]:
        return self.shared.progress(f"{self.label} {name}", total)


class LoggerConsole:
    """Lines in the log of the Prefect flow run."""

    rich = None

    def log(self, text: str) -> None:
        from prefect import get_run_logger
        from rich.text import Text

        get_run_logger().info(Text.from_markup(text).plain)

    def table(self, table: Table) -> None:
        rich = RichConsole(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        rich.print(table)
        self.log(escape("\n" + rich.export_text()))

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[ProgressLine]:
        yield PlainProgress(self, name, total)


class _Progress:
    """Text of a progress line. The rate counts from this attempt's first step, because start-up would distort it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.first: tuple[int, float] | None = None

    def text(
        self, position: int, loss: float | None, tokens_per_s: float | None, bits_per_byte: float | None = None
    ) -> str:
        self.first = self.first or (position, time.monotonic())
        if (activity := _activity.get()) is not None:
            activity.spoken = True
        text = f"{tokens(position):>6} / {tokens(self.total)} tokens"
        if loss is not None:
            text += f"  mean loss {loss:.3f}"
        if bits_per_byte is not None:
            text += f"  held out {bits_per_byte:.3f} bits/byte"
        if tokens_per_s is not None:
            text += f"  {tokens(tokens_per_s)} tok/s"
        done, seconds = position - self.first[0], time.monotonic() - self.first[1]
        if position < self.total and done > 0:
            left = round((self.total - position) * seconds / done)
            text += f"  {left // 60}:{left % 60:02d} left"
        return text


class PlainProgress(_Progress):
    """One line every few seconds and one at the end."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        super().__init__(total)
        self.console, self.name, self.next_line = console, name, 0.0

    def update(self, position: int, *values: float | None, **more: float | None) -> None:
        if time.monotonic() >= self.next_line or position >= self.total:
            self.next_line = time.monotonic() + PLAIN_INTERVAL_S
            self.console.log(f"  {self.name:<18}{self.text(position, *values, **more)}")


class _BarProgress(_Progress):
    def __init__(self, bar: Progress, name: str, total: int) -> None:
        super().__init__(total)
        self.bar, self.task = bar, bar.add_task(name, total=total, status="starting")

    def update(self, position: int, *values: float | None, **more: float | None) -> None:
        self.bar.update(self.task, completed=position, status=self.text(position, *values, **more))


class Activity:
    """Work that prints nothing while it lasts: since when, and the items of its present step."""

    def __init__(self) -> None:
        self.began, self.step, self.done, self.total = time.monotonic(), "", 0, 0
        self.changed: Callable[[], object] = lambda: None
        self.spoken = False
        """Whether a progress line tells of it from now on."""

    def text(self) -> str:
        """Return `web 12 of 40 after 1:07 min`; without items only the time."""
        items = f"{self.step} {self.done:,} of {self.total:,} " if self.total else ""
        return f"{items}after {format_duration(time.monotonic() - self.began)}"


def print_error(text: str) -> None:
    """Print a line on standard error: standard output may be a document."""
    print(text, file=sys.stderr, flush=True)


class Wait:
    """A wait for `what`: it says after QUIET_S, and then every REPEAT_S, what it waits for and what answered last."""

    def __init__(self, what: str, say: Callable[[str], None] = print_error) -> None:
        self.what, self.say, self.answer = what, say, "no answer yet"
        self.began = time.monotonic()
        self._due = self.began + QUIET_S

    def note(self, answer: str) -> None:
        """Take the newest answer, such as "connection refused"."""
        self.answer = answer
        if (now := time.monotonic()) >= self._due:
            self._due = now + REPEAT_S
            self.say(f"waits for {self.what} for {format_duration(now - self.began)}: {answer}")


_activity: ContextVar[Activity | None] = ContextVar("activity", default=None)


@contextmanager
def working(console: Console, name: str, bar: bool = True) -> Iterator[None]:
    """Show that `name` still works until the block ends, with the items that `count_items` counts.

    A terminal gets a bar that disappears; otherwise a line comes after QUIET_S, then ever more rarely up to REPEAT_S,
    until the work has a progress line. Without `bar` a terminal gets nothing.
    """
    activity = Activity()
    token = _activity.set(activity)
    try:
        if console.rich is not None and console.rich.is_terminal:
            if not bar:
                yield
                return
            columns = (TextColumn("  {task.description:<18}"), BarColumn(30), TextColumn("{task.fields[items]}"))
            with Progress(*columns, TimeElapsedColumn(), console=console.rich, transient=True) as shown:
                task = shown.add_task(name, total=None, items="")

                def show() -> None:
                    items = f"{activity.step} {activity.done:,} of {activity.total:,}"
                    shown.update(task, completed=activity.done, total=activity.total, items=items)

                activity.changed = show
                yield
            return

        def speak(stop: threading.Event) -> None:
            pause_s = QUIET_S
            while not stop.wait(pause_s):
                if not activity.spoken:
                    console.log(f"  {name:<17} [dim]{escape(activity.text())}[/]")
                pause_s = min(2 * pause_s, REPEAT_S)

        context = copy_context()  # in which the log of a flow run is known
        with in_background(lambda stop: context.run(speak, stop)):
            yield
    finally:
        _activity.reset(token)


def count_items(step: str, total: int) -> Callable[[int], None]:
    """Begin a step of `total` items of the work that is shown; any thread calls the result with what it has done."""
    if (activity := _activity.get()) is None:
        return lambda items: None
    activity.step, activity.done, activity.total = step, 0, total
    lock = threading.Lock()

    def count(items: int) -> None:
        with lock:
            activity.done += items
            activity.changed()

    return count


_current: ContextVar[Console | None] = ContextVar("console", default=None)


@contextmanager
def console_as(console: Console) -> Iterator[None]:
    """Make `console` the current one for everything that starts in the block."""
    token = _current.set(console)
    try:
        yield
    finally:
        _current.reset(token)


def current_console() -> Console:
    """Return the console of this process: the terminal for the command line, else the flow run's log."""
    if (console := _current.get()) is not None:
        return console
    return TerminalConsole() if os.environ.get("HERD_CONSOLE") == "terminal" else LoggerConsole()
