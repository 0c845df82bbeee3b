"""Artifacts in an object store, and their verified copies on this machine.

Objects are `{kind}/{name}-{key8}/{attempt}/{file}`; the manifest `{kind}/{name}-{key8}.json` makes an artifact visible.
A copy is a folder in the working folder, where a local artifact would be; the local disk must hold it (token shards
are read by pages instead, storage/page_cache.py).
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, RootModel

from herd.storage.artifact import (
    DAMAGED,
    MANIFEST,
    NEWEST,
    Artifact,
    ArtifactSpec,
    DamagedArtifact,
    Manifest,
    Store,
    UntrustedArtifact,
    check_label,
    log,
    missing_files,
    wrong_files,
)
from herd.storage.digests import PAGE, PAGED, FileDigest, digest_bytes, digest_file, digest_pages, first_wrong_page
from herd.storage.filesystem import filesystem_of, write_atomic
from herd.storage.objects import (
    copy_object,
    create_bytes,
    get_bytes,
    get_file,
    list_children,
    list_objects,
    list_objects_in,
    put_bytes,
    put_file,
    remove,
    remove_all,
    size_of,
)
from herd.storage.processes import READERS, THREADS, parallel_map
from herd.storage.root import Root, check_format
from herd.storage.staging import discard, file_lock

TRIES = 3
"""Downloads before an object counts as damaged: networks and some S3 servers return wrong bytes without an error."""
PIECE = 16 * PAGE
PAGES = ".pages"
"""Folder beside the files in the store: for each file of more than a page the SHA-256 of its pages, 32 bytes each."""
DOWNLOADING = ".downloading"
"""File in an incomplete copy: the attempt whose files the copy holds."""
LAZY = "lazy"
"""Folder of page caches in the working folder (storage/page_cache.py)."""
STORED = ".stored.json"
"""File of a staged folder with its `StoredFiles`."""
HINTS = ".newest"
"""Folder of small objects: the label last committed for a kind and name."""
ROUNDS = 3
"""Tries of a commit that conflicts with an artifact which is gone when it is read."""

_SET_ASIDE = f"tried {TRIES} times; if it is damaged, quarantine it (herd verify --set-aside) and make it again"
_REMEDY = "quarantine it with `herd verify --set-aside`, then run again to make it"


class WrongBytes(OSError):
    """The store returns other bytes than were committed; the message names object and offset."""


def get_verified_pages(uri: str, first: int, end: int, digests: bytes) -> bytes:
    """Return the bytes of the object `uri` from page `first` to byte `end`, checked against `digests` of these pages.

    Raises WrongBytes, FileNotFoundError and OSError.
    """
    start, wrong = first * PAGE, ""
    for _ in range(TRIES):
        data: bytes = filesystem_of(uri).cat_file(uri, start=start, end=end)
        page = first_wrong_page(data, digests)
        if len(data) == end - start and page is None:
            return data
        wrong = f"{len(data):,} bytes received" if page is None else f"page {first + page} has another SHA-256"
    raise WrongBytes(f"{uri}: bytes {start:,} to {end:,} are not what was committed ({wrong}); {_SET_ASIDE}")


def digest_object(uri: str, expected: FileDigest) -> str:
    """Return the fault of a file or object as a message, empty if it is intact. Reads pieces of 16 MiB."""
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


def download_verified(uri: str, digest: FileDigest, path: Path) -> None:
    """Download the object `uri` to `path` atomically, synced and verified. Raises as `get_verified_pages`."""
    partial = path.with_name(f".{path.name}.partial")
    for _ in range(TRIES):
        get_file(uri, partial)
        actual = digest_file(partial, sync=True)
        if actual == digest:
            partial.rename(path)
            return
    partial.unlink()
    raise WrongBytes(
        f"{uri}: received {actual.bytes:,} bytes of SHA-256 {actual.sha256[:12]}, committed were {digest.bytes:,} of "
        f"{digest.sha256[:12]}; {_SET_ASIDE}"
    )


@dataclass(frozen=True)
class RemoteArtifact(Artifact):
    """See `Artifact`. `path` and `path_of` download. They raise DamagedArtifact, and OSError for an unreachable store.

    A copy gets its manifest last, so an interrupted download is continued and never taken for complete. One process
    downloads, others wait.
    """

    root: Root

    @classmethod
    def from_manifest(cls, root: Root, manifest: Manifest) -> RemoteArtifact:
        return cls(manifest, root.file(manifest.label), root.join(manifest.label, manifest.attempt), root)

    @property
    def path(self) -> Path:
        """The local folder with all files, downloaded if needed."""
        if not self._whole():
            with self._lock():
                if not self._whole():
                    self._download(self.names())
                    write_atomic(self.folder / MANIFEST, self.manifest.text())
                    (self.folder / DOWNLOADING).unlink(missing_ok=True)
        return self.folder

    def path_of(self, name: str) -> Path:
        """Return the local path of a file or folder inside; downloads nothing else."""
        names = self.names(name)
        partial_copy_has_it = self._marked() == self.manifest.attempt and not self._wrong(names)
        if not partial_copy_has_it and not self._whole():
            with self._lock():
                if not self._whole():
                    self._download(names)
        return self.folder / name

    def verify(self) -> None:
        if self.path:  # downloads first
            super().verify()

    def missing(self) -> list[str]:
        """Return the files that are absent from the store or have the wrong size."""
        stored = list_objects(self.uri)
        sizes = {name: entry.bytes for name, entry in self.manifest.files.items()}
        sizes |= {f"{PAGES}/{name}": entry.bytes for name, entry in self.manifest.pages.items()}
        suspects = [name for name, size in sizes.items() if name not in stored or stored[name].bytes != size]
        return [name for name in suspects if size_of(f"{self.uri}/{name}") != sizes[name]]  # listings may lag

    def scrub_copy(self) -> None:
        """Read the local copy from the disk and delete damaged files; the next use downloads them again."""
        with self._lock():
            self._drop_wrong(self.names(), again=True)

    def adopt(self, folder: Path) -> None:
        """Make the staged `folder`, from which this artifact was committed, the local copy."""
        write_atomic(folder / MANIFEST, self.manifest.text())
        with self._lock():
            discard(self.root.local, self.folder)
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(self.folder)
            self.stamp.add_folder(self.folder, self.manifest.files)

    def damaged(self) -> list[str]:
        """Return nothing: files are verified when they are downloaded, and a damaged copy is downloaded again."""
        return []

    def _whole(self) -> bool:
        """Return whether the copy is complete and intact."""
        return self._copied() == self.manifest.attempt and not self._wrong(self.manifest.files)

    def _wrong(self, names: Iterable[str], again: bool = False) -> list[str]:
        """Return those of `names` that are absent or damaged; each file is read once per boot of this machine."""
        return wrong_files(self.folder, {name: self.manifest.files[name] for name in names}, self.stamp, again)

    def _drop_wrong(self, names: list[str], again: bool = False) -> None:
        """Delete damaged files of the copy. The caller holds the lock."""
        if self.manifest.attempt in (self._copied(), self._marked()):
            for name in self._wrong(names, again):
                (self.folder / name).unlink(missing_ok=True)

    def _marked(self) -> str | None:
        """Return the attempt of an incomplete copy."""
        try:
            return (self.folder / DOWNLOADING).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _copied(self) -> str | None:
        """Return the attempt of a complete copy."""
        try:
            return Manifest.parse((self.folder / MANIFEST).read_bytes(), str(self.folder)).attempt
        except (FileNotFoundError, NotADirectoryError, DamagedArtifact):
            return None

    def _download(self, names: list[str]) -> None:
        """Download those of `names` that are absent or damaged. The caller holds the lock."""
        self._drop_wrong(names)
        if self._marked() != self.manifest.attempt:  # first leave only verified files of this attempt in the folder
            if self._copied() != self.manifest.attempt:
                discard(self.root.local, self.folder)
            write_atomic(self.folder / DOWNLOADING, self.manifest.attempt)
            (self.folder / MANIFEST).unlink(missing_ok=True)
        parallel_map(self._download_file, missing_files(self.manifest, self.folder, names))

    def _download_file(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            download_verified(f"{self.uri}/{name}", self.manifest.files[name], path)
        except FileNotFoundError as error:
            raise DamagedArtifact(f"artifact {self.label}: {self.uri}/{name} is missing; {_REMEDY}") from error
        except WrongBytes as error:
            raise DamagedArtifact(f"artifact {self.label}: {error}") from error
        self.stamp.add_folder(self.folder, [name])

    def _lock(self) -> AbstractContextManager[None]:
        return file_lock(self.root.local, f"artifacts/{self.label}")


class StoredFile(BaseModel):
    """A file of an artifact that workers have already written into the store, elsewhere."""

    uri: str
    digest: FileDigest
    pages: str = ""
    """SHA-256 of its pages in hexadecimal digits, for files of PAGED with more than a page."""

    @classmethod
    def read(cls, uri: str) -> StoredFile:
        """Return a file with its digest; reads all its bytes once, from a copy on this machine."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, uri.rpartition("/")[2])
            get_file(uri, path)
            if (stored := size_of(uri)) != path.stat().st_size:
                raise OSError(f"{uri}: {path.stat().st_size:,} bytes received, {stored or 0:,} are stored; try again")
            if path.suffix == PAGED and path.stat().st_size > PAGE:
                digest, pages = digest_pages(path)
                return cls(uri=uri, digest=digest, pages=pages.hex())
            return cls(uri=uri, digest=digest_file(path))


class StoredFiles(RootModel[dict[str, StoredFile]]):
    """Files of an artifact by name that `Store.commit` takes from the store and not from the staged folder."""

    def give(self, folder: Path) -> None:
        """Add the files to those that a staged folder names."""
        known = self.take(folder)
        write_atomic(folder / STORED, StoredFiles(known | self.root).model_dump_json())

    @staticmethod
    def take(folder: Path) -> dict[str, StoredFile]:
        """Return the files that a staged folder names, and forget them."""
        try:
            known = StoredFiles.model_validate_json((folder / STORED).read_bytes()).root
        except FileNotFoundError:
            return {}
        (folder / STORED).unlink()
        return known


def open_store(root: Root) -> Store:
    """Return the artifacts of `root`. Raises ValueError for a root of another format."""
    check_format(root)
    return Store(root.local) if root.is_local else RemoteStore(root)


class RemoteStore(Store):
    """See `Store`; `root` is the working folder. Every method raises OSError if the store is unreachable."""

    def __init__(self, root: Root) -> None:
        super().__init__(root.local)
        self.remote, self.location = root, root.uri

    def all(self, kind: str) -> list[Artifact]:
        names = [name for name in list_children(self.remote.join(kind)) if name.endswith(".json")]
        read = parallel_map(lambda name: self._readable(f"{kind}/{name.removesuffix('.json')}"), names, READERS)
        artifacts: list[Artifact] = [artifact for artifact in read if artifact]
        return sorted(artifacts, key=lambda artifact: artifact.manifest.created)

    def commit(
        self, spec: ArtifactSpec, folder: Path, metadata: dict[str, Any], created_by: str, code: str, seconds: float
    ) -> Artifact:
        """Upload the staged `folder` as the artifact of `spec`; it becomes the local copy.

        Files that `StoredFiles` names are copied inside the store, and then nothing becomes the local copy. If another
        process committed first, its artifact is returned. After an OSError the artifact is committed or absent, never
        partial; `find` tells which.
        """
        attempt = uuid.uuid4().hex  # a prefix for each attempt: two winners would leave two whole ones, never a mixture
        stored = StoredFiles.take(folder)
        files, pages = self._upload(folder, self.remote.join(spec.label, attempt), stored)
        manifest = spec.manifest(files, metadata, created_by, code, seconds)
        artifact = RemoteArtifact.from_manifest(
            self.remote, manifest.model_copy(update={"attempt": attempt, "pages": pages})
        )
        winner = self._publish(spec, artifact)
        if winner is None:
            with suppress(OSError):  # only a hint
                put_bytes(self.remote.join(HINTS, spec.kind, spec.name), artifact.label.encode())
            if not stored:
                artifact.adopt(folder)
            return artifact
        remove_all(artifact.uri)
        return winner

    def delete(self, label: str) -> None:
        artifact = self._readable(label)
        remove(self._manifest(check_label(label)))  # first: this makes it invisible
        if artifact is not None:  # other attempts may still commit; `clean_up_root` deletes the rest later
            remove_all(artifact.uri)
        super().delete(label)

    def sign(self, label: str) -> None:
        uri = self._manifest(check_label(label))
        put_bytes(uri, self._signed_again(get_bytes(uri), uri).encode())

    def _upload(
        self, folder: Path, prefix: str, stored: dict[str, StoredFile]
    ) -> tuple[dict[str, FileDigest], dict[str, FileDigest]]:
        """Upload every file of `folder` and its page digests, copy the `stored` files; return the digests of both."""
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        large = [name for name, path in paths.items() if path.suffix == PAGED and path.stat().st_size > PAGE]
        with ThreadPoolExecutor(THREADS) as hashing:
            paged_jobs = {name: hashing.submit(digest_pages, paths[name]) for name in large}
            jobs = {name: hashing.submit(digest_file, path) for name, path in paths.items() if name not in paged_jobs}
            parallel_map(lambda name: put_file(paths[name], f"{prefix}/{name}"), paths)
        parallel_map(lambda name: copy_object(stored[name].uri, f"{prefix}/{name}"), stored, READERS)
        paged = {name: job.result() for name, job in paged_jobs.items()}
        paged |= {name: (file.digest, bytes.fromhex(file.pages)) for name, file in stored.items() if file.pages}
        parallel_map(lambda name: put_bytes(f"{prefix}/{PAGES}/{name}", paged[name][1]), paged)
        digests = {name: paged[name][0] if name in paged else jobs[name].result() for name in paths}
        digests |= {name: file.digest for name, file in stored.items()}
        return digests, {name: digest_bytes(pages) for name, (_, pages) in paged.items()}

    def _publish(self, spec: ArtifactSpec, artifact: RemoteArtifact) -> Artifact | None:
        """Create the manifest, which commits. Returns None if this attempt won, else the winner's artifact."""
        for _ in range(ROUNDS):
            if create_bytes(self._manifest(artifact.label), artifact.manifest.text().encode()):
                return None
            if winner := self.find(spec):
                return None if winner.manifest.attempt == artifact.manifest.attempt else winner
        raise OSError(
            f"artifact {artifact.label}: {self._manifest(artifact.label)} exists but is another artifact ({ROUNDS} "
            "tries); delete it, then run again"
        )

    def _newest(self, kind: str, name: str) -> Manifest | None:
        """Return the manifest that the hint names (2 requests); without a valid hint list all (1 per 500 artifacts)."""
        label = (self.remote.read(HINTS, kind, name) or b"").decode(errors="replace")
        if label.startswith(f"{kind}/{name}-") and (artifact := self._readable(label)):
            return artifact.manifest
        names = re.compile(rf"{re.escape(name)}-[0-9a-f]{{8}}\.json")
        listed = list_objects_in(self.remote.join(kind), f"{name}-")
        times = {file: info.modified for file, info in listed.items() if names.fullmatch(file)}
        for file in sorted(times, key=lambda file: (-times[file], file))[:NEWEST]:
            if artifact := self._readable(f"{kind}/{file.removesuffix('.json')}"):
                return artifact.manifest
        return None

    def _readable(self, label: str) -> RemoteArtifact | None:
        try:
            return self._get(check_label(label))
        except UntrustedArtifact as error:
            log.warning("%s", error)
            return None
        except (ValueError, DamagedArtifact):
            return None

    def _get(self, label: str) -> RemoteArtifact | None:
        uri = self._manifest(label)
        with suppress(FileNotFoundError):
            try:
                manifest = Manifest.parse(get_bytes(uri), uri)
            except DamagedArtifact:  # bits flip in transit too: read once more
                manifest = Manifest.parse(get_bytes(uri), uri)
            if not manifest.attempt:
                raise DamagedArtifact(f"{uri}: has no field attempt; delete the artifact, then run again")
            return RemoteArtifact.from_manifest(self.remote, manifest)
        return None

    def quarantine(self, label: str, seen: Manifest | None = None) -> None:
        """Quarantine a manifest, unless it was replaced since it was `seen`."""
        text = self.remote.read(f"{label}.json")
        if text is None:
            return
        with suppress(DamagedArtifact):
            current = Manifest.parse(text, label)
            if seen is None or current.attempt != seen.attempt:
                return
        put_bytes(self.remote.join(DAMAGED, f"{label.replace('/', '-')}-{uuid.uuid4().hex[:6]}.json"), text)
        remove(self._manifest(label))

    def _manifest(self, label: str) -> str:
        return self.remote.join(f"{label}.json")
