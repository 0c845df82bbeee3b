"""Immutable artifacts: directories that are committed whole, found by what they are made from.

An artifact's key is a digest of its kind, step version, parameters and the keys of its inputs, so equal intent finds
equal bytes and nothing is made twice. It is built in a staging folder, its manifest (every file with size and
SHA-256) is written last, and one rename makes it visible: readers see a whole artifact or none. What this gives up:
the root must be a local (or network-mounted) folder, because a rename is the commit; storage/object_artifact.py keeps
artifacts in an object store.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, field_validator

from storage.digests import FileDigest, digest_file, digest_folder, digest_json
from storage.filesystem import sync_folder, write_atomic
from storage.processes import boot_id
from storage.signing import distrust, signed
from storage.staging import clear_staging, discard, locked, staged

# The manifest of an artifact: what it is, what it was made from and what it holds; its presence is the commit mark.
#
# It carries the digest of itself, because a bit that flips on the way in a score of it decides a promotion as
# silently as one in a weight; one without that seal is refused. What this gives up: nobody edits one by hand.

MANIFEST, KIND = "manifest.json", "manifest"
NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
LABEL = re.compile(rf"{NAME}/{NAME}-[0-9a-f]{{8}}")
"""kind/name-key8"""


class DamagedArtifact(OSError, ValueError):
    """A committed artifact whose bytes are not what was committed; the text names it and the file."""


class UntrustedArtifact(DamagedArtifact):
    """An artifact whose manifest no trusted key signed (storage/signing.py); it is refused and left where it is."""


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
    attempt: str = Field("", pattern="^[0-9a-f]*$")
    """In an object store: the folder below the artifact's place in which the files are."""
    pages: dict[str, FileDigest] = {}
    """In an object store: token shard -> the digest of `.pages/<file>`, the SHA-256 of its pages."""

    signature: str = Field("", exclude=True)
    """Of the seal, as it was read."""

    @field_validator("files", "pages")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if not name or name.startswith("/") or "\\" in name or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(f"{name!r} is no name of a file inside an artifact")
        return files

    @field_validator("created")
    @classmethod
    def _is_time(cls, created: str) -> str:
        if datetime.fromisoformat(created).tzinfo is None:
            raise ValueError(f"{created!r} has no time zone")
        return created

    @property
    def label(self) -> str:
        """How people call it: `curated/quickstart-1a2b3c4d`."""
        return f"{self.kind}/{self.name}-{self.key[:8]}"

    def text(self) -> str:
        """Return the document that is stored; it carries its own digest, because networks flip bits in it too.

        With a signing key it is signed.
        """
        data = json.loads(self.model_dump_json())
        seal = digest_json(data)
        signature = self.signature or signed(KIND, seal)
        more = {"seal": seal, **({"signature": signature} if signature else {})}
        return json.dumps({**data, **more}, indent=1, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str | bytes, place: str, moved: bool = False, trusted: bool = True) -> Manifest:
        """Return the manifest that was read at `place`, which holds its label unless the artifact was `moved`.

        Raises DamagedArtifact if it is none or was changed, and UntrustedArtifact, unless `trusted` is False.
        """
        try:
            data = json.loads(text)
            seal, signature = data.pop("seal", None), str(data.pop("signature", ""))
            manifest = cls.model_validate(data)
            sealed = seal == digest_json(data)
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            words = str(error) or type(error).__name__
            raise DamagedArtifact(f"{place}: is no manifest of an artifact ({words})") from None
        if not moved and manifest.label not in place:
            raise DamagedArtifact(f"{place}: is the manifest of {manifest.label}")
        if not sealed:
            why = "changed since it was written" if seal else "has no seal (the digest of itself)"
            raise DamagedArtifact(f"{place}: {why}; delete the artifact, then run again")
        if trusted and (why := distrust(KIND, seal, signature)):
            raise UntrustedArtifact(f"{place}: {why}")
        return manifest.model_copy(update={"signature": signature})


def checked_label(label: str) -> str:
    """Return `label`. Raises ValueError if it is not kind/name-key8, which also keeps it inside the root."""
    if not LABEL.fullmatch(label):
        raise ValueError(f"artifact {label!r}: write kind/name-key8, such as checkpoint/quickstart-1a2b3c4d")
    return label


def missing(manifest: Manifest, folder: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the files of `manifest`, or those of its `names`, that are not in `folder` with the committed size."""
    paths = {name: folder / name for name in (manifest.files if names is None else names)}
    return [
        name for name, path in paths.items() if not path.is_file() or path.stat().st_size != manifest.files[name].bytes
    ]


# Compare stored files with what was committed, once per file and boot of a machine.
#
# A stamp says which files were read and right since the machine started. It holds size, time and inode of each
# file, so a file that was written since is read again; what decays on the disk is found after the next boot, or by
# `herd verify`, which believes no stamp. A machine reads an artifact at the speed of SHA-256 (1 to 2 GB/s a core),
# before the first use.

LAZY_FOLDER = "lazy-folder.json"
"""File of a folder that brings its bytes from an object store (storage/page_cache.py)."""
VERIFIED = ".verified"
"""Folder of the stamps in a root's working folder."""
YOUNG_NS = 10**8
"""A file written so shortly before is not stamped: a second write could leave it with the same time."""
KEPT_S = 90 * 86400.0
"""Stamps of boots before that are removed."""


class FileStat(NamedTuple):
    """What changes when a file is written."""

    bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileStat | None:
        """Return the facts of a file, None if it is no file."""
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino) if path.is_file() else None


class Stamp:
    """Which files were read and right since this machine started; lines are only added, so processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / _boot()

    def read(self) -> dict[str, FileStat]:
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return {}
        known = {}
        for line in lines:
            with suppress(ValueError, TypeError):  # a line cut short: that file is read again
                name, *facts = json.loads(line)
                known[name] = FileStat(*facts)
        return known

    def add(self, files: Mapping[str, FileStat]) -> None:
        """Say that files are right. A folder in which nothing can be written costs reading them again."""
        old = time.time_ns() - YOUNG_NS
        lines = "".join(json.dumps([name, *facts]) + "\n" for name, facts in files.items() if facts.modified_ns < old)
        with suppress(OSError):
            if lines and not self.path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                for earlier in self.folder.iterdir():
                    if time.time() - earlier.stat().st_mtime > KEPT_S:
                        earlier.unlink()
            if lines:
                with self.path.open("a") as file:
                    file.write(lines)

    def add_folder(self, folder: Path, names: Iterable[str]) -> None:
        """Say that files of `folder` are right as they are now."""
        self.add({name: facts for name in names if (facts := FileStat.of(folder / name))})

    def forget(self) -> None:
        """Have every machine read the files again."""
        shutil.rmtree(self.folder, ignore_errors=True)


def stamp_of(local: Path, label: str) -> Stamp:
    """Return the stamp of the artifact `label` in the working folder `local`."""
    return Stamp(local / VERIFIED / label)


def wrong_files(folder: Path, files: Mapping[str, FileDigest], stamp: Stamp, again: bool = False) -> list[str]:
    """Return the names of `files` whose bytes in `folder` are not what was committed, sorted.

    Files that the stamp knows as they are now are not read, unless `again`: then all are, from the disk and not from
    memory. Raises OSError for what is no fault of the bytes (a file that may not be read).
    """
    known = {} if again else stamp.read()
    facts = {name: FileStat.of(folder / name) for name in files}
    wrong = {name for name, entry in files.items() if (now := facts[name]) is None or now.bytes != entry.bytes}
    unknown = [name for name in files if name not in wrong and known.get(name) != facts[name]]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        right = list(pool.map(lambda name: _is_right(folder / name, files[name], again), unknown))
    stamp.add({name: now for name, fine in zip(unknown, right, strict=True) if fine and (now := facts[name])})
    return sorted(wrong.union(name for name, fine in zip(unknown, right, strict=True) if not fine))


def verify_folder(folder: Path) -> None:
    """Verify a folder of a committed artifact, or the artifact itself, before this machine uses it.

    Of the processes of a machine one reads, the others wait for it. A folder without a manifest, or in one, is not
    looked at. Raises DamagedArtifact naming the files; then every machine reads the artifact again.
    """
    for place in (folder, folder.parent):
        if (place / LAZY_FOLDER).exists():  # its bytes are verified as they come
            return
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            manifest = Manifest.parse((place / MANIFEST).read_bytes(), f"{place / MANIFEST}", moved=True)
            break
    else:
        return
    part = "" if place == folder else f"{folder.name}/"
    local, files = place.parents[1], {name: entry for name, entry in manifest.files.items() if name.startswith(part)}
    stamp = stamp_of(local, manifest.label)
    lock = locked(local, f"{VERIFIED}/{manifest.label}") if os.access(local, os.W_OK) else nullcontext()
    with lock:
        wrong = wrong_files(place, files, stamp)
    if wrong:
        stamp.forget()
        raise DamagedArtifact(damage(manifest.label, wrong))


def damage(label: str, names: Iterable[str]) -> str:
    """Return what is wrong with an artifact in words."""
    first, *more = sorted(names)
    text = f"{first} and {len(more)} more files" if more else first
    return f"artifact {label}: {text} changed since it was committed; run again, which sets it aside and makes it again"


def _is_right(path: Path, entry: FileDigest, fresh: bool) -> bool:
    try:
        if fresh:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return digest_file(path).sha256 == entry.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


@cache
def _boot() -> str:
    try:
        return boot_id()
    except OSError:  # no /proc
        return socket.gethostname()


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
class ArtifactSpec:
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

    def find(self, design: ArtifactSpec, damaged: Callable[[str], None] | None = None) -> Artifact | None:
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

    def explain(self, design: ArtifactSpec) -> str:
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
        self, design: ArtifactSpec, folder: Path, facts: dict[str, Any], made_by: str, code: str, seconds: float
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


def _difference(before: Manifest, design: ArtifactSpec) -> str:
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
