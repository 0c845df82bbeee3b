"""Whole files in an object store, with checks after each write.

Objects are written by `put_file` (which aborts its upload on error) and single PUTs only: an exception inside
`fs.open(..., "wb")` leaves a truncated object that others can see. After a write the size is read again, small objects
are read back. One bad reply proves nothing, because headers are lost and bits flip on the way back too.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from herd.storage.filesystem import filesystem_of, is_local, local_path, temporary_file_beside

CONFLICTS = 5
"""Tries of an exclusive write that is refused although no object exists."""
TRIES = 3
"""Uploads of an object, and size requests after each, before a write fails."""
PAUSE_S = 0.2


class ObjectInfo(NamedTuple):
    """Size and age of an object in a listing."""

    bytes: int
    modified: float
    """Seconds since 1970 by the server's clock."""


def put_file(path: Path, uri: str) -> None:
    """Upload the file `path` as the object `uri`. Raises OSError if the stored size differs afterwards."""
    filesystem, sent, stored = filesystem_of(uri), path.stat().st_size, 0
    for _ in range(TRIES):
        filesystem.put_file(str(path), uri)
        for _ in range(TRIES):
            stored = size_of(uri) or 0
            if stored == sent:
                return
            time.sleep(PAUSE_S)
    raise OSError(f"{uri}: {stored:,} bytes are stored, {sent:,} were sent, {TRIES} times")


def copy_object(source: str, uri: str) -> None:
    """Copy an object inside the store. Raises OSError if the stored size differs afterwards."""
    filesystem_of(uri).cp_file(source, uri)
    if (stored := size_of(uri)) != (size := size_of(source)):
        raise OSError(f"{uri}: {stored or 0:,} bytes are stored, {source} has {size or 0:,}; try again")


def put_bytes(uri: str, data: bytes) -> None:
    """Upload `data` as the object `uri` by one request. Raises OSError if other bytes are read back."""
    filesystem = filesystem_of(uri)
    for _ in range(TRIES):
        filesystem.pipe_file(uri, data)
        if _holds(uri, data):
            return
    raise OSError(f"{uri}: holds other bytes than were sent, {TRIES} times")


def create_bytes(uri: str, data: bytes) -> bool:
    """Create a file or an object exclusively; return whether this call created it. Raises OSError.

    `data` must not be empty and must differ between writers (contain the writer's name): the bytes read back decide who
    won, because a lost reply makes our own write look like another's, and some servers let two writers win.
    """
    if is_local(uri):
        path = local_path(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file_beside(path, data) as temporary:
            try:
                os.link(temporary, path)  # unlike a rename it fails if the file exists
            except FileExistsError:
                return False
        return True
    filesystem = filesystem_of(uri)
    for _ in range(CONFLICTS):
        created = True
        try:
            filesystem.pipe_file(uri, data, mode="create")
        except OSError as error:
            if not _exists_already(error):
                raise
            created = False
        try:
            return _holds(uri, data)
        except FileNotFoundError:
            if created:  # was deleted concurrently; do not create it again
                return True
            time.sleep(0.5)  # a conflict with a writer that failed
    raise OSError(f"{uri}: refused as existing {CONFLICTS} times, but absent when read; try again")


def get_bytes(uri: str) -> bytes:
    """Return the bytes of the object `uri`. Raises FileNotFoundError."""
    data: bytes = filesystem_of(uri).cat_file(uri)
    return data


def get_file(uri: str, path: Path) -> None:
    """Download the object `uri` to the file `path`, unverified. Raises FileNotFoundError."""
    filesystem_of(uri).get_file(uri, str(path))


def size_of(uri: str) -> int | None:
    """Return the size of the object `uri` in bytes, None if absent. Requests the object itself, not a listing."""
    for tries_left in range(TRIES)[::-1]:
        try:
            info = filesystem_of(uri).info(uri)
            break
        except FileNotFoundError:
            return None
        except KeyError:  # s3fs, if a reply lost its headers
            if not tries_left:
                raise OSError(f"{uri}: the store did not report the size in {TRIES} tries") from None
    return int(info["size"]) if info["type"] == "file" else None


def list_children(uri: str) -> dict[str, int]:
    """Return name -> size of the entries in `uri`, sorted; a folder has size 0. Empty if `uri` does not exist."""
    return {name: int(entry["size"] or 0) for name, entry in list_entries(uri)}


def list_entries(uri: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and fsspec info of the entries in `uri`, sorted. Empty if `uri` does not exist."""
    try:
        entries = filesystem_of(uri).ls(uri, detail=True)
    except FileNotFoundError:
        return []
    named = [(str(entry["name"]).rstrip("/").rsplit("/", 1)[-1], entry) for entry in entries]
    return sorted(named, key=lambda pair: pair[0])


def list_objects(uri: str) -> dict[str, ObjectInfo]:
    """Return relative name -> info of every object below `uri`, sorted. One request per 1,000 objects."""
    filesystem = filesystem_of(uri)
    start = len(str(filesystem._strip_protocol(uri))) + 1
    objects = filesystem.find(uri, detail=True)
    return {name[start:]: _object_info(info) for name, info in sorted(objects.items()) if name[start:]}


def list_objects_in(uri: str, prefix: str) -> dict[str, ObjectInfo]:
    """Return name -> info of the objects in `uri` whose names begin with `prefix` (not empty), sorted."""
    objects = filesystem_of(uri).find(uri, maxdepth=1, prefix=prefix, detail=True)
    return {name.rsplit("/", 1)[-1]: _object_info(info) for name, info in sorted(objects.items())}


def remove(uri: str) -> None:
    """Delete the object `uri`; no error if it is absent."""
    with suppress(FileNotFoundError):
        filesystem_of(uri).rm_file(uri)


def remove_all(uri: str) -> None:
    """Delete everything under `uri`. Raises OSError if something remains."""
    filesystem = filesystem_of(uri)
    with suppress(FileNotFoundError):
        filesystem.rm(uri, recursive=True)
    if left := filesystem.find(uri):  # s3fs does not report objects that a bulk delete refused
        raise OSError(f"{uri}: {len(left)} objects were not deleted, e.g. {left[0]}; check the permission to delete")


def _object_info(info: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(int(info["size"]), info["LastModified"].timestamp())


def _holds(uri: str, data: bytes) -> bool:
    """Return whether an object holds `data`; other bytes count when they are read twice."""
    before = None
    for _ in range(CONFLICTS):
        stored = get_bytes(uri)
        if stored in (data, before):
            break
        before = stored
    return stored == data


def _exists_already(error: BaseException) -> bool:
    """Return whether a conditional write failed because the object exists; servers report that in several ways."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(cause, FileExistsError) or status in (409, 412):
            return True
        cause = cause.__cause__
    return False
