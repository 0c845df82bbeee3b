"""What the commands share: where they print, how a user's mistake is told, and options that many of them have."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer
from rich.console import Console as RichConsole
from rich.markup import escape

from storage.root import Root

RootOption = Annotated[
    str, typer.Option("--root", envvar="HERD_ROOT", help="Folder or s3://bucket/prefix for artifacts and runs.")
]
FAILED, USAGE, REFUSED, INTERRUPTED = 1, 2, 3, 130
"""Exit statuses but 0: it did not come to its end, what was asked for is wrong, the gate refused the model, Ctrl-C."""
BUSY = (408, 429, 502, 503)
"""Answers of a server that may give another in a moment."""
PAUSES_S = (2.0, 5.0, 10.0, 20.0, 30.0)
T = TypeVar("T")
out = RichConsole(highlight=False, soft_wrap=True)
problems = RichConsole(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def mistakes() -> Iterator[None]:
    """Turn a user's mistake, a full disk and Ctrl-C into plain lines and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        problems.print("[yellow]stopped[/]; the same command continues where it stopped")
        raise typer.Exit(INTERRUPTED) from None
    except _foreseen() as error:
        for line in str(error).splitlines():
            problems.print(f"[red]error[/]  {escape(line)}")
        raise typer.Exit(_status(error)) from None
    except _server_gone() as error:
        raise typer.Exit(_tell_of_server(error)) from None
    except RuntimeError as error:
        if not _of_server(error):
            raise
        raise typer.Exit(_tell_of_server(error)) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        problems.print(f"[red]error[/]  root: no space left on the disk ({escape(str(error))})")
        problems.print("free some and give the same command again; nothing is lost")
        raise typer.Exit(FAILED) from None


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def exit_as_judged(root: Root, run: str) -> None:
    """Leave with the status that says that the gate refused the model of `run`, if it did."""
    from tasks.promotion.log import REFUSED as verdict
    from tasks.runs.records import Runs

    if Runs(root).find(run).verdict == verdict:
        raise typer.Exit(REFUSED)


def _server_gone() -> tuple[type[Exception], ...]:
    """Return what Prefect's client raises then; asked only when something went wrong: the import takes 70 ms."""
    from httpx import HTTPStatusError, TransportError

    return TransportError, HTTPStatusError


def _foreseen() -> tuple[type[Exception], ...]:
    """Return what says in its message what a user can do; these, too, are imported only when something went wrong."""
    from flows.local_server import NoServer
    from llama3.evaluate.gate import Unfinished
    from storage.lease import LeaseHeld, LeaseLost
    from tasks.errors import EvaluationFailed, StudyIncomplete, TrainingFailed

    return ValueError, TrainingFailed, EvaluationFailed, StudyIncomplete, Unfinished, LeaseHeld, LeaseLost, NoServer


def _status(error: Exception) -> int:
    from storage.artifact import DamagedArtifact
    from tasks.errors import HeldBack

    if isinstance(error, HeldBack):
        return REFUSED
    return USAGE if isinstance(error, ValueError) and not isinstance(error, DamagedArtifact) else FAILED


def patiently(call: Callable[[], T]) -> T:
    """Return what the flow `call` returns; call it again while Prefect's server has too much to do to let it begin."""
    from httpx import HTTPStatusError

    from flows.run_lifecycle import BEGUN

    for pause_s in PAUSES_S:
        try:
            return call()
        except (HTTPStatusError, RuntimeError) as error:
            cause = error.__cause__ if _of_server(error) else error
            if BEGUN.is_set() or not isinstance(cause, HTTPStatusError) or cause.response.status_code not in BUSY:
                raise
            problems.print(f"[yellow]Prefect is busy ({cause.response.status_code})[/]; again in {pause_s:g} s")
            time.sleep(pause_s)
    return call()


def _of_server(error: Exception) -> bool:
    """Return whether this is what Prefect makes of any failure of its first question to a server."""
    return isinstance(error, RuntimeError) and str(error).startswith("Failed to reach API at")


def _tell_of_server(error: Exception) -> int:
    """Say what is wrong with Prefect's server; return the exit status."""
    from httpx import HTTPStatusError

    cause = error.__cause__ if _of_server(error) else error
    if isinstance(cause, HTTPStatusError) and cause.response.status_code == 401:
        from flows.local_server import ACCESS

        where = escape(cause.request.url.netloc.decode())
        problems.print(f"[red]error[/]  PREFECT_API_AUTH_STRING: the Prefect server at {where} takes another password")
        problems.print(f"one of `herd up` has it in {ACCESS} of its root's folder; source that file")
        return USAGE
    problems.print(f"[red]error[/]  the Prefect server does not answer as it should ({escape(_line(error))})")
    problems.print("nothing is lost; the same command continues where it stopped")
    return FAILED
