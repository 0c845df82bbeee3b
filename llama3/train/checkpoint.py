"""Checkpoints of a stage: saved whole or not at all, verified before use, loadable on any number of processes.

Each process writes its shards as safetensors through torch.distributed.checkpoint, so nothing is ever unpickled and
loading reshards. A save builds a hidden folder, puts every file on the disk, writes the manifest last, and one rename
commits. What this gives up: training stands still meanwhile, and the folder must be on a disk that all processes share.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llama3.parallel.mesh import World
from llama3.recipe.schema import Keep
from llama3.train.manifest import Damaged, FileDigest, Manifest, digest_file
from llama3.train.state import TrainState
from storage.filesystem import sync_folder

SAVING, DELETING, DAMAGED = ".saving", ".deleting", ".damaged"
DIGITS = 18
"""Positions are written with this many digits, so that names sort as numbers."""


def save_state(folder: Path, state: TrainState, stage: str, world: World) -> None:
    """Write `state` into the new folder `folder`, manifest last. Raises RuntimeError if it cannot be written."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if world.leads:
        folder.mkdir(parents=True)
    world.wait()
    with _plain_errors(f"{folder}: cannot be written"):
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(state.tensors(), storage_writer=writer, no_dist=world.size == 1)
    files = _digests(folder, world)
    if world.leads:
        Manifest(
            stage=stage,
            position=state.position,
            averaged=state.averaged,
            model=state.model.spec.model_dump(mode="json"),
            rows=state.model.rows,
            processes=world.size,
            files=files,
        ).write(folder)
    world.wait()


def load_state(folder: Path, manifest: Manifest, state: TrainState, world: World, average: bool = True) -> None:
    """Read the checkpoint that `manifest` (verified) describes into `state`, its running average only if `average`.

    Raises ValueError if it is of another model.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    mine = (state.model.spec.model_dump(mode="json", exclude={"preset"}), state.model.rows)
    theirs = ({key: value for key, value in manifest.model.items() if key != "preset"}, manifest.rows)
    if mine != theirs:
        raise ValueError(f"{folder}: holds a model of shape {theirs}, the recipe asks {mine}; train that stage again")
    state.make_average(manifest.averaged if average else 0)
    with _plain_errors(f"{folder}: cannot be loaded"):
        load(state.tensors(), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=world.size == 1)
    state.position = manifest.position


@dataclass(frozen=True)
class Found:
    """What a stage can go on from: the newest checkpoint that verifies, and why newer ones were passed over."""

    path: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...]


class Checkpoints:
    """The folder `checkpoints` of a stage."""

    def __init__(self, folder: Path, keep: Keep, world: World) -> None:
        self.folder, self.keep, self.world = folder, keep, world
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> Found:
        """Return where to go on. Damaged checkpoints are moved aside as `.damaged-<position>` for whoever asks why."""
        return self.world.from_leader(self._newest() if self.world.leads else Found(None, None, ()))

    def save(self, state: TrainState, stage: str) -> Path:
        """Commit a checkpoint of `state` and delete those that the recipe does not keep."""
        final = self.folder / f"{state.position:0{DIGITS}}"
        building = self.folder / f"{SAVING}-{final.name}"
        save_state(building, state, stage, self.world)
        if self.world.leads:
            building.rename(final)
            sync_folder(self.folder)
            self._delete(kept(self.positions(), self.keep))
        self.world.wait()
        return final

    def positions(self) -> list[int]:
        """Return the positions of all committed checkpoints, in order."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def _newest(self) -> Found:
        for left in [*self.folder.glob(f"{SAVING}-*"), *self.folder.glob(f"{DELETING}-*")]:
            shutil.rmtree(left)
        skipped: list[str] = []
        for position in reversed(self.positions()):
            path = self.folder / f"{position:0{DIGITS}}"
            try:
                return Found(path, Manifest.verified(path), tuple(skipped))
            except Damaged as error:
                skipped.append(str(error))
                self._move(path, DAMAGED)
        return Found(None, None, tuple(skipped))

    def _delete(self, keep: set[int]) -> None:
        for position in set(self.positions()) - keep:
            shutil.rmtree(self._move(self.folder / f"{position:0{DIGITS}}", DELETING))

    def _move(self, path: Path, mark: str) -> Path:
        """Rename, so that no reader sees a folder that loses its files one by one."""
        aside = path.with_name(f"{mark}-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)


def kept(positions: list[int], keep: Keep) -> set[int]:
    """Return which of `positions` (ascending) the rule keeps: the newest few, and the first after each milestone."""
    newest = set(positions[-keep.last :])
    if keep.every is None:
        return newest
    first: dict[int, int] = {}
    for position in positions:
        first.setdefault(position // keep.every, position)
    return newest | {position for milestone, position in first.items() if milestone}


def _digests(folder: Path, world: World) -> dict[str, FileDigest]:
    """Return the digests of all files of `folder`; each process reads its share of them."""
    world.wait()
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    mine = {path.name: digest_file(path) for path in paths[world.rank :: world.size]}
    return {name: digest for part in world.gathered(mine) for name, digest in part.items()}


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which `except Exception` does not catch, into RuntimeError."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            reasons = "; ".join(f"process {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
            raise RuntimeError(f"{what}: {reasons}") from error
