"""Compiled kernels; their machine code is kept under a digest of all their sources.

numba keeps code by the time stamp of the file that holds a kernel, and does not see that one it calls in another file
has changed: a new rule in one file was ignored by a loop in another. With the digest in the folder's name, old code is
not found. The folder lies beside the sources, or in the user's cache where those cannot be written.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba

from storage.filesystem import cache_folder

_HERE = Path(__file__).parent


def _cache_folder() -> Path:
    sources = sorted([*_HERE.glob("*.py"), _HERE.parent / "text" / "words.py"])
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    cache = _HERE / "__pycache__"
    if not os.access(cache if cache.exists() else _HERE, os.W_OK):
        cache = cache_folder()
    return cache / f"kernels-{digest}"


if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = str(_cache_folder())
