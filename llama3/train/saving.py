"""One save: a state's tensors written by all processes through torch.distributed.checkpoint, committed by the leader.

`save_state` writes from the tensors themselves and returns when the folder is committed. A background save uses the
same path from a `Snapshot`, in a thread, over a process group of its own: collectives of two threads may not meet on
one group, and gloo's needs no device. Each save has one round of messages for the plan and one for the digests; the
commit happens within the second, so all processes learn in the same way whether it came to be.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from llama3.parallel.mesh import World, local
from llama3.train.manifest import Manifest
from llama3.train.shelf import Superseded

T = TypeVar("T")

# Said at each save of one process. A filter of our own around the save would have to be set from a thread.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Savable(Protocol):
    """What is saved: named tensors and three numbers, of a model with a shape."""

    position: int
    averaged: int
    spec: Any
    rows: int

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name; writing into them changes the state."""

    def make_average(self, averaged: int) -> None:
        """Make room for an average over `averaged` positions that is about to be loaded."""


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint and what it cost."""

    position: int
    bytes: int
    """Of the whole checkpoint on the leading process, of its own part on the others."""
    blocked_s: float
    """Seconds that training stood still for the copy to host memory."""
    waited_s: float
    """Seconds that it waited before, because the save before was not finished."""
    total_s: float
    """From the beginning of the copy to the commit."""


def describe(state: Savable, stage: str, world: World, attempt: str) -> Manifest:
    """Return the manifest of `state` as it is now, without files."""
    return Manifest(
        stage=stage,
        position=state.position,
        averaged=state.averaged,
        model=state.spec.model_dump(mode="json"),
        rows=state.rows,
        processes=world.size,
        attempt=attempt,
        files={},
    )


def save_state(folder: Path, state: Savable, stage: str, world: World, threads: int = 4, attempt: str = "") -> None:
    """Write `state` into the new folder `folder`, manifest last; every process calls it.

    Raises RuntimeError on every process if it cannot be written.
    """
    from llama3.train.writer import Planner, Writer

    manifest = describe(state, stage, world, attempt)
    planner = Planner()
    planner.shapes = state.tensors()
    with torch.no_grad():
        planner.parts = {name: local(tensor) for name, tensor in planner.shapes.items()}
    writer = Writer(
        folder,
        world.rank,
        threads,
        start=lambda: folder.mkdir(parents=True),
        commit=lambda files: manifest.model_copy(update={"files": files}).write(folder),
    )
    write(planner, writer, world)


def write(planner: Any, writer: Any, world: World, group: Any = None) -> None:
    """Let torch plan and write. Raises RuntimeError, on every process, and forgets the plan then."""
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with plain_errors(f"{writer.folder}: cannot be written"):
            save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=world.size == 1)
    except BaseException:
        planner.forget()
        raise


def own_group(world: World, timeout_s: float) -> Any:
    """Return a group of all processes for the background thread; every process calls it at the same place."""
    if world.size == 1:
        return None
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


class Background(Generic[T]):
    """A call that runs in a thread. The thread does not keep the process alive: a save cut short is never chosen."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait; return what the call returned or raise what it raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._value  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as failure:
            self._failure = failure


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which `except Exception` does not catch, into RuntimeError.

    If it came about because a later attempt has begun, that is raised: Superseded.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for failure in error.failures.values():
            if isinstance(failure[0], Superseded):
                raise failure[0] from None
        reasons = "; ".join(f"process {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise RuntimeError(f"{what}: {reasons}") from error
