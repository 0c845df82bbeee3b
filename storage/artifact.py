"""Immutable artifacts: directories that are committed whole, found by what they are made from.

An artifact's key is a digest of its kind, step version, parameters and the keys of its inputs, so equal intent finds
equal bytes and nothing is made twice. It is built in a staging folder, its manifest (every file with size and
SHA-256) is written last, and one rename makes it visible: readers see a whole artifact or none. What this gives up:
the root must be a local (or network-mounted) folder, because a rename is the commit; storage/remote_store.py keeps
artifacts in an object store.
"""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage.digests import FileDigest, digest_file, digest_folder, digest_json
from storage.filesystem import sync_folder, write_atomic
from storage.manifest import MANIFEST, DamagedArtifact, Manifest, UntrustedArtifact, checked_label, missing
from storage.staging import clear_staging, discard, staged
from storage.verification import Stamp, damage, stamp_of, wrong_files

log = logging.getLogger(__name__)
DAMAGED = ".damaged"
NEWEST = 3
"""Manifests that are tried, newest first, before it is said that none can be read."""


@dataclass(frozen=True)
class Artifact:
    manifest: Manifest
    folder: Path
    """Where it is on this machine, or is brought to."""
    uri: str
    """Where its files are committed: file:///folder, or the prefix of an object store."""

    @property
    def path(self) -> Path:
        """The folder with all its files on this machine, verified. Raises DamagedArtifact naming those that changed."""
        self._check(self.names())
        return self.folder

    def part(self, name: str) -> Path:
        """Return one file or folder of it, on this machine and verified.

        Raises ValueError if it has none of that name, and DamagedArtifact.
        """
        self._check(self.names(name))
        return self.folder / name

    def names(self, part: str = "") -> list[str]:
        """Return the files of it that are `part` or inside the folder `part`. Raises ValueError if there is none."""
        found = [name for name in self.manifest.files if not part or name == part or name.startswith(f"{part}/")]
        if part and not found:
            tops = sorted({name.split("/", 1)[0] for name in self.manifest.files})
            raise ValueError(f"artifact {self.label}: has no {part!r}; it has {', '.join(tops)}")
        return found

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    @property
    def label(self) -> str:
        """How people call it: `curated/quickstart-1a2b3c4d`."""
        return self.manifest.label

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.manifest.files.values())

    @property
    def created(self) -> float:
        """When it was committed, in seconds since 1970."""
        return datetime.fromisoformat(self.manifest.created).timestamp()

    def missing(self) -> list[str]:
        """Return the files that are gone or have another size than when committed (digests are not read)."""
        return missing(self.manifest, self.folder)

    @property
    def stamp(self) -> Stamp:
        """Which of its files this machine has verified since it started."""
        return stamp_of(self.folder.parents[1], self.label)

    def damaged(self) -> list[str]:
        """Return the files that are not what was committed; each is read once per boot of this machine."""
        return wrong_files(self.folder, self.manifest.files, self.stamp)

    def verify(self) -> None:
        """Read every file from the disk and raise DamagedArtifact naming those that are not what was committed."""
        self._check(self.names(), again=True)

    def _check(self, names: list[str], again: bool = False) -> None:
        """Raise DamagedArtifact if files changed; those that this machine verified since it started are not read."""
        if wrong := wrong_files(self.folder, {name: self.manifest.files[name] for name in names}, self.stamp, again):
            self.stamp.forget()  # other machines look again too
            raise DamagedArtifact(damage(self.label, wrong))


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
        return digest_json([self.kind, self.version, self.parameters, self.inputs])

    @property
    def label(self) -> str:
        """Label of the artifact that is made from this. Raises ValueError for a name that is none."""
        return checked_label(f"{self.kind}/{self.name}-{self.key[:8]}")

    def manifest(
        self, files: dict[str, FileDigest], facts: dict[str, Any], made_by: str, code: str, seconds: float
    ) -> Manifest:
        """Return the manifest of an artifact of this design, created now."""
        return Manifest(
            **vars(self),
            key=self.key,
            facts=facts,
            made_by=made_by,
            code=code,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            seconds=round(seconds, 3),
            files=files,
        )


class Store:
    """The artifacts under one root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = str(root)
        """Where they are, for messages."""

    def find(self, design: Design, damaged: Callable[[str], None] | None = None) -> Artifact | None:
        """Return the committed artifact of `design`; a damaged one is moved aside and not returned.

        Raises UntrustedArtifact for one that no trusted key signed.
        With `damaged`, which is called with what is wrong, every file is verified that this machine has not verified
        since it started; without, only names and sizes are looked at.
        """
        try:
            artifact = self._get(design.label)
        except UntrustedArtifact:
            raise
        except DamagedArtifact as error:
            if damaged:
                damaged(str(error))
            self.set_aside(design.label)
            return None
        if artifact is None or artifact.key != design.key:
            return None
        if wrong := artifact.missing() or (artifact.damaged() if damaged else []):
            if damaged:
                damaged(damage(artifact.label, wrong))
            self.set_aside(design.label, artifact.manifest)
            return None
        return artifact

    def at(self, label: str) -> Artifact:
        """Return the artifact called `label` (`kind/name-key8`). Raises ValueError if there is none.

        Raises DamagedArtifact if its manifest is damaged.
        """
        artifact = self._get(checked_label(label))
        if artifact is None:
            raise ValueError(f"artifact {label!r}: there is none under {self.place}")
        return artifact

    def all(self, kind: str) -> list[Artifact]:
        """Return the artifacts of `kind`, oldest first, without those whose manifest is damaged."""
        found = []
        for folder in sorted((self.root / kind).glob("*/")):
            try:
                if artifact := self._read(folder):
                    found.append(artifact)
            except UntrustedArtifact as error:
                log.warning("%s", error)
            except OSError:
                continue
        return sorted(found, key=lambda artifact: artifact.manifest.created)

    def explain(self, design: Design) -> str:
        """Say why `design` is new: the first difference from the newest artifact of the same kind and name."""
        before = self._newest(design.kind, design.name)
        if before is None:
            return f"{design.kind}/{design.name}: new, nothing of this name was made before"
        return f"{design.kind}/{design.name}: new, {_difference(before, design)}"

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield an empty folder inside the root; it is removed at the end unless it was committed."""
        with staged(self.root) as folder:
            yield folder

    def commit(
        self, design: Design, folder: Path, facts: dict[str, Any], made_by: str, code: str, seconds: float
    ) -> Artifact:
        """Make the staged `folder` the artifact of `design`. If another process committed it first, theirs is returned.

        Raises OSError if the disk is full; then nothing is visible.
        """
        place = self.root / design.label
        manifest = design.manifest(digest_folder(folder, sync=True), facts, made_by, code, seconds)
        write_atomic(folder / MANIFEST, manifest.text())
        place.parent.mkdir(parents=True, exist_ok=True)
        for tries_left in (1, 0):
            try:
                folder.rename(place)
                break
            except OSError:
                if (winner := self.find(design)) is not None:  # this moves aside what has no manifest
                    return winner
                if not tries_left:
                    raise
        sync_folder(place.parent)
        artifact = Artifact(manifest, place, place.absolute().as_uri())
        artifact.stamp.add_folder(place, manifest.files)
        return artifact

    def delete(self, label: str) -> None:
        """Remove the artifact called `label`, at once for readers; one that is gone already is no error."""
        discard(self.root, self.root / checked_label(label))
        stamp_of(self.root, label).forget()

    def clear_staging(self) -> None:
        """Remove what killed processes left half-made; what a live one is writing stays."""
        clear_staging(self.root)

    def _newest(self, kind: str, name: str) -> Manifest | None:
        """Return the manifest that was written last among those of `name`; only that one is read."""
        labels = re.compile(rf"{re.escape(name)}-[0-9a-f]{{8}}")
        times = {}
        for folder in (self.root / kind).glob(f"{name}-*"):
            if labels.fullmatch(folder.name):
                with suppress(OSError):
                    times[folder] = (folder / MANIFEST).stat().st_mtime
        for folder in sorted(times, key=lambda folder: (-times[folder], folder.name))[:NEWEST]:
            with suppress(OSError):
                return artifact.manifest if (artifact := self._read(folder)) else None
        return None

    def sign(self, label: str) -> None:
        """Sign the manifest of a committed artifact again, with the signing key. Raises DamagedArtifact."""
        place = self.root / checked_label(label) / MANIFEST
        write_atomic(place, self._unsigned(place.read_bytes(), str(place)))

    def _unsigned(self, text: bytes, place: str) -> str:
        return Manifest.parse(text, place, trusted=False).model_copy(update={"signature": ""}).text()

    def set_aside(self, label: str, seen: Manifest | None = None) -> None:
        """Move a damaged artifact out of sight, kept for whoever asks what happened to it.

        `seen` is its manifest, if that could be read; a store whose manifests others may replace compares it.
        """
        aside = self.root / DAMAGED / f"{label.replace('/', '-')}-{uuid.uuid4().hex[:6]}"
        aside.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process was faster
            (self.root / label).rename(aside)
        stamp_of(self.root, label).forget()

    def _get(self, label: str) -> Artifact | None:
        """Return the artifact at `label`. Raises DamagedArtifact if its manifest is damaged."""
        return self._read(self.root / label)

    def _read(self, folder: Path) -> Artifact | None:
        place = folder / MANIFEST
        there = os.path.lexists(folder)  # asked first: a commit in between brings the manifest too
        try:
            text = place.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if there and os.path.lexists(folder):
                raise DamagedArtifact(f"{place}: is not there ({error.strerror}); run again to make it anew") from None
            return None
        return Artifact(Manifest.parse(text, str(folder / MANIFEST)), folder, folder.absolute().as_uri())


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


def _difference(before: Manifest, design: Design) -> str:
    old = flatten({"step version": before.version, **before.parameters, **before.inputs})
    new = flatten({"step version": design.version, **design.parameters, **design.inputs})
    changed = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    if not changed:
        return "the committed one is gone"
    name = changed[0]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{name} {_short(old.get(name))} -> {_short(new.get(name))}{more}"


def _short(value: object) -> str:
    text = value[:8] if isinstance(value, str) and len(value) == 64 else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
