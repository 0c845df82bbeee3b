"""Every order of an operation's side effects: each call to a boundary fails in turn, and the operation is done again.

A boundary is what herd does not control: the disk, an object store, MLflow, the launch of a process. An undisturbed
operation counts its calls; then call `k` fails, for every k, before it takes effect or after (the reply is lost), once
or for ever, or the process dies there: then nothing that it still wants to do takes effect. Only that call is replaced.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pytest

Answer = TypeVar("Answer")
Lasts = Literal["once", "for ever", "to death"]
DISK = ("fsync", "link", "mkdir", "rename", "replace", "rmdir", "unlink")
"""Functions of `os` that change a disk; pathlib, shutil and tempfile call them."""


class Died(BaseException):
    """The process is gone: what its frames still want to do has no effect."""


class Fault(NamedTuple):
    """What happens at one call."""

    number: int
    """Of the call, from 1; 0: none fails."""
    after: bool = False
    """Whether the call takes effect before it fails."""
    lasts: Lasts = "once"

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} call {self.number}, {self.lasts}"


NONE = Fault(0)


def faults(calls: int, every: int = 1) -> list[Fault]:
    """Return all faults of an operation of so many calls, or every so many of them, spread over calls and kinds."""
    kinds: list[tuple[bool, Lasts]] = [
        (after, lasts) for after in (False, True) for lasts in ("once", "for ever", "to death")
    ]
    return [Fault(number, *kind) for number in range(1, calls + 1) for kind in kinds][::every]


class Boundary:
    """Counts the calls that are made while it is watched, and has `fault` happen."""

    def __init__(self, fault: Fault = NONE) -> None:
        self.fault, self.calls, self.dead = fault, list[str](), False
        self._lock, self._inside = threading.Lock(), threading.local()

    def call(self, name: str, effect: Callable[[], Answer], error: type[Exception] = OSError) -> Answer:
        """Return what `effect` does, or fail; calls that it makes itself are not counted."""
        if getattr(self._inside, "here", False):
            return effect()
        with self._lock:
            if self.dead:
                raise Died(name)
            self.calls.append(name)
            number, (at, after, lasts) = len(self.calls), self.fault
            fails = at > 0 and (number == at or (lasts == "for ever" and number > at))
            self.dead = fails and lasts == "to death"
        self._inside.here = True
        try:
            if not fails or (after and number == at):
                answer = effect()
        finally:
            self._inside.here = False
        if fails:
            raise Died(name) if self.dead else error(5, f"planted at {name}")
        return answer

    @contextmanager
    def watch_disk(self, folder: Path) -> Iterator[None]:
        """Count what changes the disk below `folder`."""

        def path_of(arguments: tuple[Any, ...], folder_handle: int | None) -> str:
            path = arguments[0]
            if isinstance(path, int):
                return os.readlink(f"/proc/self/fd/{path}")
            return os.path.join("" if folder_handle is None else os.readlink(f"/proc/self/fd/{folder_handle}"), path)

        def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*arguments: Any, **named: Any) -> Any:
                path = path_of(arguments, named.get("dir_fd"))
                if not path.startswith(f"{folder}/"):
                    return real(*arguments, **named)

                def effect() -> Any:
                    return None if name == "fsync" else real(*arguments, **named)  # the power stays on

                return self.call(f"{name} {path.removeprefix(f'{folder}/')}", effect)

            return changed

        with pytest.MonkeyPatch.context() as patch:
            for name in DISK:
                patch.setattr(os, name, watched(name, getattr(os, name)))
            yield

    @contextmanager
    def watch_methods(self, owner: type, names: Iterable[str], error: type[Exception] = OSError) -> Iterator[None]:
        """Count the calls of methods of a class."""

        def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def method(*arguments: Any, **named: Any) -> Any:
                return self.call(name, lambda: real(*arguments, **named), error)

            return method

        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(owner, name, watched(name, getattr(owner, name)))
            yield


@contextmanager
def cut_short(*errors: type[BaseException]) -> Iterator[None]:
    """Let an operation fail as a planted fault makes it fail, or with another of `errors`."""
    with suppress(Died, OSError, *errors):
        yield


def walk(play: Callable[[Fault], int], every: int = 1) -> int:
    """Play without a fault, then with each or every so many; return how many. `play` returns the number of calls.

    Raises AssertionError with every fault that broke what `play` asserts.
    """
    play(NONE)  # what is made once is there
    # threads of one operation may both make a folder: a call more than usual
    chosen, broken = faults(min(play(NONE) for _ in range(3)), every), []
    for fault in chosen:
        try:
            assert play(fault) >= fault.number, "it did not happen"
        except AssertionError as error:
            broken.append(f"{fault}: {error}")
    assert not broken, "\n".join(broken)
    return len(chosen)


@contextmanager
def watch_mlflow(boundary: Boundary) -> Iterator[None]:
    """Count the calls of MLflow's client; a failed one does not keep the next ones from being tried."""
    from mlflow import MlflowClient

    names = [name for name, value in vars(MlflowClient).items() if inspect.isfunction(value) and name[0] != "_"]
    with pytest.MonkeyPatch.context() as patch, boundary.watch_methods(MlflowClient, names, ConnectionError):
        patch.setattr("herd.tasks.tracking.mlflow.PROBE_INTERVAL_S", 0.0)
        yield
