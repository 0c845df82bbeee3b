"""Globs in addresses: `*`, `?`, `[ab]`, `**` as a whole name, and alternatives in braces, `*.{csv,tsv}`."""

from __future__ import annotations

import re
from collections.abc import Callable

_MAGIC = re.compile(r"[*?\[{]")
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def is_glob(path: str) -> bool:
    """Return whether `path` may be a glob."""
    return bool(_MAGIC.search(path))


def alternatives(pattern: str) -> list[str]:
    """Return the patterns without braces that `pattern` stands for, in order; braces without a comma are names."""
    if (braces := _BRACES.search(pattern)) is None:
        return [pattern]
    parts = (f"{pattern[: braces.start()]}{part}{pattern[braces.end() :]}" for part in braces[1].split(","))
    return list(dict.fromkeys(each for part in parts for each in alternatives(part)))


def split_glob(path: str, is_folder: Callable[[str], bool]) -> tuple[str, str]:
    """Return what is above the first wildcard of `path`, with its `/`, and the pattern below; "" without a wildcard.

    A name that `is_folder` confirms is no wildcard: `x [v1]/*.jsonl`.
    """
    for mark in _MAGIC.finditer(path):
        end = path.find("/", mark.end())
        if end < 0 or not is_folder(path[:end]):
            cut = path.rfind("/", 0, mark.start()) + 1
            return path[:cut], path[cut:]
    return path, ""


def compile_glob(root: str, pattern: str) -> tuple[re.Pattern[str], int | None]:
    """Return what matches paths of the literal `root` with `pattern` below it, and how deep; None: at any depth."""
    from fsspec.utils import glob_translate

    each = alternatives(pattern)
    depth = None if "**" in pattern else max(one.count("/") for one in each) + 1
    return re.compile(f"{re.escape(root)}(?:{'|'.join(map(glob_translate, each))})"), depth
