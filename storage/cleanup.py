"""What killed, lost and interrupted attempts left behind, removed once it is old enough to be nobody's.

In an object store: uploads in parts that were never finished (invisible, but paid for), and attempts that no manifest
names. On this machine: staging folders whose process is gone, and copies of artifacts that the root no longer has.
Ages are the server's times against the server's clock, so a host whose clock is wrong removes nothing too early.
What this gives up: an attempt that pauses for longer than the age between two files is taken for dead; a day is safe.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

from storage.artifact import LABEL, MANIFEST, DamagedArtifact
from storage.filesystem import filesystem_of
from storage.object_artifact import BRINGING, LAZY, RemoteStore
from storage.objects import ObjectInfo, children, files_below, remove_all
from storage.root import Root
from storage.staging import clear_staging, discard, newest, size

ATTEMPT = re.compile(r"([A-Za-z0-9._-]+)/([0-9a-f]{32})/.+")
"""name-key8/attempt/file"""
NO_KINDS = {
    "runs",
    "open",
    "promotions",
    "leases",
    "work",
    "in-progress",
    "comparisons",
    "logs",
    "mlflow-artifacts",
    "mlflow.db",
    LAZY,
}
"""What lies under a root or in its working folder besides kinds of artifacts."""
Listed = dict[str, ObjectInfo]


class Tidied(NamedTuple):
    """How many of each were removed, and their bytes."""

    uploads: int
    attempts: int
    staging: int
    copies: int
    bytes: int


def tidy(root: Root, older_than_s: float) -> Tidied:
    """Remove what is left over in `root` and its working folder and was not written to for `older_than_s` seconds.

    Safe beside running work. Raises OSError if the store does not answer or forbids deleting.
    """
    staging, freed = clear_staging(root.local, older_than_s)
    if root.is_local:
        return Tidied(0, 0, staging, 0, freed)
    kinds = [kind for kind in children(root.uri) if kind not in NO_KINDS and not kind.startswith(".")]
    before = _server_time(root) - older_than_s
    uploads, upload_bytes = _remove_uploads(root, before)
    attempts, attempt_bytes = 0, 0
    for kind in kinds:
        count, removed = _remove_attempts(root, kind, before)
        attempts, attempt_bytes = attempts + count, attempt_bytes + removed
    copies, copy_bytes = _remove_copies(root, older_than_s)
    return Tidied(uploads, attempts, staging, copies, freed + upload_bytes + attempt_bytes + copy_bytes)


def copies(root: Root) -> Iterator[tuple[str, Path]]:
    """Yield label and folder of what this machine holds of artifacts of a remote root: copies and page caches.

    Any of it can be brought again. An artifact may have both.
    """
    if root.is_local:
        return
    whole = filter(_is_copy, root.local.glob("[!.]*/*"))
    for folder in [*sorted(whole), *sorted(root.local.glob(f"{LAZY}/*/*"))]:
        kind, label = folder.parent.name, f"{folder.parent.name}/{folder.name}"
        if kind not in NO_KINDS and LABEL.fullmatch(label):
            yield label, folder


def _remove_attempts(root: Root, kind: str, before: float) -> tuple[int, int]:
    """Remove the attempts of `kind` that no manifest names and whose newest file is older than `before`."""
    listed, count, freed = files_below(root.join(kind)), 0, 0
    for name, attempts in _attempts(listed).items():
        if f"{name}.json" in listed and len(attempts) == 1:
            continue  # the one that is named, or the artifact is damaged, which is not for the janitor to judge
        for attempt, files in attempts.items():
            if max(stored.modified for stored in files) >= before or _named(root, f"{kind}/{name}", attempt):
                continue
            remove_all(root.join(kind, name, attempt))
            count, freed = count + 1, freed + sum(stored.bytes for stored in files)
    return count, freed


def _attempts(listed: Listed) -> dict[str, dict[str, list[ObjectInfo]]]:
    """Return name-key8 -> attempt -> its files."""
    found: dict[str, dict[str, list[ObjectInfo]]] = defaultdict(lambda: defaultdict(list))
    for path, stored in listed.items():
        if match := ATTEMPT.fullmatch(path):
            found[match[1]][match[2]].append(stored)
    return found


def _named(root: Root, label: str, attempt: str) -> bool:
    """Return whether the manifest, read now, names the attempt, or cannot be read, which leaves it open."""
    try:
        artifact = RemoteStore(root).at(label)
    except DamagedArtifact:
        return True
    except ValueError:
        return False
    return artifact.manifest.attempt == attempt


def _remove_uploads(root: Root, before: float) -> tuple[int, int]:
    """Abort the uploads below the root of which no part was sent since `before`."""
    filesystem, count, freed = filesystem_of(root.uri), 0, 0
    for upload in _uploads(root):
        place = {name: upload[name] for name in ("Bucket", "Key", "UploadId")}
        with suppress(FileNotFoundError):  # finished meanwhile
            parts = _parts(filesystem, place)
            if (
                max(time.timestamp() for time in [upload["Initiated"], *(part["LastModified"] for part in parts)])
                < before
            ):
                filesystem.call_s3("abort_multipart_upload", **place)
                count, freed = count + 1, freed + sum(int(part["Size"]) for part in parts)
    return count, freed


def _parts(filesystem: Any, place: dict[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        answer = filesystem.call_s3("list_parts", **place, PartNumberMarker=found[-1]["PartNumber"] if found else 0)
        found += answer.get("Parts", [])
        if not answer.get("IsTruncated"):
            return found


def _uploads(root: Root) -> list[dict[str, Any]]:
    bucket, prefix, _ = filesystem_of(root.uri).split_path(f"{root.uri}/")
    asked: dict[str, str] = {"Bucket": bucket, "Prefix": prefix}
    found: list[dict[str, Any]] = []
    while True:
        answer = filesystem_of(root.uri).call_s3("list_multipart_uploads", **asked)
        found += [{**upload, "Bucket": bucket} for upload in answer.get("Uploads", [])]
        if not answer.get("IsTruncated"):
            return [upload for upload in found if upload["Key"].startswith(prefix)]
        asked |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def _remove_copies(root: Root, older_than_s: float) -> tuple[int, int]:
    """Remove copies and page caches on this machine whose artifact is gone from the root."""
    before, count, freed = time.time() - older_than_s, 0, 0
    known: dict[str, dict[str, int]] = {}
    for label, folder in copies(root):
        if newest(folder) >= before:
            continue
        kind, name = label.split("/")
        if kind not in known:
            known[kind] = children(root.join(kind))
        if f"{name}.json" not in known[kind]:
            count, freed = count + 1, freed + size(folder)
            discard(root.local, folder)
    return count, freed


def _is_copy(folder: Path) -> bool:
    """Return whether a folder holds what was brought of an artifact, whole or in part."""
    return (folder / MANIFEST).is_file() or (folder / BRINGING).is_file()


def _server_time(root: Root) -> float:
    bucket = filesystem_of(root.uri).split_path(root.uri)[0]
    answer = filesystem_of(root.uri).call_s3("head_bucket", Bucket=bucket)
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
