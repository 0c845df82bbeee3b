"""Shared by the commands: consoles, common options, and errors as plain lines with an exit status."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console as RichConsole
from rich.markup import escape
from typer.core import TyperGroup

from herd.storage.root import Root

RootOption = Annotated[
    str, typer.Option("--root", envvar="HERD_ROOT", help="Folder or s3://bucket/prefix for artifacts and runs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; all other lines go to standard error.")]
FAILED, USAGE, REFUSED, INTERRUPTED = 1, 2, 3, 130
"""Exit statuses other than 0: failure, wrong input, the gate rejected the model, Ctrl-C."""
BUSY = (408, 429, 502, 503)
"""HTTP statuses of a busy server: retry."""
PAUSES_S = (2.0, 5.0, 10.0, 20.0, 30.0)
T = TypeVar("T")
out = RichConsole(highlight=False, soft_wrap=True)
problems = RichConsole(stderr=True, highlight=False, soft_wrap=True)


class DefaultGroup(TyperGroup):
    """A group whose first command is the default: `herd plan RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


@contextmanager
def mistakes(again: str = "the same command") -> Iterator[None]:
    """Turn errors of people, disks, schedulers and servers into plain lines and an exit status.

    Only a bug in herd keeps its traceback; with HERD_TRACEBACK everything does. `again` continues after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        problems.print(f"[yellow]stopped[/]; {again} continues where it stopped")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        status = None if os.environ.get("HERD_TRACEBACK") else _print_error(error)
        if status is None:
            raise
        raise typer.Exit(status) from None


@contextmanager
def option(name: str) -> Iterator[None]:
    """Begin the ValueErrors of the block with the option `name`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from error


@contextmanager
def at_work(name: str) -> Iterator[None]:
    """Show on standard error that `name` still works, unless the block takes a moment only."""
    from herd.tasks.console import TerminalConsole, working

    with working(TerminalConsole(problems), name):
        yield


def print_json(document: Any) -> None:
    """Print a document as JSON; numbers that JSON lacks (NaN) are null."""
    import json

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(plain(document), indent=1, ensure_ascii=False))


def exit_as_judged(root: Root, run: str) -> None:
    """Exit with the status REFUSED if the gate rejected the model of `run`."""
    from herd.tasks.promotion.log import REJECTED as verdict
    from herd.tasks.runs.records import Runs

    if Runs(root).find(run).verdict == verdict:
        raise typer.Exit(REFUSED)


def _print_error(error: Exception) -> int | None:
    """Print an error that the user can act on and return its exit status; None for any other error."""
    # imported only after an error: they take 70 ms and more
    from herd.flows.local_server import NoServer, is_temporary
    from herd.llama3.evaluate.gate import CheckUnfinished
    from herd.storage.filesystem import StoreError
    from herd.storage.lease import LeaseHeld, LeaseLost
    from herd.tasks.errors import EvaluationFailed, InferenceFailed, SchedulerRefused, StudyIncomplete, TrainingFailed
    from herd.tasks.tracking.moved_root import ACCESS

    failures: tuple[type[Exception], ...] = (TrainingFailed, EvaluationFailed, InferenceFailed, StudyIncomplete)
    failures += (CheckUnfinished, StoreError, SchedulerRefused)
    if isinstance(error, (ValueError, *failures, LeaseHeld, LeaseLost, NoServer)):
        for line in str(error).splitlines():
            problems.print(f"[red]error[/]  {escape(line)}")
        return _status(error)

    if isinstance(error, (OSError, MemoryError)):
        return _print_system_error(error)

    from httpx import ConnectError, HTTPStatusError, TransportError

    if isinstance(error, (TransportError, HTTPStatusError)) or _of_server(error):
        cause = error.__cause__ if _of_server(error) else error
        if isinstance(cause, HTTPStatusError) and cause.response.status_code == 401:
            from prefect.settings import PREFECT_API_KEY

            host = escape(cause.request.url.netloc.decode())
            if PREFECT_API_KEY.value():
                problems.print(f"[red]error[/]  PREFECT_API_KEY: the Prefect server at {host} does not take it")
                problems.print("make another in the settings of your account there")
                return USAGE
            problems.print(
                f"[red]error[/]  PREFECT_API_AUTH_STRING: the Prefect server at {host} takes another password"
            )
            problems.print(f"the password of `herd up` is in {ACCESS} of its root's folder; source that file")
            return USAGE
        if isinstance(cause, ConnectError) and not is_temporary():
            from prefect.settings import PREFECT_API_URL

            where = f"PREFECT_API_URL: no server answers at {escape(str(PREFECT_API_URL.value()))}"
            problems.print(f"[red]error[/]  {where}; start it, or unset the variable")
            problems.print("nothing is lost; after that the same command continues")
            return FAILED
        message = (str(error) or type(error).__name__).splitlines()[0]
        problems.print(f"[red]error[/]  the Prefect server does not answer as it should ({escape(message)})")
        problems.print("nothing is lost; the same command continues where it stopped")
        return FAILED
    return None


def _print_system_error(error: OSError | MemoryError) -> int | None:
    """Print the system's refusal and its remedy; return the exit status, or None if the reader of a pipe left."""
    from herd.storage.fetch import FULL
    from herd.tasks.errors import REMEDIES

    if isinstance(error, MemoryError):
        problems.print(f"[red]error[/]  memory: none is left ({escape(str(error) or 'out of memory')})")
        problems.print("end other processes, or lower cluster.processes or --threads; the same command continues")
    elif isinstance(error, BrokenPipeError) and _reader_left():
        return None  # click ends it with status 1, as other programs do
    elif error.errno in FULL:
        problems.print(f"[red]error[/]  root: no space left on the disk ({escape(str(error))})")
        problems.print("free some space and run the same command again; nothing is lost")
    else:
        file = f"{error.filename}: " if error.filename else ""
        problems.print(f"[red]error[/]  {escape(file + (error.strerror or str(error) or type(error).__name__))}")
        remedy = "the same command continues; HERD_TRACEBACK=1 shows where it was"
        problems.print(REMEDIES.get(error.errno or 0, remedy))
    return FAILED


def _reader_left() -> bool:
    """Return whether the reader of standard output is gone, as in `herd status | head`."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False
    return bool(poll.poll(0))


def _status(error: Exception) -> int:
    from herd.storage.artifact import DamagedArtifact
    from herd.tasks.errors import GateFailed

    if isinstance(error, GateFailed):
        return REFUSED
    return USAGE if isinstance(error, ValueError) and not isinstance(error, DamagedArtifact) else FAILED


def with_retries(call: Callable[[], T]) -> T:
    """Return the result of the flow `call`; retry while a busy Prefect server does not let it begin.

    Its flow run is created with the name of this process, which the reconciler asks whether it lives.
    """
    from httpx import HTTPStatusError
    from prefect import tags

    from herd.flows.run_lifecycle import BEGUN
    from herd.tasks.operate.owners import process_tag

    def owned() -> T:
        with tags(process_tag()):
            return call()

    for pause_s in PAUSES_S:
        try:
            return owned()
        except (HTTPStatusError, RuntimeError) as error:
            cause = error.__cause__ if _of_server(error) else error
            if BEGUN.is_set() or not isinstance(cause, HTTPStatusError) or cause.response.status_code not in BUSY:
                raise
            problems.print(f"[yellow]Prefect is busy ({cause.response.status_code})[/]; again in {pause_s:g} s")
            time.sleep(pause_s)
    return owned()


def _of_server(error: Exception) -> bool:
    """Return whether this is Prefect's error for a failed first request to a server."""
    return isinstance(error, RuntimeError) and str(error).startswith("Failed to reach API at")
