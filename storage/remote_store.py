"""Artifacts in an object store: `{kind}/{name}-{key8}/{attempt}/{file}`, visible by `{kind}/{name}-{key8}.json`.

Nothing is overwritten or renamed. Each attempt to commit sends its files to a prefix of its own, has their sizes told,
and then writes the manifest by one conditional PUT and reads it back: what is read decides who won, because a lost
reply makes our own write look like another's, and some servers let two writers win. Two winners leave two whole
attempts, never a mixed artifact. Readers believe a manifest whose files all have the right size, and hash what they
bring. What this gives up: a commit sends every file once more than a local one, and an attempt that was killed or lost
while the server was away stays until the janitor (storage/janitor.py) comes.
"""

from __future__ import annotations

import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from storage.artifact import DAMAGED, NEWEST, Artifact, Design, Store, log
from storage.digests import PAGE, PAGED, THREADS, FileDigest, digest_bytes, digest_file, digest_pages
from storage.manifest import DamagedArtifact, Manifest, UntrustedArtifact, checked_label
from storage.objects import children, create_bytes, files_in, get_bytes, put_bytes, put_file, remove, remove_all
from storage.remote_artifact import PAGES, RemoteArtifact
from storage.root import Root
from storage.threads import READERS, each

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
        self, design: Design, folder: Path, facts: dict[str, Any], made_by: str, code: str, seconds: float
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

    def _publish(self, design: Design, artifact: RemoteArtifact) -> Artifact | None:
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
