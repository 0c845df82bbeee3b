"""Checkpoints of a stage: saved in the background, verified before use, loaded on any layout.

A step waits only for a copy of the state to host memory, which a thread writes and then commits. A failed save leaves
earlier checkpoints untouched and training goes on; after a few failures in a row the next save raises on every process.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from herd.llama3.parallel.mesh import ParallelContext, run_on_rank0_and_broadcast, to_local
from herd.llama3.recipe.sections import Keep
from herd.llama3.train.checkpoint import dcp
from herd.llama3.train.checkpoint.dcp import Savable, SaveResult
from herd.llama3.train.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from herd.llama3.train.checkpoint.storage import (
    CheckpointRef,
    CheckpointStore,
    JournalUpload,
    LocalCheckpointStore,
    RemoteCheckpointStore,
    SupersededError,
)
from herd.llama3.train.device import DeviceTime
from herd.llama3.train.job import SAVE_TIMEOUT_S
from herd.storage.digests import FileDigest

THREADS = 4
"""Files that each process writes or reads at the same time."""
TOLERATED = 3
"""Failed saves in a row after which training ends: a full disk is often cleaned up before that."""
ADVICE = (
    "repair or restore one of them and give the same command again, or add --restart-damaged to train the stage again "
    "from its start"
)


class SaveFailed(RuntimeError):
    """A checkpoint could not be saved; earlier checkpoints are untouched."""


class NoGoodCheckpoint(ValueError):
    """There are checkpoints of the stage and all are damaged: the text names each."""


@dataclass(frozen=True)
class RestorePoint:
    """What a stage continues from: the newest checkpoint that verifies, and why newer ones were skipped."""

    path: Path | None
    manifest: CheckpointManifest | None
    skipped: tuple[str, ...]


class Checkpoints:
    """The checkpoints of a stage in `folder`, or at `uri` (then `folder` is only for files in transit)."""

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
        log: Callable[[str], None] = print,
    ) -> None:
        """Open the store; every process must do so at the same point. `log` gets the saves that failed.

        With a `uri`, the journal in the folder `work` and the small files beside it are kept with the checkpoints.
        """
        self.keep, self.world, self.threads, self.tolerated, self.log = keep, world, threads, tolerated, log
        self.attempt = world.broadcast_object(f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex[:8]}")
        self.store: CheckpointStore = (
            RemoteCheckpointStore(uri, folder, self.attempt) if uri else LocalCheckpointStore(folder)
        )
        self.journal_upload = JournalUpload(uri, work, self.attempt) if uri and work and world.is_rank0 else None
        self.snapshot = Snapshot(world.rank)
        # The thread has its own group: collectives of two threads must not meet on one. gloo needs no device.
        self.group: Any = None
        if world.size > 1:
            self.group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S))
        self.failures: list[str] = []
        """Errors of the saves since the last that succeeded."""
        self._running: Future[SaveResult] | None = None
        self._thread: threading.Thread | None = None
        """Of the last save; deletes older checkpoints after it."""
        self._done: list[SaveResult] = []
        self._saves = 0

    def begin(self, state: Savable, stage: str) -> float:
        """Copy `state` and start writing it in a thread; return the seconds that training waited.

        Every process calls it at the same step. Raises SaveFailed if the last saves have all failed.
        """
        began = time.perf_counter()
        self._wait()
        self._give_up()
        waited = time.perf_counter() - began
        manifest = dcp.make_manifest(state, stage, self.world, self.attempt)
        self.snapshot.take(state.tensors())
        blocked = time.perf_counter() - began - waited
        self._saves += 1
        journal_end = self.journal_upload.mark() if self.journal_upload else 0
        cost = SaveResult(state.position, 0, blocked, waited, 0.0)
        self._running, before = Future[SaveResult](), self._thread
        running = self._running

        def run() -> None:
            try:
                running.set_result(self._save(manifest, cost, began + waited, journal_end))
            except BaseException as error:
                running.set_exception(error)
            # After the result: the other processes would wait for rank 0 at the next step that they take together.
            if before is not None:
                before.join()
            if self.world.is_rank0 and running.exception() is None:
                self._prune()

        # A daemon: an interrupted save is never loaded, so exit need not wait for it.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()
        return waited + blocked

    @property
    def saving(self) -> bool:
        """Whether a save is in progress, or has ended and was not polled yet."""
        return self._running is not None

    def poll(self) -> list[SaveResult]:
        """Return what was committed since the last call; never waits, so a loop may call it after each step."""
        if self._running is not None and self._running.done():
            self._wait()
        done, self._done = self._done, []
        return done

    def finish(self) -> list[SaveResult]:
        """Wait for the save in progress and what it deletes, then poll; every process calls it.

        Raises SaveFailed and SupersededError.
        """
        self._wait_for_thread()
        self._give_up()
        run_on_rank0_and_broadcast(self.world, self.store.check)
        return self.poll()

    def save(self, state: Savable, stage: str) -> SaveResult:
        """Save `state` and wait for the commit. Raises SaveFailed if this one fails."""
        self.begin(state, stage)
        self._wait_for_thread()
        if self.failures:
            raise SaveFailed(self.failures[-1])
        return self._done.pop()

    def resume(self, state: Savable, before: int | None = None, restart: bool = False) -> RestorePoint:
        """Load the newest good checkpoint into `state`; every process calls it. Quarantines damaged newer ones.

        With `before`, checkpoints past that position are deleted; raises ValueError if one of them is pinned. Raises
        NoGoodCheckpoint if all are damaged, because a disk that can be repaired may hold days of training; `restart`
        quarantines them instead, and `state` must be reset. Raises ValueError for a checkpoint of another model.
        """
        self._wait_for_thread()
        self.store.remove_leftovers(self.world)
        if before is not None:
            run_on_rank0_and_broadcast(self.world, lambda: self._forget_after(before))
        loaded: tuple[Path | None, CheckpointManifest | None] = None, None
        damaged: dict[CheckpointRef, str] = {}
        reason = f"loading, attempt {self.attempt}"
        for ref in reversed(run_on_rank0_and_broadcast(self.world, self.store.refs)):
            try:
                with self.store.pins.pinned(ref.position, reason) if self.world.is_rank0 else nullcontext():
                    path, manifest = self.store.open(ref, self.world)
                    download = partial(self.store.download, path, manifest, self.world)
                    try:
                        load_state(path, manifest, state, self.world, threads=self.threads, download=download)
                    finally:
                        self.store.release(path)
                loaded = path, manifest
                break
            except DamagedCheckpoint as damage:
                damaged[ref] = str(damage)
        reasons = tuple(damaged.values())
        if damaged and loaded[0] is None and not restart:
            raise NoGoodCheckpoint(
                "\n".join([f"checkpoints: none of this stage is good: {reasons[0]}", *reasons[1:], ADVICE])
            )

        def quarantine() -> None:
            for ref, reason in damaged.items():
                self.store.quarantine(ref, reason)

        run_on_rank0_and_broadcast(self.world, quarantine)
        return RestorePoint(*loaded, reasons)

    def restore(self, point: RestorePoint) -> bool:
        """Download journal and small files if those on this machine are not those of `point`; return whether.

        Every process calls it, before that folder is used. Raises DamagedCheckpoint if they are missing in the store.
        """
        chunk = point.manifest.journal if point.manifest else None
        if chunk is None:
            return False
        return run_on_rank0_and_broadcast(
            self.world, lambda: self.journal_upload is not None and self.journal_upload.restore(chunk)
        )

    def positions(self) -> list[int]:
        return sorted({ref.position for ref in self.store.refs()})

    def _save(self, manifest: CheckpointManifest, cost: SaveResult, began: float, journal_end: int) -> SaveResult:
        """In the thread: wait for the copy, write, commit."""
        on_device = self.snapshot.wait()
        building = self.store.building(manifest.position, self._saves)

        def commit(files: dict[str, FileDigest]) -> None:
            # The journal up to `journal_end` goes first: a checkpoint must not be ahead of it.
            upload = self.journal_upload
            chunk = None if upload is None else upload.store(manifest.position, self._saves, journal_end)
            self.store.commit(building, manifest.model_copy(update={"files": files, "journal": chunk}))

        writer = dcp.Writer(
            building,
            self.threads,
            start=lambda: self.store.start(building),
            stored=lambda path: self.store.stored(building, path),
            commit=commit,
        )
        committed = False
        try:
            world = replace(self.world, host_group=self.group)
            written = writer.write(self.snapshot.items, self.snapshot.parts, world)
            committed = True
        finally:
            self.store.end_save(building, committed, self.world.is_rank0)
        total = time.perf_counter() - began
        size = sum(digest.bytes for digest in written.values())
        return replace(cost, bytes=size, blocked_s=max(cost.blocked_s, on_device), total_s=total)

    def _wait(self) -> None:
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            self._done.append(running.result())
            self.failures = []
        except SupersededError:
            raise
        except Exception as error:
            self.failures.append(str(error))
            if self.world.is_rank0:
                self.log(f"checkpoint failed, {len(self.failures)} in a row: {error}")

    def _wait_for_thread(self) -> None:
        """Wait for the save in progress, and on rank 0 for the deletions after it."""
        self._wait()
        if self._thread is not None:
            self._thread.join()

    def _give_up(self) -> None:
        if len(self.failures) >= self.tolerated:
            raise SaveFailed(f"{len(self.failures)} checkpoints in a row could not be saved; {self.failures[-1]}")

    def _prune(self) -> None:
        """Delete what is not kept. Errors are logged only: a checkpoint too many does not make the save a failure."""
        try:
            refs = self.store.refs()
            positions = sorted({ref.position for ref in refs})
            keep = self.keep.kept(positions, pinned=self.store.pins.all())
            newest = {ref.position: ref for ref in refs}
            for ref in refs:
                if ref.position not in keep or newest[ref.position] != ref:
                    self.store.delete(ref)
        except Exception as error:
            self.log(f"older checkpoints could not be deleted: {type(error).__name__}: {error}")

    def _forget_after(self, position: int) -> None:
        """Delete the checkpoints after `position`. Raises ValueError if one of them is pinned."""
        pinned = self.store.pins.all()
        for ref in self.store.refs():
            if ref.position > position:
                if ref.position in pinned:
                    reasons = ", ".join(pinned[ref.position])
                    raise ValueError(f"going back to {position}: checkpoint {ref.position} is pinned ({reasons})")
                self.store.delete(ref)


class Snapshot:
    """A copy of the state in host memory, from which a checkpoint is written while training goes on.

    On CUDA the copies run on the training stream into pinned memory: the host does not wait, and a later optimizer step
    cannot overtake them (12 GB of a 1B model take about 0.3 s at 40 GB/s).
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.parts: dict[str, Tensor] = {}
        """This process's tensors."""
        self.items: list[WriteItem] = []
        """Those that this process writes."""
        self._began: DeviceTime | None = None
        self._copied: DeviceTime | None = None

    @torch.no_grad()
    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Allocate memory for `tensors`, and choose what this process writes, unless that was done."""
        parts = {name: to_local(tensor) for name, tensor in tensors.items()}
        allocated = {name: (part.shape, part.dtype) for name, part in self.parts.items()}
        if allocated == {name: (part.shape, part.dtype) for name, part in parts.items()}:
            return
        pinned = any(part.is_cuda for part in parts.values())
        self.parts = {name: torch.zeros(p.shape, dtype=p.dtype, pin_memory=pinned) for name, p in parts.items()}
        self.items = dcp.parts_to_write(tensors, self.rank)

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> None:
        """Copy `tensors`; call `wait` before reading `parts`."""
        self.prepare(tensors)
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), torch.device("cpu"))
        self._began = DeviceTime(device)
        for name, tensor in tensors.items():
            self.parts[name].copy_(to_local(tensor), non_blocking=True)
        self._copied = DeviceTime(device) if device.type == "cuda" else None

    def wait(self) -> float:
        """Wait for the copies; return the seconds for which they held up the device (on a CPU 0)."""
        if self._began is None or self._copied is None:
            return 0.0
        self._copied.wait()
        return self._copied.seconds_since(self._began)


def load_state(
    folder: Path,
    manifest: CheckpointManifest,
    state: Savable,
    world: ParallelContext,
    average: bool = True,
    threads: int = THREADS,
    download: Callable[[Collection[str]], None] = lambda names: None,
) -> None:
    """Read the checkpoint of `manifest` into `state` and verify it; its running average only if `average`.

    Every process calls it; `download` as in `dcp.load`, by default all files are there. Raises ValueError, with `state`
    untouched, if it is of another model. Raises DamagedCheckpoint on all processes if a file has changed; `state` is
    then partly overwritten.
    """
    expected = (state.config.model_dump(mode="json", exclude={"preset"}), state.rows)
    stored = ({key: value for key, value in manifest.model.items() if key != "preset"}, manifest.rows)
    if expected != stored:
        raise ValueError(
            f"{folder}: holds a model of shape {stored}, the recipe asks {expected}; train that stage again"
        )
    state.make_average(manifest.averaged if average else 0)
    dcp.load(folder, manifest, state.tensors(), world, threads, download)
    state.position = manifest.position
