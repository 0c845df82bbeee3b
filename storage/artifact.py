"""Immutable artifacts: folders that are committed atomically and found by a key.

The key is a digest of kind, step version, parameters and input keys, so equal work is done once. An artifact is written
in a staging folder, its manifest (size and SHA-256 of each file) last, and one rename makes it visible. The root is a
local or mounted folder here; storage/object_artifact.py is the same for an object store.
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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, field_validator

from herd.storage.digests import FileDigest, digest_file, digest_folder, digest_json, sign, signature_error
from herd.storage.filesystem import sync_folder, write_atomic
from herd.storage.processes import boot_id, parallel_map
from herd.storage.staging import clear_staging, discard, file_lock, staging_folder

MANIFEST, KIND = "manifest.json", "manifest"
NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
LABEL = re.compile(rf"{NAME}/{NAME}-[0-9a-f]{{8}}")
"""kind/name-key8"""
DAMAGED = ".damaged"
"""Folder of quarantined artifacts."""
NEWEST = 3
"""Manifests to try, newest first, before giving up."""
LAZY_FOLDER = "lazy-folder.json"
"""File in a folder whose bytes are downloaded on demand (storage/page_cache.py)."""
VERIFIED = ".verified"
"""Folder of the stamps in a root's working folder."""
YOUNG_NS = 10**8
"""A file younger than this gets no stamp: a second write could leave it with the same modification time."""
KEPT_S = 90 * 86400.0
"""Older stamps of earlier boots are deleted."""

log = logging.getLogger(__name__)


class DamagedArtifact(OSError, ValueError):
    """The bytes of an artifact differ from what was committed; the message names artifact and file."""


class UntrustedArtifact(DamagedArtifact):
    """No trusted key signed the manifest (storage/digests.py). The artifact is refused, not quarantined."""


class Manifest(BaseModel):
    """Identity, inputs and files of an artifact; its presence is the commit mark.

    The stored document contains its own digest (`seal`): a flipped bit in a score could decide a promotion.
    """

    kind: str
    name: str
    key: str
    version: int
    """Version of the step; raised when the step's result changes for equal inputs."""
    parameters: dict[str, Any]
    inputs: dict[str, str]
    """Role -> key of the input artifact, or digest of outside data."""
    metadata: dict[str, Any]
    """Counts and scores, readable without opening the files."""
    created_by: str
    """Name of the run."""
    code: str
    created: str
    seconds: float
    files: dict[str, FileDigest]
    attempt: str = Field("", pattern="^[0-9a-f]*$")
    """In an object store: the subfolder that contains the files."""
    pages: dict[str, FileDigest] = {}
    """In an object store: token shard -> digest of `.pages/<file>`, which holds the SHA-256 of each page."""
    signature: str = Field("", exclude=True)
    """Signature of the seal, as it was read."""

    @field_validator("files", "pages")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if not name or name.startswith("/") or "\\" in name or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(f"{name!r} is not a file name inside an artifact; use a relative path without '..'")
        return files

    @field_validator("created")
    @classmethod
    def _is_time(cls, created: str) -> str:
        if datetime.fromisoformat(created).tzinfo is None:
            raise ValueError(f"{created!r} has no time zone; append +00:00")
        return created

    @property
    def label(self) -> str:
        """Readable name: `curated/quickstart-1a2b3c4d`."""
        return f"{self.kind}/{self.name}-{self.key[:8]}"

    def text(self) -> str:
        """Return the JSON document to store, with its own digest and, if a signing key is configured, a signature."""
        data = json.loads(self.model_dump_json())
        seal = digest_json(data)
        data["seal"] = seal
        if signature := self.signature or sign(KIND, seal):
            data["signature"] = signature
        return json.dumps(data, indent=1, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str | bytes, location: str, moved: bool = False, trusted: bool = True) -> Manifest:
        """Parse the manifest read at `location`, whose path must contain the label unless the artifact was `moved`.

        Raises DamagedArtifact if the text is not an intact manifest, UntrustedArtifact unless `trusted` is False.
        """
        try:
            data = json.loads(text)
            seal, signature = data.pop("seal", None), str(data.pop("signature", ""))
            manifest = cls.model_validate(data)
            sealed = seal == digest_json(data)
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            message = str(error) or type(error).__name__
            raise DamagedArtifact(f"{location}: not an artifact manifest ({message})") from None
        if not moved and manifest.label not in location:
            raise DamagedArtifact(f"{location}: this is the manifest of {manifest.label}")
        if not sealed:
            why = "changed since it was written" if seal else "has no seal (the digest of itself)"
            raise DamagedArtifact(f"{location}: {why}; delete the artifact, then run again")
        if trusted and (why := signature_error(KIND, seal, signature)):
            raise UntrustedArtifact(f"{location}: {why}")
        return manifest.model_copy(update={"signature": signature})


def check_label(label: str) -> str:
    """Return `label` if it has the form kind/name-key8, which also keeps it inside the root; else raise ValueError."""
    if not LABEL.fullmatch(label):
        raise ValueError(f"artifact {label!r}: write kind/name-key8, such as checkpoint/quickstart-1a2b3c4d")
    return label


def missing_files(manifest: Manifest, folder: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the files of `manifest` (or only `names`) that `folder` lacks or has with another size."""
    absent = []
    for name in manifest.files if names is None else names:
        path = folder / name
        if not path.is_file() or path.stat().st_size != manifest.files[name].bytes:
            absent.append(name)
    return absent


# Verification: each file is hashed once per boot of a machine (SHA-256, 1 to 2 GB/s per core). Damage on the disk after
# that is found after the next boot, or by `herd verify`, which ignores stamps.


class FileStat(NamedTuple):
    """File attributes that change when a file is written."""

    bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def from_path(cls, path: Path) -> FileStat | None:
        """Return the attributes of a regular file, else None."""
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino) if path.is_file() else None


class VerifiedFiles:
    """Files verified since this machine booted, with size, time and inode. Append-only, so processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / _boot_name()

    def read(self) -> dict[str, FileStat]:
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return {}
        known = {}
        for line in lines:
            with suppress(ValueError, TypeError):  # a truncated line: that file is verified again
                name, *stat = json.loads(line)
                known[name] = FileStat(*stat)
        return known

    def add(self, files: Mapping[str, FileStat]) -> None:
        """Record verified files."""
        old = time.time_ns() - YOUNG_NS
        lines = "".join(json.dumps([name, *stat]) + "\n" for name, stat in files.items() if stat.modified_ns < old)
        with suppress(OSError):  # a read-only folder only costs another verification
            if lines and not self.path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                for earlier in self.folder.iterdir():
                    if time.time() - earlier.stat().st_mtime > KEPT_S:
                        earlier.unlink()
            if lines:
                with self.path.open("a") as file:
                    file.write(lines)

    def add_folder(self, folder: Path, names: Iterable[str]) -> None:
        """Record files of `folder` as verified in their current state."""
        self.add({name: stat for name in names if (stat := FileStat.from_path(folder / name))})

    def forget(self) -> None:
        """Delete the stamps of all machines, so that each verifies the files again."""
        shutil.rmtree(self.folder, ignore_errors=True)


def verified_files(local: Path, label: str) -> VerifiedFiles:
    """Return the stamp of the artifact `label` in the working folder `local`."""
    return VerifiedFiles(local / VERIFIED / label)


def wrong_files(folder: Path, files: Mapping[str, FileDigest], stamp: VerifiedFiles, again: bool = False) -> list[str]:
    """Return, sorted, the names of `files` whose bytes in `folder` differ from what was committed.

    Files with a valid stamp are not read. With `again` all are read, from the disk and not from the page cache.
    Raises OSError for a file that cannot be read for another reason (permissions).
    """
    known = {} if again else stamp.read()
    stats = {name: FileStat.from_path(folder / name) for name in files}
    wrong = {name for name, entry in files.items() if (stat := stats[name]) is None or stat.bytes != entry.bytes}
    unknown = [name for name in files if name not in wrong and known.get(name) != stats[name]]
    threads = min(8, os.cpu_count() or 1)
    intact = parallel_map(lambda name: _is_intact(folder / name, files[name], again), unknown, threads)
    stamp.add({name: stat for name, ok in zip(unknown, intact, strict=True) if ok and (stat := stats[name])})
    return sorted(wrong.union(name for name, ok in zip(unknown, intact, strict=True) if not ok))


def _is_intact(path: Path, entry: FileDigest, drop_cache: bool) -> bool:
    try:
        if drop_cache:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return digest_file(path).sha256 == entry.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False  # an unreadable sector


def verify_folder(folder: Path) -> None:
    """Verify an artifact, or one folder inside it, before this machine uses it.

    One process of the machine verifies, the others wait. A folder without a manifest, here or in its parent, passes.
    Raises DamagedArtifact naming the files; then every machine verifies the artifact again.
    """
    for base in (folder, folder.parent):
        if (base / LAZY_FOLDER).exists():  # pages are verified as they are downloaded
            return
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            manifest = Manifest.parse((base / MANIFEST).read_bytes(), f"{base / MANIFEST}", moved=True)
            break
    else:
        return
    prefix = "" if base == folder else f"{folder.name}/"
    local, files = base.parents[1], {name: entry for name, entry in manifest.files.items() if name.startswith(prefix)}
    stamp = verified_files(local, manifest.label)
    # With the boot, as the stamp: a lock of all hosts of a mounted root would have them hash one after the other.
    name = f"{VERIFIED}/{manifest.label}-{_boot_name()}"
    with file_lock(local, name) if os.access(local, os.W_OK) else nullcontext():
        wrong = wrong_files(base, files, stamp)
    if wrong:
        stamp.forget()
        raise DamagedArtifact(damage_message(manifest.label, wrong))


def damage_message(label: str, names: Iterable[str]) -> str:
    """Return the error message for an artifact whose files `names` are damaged."""
    first, *more = sorted(names)
    files = f"{first} and {len(more)} more files" if more else first
    return f"artifact {label}: {files} changed since it was committed; run again to quarantine it and make it again"


@cache
def _boot_name() -> str:
    try:
        return boot_id()
    except OSError:  # no /proc
        return socket.gethostname()


@dataclass(frozen=True)
class Artifact:
    manifest: Manifest
    folder: Path
    """Local folder, also of a copy that is not downloaded yet."""
    uri: str
    """Where the files are committed: file:///folder, or a prefix in an object store."""

    @property
    def path(self) -> Path:
        """The local folder with all files, verified. Raises DamagedArtifact naming files that changed."""
        self._check(self.names())
        return self.folder

    def path_of(self, name: str) -> Path:
        """Return the path of a file or folder inside, verified. Raises ValueError if absent, and DamagedArtifact."""
        self._check(self.names(name))
        return self.folder / name

    def names(self, path: str = "") -> list[str]:
        """Return the files equal to or inside `path` (default: all). Raises ValueError if there are none."""
        names = [name for name in self.manifest.files if not path or name == path or name.startswith(f"{path}/")]
        if path and not names:
            entries = sorted({name.split("/", 1)[0] for name in self.manifest.files})
            raise ValueError(f"artifact {self.label}: has no {path!r}; it has {', '.join(entries)}")
        return names

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def metadata(self) -> dict[str, Any]:
        return self.manifest.metadata

    @property
    def label(self) -> str:
        """Readable name: `curated/quickstart-1a2b3c4d`."""
        return self.manifest.label

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.manifest.files.values())

    @property
    def created(self) -> float:
        """Commit time in seconds since 1970."""
        return datetime.fromisoformat(self.manifest.created).timestamp()

    def missing(self) -> list[str]:
        """Return the files that are absent or have the wrong size (no digests are computed)."""
        return missing_files(self.manifest, self.folder)

    @property
    def stamp(self) -> VerifiedFiles:
        """Which files this machine has verified since it booted."""
        return verified_files(self.folder.parents[1], self.label)

    def damaged(self) -> list[str]:
        """Return the damaged files; each file is read once per boot of this machine."""
        return wrong_files(self.folder, self.manifest.files, self.stamp)

    def verify(self) -> None:
        """Read every file from the disk. Raises DamagedArtifact naming the damaged ones."""
        self._check(self.names(), again=True)

    def _check(self, names: list[str], again: bool = False) -> None:
        if wrong := wrong_files(self.folder, {name: self.manifest.files[name] for name in names}, self.stamp, again):
            self.stamp.forget()  # so that other machines verify again too
            raise DamagedArtifact(damage_message(self.label, wrong))


@dataclass(frozen=True)
class ArtifactSpec:
    """Kind, name, version, parameters and inputs of an artifact; they determine its key."""

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
        """Label of the artifact. Raises ValueError if the name is invalid."""
        return check_label(f"{self.kind}/{self.name}-{self.key[:8]}")

    def manifest(
        self, files: dict[str, FileDigest], metadata: dict[str, Any], created_by: str, code: str, seconds: float
    ) -> Manifest:
        """Return the manifest of an artifact created now from this config."""
        return Manifest(
            **vars(self),
            key=self.key,
            metadata=metadata,
            created_by=created_by,
            code=code,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            seconds=round(seconds, 3),
            files=files,
        )


class Store:
    """The artifacts under one root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.location = str(root)
        """Address for messages."""

    def find(self, spec: ArtifactSpec, damaged: Callable[[str], None] | None = None) -> Artifact | None:
        """Return the committed artifact of `spec`, or None. A damaged one is quarantined.

        With `damaged`, a callback for the error message, files are hashed (once per boot); without, only names and
        sizes are compared. Raises UntrustedArtifact if no trusted key signed the manifest.
        """
        try:
            artifact = self._get(spec.label)
        except UntrustedArtifact:
            raise
        except DamagedArtifact as error:
            if damaged:
                damaged(str(error))
            self.quarantine(spec.label)
            return None
        if artifact is None or artifact.key != spec.key:
            return None
        if wrong := artifact.missing() or (artifact.damaged() if damaged else []):
            if damaged:
                damaged(damage_message(artifact.label, wrong))
            self.quarantine(spec.label, artifact.manifest)
            return None
        return artifact

    def load(self, label: str) -> Artifact:
        """Return the artifact `label` (`kind/name-key8`). Raises ValueError if absent, and DamagedArtifact."""
        artifact = self._get(check_label(label))
        if artifact is None:
            raise ValueError(f"artifact {label!r}: not found under {self.location}")
        return artifact

    def all(self, kind: str) -> list[Artifact]:
        """Return the artifacts of `kind`, oldest first; damaged and untrusted ones are left out."""
        artifacts = []
        for folder in sorted((self.root / kind).glob("*/")):
            try:
                if artifact := self._get(f"{kind}/{folder.name}"):
                    artifacts.append(artifact)
            except UntrustedArtifact as error:
                log.warning("%s", error)
            except OSError:
                continue
        return sorted(artifacts, key=lambda artifact: artifact.manifest.created)

    def explain(self, spec: ArtifactSpec) -> str:
        """Say why `spec` is new: the first difference from the newest artifact of the same kind and name."""
        name, before = f"{spec.kind}/{spec.name}", self._newest(spec.kind, spec.name)
        if before is None:
            return f"{name}: new, nothing of this name was made before"
        old = flatten({"step version": before.version, **before.parameters, **before.inputs})
        new = flatten({"step version": spec.version, **spec.parameters, **spec.inputs})
        changed = [field for field in {**new, **old} if old.get(field) != new.get(field)]
        if not changed:
            return f"{name}: new, the committed one is gone"
        first = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{name}: new, {first} {_short(old.get(first))} -> {_short(new.get(first))}{more}"

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield an empty folder inside the root; it is removed at the end unless it was committed."""
        with staging_folder(self.root) as folder:
            yield folder

    def commit(
        self, spec: ArtifactSpec, folder: Path, metadata: dict[str, Any], created_by: str, code: str, seconds: float
    ) -> Artifact:
        """Commit the staged `folder` as the artifact of `spec`; if another process was first, return its artifact.

        Raises OSError if the disk is full; then nothing is visible.
        """
        target = self.root / spec.label
        manifest = spec.manifest(digest_folder(folder, sync=True), metadata, created_by, code, seconds)
        write_atomic(folder / MANIFEST, manifest.text())
        target.parent.mkdir(parents=True, exist_ok=True)
        for tries_left in (1, 0):
            try:
                folder.rename(target)
                break
            except OSError:
                if (winner := self.find(spec)) is not None:  # also quarantines a folder without a manifest
                    return winner
                if not tries_left:
                    raise
        sync_folder(target.parent)
        artifact = Artifact(manifest, target, target.absolute().as_uri())
        artifact.stamp.add_folder(target, manifest.files)
        return artifact

    def delete(self, label: str) -> None:
        """Delete the artifact `label`, atomically for readers; no error if it is absent."""
        discard(self.root, self.root / check_label(label))
        verified_files(self.root, label).forget()

    def clear_staging(self) -> None:
        """Delete staging folders of dead processes."""
        clear_staging(self.root)

    def _newest(self, kind: str, name: str) -> Manifest | None:
        """Return the newest manifest of `name`; modification times decide, so that only this one is read."""
        labels = re.compile(rf"{re.escape(name)}-[0-9a-f]{{8}}")
        times = {}
        for folder in (self.root / kind).glob(f"{name}-*"):
            if labels.fullmatch(folder.name):
                with suppress(OSError):
                    times[folder] = (folder / MANIFEST).stat().st_mtime
        for folder in sorted(times, key=lambda folder: (-times[folder], folder.name))[:NEWEST]:
            with suppress(OSError):
                return artifact.manifest if (artifact := self._get(f"{kind}/{folder.name}")) else None
        return None

    def sign(self, label: str) -> None:
        """Replace the signature of a committed artifact by one of the current signing key. Raises DamagedArtifact."""
        path = self.root / check_label(label) / MANIFEST
        write_atomic(path, self._signed_again(path.read_bytes(), str(path)))

    def _signed_again(self, text: bytes, location: str) -> str:
        return Manifest.parse(text, location, trusted=False).model_copy(update={"signature": ""}).text()

    def quarantine(self, label: str, seen: Manifest | None = None) -> None:
        """Quarantine a damaged artifact: move it to `.damaged`, where it can be inspected.

        `seen` is its manifest, if readable; an object store compares it, because another writer may have replaced it.
        """
        target = self.root / DAMAGED / f"{label.replace('/', '-')}-{uuid.uuid4().hex[:6]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process was faster
            (self.root / label).rename(target)
        verified_files(self.root, label).forget()

    def _get(self, label: str) -> Artifact | None:
        """Return the artifact at `label`, or None. Raises DamagedArtifact if its manifest is damaged or absent."""
        folder = self.root / label
        path = folder / MANIFEST
        existed = os.path.lexists(folder)  # check first: a commit in between adds the manifest too
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if existed and os.path.lexists(folder):
                raise DamagedArtifact(f"{path}: missing ({error.strerror}); run again to make the artifact") from None
            return None
        return Artifact(Manifest.parse(text, str(path)), folder, folder.absolute().as_uri())


def flatten(data: dict[str, Any], prefix: str = "", depth: int = 9) -> dict[str, Any]:
    """Return nested mappings as one level with dotted names, at most `depth` levels deep; lists stay lists."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict) and value and depth > 1:
            flat |= flatten(value, f"{prefix}{name}.", depth - 1)
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _short(value: object) -> str:
    text = value[:8] if isinstance(value, str) and len(value) == 64 else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
