"""Which files on this machine hold text worth reading: Python's library, installed packages, manuals, translations.

Files are looked up once per process: what runs us does not change under us. Names are relative to where things are
installed, so that two machines with the same packages see the same names in the same order. What this gives up:
packages that live in zip files or in editable checkouts are not seen.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

SYSTEM_FOLDERS = {"man": Path("/usr/share/man"), "doc": Path("/usr/share/doc"), "locale": Path("/usr/share/locale")}
_LARGEST = 200_000
"""Bytes; larger files are tables, bundles and generated code more often than text."""
_SKIPPED_FOLDERS = frozenset(("__pycache__", "site-packages", "dist-packages", "node_modules"))


@dataclass(frozen=True, slots=True)
class Found:
    """A file and what it belongs to."""

    path: str
    name: str
    """Place and relative path: `packages/numpy/linalg/__init__.py`, `stdlib/json/decoder.py`, `man/man1/ls.1.gz`."""
    size: int

    @property
    def ending(self) -> str:
        """The file's suffix, lower case, that of the packed file for .gz."""
        return os.path.splitext(self.name.lower().removesuffix(".gz"))[1]

    @property
    def group(self) -> str:
        """What it is spread over: the package, or for manual pages the section and first letter."""
        parts = self.name.split("/")
        if parts[0] == "man":
            return "/".join(parts[:-1]) + "/" + parts[-1][:1]
        if parts[0] == "locale":
            return parts[-1]
        return "/".join(parts[:2])


@cache
def package_files() -> tuple[Found, ...]:
    """Return the files of Python's standard library and of the installed packages, by name."""
    paths = sysconfig.get_paths()
    packages = {Path(paths[key]).resolve() for key in ("purelib", "platlib")}
    found = [*_below(Path(paths["stdlib"]), "stdlib")]
    for folder in packages:
        found += _below(folder, "packages")
    return tuple(sorted(found, key=lambda file: file.name))


@cache
def system_files() -> tuple[Found, ...]:
    """Return the files of the manual, documentation and translation folders, by name; none where they are missing."""
    found = [file for place, folder in SYSTEM_FOLDERS.items() for file in _below(folder, place)]
    return tuple(sorted(found, key=lambda file: file.name))


@cache
def installed_state() -> str:
    """Return a digest of the names and sizes of all these files."""
    files = "\0".join(f"{file.name} {file.size}" for file in (*package_files(), *system_files()))
    return blake2b(files.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def distributions() -> list[str]:
    """Return `name-version` of every installed distribution, sorted."""
    tops = {file.name.split("/")[1] for file in package_files() if file.name.startswith("packages/")}
    return sorted(top.removesuffix(".dist-info") for top in tops if top.endswith(".dist-info"))


def spread(files: Iterable[Found]) -> list[Found]:
    """Return `files` in a fixed order that takes one of each group in turn, so that a cut keeps something of all."""
    turn: dict[str, int] = {}
    placed = []
    for digest, file in sorted(((_digest(file), file) for file in files), key=lambda pair: pair[0]):
        turn[file.group] = turn.get(file.group, -1) + 1
        placed.append((turn[file.group], digest, file))
    return [file for _, _, file in sorted(placed, key=lambda place: place[:2])]


@cache
def licences() -> dict[str, str]:
    """Return the licence that each installed package declares, by its top-level folder or module."""
    found = {}
    for file in package_files():
        if file.name.endswith(".dist-info/METADATA"):
            head = Path(file.path).read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
            declared = re.search(r"^License(?:-Expression)?: (\S.{0,59})$", head, re.MULTILINE)
            if declared:
                found.update(dict.fromkeys(_modules(Path(file.path)), declared[1]))
    return found


def _digest(file: Found) -> bytes:
    return blake2b(file.name.encode("utf-8", "replace")).digest()


def _modules(metadata: Path) -> set[str]:
    distribution = metadata.parent.name
    names = {distribution, distribution.split("-")[0].lower()}
    listed = metadata.parent / "top_level.txt"
    return names | set(listed.read_text().split()) if listed.exists() else names


def _below(folder: Path, place: str) -> Iterator[Found]:
    """Yield the regular files below `folder` that are small enough to be text; links would count files twice."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name = f"{place}/{entry.name}"
        if entry.is_dir(follow_symlinks=False) and entry.name not in _SKIPPED_FOLDERS:
            yield from _below(Path(entry.path), name)
        elif entry.is_file(follow_symlinks=False) and 0 < (size := entry.stat().st_size) <= _LARGEST:
            yield Found(entry.path, name, size)
