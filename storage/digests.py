"""Size and SHA-256 of files and pages, computed by several threads, and signatures of documents.

SHA-256 and not a checksum, because the digest is also an unforgeable name; it costs 0.6 s per GB and core where the
processor has instructions for it. Token shards also have a digest per page (32 bytes per MiB), so that a range read can
be verified without the rest of the file.

Write access to the bucket is not enough to forge a score: HERD_SIGNING_KEY names a file with an Ed25519 private key
(PEM), HERD_TRUSTED_KEYS files with public keys, separated by colons. If either is set, manifests and promotion records
without a signature by one of these keys are refused. To revoke a leaked key, remove it from the trusted keys and sign
its artifacts again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from herd.storage.filesystem import cache_folder, sync_folder, write_atomic
from herd.storage.processes import parallel_map

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PAGE = 2**20
"""Bytes of a page; the last one of a file may be shorter."""
PAGED = ".bin"
"""Suffix of files that are read in pages (token shards); page digests double the cost, so others have none."""
PAGE_DIGEST = 32
"""Bytes of a page's SHA-256."""

SIGNING, TRUSTED = "HERD_SIGNING_KEY", "HERD_TRUSTED_KEYS"
OTHERS = 0o077
"""Permission bits of group and others."""
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


class FileDigest(BaseModel):
    bytes: int
    sha256: str


def digest_bytes(data: bytes) -> FileDigest:
    """Return size and SHA-256 of `data`."""
    return FileDigest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def digest_json(data: object) -> str:
    """Return the SHA-256 (hex) of `data` as JSON; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_file(path: Path, sync: bool = False) -> FileDigest:
    """Return size and SHA-256 of a file; `sync` also flushes it to the disk. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return FileDigest(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def digest_pages(path: Path) -> tuple[FileDigest, bytes]:
    """Return the digest of a file and the concatenated SHA-256 of its pages, from one read. Raises OSError."""
    whole, pages, size = hashlib.sha256(), bytearray(), 0
    with path.open("rb") as file:
        while data := file.read(PAGE):
            whole.update(data)
            pages += hashlib.sha256(data).digest()
            size += len(data)
    return FileDigest(bytes=size, sha256=whole.hexdigest()), bytes(pages)


def first_wrong_page(data: bytes, digests: bytes) -> int | None:
    """Return the index of the first page in `data` that does not match `digests`; None if all match."""
    for number, start in enumerate(range(0, len(data), PAGE)):
        expected = digests[number * PAGE_DIGEST : (number + 1) * PAGE_DIGEST]
        if hashlib.sha256(memoryview(data)[start : start + PAGE]).digest() != expected:
            return number
    return None


def digest_folder(folder: Path, sync: bool = False) -> dict[str, FileDigest]:
    """Return relative name -> digest of every file under `folder`, sorted. Raises OSError.

    `sync` also flushes the files and the folders below `folder` to the disk.
    """
    entries = sorted(folder.rglob("*"))
    paths = [path for path in entries if path.is_file()]
    digests = parallel_map(lambda path: digest_file(path, sync), paths)
    for path in entries if sync else ():
        if path.is_dir():
            sync_folder(path)
    return {path.relative_to(folder).as_posix(): digest for path, digest in zip(paths, digests, strict=True)}


def sign(what: str, digest: str) -> str:
    """Return the signature of a document of kind `what` with that SHA-256, empty if no key is configured.

    Raises ValueError for an unusable key, and if there are trusted keys but no signing key.
    """
    key = _signing_key(os.environ.get(SIGNING, ""))
    if key is None and os.environ.get(TRUSTED):
        raise ValueError(f"{SIGNING}: is not set, but {TRUSTED} is, so artifacts made here would be refused; set both")
    return base64.b64encode(key.sign(_message(what, digest))).decode() if key else ""


def signature_error(what: str, digest: str, signature: str) -> str:
    """Return why a document is refused; empty if a trusted key signed it, or no key is configured.

    Raises ValueError for an unusable key.
    """
    keys = _trusted_keys(os.environ.get(SIGNING, ""), os.environ.get(TRUSTED, ""))
    if not keys:
        return ""
    if not signature:
        return f"is not signed, but {SIGNING} or {TRUSTED} requires it; if it is yours, sign it: herd verify --sign"
    from cryptography.exceptions import InvalidSignature

    for key in keys:
        try:
            key.verify(base64.b64decode(signature), _message(what, digest))
        except (InvalidSignature, ValueError):
            continue
        return ""
    return f"is signed by none of the {len(keys)} keys of {SIGNING} and {TRUSTED}; do not use it"


def _message(what: str, digest: str) -> bytes:
    return f"herd {what}\n{digest}\n".encode()


@lru_cache(8)
def _signing_key(path: str) -> Ed25519PrivateKey | None:
    if not path:
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    remedy = "make one: openssl genpkey -algorithm ed25519 -out FILE; chmod 600 FILE"
    try:
        file = Path(path).expanduser()
        if file.stat().st_mode & OTHERS:
            raise ValueError("others can read it; chmod 600 FILE")
        key = load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{SIGNING}: {path}: cannot be used ({error}); {remedy}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{SIGNING}: {path}: is not an Ed25519 key; {remedy}")
    return key


@lru_cache(8)
def _trusted_keys(signing: str, paths: str) -> tuple[Ed25519PublicKey, ...]:
    if not signing and not paths:
        return ()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    own = _signing_key(signing)
    trusted = [own.public_key()] if own else []
    for path in filter(None, paths.split(os.pathsep)):
        try:
            keys = [load_pem_public_key(text) for text in _PUBLIC.findall(Path(path).expanduser().read_bytes())]
        except (OSError, ValueError) as error:
            raise ValueError(f"{TRUSTED}: {path}: cannot be used ({error})") from None
        ed25519 = [key for key in keys if isinstance(key, Ed25519PublicKey)]
        if not ed25519 or len(ed25519) != len(keys):
            raise ValueError(
                f"{TRUSTED}: {path}: is not a file of Ed25519 public keys; "
                f"write: openssl pkey -in KEY -pubout -out {path}"
            )
        trusted += ed25519
    return tuple(trusted)


# Digests of local files by content: a file is read again only if its size, times or inode changed. What was read is
# remembered in the user's cache, a file per folder. A file that changed within two seconds before it was read is not
# remembered: a later change may have the same times.

SETTLED_NS = 2_000_000_000
_Known = dict[str, tuple[list[int], str]]


def content_digests(paths: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each of `paths`, absolute paths of regular files. Raises OSError."""
    digests: dict[str, str] = {}
    for folder, names in groupby(sorted(paths, key=os.path.split), key=os.path.dirname):
        digests |= _in_folder(folder, [os.path.basename(path) for path in names])
    return digests


def _in_folder(folder: str, names: Sequence[str]) -> dict[str, str]:
    cached = cache_folder() / "digests" / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}.json"
    known: _Known = {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        known = {name: (list(state), str(digest)) for name, (state, digest) in json.loads(cached.read_text()).items()}

    def digest(name: str) -> tuple[list[int], str]:
        path = Path(folder, name)
        state = _state(path)
        if name in known and known[name][0] == state:
            return known[name]
        while True:
            now, found = time.time_ns(), digest_file(path).sha256
            before, state = state, _state(path)
            if before == state:
                return (state if max(state[1:3]) + SETTLED_NS < now else []), found

    found = dict(zip(names, parallel_map(digest, names), strict=True))
    if any(known.get(name) != entry for name, entry in found.items()):
        settled = {name: entry for name, entry in (known | found).items() if entry[0]}
        with suppress(OSError):
            write_atomic(cached, json.dumps(settled))
    return {os.path.join(folder, name): sha256 for name, (_, sha256) in found.items()}


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
