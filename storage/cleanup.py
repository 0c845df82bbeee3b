"""Delete orphaned uploads, attempts, staging folders and copies older than a grace period.

In an object store: unfinished multipart uploads (invisible, but paid for) and attempts that no manifest names. On this
machine: staging folders of dead processes, and copies of artifacts that the root no longer has. Ages in the store are
compared with the server's clock. An attempt that pauses longer than the grace period between two files counts as dead.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from herd.storage.artifact import LABEL, MANIFEST, DamagedArtifact
from herd.storage.filesystem import filesystem_of
from herd.storage.object_artifact import DOWNLOADING, LAZY, RemoteStore
from herd.storage.objects import ObjectInfo, list_children, list_objects, remove_all
from herd.storage.root import Root
from herd.storage.staging import clear_staging, discard, disk_usage, newest_mtime

ATTEMPT = re.compile(r"([A-Za-z0-9._-]+)/([0-9a-f]{32})/.+")
"""name-key8/attempt/file"""


class CleanupResult(NamedTuple):
    """Number of deleted items of each type, and their bytes."""

    uploads: int
    attempts: int
    staging: int
    copies: int
    bytes: int


def clean_up_root(root: Root, older_than_s: float, kinds: Collection[str]) -> CleanupResult:
    """Delete orphaned data in `root` and its working folder that was not written to for `older_than_s` seconds.

    `kinds` are those of artifacts; other folders stay as they are. Safe while other processes work. Raises OSError if
    the store is unreachable or forbids deleting.
    """
    staging, freed = clear_staging(root.local, older_than_s)
    if root.is_local:
        return CleanupResult(0, 0, staging, 0, freed)
    filesystem = filesystem_of(root.uri)
    before = filesystem.server_time(root.uri) - older_than_s
    uploads, upload_bytes = filesystem.abort_uploads(root.uri, before)
    attempts, attempt_bytes = 0, 0
    for kind in kinds:
        count, removed = _remove_attempts(root, kind, before)
        attempts, attempt_bytes = attempts + count, attempt_bytes + removed
    copy_count, copy_bytes = _remove_copies(root, older_than_s, kinds)
    return CleanupResult(uploads, attempts, staging, copy_count, freed + upload_bytes + attempt_bytes + copy_bytes)


def local_copies(root: Root, kinds: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Yield label and folder of each copy and page cache of an artifact of a remote root on this machine, of `kinds`.

    All can be downloaded again. An artifact may have both.
    """
    if root.is_local:
        return
    for kind in kinds:
        whole = [
            folder
            for folder in sorted(root.local.glob(f"{kind}/*"))
            if (folder / MANIFEST).is_file() or (folder / DOWNLOADING).is_file()
        ]
        for folder in [*whole, *sorted(root.local.glob(f"{LAZY}/{kind}/*"))]:
            if LABEL.fullmatch(f"{kind}/{folder.name}"):
                yield f"{kind}/{folder.name}", folder


def _remove_attempts(root: Root, kind: str, before: float) -> tuple[int, int]:
    """Delete the attempts of `kind` that no manifest names and whose newest file is older than `before`."""
    listed, count, freed = list_objects(root.join(kind)), 0, 0
    attempts_of: dict[str, dict[str, list[ObjectInfo]]] = defaultdict(lambda: defaultdict(list))
    for path, stored in listed.items():
        if match := ATTEMPT.fullmatch(path):
            attempts_of[match[1]][match[2]].append(stored)
    for name, attempts in attempts_of.items():
        if f"{name}.json" in listed and len(attempts) == 1:
            continue  # the committed attempt; if it is another one, the artifact is damaged and must be kept
        for attempt, files in attempts.items():
            if max(stored.modified for stored in files) >= before or _is_named(root, f"{kind}/{name}", attempt):
                continue
            remove_all(root.join(kind, name, attempt))
            count, freed = count + 1, freed + sum(stored.bytes for stored in files)
    return count, freed


def _is_named(root: Root, label: str, attempt: str) -> bool:
    """Return whether the current manifest names the attempt; also true if the manifest is damaged."""
    try:
        artifact = RemoteStore(root).load(label)
    except DamagedArtifact:
        return True
    except ValueError:
        return False
    return artifact.manifest.attempt == attempt


def _remove_copies(root: Root, older_than_s: float, kinds: Collection[str]) -> tuple[int, int]:
    """Delete copies and page caches on this machine whose artifact is gone from the root."""
    before, count, freed = time.time() - older_than_s, 0, 0
    manifests: dict[str, dict[str, int]] = {}
    for label, folder in local_copies(root, kinds):
        if newest_mtime(folder) >= before:
            continue
        kind, name = label.split("/")
        if kind not in manifests:
            manifests[kind] = list_children(root.join(kind))
        if f"{name}.json" not in manifests[kind]:
            count, freed = count + 1, freed + disk_usage(folder)
            discard(root.local, folder)
    return count, freed
