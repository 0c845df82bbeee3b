"""Real documents found on this machine, by domain: the source `installed`, which needs no download and no network.

general: package descriptions and documentation, docstrings, manual pages. math: generated worked problems beside the
documentation of numerical packages. code: the standard library and installed packages. multilingual: translated
messages and manual pages, then generated problems in five languages. Order is fixed by file names and goes round the
packages, so a limit keeps some of each. What this gives up: the text is technical; a model trained on it knows
software, not the world.
"""

from __future__ import annotations

import gzip
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from llama3.data.demo.manual_pages import manual_text
from llama3.data.demo.translations import (
    catalogue_documents,
    catalogue_language,
    description,
    docstrings,
    read_mo,
    read_po,
)
from llama3.data.demo.word_problems import translated_document
from llama3.data.demo.worked_problems import document
from llama3.data.readers.document import GENERATED, Document, format_of
from llama3.data.text.language import primary
from llama3.recipe.base import Domain

# Which files on this machine hold text worth reading: Python's library, installed packages, manuals, translations.
#
# Files are looked up once per process: what runs us does not change under us. Names are relative to where things
# are installed, so that two machines with the same packages see the same names in the same order. What this gives
# up: packages that live in zip files or in editable checkouts are not seen.

SYSTEM_FOLDERS = {"man": Path("/usr/share/man"), "doc": Path("/usr/share/doc"), "locale": Path("/usr/share/locale")}
_LARGEST_FILE = 200_000
"""Bytes; larger files are tables, bundles and generated code more often than text."""
_SKIPPED_FOLDERS = frozenset(("__pycache__", "site-packages", "dist-packages", "node_modules"))


@dataclass(frozen=True, slots=True)
class InstalledFile:
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
def package_files() -> tuple[InstalledFile, ...]:
    """Return the files of Python's standard library and of the installed packages, by name."""
    paths = sysconfig.get_paths()
    packages = {Path(paths[key]).resolve() for key in ("purelib", "platlib")}
    found = [*_below(Path(paths["stdlib"]), "stdlib")]
    for folder in packages:
        found += _below(folder, "packages")
    return tuple(sorted(found, key=lambda file: file.name))


@cache
def system_files() -> tuple[InstalledFile, ...]:
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


def spread(files: Iterable[InstalledFile]) -> list[InstalledFile]:
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


def _digest(file: InstalledFile) -> bytes:
    return blake2b(file.name.encode("utf-8", "replace")).digest()


def _modules(metadata: Path) -> set[str]:
    distribution = metadata.parent.name
    names = {distribution, distribution.split("-")[0].lower()}
    listed = metadata.parent / "top_level.txt"
    return names | set(listed.read_text().split()) if listed.exists() else names


def _below(folder: Path, place: str) -> Iterator[InstalledFile]:
    """Yield the regular files below `folder` that are small enough to be text; links would count files twice."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name = f"{place}/{entry.name}"
        if entry.is_dir(follow_symlinks=False) and entry.name not in _SKIPPED_FOLDERS:
            yield from _below(Path(entry.path), name)
        elif entry.is_file(follow_symlinks=False) and 0 < (size := entry.stat().st_size) <= _LARGEST_FILE:
            yield InstalledFile(entry.path, name, size)


PROBLEM_DOCUMENTS = 20_000
"""Generated documents of math where nothing limits the source: about 19 MB."""
TRANSLATED_DOCUMENTS = 4_000
"""Generated documents after the real ones of multilingual: about 2.5 MB."""
_PROBLEM_SHARE = 0.6
"""Of the bytes of math, as long as real text lasts."""
_CODE = frozenset(
    (".py", ".pyx", ".pxd", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".js", ".ts", ".f90", ".sh")
)
_LARGEST = 50_000
"""Bytes of a file once unpacked; with longer files, a small limit would hold few documents of few packages."""
_PACKED = 3
"""How much gzip makes of manual pages and documentation, roughly."""
_PROSE = frozenset((".md", ".rst", ".txt"))
_MATH_PACKAGES = frozenset(
    (
        "numpy",
        "scipy",
        "sympy",
        "mpmath",
        "networkx",
        "sklearn",
        "statsmodels",
        "gmpy2",
        "shapely",
        "contourpy",
        "cvxpy",
    )
)
_MATH_MODULES = frozenset(
    ("statistics.py", "fractions.py", "decimal.py", "_pydecimal.py", "random.py", "numbers.py", "heapq.py", "bisect.py")
)
_NO_PROSE = re.compile(
    r"licen[sc]e|copying|copyright|notice|authors|contributors|maintainers|change|news|history|release|todo|credits|thanks"
    r"|top_level|entry_points|requirements|sources\.txt|/tests?/|/testing/|/data/|test_?data|installed-files",
    re.IGNORECASE,
)
_LONGEST_LINE = 1_000
"""Characters; longer lines mean minified or generated code."""


def installed_documents(domain: Domain, name: str, seed: int, system: bool) -> Iterator[Document]:
    """Yield the documents of `domain` that this machine offers, under the source name `name`."""
    real = _documents(domain, name, system)
    if domain == "math":
        yield from _between_problems(real, name, seed)
    yield from real
    if domain == "multilingual":
        for index in range(TRANSLATED_DOCUMENTS):
            language, text = translated_document(seed, index)
            yield Document(text, f"{GENERATED}{language}/{seed}/{index}", language, "CC0-1.0", name)


def _between_problems(real: Iterator[Document], name: str, seed: int) -> Iterator[Document]:
    """Yield generated problems with documents of `real` between them, so that any cut holds both in their shares."""
    made, read = 0, 0
    for index in range(PROBLEM_DOCUMENTS):
        text = document(seed, index)
        yield Document(text, f"{GENERATED}{seed}/{index}", "en", "CC0-1.0", name)
        made += len(text)
        while made * (1 - _PROBLEM_SHARE) > read * _PROBLEM_SHARE and (found := next(real, None)) is not None:
            read += found.size
            yield found


def installed_fingerprint(domain: Domain, system: bool) -> list[object]:
    """Return what the documents of `domain` depend on: the interpreter, the distributions, file names and sizes."""
    files = sorted((file.name, file.size) for file in _files(domain, system))
    return [list(sys.version_info[:3]), distributions(), files]


@cache  # a run asks for them in its preflight, its key and twice in its first step
def _files(domain: Domain, system: bool) -> list[InstalledFile]:
    """Return the files that `domain` reads, in the order of `spread`; none of them twice in one domain."""
    chosen: Callable[[InstalledFile], bool] = {
        "general": lambda file: _is_prose(file) and not _is_math(file),
        "math": lambda file: _is_prose(file) and _is_math(file),
        "code": lambda file: file.ending in _CODE and file.size <= _LARGEST and file.name[:4] in ("stdl", "pack"),
        "multilingual": _is_translation,
    }[domain]
    return spread(file for file in (*package_files(), *(system_files() if system else ())) if chosen(file))


def _is_math(file: InstalledFile) -> bool:
    parts = file.name.split("/")
    package = parts[1].split("-")[0].lower()
    return package in _MATH_PACKAGES or (parts[0] == "stdlib" and parts[1] in _MATH_MODULES)


def _is_prose(file: InstalledFile) -> bool:
    place, _, rest = file.name.partition("/")
    if file.ending != ".py" and file.size * (_PACKED if rest.endswith(".gz") else 1) > _LARGEST:
        return False
    if place == "man":
        return bool(re.match(r"man\d", rest))
    if place == "locale" or _NO_PROSE.search(rest):
        return False
    if place == "doc" and file.ending in (".html", ""):
        return "readme" in rest.lower()
    return file.ending in _PROSE or (place != "doc" and (file.ending == ".py" or rest.endswith(".dist-info/METADATA")))


def _is_translation(file: InstalledFile) -> bool:
    if file.name.startswith("man/"):
        return not re.match(r"man/(man\d|en)", file.name)
    language = catalogue_language(file.name) if file.ending in (".mo", ".po") else None
    if language is None or language == "en":
        return False
    return file.ending == ".mo" or not os.path.exists(file.path[:-3] + ".mo")


def _documents(domain: Domain, name: str, system: bool) -> Iterator[Document]:
    known = licences()
    for file in _files(domain, system):
        licence = _licence(file, known)
        for number, (text, language) in enumerate(_read(file, domain)):
            if text.strip():
                url = file.name if number == 0 else f"{file.name}#{number}"
                yield Document(text, url, language, licence, name, format_of(file.ending[1:]))


def _licence(file: InstalledFile, known: dict[str, str]) -> str:
    place, _, rest = file.name.partition("/")
    top = rest.split("/")[0]
    return "PSF-2.0" if place == "stdlib" else known.get(top, known.get(top.lower(), "unknown"))


def _read(file: InstalledFile, domain: Domain) -> Iterator[tuple[str, str | None]]:
    """Yield (text, language or None) of one file; a file that went away or is damaged yields nothing."""
    try:
        data = Path(file.path).read_bytes()
        data = gzip.decompress(data) if file.name.endswith(".gz") else data
        if file.ending in (".mo", ".po"):
            yield from _translated(file, data)
            return
    except (OSError, EOFError, ValueError):
        return
    text = data.decode("utf-8", "replace")
    if domain == "code":
        if max(map(len, text.split("\n"))) <= _LONGEST_LINE:
            yield text, None
    elif file.name.startswith("man/"):
        yield manual_text(text), _manual_language(file.name)
    elif file.ending == ".py":
        yield from ((part, None) for part in docstrings(text, _module(file.name)))
    else:
        yield description(text) if file.name.endswith("METADATA") else text, None


def _translated(file: InstalledFile, data: bytes) -> Iterator[tuple[str, str | None]]:
    language = primary(catalogue_language(file.name) or "")
    messages = read_mo(data) if file.ending == ".mo" else read_po(data.decode("utf-8", "replace"))
    for text in catalogue_documents(messages):
        yield text, language


def _manual_language(name: str) -> str:
    folder = name.split("/")[1]
    return "en" if re.match(r"man\d", folder) else primary(folder)


def _module(name: str) -> str:
    return name.partition("/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
