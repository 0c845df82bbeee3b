"""The content of local files as SHA-256: a file is read again only if its size, times or inode changed.

What was read is remembered in the user's cache, a file per folder. A file that changed within two seconds before it was
read is not remembered: a later change may have the same times.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from herd.storage.digests import digest_file
from herd.storage.filesystem import cache_folder, write_atomic
from herd.storage.processes import parallel_map

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
