"""Which files of a repository are code that people wrote, and in which language: by name, then by their first lines.

Languages and endings are those of Pygments, which `rich` installs.
"""

from __future__ import annotations

import fnmatch
import re
from functools import cache, lru_cache

from pygments.lexers import get_all_lexers  # type: ignore[import-untyped]

VENDORED, GENERATED, NOT_CODE, BINARY = "vendored", "generated", "not_code", "binary"
LEFT_OUT = {
    VENDORED: "In a folder of foreign code: node_modules, vendor, third_party.",
    GENERATED: "Written by a tool: *.min.js, a lock file, or its first lines say so.",
    NOT_CODE: "Of a repository, but its ending is of no programming language.",
    BINARY: "Of a repository; it has an ending of code, and is not text.",
}
"""Why a file of a source with `format: code` is not read."""
_FOREIGN = {
    "node_modules", "bower_components", "jspm_packages", "vendor", "vendored", "third_party", "third-party",
    "thirdparty", "3rdparty", "pods", "carthage", "godeps", "site-packages", "__pycache__", "venv", "cvs",
}  # fmt: skip
_BY_TOOLS = re.compile(
    r".*[.-]min\.(js|css|mjs)|.*\.(bundle|chunk)\.(js|css)|.*\.lock|(package-lock|npm-shrinkwrap|packages\.lock)\.json"
    r"|pnpm-lock\.ya?ml|go\.sum|gradlew(\.bat)?|mvnw(\.cmd)?|.*\.pb\.(go|cc|h|c|swift)|.*_pb2?(_grpc)?\.(py|pyi|js|ts|rb)"
    r"|.*\.(g|freezed)\.dart|.*\.designer\.(cs|vb)|zz_generated\..*|.*_generated\.(go|rs|h)",
    re.I,
)
_HEADER = 20
"""Lines at the beginning that may say that a tool wrote the file."""
_COMMENT = re.compile(r"\s*(//|#|/\*|\*|--|;|%|<!--|\"\"\"|''')")
_GENERATED = re.compile(r"@generated\b|this (file|code) (is|was|has been) (auto|automatically)[ -]?generated", re.I)
_BY_A_TOOL, _DO_NOT = re.compile(r"\b(auto-?)?generated\b", re.I), re.compile(r"\bdo not (edit|modify|change)\b", re.I)
_NO_CODE = {
    "Text only", "JSON", "XML", "Gettext Catalog", "Diff", "WDiff", "ASCII armored", "Todotxt", "Hexdump",
    "GAP session", "Debian Control file", "Debian Sourcelist", "Srcinfo", "World of Warcraft TOC", "Python Traceback",
}  # fmt: skip
"""Data, keys and logs among the lexers."""
_COMMON = {
    ".as": "actionscript", ".asm": "nasm", ".bas": "vbnet", ".c": "c", ".cl": "commonlisp", ".fs": "fsharp",
    ".gd": "gdscript", ".h": "c", ".hh": "cpp", ".inc": "php", ".lean": "lean4", ".m": "objectivec",
    ".mm": "objectivecpp", ".pl": "perl", ".pm": "perl", ".pro": "prolog", ".r": "r", ".s": "gas",
    ".sc": "supercollider", ".sql": "sql", ".t": "perl", ".ttl": "turtle", ".v": "verilog",
}  # fmt: skip
"""The usual language of endings that several have."""
_NAMES = {"go.mod": "go", "go.work": "go", "Jenkinsfile": "groovy", "Justfile": "make"}
_PICTURES = "*.x[bp]m"


def reason_to_leave(below: str) -> str:
    """Return why the file of this path below its repository is not read, a key of LEFT_OUT; "" if it is."""
    *folders, name = below.split("/")
    if any(folder.lower() in _FOREIGN for folder in folders):
        return VENDORED
    return GENERATED if _BY_TOOLS.fullmatch(name) else "" if language_of(name) else NOT_CODE


@lru_cache(1 << 16)
def language_of(name: str) -> str:
    """Return the language of a file by its name, in lower case without punctuation; "" if it is not code."""
    names, endings, patterns = _languages()
    ending = f".{name.rpartition('.')[2].lower()}" if "." in name else ""
    if found := names.get(name) or endings.get(ending):
        return found
    return next((language for pattern, language in patterns if pattern.fullmatch(name)), "")


@cache
def _languages() -> tuple[dict[str, str], dict[str, str], list[tuple[re.Pattern[str], str]]]:
    """Return the languages by name, by ending and by pattern."""
    names: dict[str, str] = {}
    endings: dict[str, str] = {}
    patterns = []
    for title, aliases, files, _ in sorted(get_all_lexers(plugins=False)):
        language = re.sub(r"[\W_]", "", aliases[0].lower()) if aliases else ""
        if not language or title in _NO_CODE:
            continue
        for pattern in files:
            if not set(pattern[2:]) & set("*?[") and pattern.startswith("*."):
                endings.setdefault(pattern[1:].lower(), language)
            elif not set(pattern) & set("*?["):
                names.setdefault(pattern, language)
            elif pattern != _PICTURES:
                patterns.append((re.compile(fnmatch.translate(pattern)), language))
    return names | _NAMES, endings | _COMMON, patterns


def is_binary(data: bytes) -> bool:
    """Return whether git would call `data` binary: a zero in its first 8,000 bytes."""
    return b"\0" in data[:8000]


def is_generated(text: str) -> bool:
    """Return whether a comment in the first lines says that a tool wrote the file."""
    lines = text[:8000].split("\n", _HEADER)[:_HEADER]
    header = "\n".join(line for line in lines if _COMMENT.match(line))
    return bool(_GENERATED.search(header) or (_BY_A_TOOL.search(header) and _DO_NOT.search(header)))
