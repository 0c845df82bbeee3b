"""An artifact in an object store: brought to this machine when somebody wants its files, and verified on the way.

What is brought lies in the working folder where a local artifact would lie, so nothing else has to know. Every file
is hashed as it comes and the manifest is written last: a copy that a killed process left half-brought is gone on
with, never taken for whole. One process brings, others wait for it. What this gives up: the local disk must hold the
artifact (token shards are read in pages instead, storage/lazy.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from storage.artifact import Artifact
from storage.filesystem import write_atomic
from storage.manifest import MANIFEST, DamagedArtifact, Manifest, missing
from storage.objects import files_below, size_of
from storage.root import Root
from storage.staging import discard, locked
from storage.threads import each
from storage.verification import wrong_files
from storage.verified import WrongBytes, verified_file

PAGES = ".pages"
"""Folder beside the files in the store: for each of more than a page the SHA-256 of its pages, 32 bytes each."""
BRINGING = ".bringing"
"""In a copy that is not whole: the attempt whose files it holds."""
LAZY = "lazy"
"""Folder of page caches in the working folder (storage/lazy.py)."""


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
