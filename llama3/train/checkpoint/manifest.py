"""The manifest of a checkpoint: written last, it names every file with its digest, and itself.

torch loads a flipped bit without a word, so every load hashes what it reads (see `loading`), and `verified` looks at
a whole folder without loading it, all processes together. A folder without a manifest, with a file changed, missing,
or added, is damaged and says where.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from llama3.parallel.mesh import ParallelContext, raise_on_all_ranks, run_on_rank0_and_broadcast
from storage.digests import THREADS, FileDigest, digest_file
from storage.filesystem import sync_folder, write_atomic

MANIFEST = "manifest.json"
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names that a manifest may hold: a file of this folder, never a path out of it."""


class Damaged(ValueError):
    """A checkpoint that cannot be trusted; the text names the file and what is wrong with it."""


class Malformed(Damaged):
    """Its files are not those of this state, though they may be as they were written."""


class JournalChunk(BaseModel):
    """A piece of the journal that is kept beside the checkpoints (see `segments`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=rf"^{PLAIN.pattern}$")
    sha256: str


class CheckpointManifest(BaseModel):
    """What a checkpoint holds; its presence is the commit mark."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    position: int
    averaged: int
    """Positions summed into the running average; 0: the checkpoint has none."""
    model: dict[str, Any]
    """Shape of the model."""
    rows: int
    """Embedding rows."""
    processes: int
    """How many wrote it; any number may load it."""
    attempt: str
    """Start of the trainer that wrote it: a time and a random part."""
    files: dict[str, FileDigest]
    journal: JournalChunk | None = None
    """The last piece of the journal up to this position; None on a local disk, where the journal itself is."""

    @field_validator("files")
    @classmethod
    def _plain(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if not PLAIN.fullmatch(name):
                raise ValueError(f"file name {name!r} is not plain")
        return files

    def text(self) -> str:
        """Return what is stored: the content and its own digest."""
        content = self.model_dump(mode="json")
        return json.dumps({"content": content, "sha256": _digest_of(content)}, indent=1, sort_keys=True) + "\n"

    def write(self, folder: Path) -> None:
        """Commit `folder`, whose files must already be on the disk."""
        write_atomic(folder / MANIFEST, self.text())
        sync_folder(folder)

    @classmethod
    def parse(cls, text: bytes, where: str) -> Self:
        """Return the manifest that was stored at `where`. Raises Damaged."""
        try:
            data = json.loads(text)
            if data["sha256"] != _digest_of(data["content"]):
                raise Damaged(f"{where}: has changed since it was written")
            return cls.model_validate(data["content"])
        except (
            ValidationError,
            KeyError,
            TypeError,
            RecursionError,
            UnicodeDecodeError,
            json.JSONDecodeError,
        ) as error:
            raise Damaged(f"{where}: is not a manifest ({type(error).__name__})") from error

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the manifest of `folder`, whose files are as many as it says. Raises Damaged."""
        path = folder / MANIFEST
        try:
            manifest = cls.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror})") from error
        found = {str(entry.relative_to(folder)) for entry in folder.rglob("*") if not entry.is_dir()}
        manifest.compare(found - {MANIFEST}, str(folder))
        return manifest

    def compare(self, found: AbstractSet[str], where: str) -> None:
        """Raise Damaged if the folder `where` holds other files than the manifest names."""
        for name in sorted(found - self.files.keys()):
            raise Damaged(f"{where}/{name}: is not in the manifest")
        for name in sorted(self.files.keys() - found):
            raise Damaged(f"{where}/{name}: is missing")

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Read those files of `folder`. Raises Damaged."""
        with ThreadPoolExecutor(THREADS) as pool:
            for problem in pool.map(lambda name: self.problem(folder / name), names):
                if problem:
                    raise Damaged(problem)

    def problem(self, path: Path) -> str | None:
        """Return what is wrong with the file `path`, or None. The size is looked at first: it costs nothing."""
        expected = self.files[path.name]
        try:
            size = path.stat().st_size
            found = digest_file(path) if size == expected.bytes else FileDigest(bytes=size, sha256="")
        except FileNotFoundError:
            return f"{path}: is missing"
        except OSError as error:
            return f"{path}: cannot be read ({error.strerror})"
        return self.difference(str(path), found)

    def difference(self, where: str, found: FileDigest) -> str | None:
        """Return in words how `found`, read at `where`, differs from what was written, or None."""
        expected = self.files[where.rsplit("/", 1)[-1]]
        if found.bytes != expected.bytes:
            return f"{where}: has {found.bytes:,} bytes, {expected.bytes:,} were written"
        if found.sha256 != expected.sha256:
            digests = f"SHA-256 {found.sha256[:12]}, not {expected.sha256[:12]}"
            return f"{where}: has changed since it was written ({digests})"
        return None

    def share(self, rank: int, size: int) -> list[str]:
        """Return the files that process `rank` of `size` verifies: neighbours, so its own if as many wrote them."""
        names = sorted(self.files)
        return names[len(names) * rank // size : len(names) * (rank + 1) // size]


def verified(folder: Path, world: ParallelContext) -> CheckpointManifest:
    """Return the manifest of `folder` after reading all of its files, each process its share.

    Every process must call it. Raises Damaged on all of them if one finds something wrong.
    """
    manifest = run_on_rank0_and_broadcast(world, lambda: CheckpointManifest.read(folder))
    raise_on_all_ranks(world, lambda: manifest.check(folder, manifest.share(world.rank, world.size)))
    return manifest


def _digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
