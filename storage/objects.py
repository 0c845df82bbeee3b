"""Files in an object store, moved whole and checked: what checkpoints need of s3fs beyond naming a file.

An exception inside `with fs.open(..., "wb")` leaves a truncated object that others can see, so nothing is written but
by `put_file` (which aborts its upload) and single PUTs. A reply that says "stored" is not believed: the size is asked
for again, small objects are read back; and neither is one answer that says the opposite, because headers are lost and
bits flip on the way back too. What this gives up: a file must exist locally before it is sent.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from storage.filesystem import filesystem_of, is_local, local_path, written_beside

CONFLICTS = 5
"""Tries of an exclusive write that neither succeeds nor finds another's object."""
TRIES = 3
"""Times that something is sent, and that each is asked for, before it counts as not stored."""
PAUSE_S = 0.2


class Stored(NamedTuple):
    """What a listing says of an object."""

    bytes: int
    modified: float
    """Seconds since 1970, by the server's clock."""


def put_file(path: Path, uri: str) -> None:
    """Store the file `path` as the object `uri`. Raises OSError if it is not there afterwards with the same size."""
    filesystem, sent, stored = filesystem_of(uri), path.stat().st_size, 0
    for _ in range(TRIES):
        filesystem.put_file(str(path), uri)
        for _ in range(TRIES):
            stored = size_of(uri) or 0
            if stored == sent:
                return
            time.sleep(PAUSE_S)
    raise OSError(f"{uri}: {stored:,} bytes are stored, {sent:,} were sent, {TRIES} times")


def put_bytes(uri: str, data: bytes) -> None:
    """Store `data` as the object `uri` by one request. Raises OSError if other bytes are read back."""
    filesystem = filesystem_of(uri)
    for _ in range(TRIES):
        filesystem.pipe_file(uri, data)
        if _holds(uri, data):
            return
    raise OSError(f"{uri}: holds other bytes than were sent, {TRIES} times")


def create_bytes(uri: str, data: bytes) -> bool:
    """Write a file or an object that must not exist; return whether ours is the one that is there. Raises OSError.

    `data` must not be empty and must differ from what any other writer would write (hold the writer's name): what is
    read back decides, because a lost reply makes our own write look like another's, and some servers let two win.
    """
    if is_local(uri):
        return _create_local(local_path(uri), data)
    filesystem = filesystem_of(uri)
    for _ in range(CONFLICTS):
        try:
            filesystem.pipe_file(uri, data, mode="create")
        except OSError as error:
            if not _exists_already(error):
                raise
        try:
            return _holds(uri, data)
        except FileNotFoundError:  # a conflict with a writer who failed, or it was deleted meanwhile
            time.sleep(0.5)
    raise OSError(f"{uri}: refused as existing {CONFLICTS} times, and not there when read; try again")


def get_bytes(uri: str) -> bytes:
    """Return the bytes of the object `uri`. Raises FileNotFoundError."""
    data: bytes = filesystem_of(uri).cat_file(uri)
    return data


def get_file(uri: str, path: Path) -> None:
    """Copy the object `uri` to the file `path`, whose bytes are not to be trusted yet. Raises FileNotFoundError."""
    filesystem_of(uri).get_file(uri, str(path))


def size_of(uri: str) -> int | None:
    """Return the bytes of the object `uri`, None if there is none. Asks for the object itself, not a listing."""
    for tries_left in range(TRIES)[::-1]:
        try:
            info = filesystem_of(uri).info(uri)
            break
        except FileNotFoundError:
            return None
        except KeyError:  # s3fs, of a reply that has lost its headers
            if not tries_left:
                raise OSError(f"{uri}: the store does not tell its size, {TRIES} times") from None
    return int(info["size"]) if info["type"] == "file" else None


def children(uri: str) -> dict[str, int]:
    """Return the names directly under `uri` with their sizes, sorted; a folder has size 0. Nothing there: empty."""
    try:
        found = filesystem_of(uri).ls(uri, detail=True)
    except FileNotFoundError:
        return {}
    return dict(sorted((str(entry["name"]).rstrip("/").rsplit("/", 1)[-1], int(entry["size"] or 0)) for entry in found))


def files_below(uri: str) -> dict[str, Stored]:
    """Return every object below `uri` by its name from there, sorted; nothing there: empty. One request per 1,000."""
    filesystem = filesystem_of(uri)
    start = len(str(filesystem._strip_protocol(uri))) + 1
    found = filesystem.find(uri, detail=True)
    return {name[start:]: _stored(info) for name, info in sorted(found.items()) if name[start:]}


def files_in(uri: str, prefix: str) -> dict[str, Stored]:
    """Return the objects directly under `uri` whose names begin with `prefix` (not empty), sorted."""
    found = filesystem_of(uri).find(uri, maxdepth=1, prefix=prefix, detail=True)
    return {name.rsplit("/", 1)[-1]: _stored(info) for name, info in sorted(found.items())}


def remove(uri: str) -> None:
    """Delete the object `uri`; one that is gone already is no error."""
    with suppress(FileNotFoundError):
        filesystem_of(uri).rm_file(uri)


def remove_all(uri: str) -> None:
    """Delete everything under `uri`, which may be nothing. Raises OSError if something is still there afterwards."""
    filesystem = filesystem_of(uri)
    with suppress(FileNotFoundError):
        filesystem.rm(uri, recursive=True)
    if left := filesystem.find(uri):  # s3fs says nothing of objects that a bulk delete could not delete
        raise OSError(f"{uri}: {len(left)} objects could not be deleted, {left[0]} among them; is deleting allowed?")


def _stored(info: dict[str, Any]) -> Stored:
    return Stored(int(info["size"]), info["LastModified"].timestamp())


def _holds(uri: str, data: bytes) -> bool:
    """Return whether an object holds `data`; other bytes are believed when they came twice."""
    before = None
    for _ in range(CONFLICTS):
        found = get_bytes(uri)
        if found in (data, before):
            break
        before = found
    return found == data


def _create_local(path: Path, data: bytes) -> bool:
    """Write beside the place and link there, which fails if something is there: never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path, data) as made:
        try:
            os.link(made, path)
        except FileExistsError:
            return False
    return True


def _exists_already(error: BaseException) -> bool:
    """Return whether a conditional write was refused because the object exists; servers say so in several ways."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(cause, FileExistsError) or status in (409, 412):
            return True
        cause = cause.__cause__
    return False
