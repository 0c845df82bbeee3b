"""Times, sizes, losses and commands as people read them, in tables, on pages and below a run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.root import DEFAULT_ROOT, Root


def command(root: Root, *words: str) -> str:
    """Return a command line of herd that works as printed: on this root, by the program that was started."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "herd" and not shutil.which("herd") else "herd"
    place = [] if Root.of(os.environ.get("HERD_ROOT") or DEFAULT_ROOT) == root else ["--root", root.uri]
    return shlex.join([program, *words, *place])


def losses(facts: Mapping[str, Any], digits: int = 3) -> str:
    """Return the mean losses at both ends of a stage: `5.390 > 4.978`."""
    return f"{facts['first_loss']:.{digits}f} > {facts['last_loss']:.{digits}f}"


def bits_per_byte(facts: Mapping[str, Any], digits: int = 3) -> str:
    """Return what a stage scored on held-out text at its end; empty where nothing was scored."""
    return f"{facts['bits_per_byte']:.{digits}f}" if "bits_per_byte" in facts else ""


def clock(seconds: float) -> str:
    """Return a length of time: `45 s`, `3:07 min`, `5:12 h`, `3 d 4 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60, whole // 3600
    if hours == 0:
        return f"{minutes}:{whole % 60:02d} min"
    return f"{hours}:{minutes % 60:02d} h" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def size(count: float) -> str:
    """Return a number of bytes: `812 B`, `4.2 MB`, `1.7 TB` (powers of 1000)."""
    for suffix, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {suffix}"
    return f"{count:.0f} B"
