"""Numba kernels. Their machine code is cached in a folder named by a digest of all their sources.

numba invalidates cached code by the time stamp of the kernel's own file, so it misses a change in a kernel of another
file that it calls: a new rule in one file was ignored by a loop in another.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba

from herd.storage.filesystem import cache_folder

_HERE = Path(__file__).parent


def _cache_folder() -> Path:
    sources = sorted([*_HERE.glob("*.py"), _HERE.parent / "text" / "words.py"])
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    cache = _HERE / "__pycache__"  # beside the sources, or in the user's cache where those are read-only
    if not os.access(cache if cache.exists() else _HERE, os.W_OK):
        cache = cache_folder()
    return cache / f"kernels-{digest}"


if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = str(_cache_folder())
