"""Records the files with a called function; Python imports this file when a process starts (see `first_step`).

Standard library only, and nothing that a process of herd would not import anyway. A path is written when its first
function is called, so that a process that is killed or forked loses nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

FOLDER, LAST = os.environ["CALLED_FILES_FOLDER"], os.environ["CALLED_FILES_LAST"]
PACKAGES = tuple(os.environ["CALLED_FILES_PACKAGES"].split(os.pathsep))
ENDED = os.path.join(FOLDER, "ended")
"""Made when the function LAST is called; no process records anything after that."""
FUNCTION = 1
"""CO_OPTIMIZED: in the code of functions, not of modules and classes."""
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Before Python 3.12 these are functions, which a module calls when it is imported."""
seen: set[str] = set()
"""Files that are recorded, and those of other packages."""


def record_call(frame: FrameType, event: str, argument: Any) -> None:
    """Trace function that only hears of calls, since it returns none for lines: a fourth of a profiler's events."""
    code = frame.f_code
    path, last = code.co_filename, code.co_name == LAST
    if path in seen and not last:
        return
    if not path.startswith(PACKAGES):
        seen.add(path)
    elif code.co_flags & FUNCTION and code.co_name not in COMPREHENSIONS and not os.path.exists(ENDED):
        seen.add(path)
        with open(os.path.join(FOLDER, f"{os.getpid()}.files"), "a") as file:
            file.write(path + "\n")
        if last:
            open(ENDED, "w").close()


threading.settrace(record_call)
sys.settrace(record_call)
