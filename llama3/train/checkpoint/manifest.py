"""The manifest of a checkpoint: written last, it names every file with its digest, and holds its own digest.

torch loads a flipped bit without an error, so every load hashes what it reads (see `dcp`). A folder without a manifest,
or with a file changed, missing or added, is damaged.
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

from herd.storage.digests import FileDigest, digest_file
from herd.storage.filesystem import sync_folder, write_atomic
from herd.storage.processes import THREADS

MANIFEST = "manifest.json"
# In an object store, where nothing is renamed:
DAMAGED_MARK = "damaged.txt"
"""Beside the files of a checkpoint that failed to verify: why."""
SUPERSEDED_MARKS = "superseded"
"""Beside the checkpoints: has an empty object for each that a rollback superseded (see `superseded_mark`)."""
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names that a manifest may contain: a file of this folder, never a path out of it."""


def superseded_mark(name: str) -> str:
    """Return the name of the mark of the checkpoint `<position>/<save>`."""
    return name.replace("/", ".")


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be trusted; the text names the file and what is wrong with it."""


class MalformedManifest(DamagedCheckpoint):
    """The files do not hold this state, though they may be as they were written."""


class JournalChunk(BaseModel):
    """A chunk of the journal that is stored beside the checkpoints (see `JournalUpload`)."""

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
    vocab_size: int
    """Ids of the embedding, base and special."""
    processes: int
    """How many processes wrote it; any number may load it."""
    attempt: str
    """Id of the trainer process that wrote it: its start time and a random part."""
    files: dict[str, FileDigest]
    journal: JournalChunk | None = None
    """The last chunk of the journal up to this position; None on a local disk, which has the journal itself."""

    @field_validator("files")
    @classmethod
    def _plain(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if not PLAIN.fullmatch(name):
                raise ValueError(f"file name {name!r} is not plain")
        return files

    def text(self) -> str:
        """Return the text of the file: the content and its digest."""
        content = self.model_dump(mode="json")
        return json.dumps({"content": content, "sha256": _digest_of(content)}, indent=1, sort_keys=True) + "\n"

    def write(self, folder: Path) -> None:
        """Commit `folder`, whose files must already be on the disk."""
        write_atomic(folder / MANIFEST, self.text())
        sync_folder(folder)

    @classmethod
    def parse(cls, text: bytes, where: str) -> Self:
        """Return the manifest that was stored at `where`. Raises DamagedCheckpoint."""
        try:
            data = json.loads(text)
            if data["sha256"] != _digest_of(data["content"]):
                raise DamagedCheckpoint(f"{where}: has changed since it was written")
            return cls.model_validate(data["content"])
        except (
            ValidationError,
            KeyError,
            TypeError,
            RecursionError,
            UnicodeDecodeError,
            json.JSONDecodeError,
        ) as error:
            raise DamagedCheckpoint(f"{where}: is not a manifest ({type(error).__name__})") from error

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the manifest of `folder`, which holds exactly the files that it names. Raises DamagedCheckpoint."""
        path = folder / MANIFEST
        try:
            manifest = cls.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: cannot be read ({error.strerror})") from error
        names = {str(entry.relative_to(folder)) for entry in folder.rglob("*") if not entry.is_dir()}
        manifest.compare(names - {MANIFEST}, str(folder))
        return manifest

    def compare(self, names: AbstractSet[str], where: str) -> None:
        """Raise DamagedCheckpoint if the files `names` of the folder `where` are not those of the manifest."""
        for name in sorted(names - self.files.keys()):
            raise DamagedCheckpoint(f"{where}/{name}: is not in the manifest")
        for name in sorted(self.files.keys() - names):
            raise DamagedCheckpoint(f"{where}/{name}: is missing")

    def difference(self, where: str, digest: FileDigest) -> str | None:
        """Return a message if `digest`, of the file at `where`, is not what was written, else None."""
        expected = self.files[where.rsplit("/", 1)[-1]]
        if digest.bytes != expected.bytes:
            return f"{where}: has {digest.bytes:,} bytes, {expected.bytes:,} were written"
        if digest.sha256 != expected.sha256:
            digests = f"SHA-256 {digest.sha256[:12]}, not {expected.sha256[:12]}"
            return f"{where}: has changed since it was written ({digests})"
        return None

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Read the files `names` of `folder` and compare them with the manifest. Raises DamagedCheckpoint."""

        def problem(path: Path) -> str | None:
            try:
                size = path.stat().st_size  # compared first: it costs nothing
                complete = size == self.files[path.name].bytes
                digest = digest_file(path) if complete else FileDigest(bytes=size, sha256="")
            except FileNotFoundError:
                return f"{path}: is missing"
            except OSError as error:
                return f"{path}: cannot be read ({error.strerror})"
            return self.difference(str(path), digest)

        with ThreadPoolExecutor(THREADS) as pool:
            for message in pool.map(lambda name: problem(folder / name), names):
                if message:
                    raise DamagedCheckpoint(message)


def _digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
