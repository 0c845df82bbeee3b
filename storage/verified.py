"""Bytes of an object store that are those which were committed, or an error that names the place.

Networks and disks flip bits that TCP and a server's own checks let through (measured: S3 servers that store no checksum
return wrong bytes without a word), so what comes is hashed, and asked for again if it is wrong. What this gives up: an
object that is really damaged is brought three times before that is said.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from storage.digests import PAGE, FileDigest, digest_file, wrong_page
from storage.filesystem import filesystem_of
from storage.objects import get_file

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
    raise WrongBytes(f"{uri}: bytes {start:,} to {end:,} are not what was committed ({wrong}); {_REMEDY}")


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
        f"were committed; {_REMEDY}"
    )


_REMEDY = f"asked {TRIES} times; if it is damaged, set it aside (herd verify --set-aside) and make it again"
