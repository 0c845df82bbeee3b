"""What the commands share: where they print, how a user's mistake is told, and options that many of them have."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console as RichConsole
from rich.markup import escape

from flows.children import NoServer
from storage.holder import LeaseHeld
from tasks.failures import StudyIncomplete, TrainingFailed

RootOption = Annotated[
    str, typer.Option("--root", envvar="HERD_ROOT", help="Folder or s3://bucket/prefix for artifacts and runs.")
]
out = RichConsole(highlight=False, soft_wrap=True)
problems = RichConsole(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def mistakes() -> Iterator[None]:
    """Turn a user's mistake, a full disk and Ctrl-C into plain lines and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        problems.print("[yellow]stopped[/]; the same command continues where it stopped")
        raise typer.Exit(130) from None
    except _server_gone() as error:
        problems.print(f"[red]error[/]  the Prefect server went away ({escape(str(error))})")
        problems.print("nothing is lost; the same command continues where it stopped")
        raise typer.Exit(1) from None
    except (ValueError, TrainingFailed, StudyIncomplete, LeaseHeld) as error:
        for line in str(error).splitlines():
            problems.print(f"[red]error[/]  {escape(line)}")
        raise typer.Exit(2) from None
    except NoServer as error:
        problems.print(f"[red]error[/]  {escape(str(error))}")
        raise typer.Exit(1) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        problems.print(f"[red]error[/]  root: no space left on the disk ({escape(str(error))})")
        problems.print("free some and give the same command again; nothing is lost")
        raise typer.Exit(1) from None


def _server_gone() -> type[Exception]:
    """Return what Prefect's client raises then; asked only when something went wrong: the import takes 70 ms."""
    from httpx import TransportError

    return TransportError
