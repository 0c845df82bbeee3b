"""Order of the steps, forms and the command line."""

import ctypes
import os
import sys
from contextlib import suppress

if sys.platform == "win32":  # else the first import of a lock would end in a traceback
    sys.exit("error  herd needs Linux; on Windows use WSL 2")

# What a data step frees must leave the process, because the trainer beside it needs it: 0.3 GiB of 2 in the quickstart.
# Arrow's own allocator keeps pages, and so does a heap for each thread (M_ARENA_MAX = -8; only glibc has them).
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
with suppress(AttributeError):
    ctypes.CDLL(None).mallopt(-8, 2)
