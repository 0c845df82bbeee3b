"""Files in an object store, moved whole and checked: what checkpoints need of s3fs beyond naming a file.

An exception inside `with fs.open(..., "wb")` leaves a truncated object that others can see, so nothing is written but
by `put_file` (which aborts its upload) and single PUTs. A reply that says "stored" is not believed: the size is asked
for again, small objects are read back. What this gives up: a file must exist locally before it is sent.
"""

from __future__ import annotations

from pathlib import Path

from storage.filesystem import filesystem_of


def put_file(path: Path, uri: str) -> None:
    """Store the file `path` as the object `uri`. Raises OSError if it is not there afterwards with the same size."""
    filesystem = filesystem_of(uri)
    filesystem.put_file(str(path), uri)
    stored, sent = int(filesystem.info(uri)["size"]), path.stat().st_size
    if stored != sent:
        raise OSError(f"{uri}: {stored:,} bytes are stored, {sent:,} were sent")


def put_bytes(uri: str, data: bytes) -> None:
    """Store `data` as the object `uri` by one request. Raises OSError if other bytes are read back."""
    filesystem = filesystem_of(uri)
    filesystem.pipe_file(uri, data)
    if filesystem.cat_file(uri) != data:
        raise OSError(f"{uri}: holds other bytes than were sent")


def get_bytes(uri: str) -> bytes:
    """Return the bytes of the object `uri`. Raises FileNotFoundError."""
    data: bytes = filesystem_of(uri).cat_file(uri)
    return data


def get_file(uri: str, path: Path) -> None:
    """Copy the object `uri` to the file `path`, whose bytes are not to be trusted yet. Raises FileNotFoundError."""
    filesystem_of(uri).get_file(uri, str(path))


def children(uri: str) -> dict[str, int]:
    """Return the names directly under `uri` with their sizes, sorted; a folder has size 0. Nothing there: empty."""
    try:
        found = filesystem_of(uri).ls(uri, detail=True)
    except FileNotFoundError:
        return {}
    return dict(sorted((str(entry["name"]).rstrip("/").rsplit("/", 1)[-1], int(entry["size"] or 0)) for entry in found))


def remove(uri: str) -> None:
    """Delete the object `uri`; one that is gone already is no error."""
    filesystem = filesystem_of(uri)
    if filesystem.exists(uri):
        filesystem.rm_file(uri)


def remove_all(uri: str) -> None:
    """Delete everything under `uri`, which may be nothing."""
    filesystem = filesystem_of(uri)
    if filesystem.exists(uri):
        filesystem.rm(uri, recursive=True)
