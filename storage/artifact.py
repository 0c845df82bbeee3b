"""Immutable artifacts: directories that are committed whole, found by what they are made from.

An artifact's key is a digest of its kind, step version, parameters and the keys of its inputs, so equal intent finds
equal bytes and nothing is made twice. It is built in a staging folder, its manifest (every file with size and
SHA-256) is written last, and one rename makes it visible: readers see a whole artifact or none. What this gives up:
the root must be a local (or network-mounted) folder, because a rename is the commit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from storage.digests import FileDigest, digest_file, digest_folder
from storage.filesystem import sync_folder, write_atomic

MANIFEST = "manifest.json"
STAGING = ".staging"
DAMAGED = ".damaged"


class Manifest(BaseModel):
    """What an artifact is, what it was made from and what it holds; its presence is the commit mark."""

    kind: str
    name: str
    key: str
    version: int
    """Version of the step that made it; raised when the step's result changes for equal inputs."""
    parameters: dict[str, Any]
    inputs: dict[str, str]
    """Role -> key of the artifact (or digest of the outside data) that it was made from."""
    facts: dict[str, Any]
    """What is worth knowing without opening the files: counts, scores."""
    made_by: str
    code: str
    created: str
    seconds: float
    files: dict[str, FileDigest]


@dataclass(frozen=True)
class Artifact:
    path: Path
    manifest: Manifest

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    @property
    def label(self) -> str:
        """How people call it: `curated/quickstart-1a2b3c4d`."""
        return f"{self.manifest.kind}/{self.path.name}"

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.manifest.files.values())

    @property
    def created(self) -> float:
        """When it was committed, in seconds since 1970."""
        return datetime.fromisoformat(self.manifest.created).timestamp()

    def missing(self) -> list[str]:
        """Return the files that are gone or have another size than when committed (digests are not read)."""
        sizes = {name: (self.path / name) for name in self.manifest.files}
        return [
            name
            for name, path in sizes.items()
            if not path.is_file() or path.stat().st_size != self.manifest.files[name].bytes
        ]

    def verify(self) -> None:
        """Read every file and raise ValueError naming those whose digest is not the committed one."""
        wrong = self.missing() or [
            name for name, entry in self.manifest.files.items() if file_digest(self.path / name) != entry.sha256
        ]
        if wrong:
            raise ValueError(f"artifact {self.label}: {', '.join(wrong)} changed since it was committed; make it again")


@dataclass(frozen=True)
class Design:
    """What an artifact is to be made from; decides its key."""

    kind: str
    name: str
    version: int
    parameters: dict[str, Any]
    inputs: dict[str, str]

    @property
    def key(self) -> str:
        intent = [self.kind, self.version, self.parameters, self.inputs]
        return hashlib.sha256(json.dumps(intent, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Store:
    """The artifacts under one root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, design: Design) -> Artifact | None:
        """Return the committed artifact of `design`; a damaged one is moved aside and not returned."""
        artifact = self._read(self._place(design))
        if artifact is None or artifact.key != design.key:
            return None
        if artifact.missing():
            aside = self.root / DAMAGED / f"{design.kind}-{artifact.path.name}-{uuid.uuid4().hex[:6]}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            artifact.path.rename(aside)
            return None
        return artifact

    def at(self, label: str) -> Artifact:
        """Return the artifact called `label` (`kind/name-key8`). Raises ValueError if there is none."""
        artifact = self._read(self.root / label)
        if artifact is None:
            raise ValueError(f"artifact {label!r}: there is none under {self.root}")
        return artifact

    def all(self, kind: str) -> list[Artifact]:
        """Return the artifacts of `kind`, oldest first."""
        folders = sorted((self.root / kind).glob("*/"))
        found = [artifact for folder in folders if (artifact := self._read(folder))]
        return sorted(found, key=lambda artifact: artifact.manifest.created)

    def explain(self, design: Design) -> str:
        """Say why `design` is new: the first difference from the newest artifact of the same kind and name."""
        known = [artifact for artifact in self.all(design.kind) if artifact.manifest.name == design.name]
        if not known:
            return f"{design.kind}/{design.name}: new, the first of its name"
        before = known[-1].manifest
        old = flatten({"step version": before.version, **before.parameters, **before.inputs})
        new = flatten({"step version": design.version, **design.parameters, **design.inputs})
        changed = [name for name in {**new, **old} if old.get(name) != new.get(name)]
        if not changed:
            return f"{design.kind}/{design.name}: new, the committed one is gone"
        name = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{design.kind}/{design.name}: new, {name} {_short(old.get(name))} -> {_short(new.get(name))}{more}"

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield an empty folder inside the root; it is removed at the end unless it was committed."""
        folder = self.root / STAGING / uuid.uuid4().hex
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(
        self, design: Design, folder: Path, facts: dict[str, Any], made_by: str, code: str, seconds: float
    ) -> Artifact:
        """Make the staged `folder` the artifact of `design`. If another process committed it first, theirs is returned.

        Raises OSError if the disk is full; then nothing is visible.
        """
        manifest = Manifest(
            kind=design.kind,
            name=design.name,
            key=design.key,
            version=design.version,
            parameters=design.parameters,
            inputs=design.inputs,
            facts=facts,
            made_by=made_by,
            code=code,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            seconds=round(seconds, 3),
            files=digest_folder(folder, sync=True),
        )
        write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=1))
        place = self._place(design)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.rename(place)
        except OSError:
            winner = self.find(design)
            if winner is None:
                raise
            return winner
        sync_folder(place.parent)
        return Artifact(place, manifest)

    def clear_staging(self) -> None:
        """Remove what killed processes left half-made. Call only while holding the root's lease."""
        shutil.rmtree(self.root / STAGING, ignore_errors=True)

    def _place(self, design: Design) -> Path:
        return self.root / design.kind / f"{design.name}-{design.key[:8]}"

    def _read(self, folder: Path) -> Artifact | None:
        try:
            text = (folder / MANIFEST).read_text()
        except OSError:
            return None
        return Artifact(folder, Manifest.model_validate_json(text))


def flatten(data: dict[str, Any], prefix: str = "", depth: int = 9) -> dict[str, Any]:
    """Return nested mappings as one level with dotted names, at most `depth` levels down; lists stay whole."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict) and value and depth > 1:
            flat |= flatten(value, f"{prefix}{name}.", depth - 1)
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    return digest_file(path).sha256


def _short(value: object) -> str:
    text = value[:8] if isinstance(value, str) and len(value) == 64 else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
