"""Checkpoints of a stage: saved whole or not at all while training goes on, verified before use, on any layout.

A step waits only for a copy of the state to host memory; a thread writes it (see `saving`), and the commit is the last
thing that happens (`shelf`, `remote`). A save that fails costs nothing but itself: the one before stays, training goes
on, and after a few failures in a row the next save raises, on every process at the same step. Nothing is ever
unpickled, and loading reshards. What this gives up: host memory for one more copy of the state, and the tokens since
the last commit if the machine dies while the next one is being written.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama3.parallel.mesh import ParallelContext, local, run_on_rank0_and_broadcast
from llama3.recipe.sections import Keep
from llama3.train.checkpoint.dcp import Background, Savable, SaveResult, describe, own_group, plain_errors, write
from llama3.train.checkpoint.journal_upload import Segments
from llama3.train.checkpoint.manifest import CheckpointManifest, Damaged, Malformed, verified
from llama3.train.checkpoint.storage import CheckpointRef, CheckpointStore, LocalShelf, RemoteShelf, Superseded, kept

# A copy of the training state in host memory: what a checkpoint is written from while training goes on.
#
# Making it is all that a step waits for. On CUDA the copies run on the training stream into pinned memory: nothing
# waits on the host, and a later optimizer step cannot overtake them (12 GB of a 1B model take about 0.3 s at 40
# GB/s). On a CPU they are plain copies. The memory is kept and used again, so one more state must fit into host
# memory.


class Snapshot:
    """Host memory for one state; `parts` holds this process's tensors, `shapes` what they are parts of."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        self.shapes: dict[str, Tensor] = {}
        """The same names as tensors without data (meta device), sharded as the state is: what is planned with."""
        self._began: Any = None
        self._copied: Any = None

    @torch.no_grad()
    def prepare(self, tensors: dict[str, Tensor]) -> bool:
        """Make room for `tensors`; return whether there was none. Otherwise the first copy pays for the memory."""
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        if _kinds(parts) == _kinds(self.parts):
            return False
        pinned = any(part.is_cuda for part in parts.values())
        self.parts = {name: torch.zeros(p.shape, dtype=p.dtype, pin_memory=pinned) for name, p in parts.items()}
        self.shapes = {name: _without_data(tensor) for name, tensor in tensors.items()}
        return True

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> bool:
        """Copy `tensors`; return whether they are others than the time before. Call `wait` before reading `parts`."""
        changed = self.prepare(tensors)
        on_device = any(tensor.is_cuda for tensor in tensors.values())
        self._began, self._copied = (_event(), None) if on_device else (None, None)
        for name, tensor in tensors.items():
            self.parts[name].copy_(local(tensor), non_blocking=True)
        if on_device:
            self._copied = _event()
        return changed

    def wait(self) -> float:
        """Return when the copies are there, and the seconds for which they held up the device (on a CPU 0)."""
        if self._copied is None:
            return 0.0
        self._copied.synchronize()
        return float(self._began.elapsed_time(self._copied)) / 1000


def _event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _kinds(parts: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (part.shape, part.dtype) for name, part in parts.items()}


def _without_data(tensor: Tensor) -> Tensor:
    part = local(tensor).to("meta")
    if not hasattr(tensor, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    cut: Any = tensor
    whole = {"shape": cut.shape, "stride": cut.stride()}
    return DTensor.from_local(part, cut.device_mesh, cut.placements, run_check=False, **whole)


THREADS = 4
"""Files that each process writes or reads at the same time."""
TOLERATED = 3
"""Failed saves in a row after which training ends: a disk that is full now is often emptied by somebody."""
TIMEOUT_S = 3600.0
"""How long a process whose part is written waits for the slowest."""
ADVICE = (
    "mend or bring back one of them and give the same command again, or add --restart-damaged to train the stage again "
    "from its start"
)


class SaveFailed(RuntimeError):
    """A checkpoint could not be saved; the ones before are untouched."""


class NoneGood(ValueError):
    """There are checkpoints of the stage and all are damaged: the text names each."""


@dataclass(frozen=True)
class RestorePoint:
    """What a stage goes on from: the newest checkpoint that verifies, and why newer ones were passed over."""

    path: Path | None
    manifest: CheckpointManifest | None
    skipped: tuple[str, ...]


class Checkpoints:
    """The checkpoints of a stage in `folder`, or at `uri` (then `folder` is only for what is on its way)."""

    def __init__(
        self,
        folder: Path,
        keep: Keep,
        world: ParallelContext,
        *,
        uri: str | None = None,
        work: Path | None = None,
        threads: int = THREADS,
        tolerated: int = TOLERATED,
        say: Callable[[str], None] = print,
    ) -> None:
        """Open the place; every process must do so at the same point. `say` is told of saves that failed.

        With a `uri`, the journal in the folder `work` and what belongs to it are kept with the checkpoints.
        """
        self.keep, self.world, self.threads, self.tolerated, self.say = keep, world, threads, tolerated, say
        self.attempt = world.from_leader(f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex[:8]}")
        self.shelf: CheckpointStore = RemoteShelf(uri, folder, self.attempt) if uri else LocalShelf(folder)
        self.segments = Segments(uri, work, self.attempt) if uri and work and world.leads else None
        self.snapshot, self.group = Snapshot(), own_group(world, TIMEOUT_S)
        self.failures: list[str] = []
        """What went wrong in the saves since the last that succeeded."""
        self._planner: object = None
        self._running: Background[SaveResult] | None = None
        self._done: list[SaveResult] = []
        self._saves = 0

    def prepare(self, state: Savable) -> None:
        """Take the memory for a copy of `state` now, rather than while the first save blocks a step."""
        self.snapshot.prepare(state.tensors())

    def begin(self, state: Savable, stage: str) -> float:
        """Copy `state` and start writing it; return the seconds that this took. Waits for the save before.

        Every process calls it at the same step. Raises SaveFailed if the last saves have all failed.
        """
        began = time.perf_counter()
        self._wait()
        self._give_up()
        waited = time.perf_counter() - began
        manifest = describe(state, stage, self.world, self.attempt)
        changed = self.snapshot.take(state.tensors())
        blocked = time.perf_counter() - began - waited
        self._saves += 1
        mark = self.segments.mark() if self.segments else 0
        cost = SaveResult(state.position, 0, blocked, waited, 0.0)
        self._running = Background(lambda: self._save(manifest, changed, cost, began + waited, mark))
        return waited + blocked

    @property
    def saving(self) -> bool:
        """Whether a save is in progress, or its end was not looked at yet."""
        return self._running is not None

    def poll(self) -> list[SaveResult]:
        """Return what was committed since the last call; never waits, so a loop may ask after each step."""
        if self._running is not None and self._running.done:
            self._wait()
        done, self._done = self._done, []
        return done

    def finish(self) -> list[SaveResult]:
        """Wait for the save in progress; return as `poll` does. Every process calls it.

        Raises SaveFailed as `begin` does, and Superseded if a later attempt has begun.
        """
        self._wait()
        self._give_up()
        run_on_rank0_and_broadcast(self.world, self.shelf.check)
        return self.poll()

    def save(self, state: Savable, stage: str) -> SaveResult:
        """Save `state` and wait for the commit. Raises SaveFailed if this one fails."""
        self.begin(state, stage)
        self._wait()
        if self.failures:
            raise SaveFailed(self.failures[-1])
        return self._done.pop()

    def resume(self, state: Savable, before: int | None = None, anew: bool = False) -> RestorePoint:
        """Load the newest good checkpoint into `state`; every process calls it. Damaged newer ones are set aside.

        If all are damaged, raises NoneGood and leaves them where they are: days of training may hang on a disk that
        can be mended. With `anew` they are set aside instead; `state` holds parts of them then and must be made again.

        With `before`, those past that position are deleted: the run takes another way from there. Raises ValueError
        if one of them is pinned, or if the checkpoint is of another model.
        """
        self._wait()
        self.shelf.clean(self.world)
        if before is not None:
            run_on_rank0_and_broadcast(self.world, lambda: self._forget_after(before))
        loaded: tuple[Path | None, CheckpointManifest | None] = None, None
        damaged: dict[CheckpointRef, str] = {}
        for place in reversed(run_on_rank0_and_broadcast(self.world, self.shelf.places)):
            try:
                loaded = self._load(place, state)
                break
            except Damaged as damage:
                damaged[place] = str(damage)
        reasons = tuple(damaged.values())
        if damaged and loaded[0] is None and not anew:
            raise NoneGood("\n".join([f"checkpoints: none of this stage is good: {reasons[0]}", *reasons[1:], ADVICE]))
        run_on_rank0_and_broadcast(self.world, lambda: self._set_aside(damaged))
        return RestorePoint(*loaded, reasons)

    def restore(self, found: RestorePoint) -> bool:
        """Bring the journal and what belongs to it to this machine if they are not those of `found`.

        Every process calls it, before anything is read from that folder or written there. Returns whether it was
        needed. Raises Damaged if they are not to be had.
        """
        segment = found.manifest.journal if found.manifest else None
        if segment is None:
            return False
        return run_on_rank0_and_broadcast(
            self.world, lambda: self.segments is not None and self.segments.restore(segment)
        )

    def positions(self) -> list[int]:
        """Return the positions of all committed checkpoints, in order."""
        return sorted({place.position for place in self.shelf.places()})

    def pin(self, position: int, reason: str) -> None:
        """Keep the checkpoint at `position` until `unpin` is called with the same reason; one process calls it."""
        self.shelf.pins.add(position, reason)

    def unpin(self, position: int, reason: str) -> None:
        """Take that pin away."""
        self.shelf.pins.remove(position, reason)

    def _set_aside(self, damaged: dict[CheckpointRef, str]) -> None:
        for place, reason in damaged.items():
            self.shelf.set_aside(place, reason)

    def _load(self, place: CheckpointRef, state: Savable) -> tuple[Path, CheckpointManifest]:
        reason = f"loading, attempt {self.attempt}"
        if self.world.leads:
            self.shelf.pins.add(place.position, reason, seconds=86_400)
        try:
            path, manifest = self.shelf.fetch(place, self.world)
            try:
                load_state(path, manifest, state, self.world, threads=self.threads)
            finally:
                self.shelf.release(path)
            return path, manifest
        finally:
            if self.world.leads:
                self.shelf.pins.remove(place.position, reason)

    def _save(
        self, manifest: CheckpointManifest, changed: bool, cost: SaveResult, began: float, mark: int
    ) -> SaveResult:
        """What the thread does: wait for the copy, write, commit, delete what the recipe does not keep."""
        from llama3.train.checkpoint.dcp import WritePlanner, Writer

        if not isinstance(self._planner, WritePlanner):
            self._planner = WritePlanner()
        if changed:
            self._planner.forget()
        on_device = self.snapshot.wait()
        self._planner.shapes, self._planner.parts = self.snapshot.shapes, self.snapshot.parts
        building = self.shelf.building(manifest.position, self._saves)
        writer = Writer(
            building,
            self.world.rank,
            self.threads,
            start=lambda: self.shelf.start(building),
            stored=lambda path: self.shelf.stored(building, path),
            commit=lambda files: self._commit(building, manifest.model_copy(update={"files": files}), mark),
        )
        committed = False
        try:
            write(self._planner, writer, self.world, self.group)
            committed = True
        finally:
            self.shelf.settle(building, committed, self.world.leads)
        total = time.perf_counter() - began
        if self.world.leads:
            self._prune()
        size = sum(digest.bytes for digest in writer.written.values())
        return replace(cost, bytes=size, blocked_s=max(cost.blocked_s, on_device), total_s=total)

    def _commit(self, building: Path, manifest: CheckpointManifest, mark: int) -> None:
        """What the leading process does once all files are there. The journal goes first: up to `mark`."""
        if self.segments is not None:
            segment = self.segments.store(manifest.position, self._saves, mark)
            manifest = manifest.model_copy(update={"journal": segment})
        self.shelf.commit(building, manifest)

    def _wait(self) -> None:
        """Wait for the save in progress and note how it ended."""
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            self._done.append(running.result())
            self.failures = []
        except Superseded:
            raise
        except Exception as error:
            self.failures.append(str(error))
            if self.world.leads:
                self.say(f"checkpoint failed, {len(self.failures)} in a row: {error}")

    def _give_up(self) -> None:
        if len(self.failures) >= self.tolerated:
            raise SaveFailed(f"{len(self.failures)} checkpoints in a row could not be saved; {self.failures[-1]}")

    def _prune(self) -> None:
        """Delete what is not kept; a checkpoint too many is no reason to call the save failed."""
        try:
            places = self.shelf.places()
            positions = sorted({place.position for place in places})
            keep = kept(positions, self.keep) | self.shelf.pins.all().keys()
            newest = {place.position: place for place in places}
            for place in places:
                if place.position not in keep or newest[place.position] != place:
                    self.shelf.delete(place)
        except Exception as error:
            self.say(f"older checkpoints could not be deleted: {type(error).__name__}: {error}")

    def _forget_after(self, position: int) -> None:
        pinned = self.shelf.pins.all()
        for place in self.shelf.places():
            if place.position > position:
                if place.position in pinned:
                    reasons = ", ".join(pinned[place.position])
                    raise ValueError(f"going back to {position}: checkpoint {place.position} is pinned ({reasons})")
                self.shelf.delete(place)


def load_state(
    folder: Path,
    manifest: CheckpointManifest,
    state: Savable,
    world: ParallelContext,
    average: bool = True,
    threads: int = THREADS,
) -> None:
    """Read the checkpoint that `manifest` describes into `state`, its running average only if `average`, and verify it.

    Every process calls it. Raises ValueError, with `state` untouched, if it is of another model. Raises Damaged on all
    processes if a file is not what was written; then `state` holds parts of it, and must be loaded or made again.
    """
    from llama3.train.checkpoint.dcp import load

    mine = (state.spec.model_dump(mode="json", exclude={"preset"}), state.rows)
    theirs = ({key: value for key, value in manifest.model.items() if key != "preset"}, manifest.rows)
    if mine != theirs:
        raise ValueError(f"{folder}: holds a model of shape {theirs}, the recipe asks {mine}; train that stage again")
    state.make_average(manifest.averaged if average else 0)
    try:
        with plain_errors(f"{folder}: cannot be loaded"):
            load(folder, manifest, state.tensors(), world, threads)
    except (RuntimeError, OSError, Malformed):
        verified(folder, world)  # a damaged file is the likely cause, and its name says more
        raise
    state.position = manifest.position
