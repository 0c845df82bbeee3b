"""The manifest of a checkpoint: written last, it names every file with its digest, and itself.

torch loads a flipped bit without a word, so nothing is loaded that was not verified: every byte is read once more
at each start. A folder without a manifest, with a file changed, missing, or added, is damaged and says where.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.filesystem import sync_folder, write_atomic

MANIFEST = "manifest.json"


class Damaged(ValueError):
    """A checkpoint that cannot be trusted; the text names the file and what is wrong with it."""


class FileDigest(BaseModel):
    bytes: int
    sha256: str


class Manifest(BaseModel):
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
    files: dict[str, FileDigest]

    def write(self, folder: Path) -> None:
        """Commit `folder`, whose files must already be on the disk."""
        content = self.model_dump(mode="json")
        text = json.dumps({"content": content, "sha256": _digest_of(content)}, indent=1, sort_keys=True)
        write_atomic(folder / MANIFEST, text + "\n")
        sync_folder(folder)

    @classmethod
    def verified(cls, folder: Path) -> Self:
        """Return the manifest of `folder` after reading all of its files. Raises Damaged."""
        manifest = cls._read(folder)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
        for name in sorted(found - manifest.files.keys()):
            raise Damaged(f"{folder / name}: is not in the manifest")
        for name, expected in sorted(manifest.files.items()):
            _check(folder / name, expected)
        return manifest

    @classmethod
    def _read(cls, folder: Path) -> Self:
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_bytes())
            if data["sha256"] != _digest_of(data["content"]):
                raise Damaged(f"{path}: has changed since it was written")
            return cls.model_validate(data["content"])
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror})") from error
        except (ValidationError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise Damaged(f"{path}: is not a manifest ({type(error).__name__})") from error


def digest_file(path: Path) -> FileDigest:
    """Return size and SHA-256 of a file that was just written, and put it on the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileDigest(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def _check(path: Path, expected: FileDigest) -> None:
    if not path.is_file():
        raise Damaged(f"{path}: is missing")
    if path.stat().st_size != expected.bytes:
        raise Damaged(f"{path}: has {path.stat().st_size:,} bytes, {expected.bytes:,} were written")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected.sha256:
        raise Damaged(f"{path}: has changed since it was written (SHA-256 {digest[:12]}, not {expected.sha256[:12]})")


def _digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
