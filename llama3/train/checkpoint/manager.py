"""Checkpoints of a stage: saved in the background, verified before use, loaded on any layout.

A step waits only for a copy of the state to host memory, which a thread writes and then commits. After a failed save,
training continues and earlier checkpoints are as before; after a few failures in a row the next save raises on every
process.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from herd.llama3.parallel.mesh import ParallelContext, run_on_rank0_and_broadcast, to_local
from herd.llama3.recipe.sections import Keep, Model
from herd.llama3.train.checkpoint import dcp
from herd.llama3.train.checkpoint.dcp import THREADS, Savable, SaveResult
from herd.llama3.train.checkpoint.journal_upload import JournalUpload
from herd.llama3.train.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from herd.llama3.train.checkpoint.storage import (
    CheckpointRef,
    CheckpointStore,
    LocalCheckpointStore,
    LocalSave,
    RemoteCheckpointStore,
    RemoteSave,
    SupersededError,
)
from herd.llama3.train.device import DeviceTime
from herd.llama3.train.job import SAVE_TIMEOUT_S

TOLERATED = 3
"""Failed saves in a row after which training ends: a full disk is often cleaned up before that."""
ADVICE = (
    "repair or restore one of them and give the same command again, or add --restart-damaged to train the stage again "
    "from its start"
)
ROLLBACK_ADVICE = (
    "give the same command again with --set spikes.policy=skip, which continues from the newest checkpoint without the "
    "spike's batch, or add --restart-damaged to train the stage again from its start"
)


class SaveFailed(RuntimeError):
    """A checkpoint could not be saved; earlier checkpoints are untouched."""


class NoGoodCheckpoint(ValueError):
    """All checkpoints of the stage are damaged or past the position of a rollback: the text names each."""


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
        rollback: int = 0,
        threads: int = THREADS,
        tolerated: int = TOLERATED,
        log: Callable[[str], None] = print,
    ) -> None:
        """Open the store; every process must do so at the same point. `log` gets the saves that failed.

        With a `uri`, the journal in the folder `work` and the small files beside it are kept with the checkpoints.
        `rollback`: tokens before the newest checkpoint to which training may go back.
        """
        self.keep, self.world, self.threads, self.tolerated, self.log = keep, world, threads, tolerated, log
        self.rollback = rollback
        self.attempt = world.broadcast_object(f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex[:8]}")
        self.store: CheckpointStore
        if uri:
            journal = JournalUpload(uri, work, self.attempt) if work and world.is_rank0 else None
            self.store = RemoteCheckpointStore(uri, folder, self.attempt, journal)
        else:
            self.store = LocalCheckpointStore(folder)
        self.snapshot = Snapshot(world.rank)
        self.failures: list[str] = []
        """Errors of the saves since the last that succeeded."""
        # The thread that saves has a group to itself: collectives of two threads must not meet on one. gloo needs no
        # device.
        self._saving_world = world
        if world.size > 1:
            group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S))
            self._saving_world = replace(world, host_group=group)
        # One thread saves, another deletes older checkpoints: else a save would end on rank 0 only after the deletions,
        # and the other processes would wait for rank 0 at the next step that they take together.
        self._save_thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._prune_thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-prune")
        self._saving: Future[SaveResult] | None = None
        self._pruning: Future[None] | None = None
        self._done: list[SaveResult] = []
        self._saves = 0

    def begin(self, state: Savable, stage: str) -> float:
        """Copy `state` and start writing it in a thread; return the seconds that training waited.

        Every process calls it at the same step. Raises SaveFailed if the last saves have all failed.
        """
        began = time.perf_counter()
        self._wait()
        self._give_up()
        copy_began = time.perf_counter()
        manifest = dcp.make_manifest(state, stage, self.world, self.attempt)
        self.snapshot.take(state.tensors())
        waited_s, blocked_s = copy_began - began, time.perf_counter() - copy_began
        self._saves += 1
        save = self.store.save(state.position, self._saves)  # here: it notes where the journal ends now
        self._saving = self._save_thread.submit(self._save, save, manifest, waited_s, blocked_s, copy_began)
        return waited_s + blocked_s

    @property
    def saving(self) -> bool:
        """Whether a save is in progress, or has ended and was not polled yet."""
        return self._saving is not None

    def poll(self) -> list[SaveResult]:
        """Return the checkpoints committed since the last call; never waits, so a loop may call it after each step."""
        if self._saving is not None and self._saving.done():
            self._wait()
        done, self._done = self._done, []
        return done

    def finish(self) -> list[SaveResult]:
        """Wait for the save in progress and what it deletes, then poll; every process calls it.

        Raises SaveFailed and SupersededError.
        """
        self._wait_for_pruning()
        self._give_up()
        run_on_rank0_and_broadcast(self.world, self.store.check)
        return self.poll()

    def save(self, state: Savable, stage: str) -> SaveResult:
        """Save `state` and wait for the commit. Raises SaveFailed if this one fails."""
        self.begin(state, stage)
        self._wait_for_pruning()
        if self.failures:
            raise SaveFailed(self.failures[-1])
        return self._done.pop()

    def resume(self, state: Savable, before: int | None = None, restart: bool = False) -> RestorePoint:
        """Load the newest good checkpoint into `state`; every process calls it. Quarantines damaged newer ones.

        With `before`, loads the newest that is not past this position, and only then supersedes those that are: they
        are kept until the next commit. Raises NoGoodCheckpoint if there is none, and ValueError if one past it is
        pinned; then all are as they were. Without `before`, raises NoGoodCheckpoint if all are damaged, because a disk
        that can be repaired may hold days of training. `restart` quarantines the damaged ones instead, and `state` must
        be reset. Raises ValueError for a checkpoint of another model.
        """
        self._wait_for_pruning()
        self.store.remove_leftovers(self.world)
        refs = run_on_rank0_and_broadcast(self.world, lambda: self._refs_to_load(before))
        later = [ref for ref in refs if before is not None and ref.position > before]
        path: Path | None = None
        manifest: CheckpointManifest | None = None
        damaged: dict[CheckpointRef, str] = {}
        for ref in reversed(refs[: len(refs) - len(later)]):
            try:
                path, manifest = self._load(ref, state)
                break
            except DamagedCheckpoint as damage:
                damaged[ref] = str(damage)
        reasons = tuple(damaged.values())
        if path is None and not restart and (damaged or before is not None):
            raise NoGoodCheckpoint(self._none_is_good(before, reasons, later))

        def quarantine() -> None:
            if later:
                self.store.check()  # loading may have taken minutes
            for ref, reason in damaged.items():
                self.store.quarantine(ref, reason)
            for ref in later:
                self.store.supersede(ref)

        run_on_rank0_and_broadcast(self.world, quarantine)
        return RestorePoint(path, manifest, reasons)

    def restore(self, point: RestorePoint) -> bool:
        """Download journal and small files if those on this machine are not those of `point`; return whether.

        Every process calls it, before that folder is used. Raises DamagedCheckpoint if they are missing in the store.
        """
        manifest = point.manifest
        if manifest is None:
            return False
        return run_on_rank0_and_broadcast(self.world, lambda: self.store.restore_journal(manifest))

    def positions(self) -> list[int]:
        return sorted({ref.position for ref in self.store.refs()})

    def _save(
        self,
        save: LocalSave | RemoteSave,
        manifest: CheckpointManifest,
        waited_s: float,
        blocked_s: float,
        copy_began: float,
    ) -> SaveResult:
        """In the thread: wait for the copy, write, commit; on rank 0 have older checkpoints deleted."""
        copy_s = self.snapshot.wait()
        committed = False
        try:
            items, shards = self.snapshot.items, self.snapshot.shards
            written = dcp.write(save, manifest, items, shards, self._saving_world, self.threads)
            committed = True
        finally:
            save.clean_up(committed, self.world.is_rank0)
        if self.world.is_rank0:
            self._pruning = self._prune_thread.submit(self._prune)
        size, total_s = sum(digest.bytes for digest in written.values()), time.perf_counter() - copy_began
        return SaveResult(manifest.position, size, max(blocked_s, copy_s), waited_s, total_s)

    def _load(self, ref: CheckpointRef, state: Savable) -> tuple[Path, CheckpointManifest]:
        """Read a checkpoint into `state`; return its folder and manifest. Raises DamagedCheckpoint."""
        reason = f"loading, attempt {self.attempt}"
        with self.store.pins.pinned(ref.position, reason) if self.world.is_rank0 else nullcontext():
            path, manifest = self.store.open(ref, self.world)
            download = partial(self.store.download, path, manifest, self.world)
            try:
                load_state(path, manifest, state, self.world, threads=self.threads, download=download)
            finally:
                self.store.release(path)
        return path, manifest

    def _wait(self) -> None:
        """Wait for the save in progress, if any: keep its result, or count its failure. Raises SupersededError."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            self._done.append(saving.result())
            self.failures = []
        except SupersededError:
            raise
        except Exception as error:
            self.failures.append(str(error))
            if self.world.is_rank0:
                self.log(f"checkpoint failed, {len(self.failures)} in a row: {error}")

    def _wait_for_pruning(self) -> None:
        """Wait for the save in progress, and on rank 0 for the deletions after it."""
        self._wait()
        if self._pruning is not None:
            self._pruning.result()

    def _give_up(self) -> None:
        if len(self.failures) >= self.tolerated:
            raise SaveFailed(f"{len(self.failures)} checkpoints in a row could not be saved; {self.failures[-1]}")

    def _prune(self) -> None:
        """Delete checkpoints that are not kept. Errors are only logged: the save itself has succeeded."""
        try:
            refs = self.store.refs()
            self.store.check()  # after the list: it may have what a later attempt has saved
            positions = sorted({ref.position for ref in refs})
            keep = self.keep.kept(positions, pinned=self.store.pins.all(), rollback=self.rollback)
            newest = {ref.position: ref for ref in refs}
            for ref in refs:
                if ref.position not in keep or newest[ref.position] != ref:
                    self.store.delete(ref)
            self.store.remove_superseded()
        except Exception as error:
            self.log(f"older checkpoints could not be deleted: {type(error).__name__}: {error}")

    def _refs_to_load(self, before: int | None) -> list[CheckpointRef]:
        """Return the committed checkpoints. Raises ValueError if one past `before` is pinned."""
        refs = self.store.refs()
        if before is not None:
            self.store.check()  # after the list: it may have what a later attempt has saved
        pinned = self.store.pins.all() if before is not None else {}
        for ref in refs:
            if before is not None and ref.position > before and ref.position in pinned:
                reasons = ", ".join(pinned[ref.position])
                raise ValueError(f"going back to {before}: checkpoint {ref.position} is pinned ({reasons})")
        return refs

    def _none_is_good(self, before: int | None, reasons: tuple[str, ...], later: list[CheckpointRef]) -> str:
        """Return the text of NoGoodCheckpoint; every process calls it."""
        if before is None:
            superseded = run_on_rank0_and_broadcast(self.world, self.store.superseded)
            aside = [f"superseded by a rollback, and whole: {', '.join(superseded)}"] if superseded else []
            return "\n".join([f"checkpoints: none of this stage is good: {reasons[0]}", *reasons[1:], *aside, ADVICE])
        kept = f"those at {', '.join(str(ref.position) for ref in later)} are untouched" if later else "there is none"
        return "\n".join(
            [f"checkpoints: none up to {before}, where the rollback begins, is good; {kept}", *reasons, ROLLBACK_ADVICE]
        )


class Snapshot:
    """A copy of the state in host memory, from which a checkpoint is written while training continues.

    On CUDA the copies run on the training stream into pinned memory: the host does not wait, and a later optimizer step
    cannot overtake them (12 GB of a 1B model take about 0.3 s at 40 GB/s).
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.shards: dict[str, Tensor] = {}
        """What this process has of each tensor."""
        self.items: list[WriteItem] = []
        """The shards that this process writes."""
        self._began: DeviceTime | None = None
        self._copied: DeviceTime | None = None

    @torch.no_grad()
    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Allocate memory for `tensors`, and choose what this process writes, unless that was done."""
        shards = {name: to_local(tensor) for name, tensor in tensors.items()}
        allocated = {name: (shard.shape, shard.dtype) for name, shard in self.shards.items()}
        if allocated == {name: (shard.shape, shard.dtype) for name, shard in shards.items()}:
            return
        pinned = any(shard.is_cuda for shard in shards.values())
        self.shards = {name: torch.zeros(s.shape, dtype=s.dtype, pin_memory=pinned) for name, s in shards.items()}
        self.items = dcp.shards_to_write(tensors, self.rank)

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> None:
        """Copy `tensors`; call `wait` before reading `shards`."""
        self.prepare(tensors)
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), torch.device("cpu"))
        self._began = DeviceTime(device)
        for name, tensor in tensors.items():
            self.shards[name].copy_(to_local(tensor), non_blocking=True)
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
    # not max_seq_len: a stage with longer sequences may follow
    config = Model.model_validate({**manifest.model, "preset": "custom"})
    expected = {**state.config.shape, "vocab_size": state.vocab_size}
    stored = {**config.shape, "vocab_size": manifest.vocab_size}
    if expected != stored:
        raise ValueError(
            f"{folder}: holds a model of shape {stored}, the recipe has {expected}; train that stage again"
        )
    state.make_average(manifest.averaged if average else 0)
    dcp.load(folder, manifest, state.tensors(), world, threads, download)
    state.position, state.loaded_seq_len = manifest.position, config.max_seq_len
