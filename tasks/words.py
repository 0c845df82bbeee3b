"""Times and sizes as people read them, in tables and on pages."""

from __future__ import annotations


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
