"""An artifact in an object store: brought to this machine when somebody wants its files, and verified on the way.

What is brought lies in the working folder where a local artifact would lie, so nothing else has to know. Every file
is hashed as it comes and the manifest is written last: a copy that a killed process left half-brought is gone on
with, never taken for whole. One process brings, others wait for it. What this gives up: the local disk must hold the
artifact (token shards are read in pages instead, storage/page_cache.py).
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.artifact import (
    DAMAGED,
    MANIFEST,
    NEWEST,
    Artifact,
    ArtifactSpec,
    DamagedArtifact,
    Manifest,
    Store,
    UntrustedArtifact,
    checked_label,
    log,
    missing,
    wrong_files,
)
from storage.digests import (
    PAGE,
    PAGED,
    READERS,
    THREADS,
    FileDigest,
    digest_bytes,
    digest_file,
    digest_pages,
    each,
    wrong_page,
)
from storage.filesystem import filesystem_of, write_atomic
from storage.objects import (
    children,
    create_bytes,
    files_below,
    files_in,
    get_bytes,
    get_file,
    put_bytes,
    put_file,
    remove,
    remove_all,
    size_of,
)
from storage.root import Root
from storage.staging import discard, locked

# Bytes of an object store that are those which were committed, or an error that names the place.
#
# Networks and disks flip bits that TCP and a server's own checks let through (measured: S3 servers that store no
# checksum return wrong bytes without a word), so what comes is hashed, and asked for again if it is wrong. What
# this gives up: an object that is really damaged is brought three times before that is said.

TRIES = 3
PIECE = 16 * PAGE


class WrongBytes(OSError):
    """The store returns other bytes than were committed; the text names the object and the place."""


def verified_pages(uri: str, first: int, end: int, digests: bytes) -> bytes:
    """Return the bytes of the object `uri` from page `first` to byte `end`; `digests` are those of these pages.

    Raises WrongBytes, FileNotFoundError and OSError.
    """
    start, wrong = first * PAGE, ""
    for _ in range(TRIES):
        data: bytes = filesystem_of(uri).cat_file(uri, start=start, end=end)
        page = wrong_page(data, digests)
        if len(data) == end - start and page is None:
            return data
        wrong = f"{len(data):,} bytes came" if page is None else f"page {first + page} has another SHA-256"
    raise WrongBytes(f"{uri}: bytes {start:,} to {end:,} are not what was committed ({wrong}); {_SET_ASIDE}")


def digest_object(uri: str, expected: FileDigest) -> str:
    """Return what is wrong with a file or an object in words, empty if nothing is; it is read in pieces of 16 MiB."""
    filesystem, problem = filesystem_of(uri), ""
    for _ in range(TRIES):
        digest = hashlib.sha256()
        try:
            size = int(filesystem.info(uri)["size"])
            for start in range(0, size if size == expected.bytes else 0, PIECE):
                digest.update(filesystem.cat_file(uri, start=start, end=min(start + PIECE, size)))
        except FileNotFoundError:
            return "is missing"
        if size != expected.bytes:
            problem = f"has {size:,} bytes, {expected.bytes:,} were committed"
        elif digest.hexdigest() != expected.sha256:
            problem = "has another SHA-256"
        else:
            return ""
    return problem


def verified_file(uri: str, digest: FileDigest, place: Path) -> None:
    """Bring the object `uri` to `place`, where it appears whole and on the disk. Raises as `verified_pages`."""
    part = place.with_name(f".{place.name}.part")
    for _ in range(TRIES):
        get_file(uri, part)
        found = digest_file(part, sync=True)
        if found == digest:
            part.rename(place)
            return
    part.unlink()
    raise WrongBytes(
        f"{uri}: {found.bytes:,} bytes of SHA-256 {found.sha256[:12]} came, {digest.bytes:,} of {digest.sha256[:12]} "
        f"were committed; {_SET_ASIDE}"
    )


_SET_ASIDE = f"asked {TRIES} times; if it is damaged, set it aside (herd verify --set-aside) and make it again"


PAGES = ".pages"
"""Folder beside the files in the store: for each of more than a page the SHA-256 of its pages, 32 bytes each."""
BRINGING = ".bringing"
"""In a copy that is not whole: the attempt whose files it holds."""
LAZY = "lazy"
"""Folder of page caches in the working folder (storage/page_cache.py)."""


@dataclass(frozen=True)
class RemoteArtifact(Artifact):
    """See `Artifact`. `path` and `part` raise OSError if the store does not answer, DamagedArtifact if it is broken."""

    root: Root

    @classmethod
    def of(cls, root: Root, manifest: Manifest) -> RemoteArtifact:
        return cls(manifest, root.file(manifest.label), root.join(manifest.label, manifest.attempt), root)

    @property
    def path(self) -> Path:
        """The folder with all its files on this machine; they are brought if needed."""
        if not self._whole():
            with self._lock():
                if not self._whole():
                    self._drop_wrong(self.names())
                    self._bring(self.names())
                    write_atomic(self.folder / MANIFEST, self.manifest.text())
                    (self.folder / BRINGING).unlink(missing_ok=True)
        return self.folder

    def part(self, name: str) -> Path:
        """Return one file or folder of it on this machine; nothing else is brought."""
        names = self.names(name)
        if not self._here(names) and not self._whole():
            with self._lock():
                if not self._whole():
                    self._drop_wrong(names)
                    self._bring(names)
        return self.folder / name

    def verify(self) -> None:
        if self.path:  # brought first
            super().verify()

    def missing(self) -> list[str]:
        """Return the files that are gone from the store or have another size than when committed."""
        stored = files_below(self.uri)
        sizes = {name: entry.bytes for name, entry in self.manifest.files.items()}
        sizes |= {f"{PAGES}/{name}": entry.bytes for name, entry in self.manifest.pages.items()}
        doubtful = [name for name, size in sizes.items() if name not in stored or stored[name].bytes != size]
        return [name for name in doubtful if size_of(f"{self.uri}/{name}") != sizes[name]]  # listings may lag

    def scrub_copy(self) -> None:
        """Read the copy on this machine and remove what changed in it, which is brought again when it is used."""
        with self._lock():
            self._drop_wrong(self.names(), again=True)

    def adopt(self, folder: Path) -> None:
        """Make the staged `folder`, from which this artifact was committed, the copy on this machine."""
        write_atomic(folder / MANIFEST, self.manifest.text())
        with self._lock():
            discard(self.root.local, self.folder)
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(self.folder)
            self.stamp.add_folder(self.folder, self.manifest.files)

    def damaged(self) -> list[str]:
        """Return nothing: bytes of the store are verified when they are brought, and a wrong copy is brought again."""
        return []

    def _whole(self) -> bool:
        return self._copied() == self.manifest.attempt and not self._wrong(self.manifest.files)

    def _here(self, names: list[str]) -> bool:
        """Return whether a copy that is not whole holds `names`; a file appears in it when it is verified."""
        return self._marked() == self.manifest.attempt and not self._wrong(names)

    def _wrong(self, names: Iterable[str], again: bool = False) -> list[str]:
        """Return those of `names` that are not here as committed; each is read once per boot of this machine."""
        return wrong_files(self.folder, {name: self.manifest.files[name] for name in names}, self.stamp, again)

    def _drop_wrong(self, names: list[str], again: bool = False) -> None:
        """Remove the files of a copy that changed after they were brought. The lock is held."""
        if self.manifest.attempt in (self._copied(), self._marked()):
            for name in self._wrong(names, again):
                (self.folder / name).unlink(missing_ok=True)

    def _marked(self) -> str | None:
        """Return the attempt of which the folder holds some files."""
        try:
            return (self.folder / BRINGING).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _copied(self) -> str | None:
        """Return the attempt of which the folder says that it holds all files."""
        try:
            return Manifest.parse((self.folder / MANIFEST).read_bytes(), str(self.folder)).attempt
        except (FileNotFoundError, NotADirectoryError, DamagedArtifact):
            return None

    def _bring(self, names: list[str]) -> None:
        """Bring those of `names` that are not here yet. The lock is held."""
        self._prepare()
        each(self._bring_one, missing(self.manifest, self.folder, names))

    def _prepare(self) -> None:
        """Leave in the folder only files of our attempt, each of them verified when it came."""
        if self._marked() == self.manifest.attempt:
            return
        if self._copied() != self.manifest.attempt:
            discard(self.root.local, self.folder)
        write_atomic(self.folder / BRINGING, self.manifest.attempt)
        (self.folder / MANIFEST).unlink(missing_ok=True)

    def _bring_one(self, name: str) -> None:
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            verified_file(f"{self.uri}/{name}", self.manifest.files[name], place)
        except FileNotFoundError as error:
            raise DamagedArtifact(f"artifact {self.label}: {self.uri}/{name} is missing; {_REMEDY}") from error
        except WrongBytes as error:
            raise DamagedArtifact(f"artifact {self.label}: {error}") from error
        self.stamp.add_folder(self.folder, [name])

    def _lock(self) -> AbstractContextManager[None]:
        return locked(self.root.local, f"artifacts/{self.label}")


_REMEDY = "set it aside with `herd verify --set-aside`, then run again: it is made anew"


# Artifacts in an object store: `{kind}/{name}-{key8}/{attempt}/{file}`, visible by `{kind}/{name}-{key8}.json`.
#
# Nothing is overwritten or renamed. Each attempt to commit sends its files to a prefix of its own, has their sizes
# told, and then writes the manifest by one conditional PUT and reads it back: what is read decides who won, because
# a lost reply makes our own write look like another's, and some servers let two writers win. Two winners leave two
# whole attempts, never a mixed artifact. Readers believe a manifest whose files all have the right size, and hash
# what they bring. What this gives up: a commit sends every file once more than a local one, and an attempt that was
# killed or lost while the server was away stays until the janitor (storage/cleanup.py) comes.

HINTS = ".newest"
"""Folder of small objects: label of the artifact of a kind and name that was committed last."""
ROUNDS = 3
"""Tries of a commit that is refused for an artifact which is gone when it is looked at."""


def open_store(root: Root) -> Store:
    """Return the artifacts of `root`."""
    return Store(root.local) if root.is_local else RemoteStore(root)


class RemoteStore(Store):
    """See `Store`; its `root` is the working folder. Every method raises OSError if the store does not answer."""

    def __init__(self, root: Root) -> None:
        super().__init__(root.local)
        self.remote, self.place = root, root.uri

    def all(self, kind: str) -> list[Artifact]:
        names = [name for name in children(self.remote.join(kind)) if name.endswith(".json")]
        read = each(lambda name: self._readable(f"{kind}/{name.removesuffix('.json')}"), names, READERS)
        found: list[Artifact] = [artifact for artifact in read if artifact]
        return sorted(found, key=lambda artifact: artifact.manifest.created)

    def commit(
        self, design: ArtifactSpec, folder: Path, facts: dict[str, Any], made_by: str, code: str, seconds: float
    ) -> Artifact:
        """Send the staged `folder` and make it the artifact of `design`; it becomes the copy on this machine.

        If another process committed it first, theirs is returned. After an OSError it may be committed or not, never
        in part; `find` tells.
        """
        attempt = uuid.uuid4().hex
        files, pages = self._send(folder, self.remote.join(design.label, attempt))
        manifest = design.manifest(files, facts, made_by, code, seconds)
        artifact = RemoteArtifact.of(self.remote, manifest.model_copy(update={"attempt": attempt, "pages": pages}))
        winner = self._publish(design, artifact)
        if winner is None:
            with suppress(OSError):  # a hint only
                put_bytes(self._hint(design.kind, design.name), artifact.label.encode())
            artifact.adopt(folder)
            return artifact
        remove_all(artifact.uri)
        return winner

    def delete(self, label: str) -> None:
        remove(self._manifest(checked_label(label)))  # first: from now on it is no artifact
        remove_all(self.remote.join(label))
        super().delete(label)

    def sign(self, label: str) -> None:
        uri = self._manifest(checked_label(label))
        put_bytes(uri, self._unsigned(get_bytes(uri), uri).encode())

    def _send(self, folder: Path, prefix: str) -> tuple[dict[str, FileDigest], dict[str, FileDigest]]:
        """Send every file of `folder`; return their digests, and those of what was sent about their pages."""
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        large = [name for name, path in paths.items() if path.suffix == PAGED and path.stat().st_size > PAGE]
        with ThreadPoolExecutor(THREADS) as hashing:
            paged = {name: hashing.submit(digest_pages, paths[name]) for name in large}
            whole = {name: hashing.submit(digest_file, path) for name, path in paths.items() if name not in paged}
            each(lambda name: put_file(paths[name], f"{prefix}/{name}"), paths)
        found = {name: future.result() for name, future in paged.items()}
        each(lambda name: put_bytes(f"{prefix}/{PAGES}/{name}", found[name][1]), found)
        digests = {name: found[name][0] if name in found else whole[name].result() for name in paths}
        return digests, {name: digest_bytes(pages) for name, (_, pages) in found.items()}

    def _publish(self, design: ArtifactSpec, artifact: RemoteArtifact) -> Artifact | None:
        """Write the manifest, the commit. Returns None if ours is the one that counts, else the winner's artifact."""
        for _ in range(ROUNDS):
            if create_bytes(self._manifest(artifact.label), artifact.manifest.text().encode()):
                return None
            if winner := self.find(design):
                return None if winner.manifest.attempt == artifact.manifest.attempt else winner
        raise OSError(
            f"artifact {artifact.label}: {self._manifest(artifact.label)} exists and is not it, {ROUNDS} times; "
            "delete the artifact, then run again"
        )

    def _newest(self, kind: str, name: str) -> Manifest | None:
        """Return the manifest that the hint names: 2 requests. Without a true hint list them: 1 in 500 artifacts."""
        label = (self.remote.read(HINTS, kind, name) or b"").decode(errors="replace")
        if label.startswith(f"{kind}/{name}-") and (artifact := self._readable(label)):
            return artifact.manifest
        names = re.compile(rf"{re.escape(name)}-[0-9a-f]{{8}}\.json")
        found = files_in(self.remote.join(kind), f"{name}-")
        ours = {file: stored.modified for file, stored in found.items() if names.fullmatch(file)}
        for file in sorted(ours, key=lambda file: (-ours[file], file))[:NEWEST]:
            if artifact := self._readable(f"{kind}/{file.removesuffix('.json')}"):
                return artifact.manifest
        return None

    def _hint(self, kind: str, name: str) -> str:
        return self.remote.join(HINTS, kind, name)

    def _readable(self, label: str) -> RemoteArtifact | None:
        try:
            return self._get(checked_label(label))
        except UntrustedArtifact as error:
            log.warning("%s", error)
            return None
        except (ValueError, DamagedArtifact):
            return None

    def _get(self, label: str) -> RemoteArtifact | None:
        """Return the artifact at `label`, read a second time if it comes changed: bits flip on the way too."""
        uri = self._manifest(label)
        with suppress(FileNotFoundError):
            try:
                manifest = Manifest.parse(get_bytes(uri), uri)
            except DamagedArtifact:
                manifest = Manifest.parse(get_bytes(uri), uri)
            if not manifest.attempt:
                raise DamagedArtifact(f"{uri}: does not say where its files are")
            return RemoteArtifact.of(self.remote, manifest)
        return None

    def set_aside(self, label: str, seen: Manifest | None = None) -> None:
        """Move a manifest out of sight, kept for whoever asks; not one that was written since it was `seen`."""
        text = self.remote.read(f"{label}.json")
        if text is None:
            return
        with suppress(DamagedArtifact):
            now = Manifest.parse(text, label)
            if seen is None or now.attempt != seen.attempt:
                return
        kept = f"{label.replace('/', '-')}-{uuid.uuid4().hex[:6]}.json"
        put_bytes(self.remote.join(DAMAGED, kept), text)
        remove(self._manifest(label))

    def _manifest(self, label: str) -> str:
        return self.remote.join(f"{label}.json")
