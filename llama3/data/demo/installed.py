"""Real documents on this machine by domain: the source `installed`, which needs no download and no network.

general: package descriptions and documentation, docstrings, manual pages. math: generated problems and the
documentation of numerical packages. code: the standard library and installed packages. multilingual: translated
messages and manual pages, then generated problems in five languages. The text is technical.
"""

from __future__ import annotations

import ast
import gzip
import inspect
import os
import re
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email.parser import Parser
from functools import cache
from hashlib import blake2b
from pathlib import Path

from herd.llama3.data.demo.word_problems import document, translated_document
from herd.llama3.data.readers.document import GENERATED, Document, format_of
from herd.llama3.data.text.language import primary_subtag
from herd.llama3.recipe.base import Domain

# Manual pages: roff with the `man` and `mdoc` macros, without tables, equations, conditionals and macro definitions.
# Running `man` or `groff` would take 20 to 50 ms a page, and a slim container has neither.

_PLAIN = dict.fromkeys("&|^)/,%:c{}pud", "") | dict.fromkeys(" ~0", " ") | {"e": "\\", "t": "\t"}
"""One-character escapes with another meaning than the character itself."""
_GLYPHS = {
    **{"aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "Fo": "«", "Fc": "»"},
    **{"lB": "[", "rB": "]", "lC": "{", "rC": "}", "la": "⟨", "ra": "⟩", "ul": "_", "sh": "#", "at": "@", "Do": "$"},
    **{"em": "—", "en": "–", "hy": "-", "mi": "-", "bu": "•", "ha": "^", "ti": "~", "ga": "`", "rs": "\\", "or": "|"},
    **{"->": "→", "<-": "←", "<=": "≤", ">=": "≥", "!=": "≠", "+-": "±", "mu": "×", "de": "°"},
    **{"co": "©", "rg": "®", "tm": "™", "R": "®"},
}
_ESCAPE = re.compile(
    r"""\\(?:f(?:\[[^]]*\]|\(..|.)|s[-+]?\(?\d{1,2}|[*n](?:\[(?P<s2>[^]]*)\]|\((?P<s1>..)|.)|\[(?P<long>[^]]*)\]
    |\((?P<two>..)|[hvwzlLbDXNkom](?:'[^']*'|\[[^]]*\]|.)|(?P<one>.))""",
    re.DOTALL | re.VERBOSE,
)
_COMMENT = re.compile(r"""\\["#].*$""", re.MULTILINE)
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
_BREAKS = "PP P LP Pp HP IP TP TQ It sp RS RE Bl El br"
_PARAGRAPHS = frozenset(_BREAKS.split())
_LITERAL = {"nf": True, "EX": True, "Bd": True, "fi": False, "EE": False, "Ed": False}
_PAIRS = {"Op": "[]", "Aq": "<>", "Pq": "()", "Bq": "[]", "Brq": "{}", "Dq": "“”", "Sq": "‘’", "Ql": "‘’", "Qq": '""'}
_BRACKETS = {name: (pair[0], pair[1]) for name, pair in _PAIRS.items()}
_BRACKETS |= {"Fl": ("-", ""), "Oo": ("[", ""), "Oc": ("", "]")}
_MACROS = "TH Dd Dt Os PD UC AT DT Sm Rs Re URL LINKSTYLE"
_SETTINGS = "so ad na hy nh in ti ta ds nr rm ne ll ft ps vs tr als mso pl po bp cs fp hw hc lf ss do eo ec nop"
_IGNORED = frozenset((*_MACROS.split(), *_SETTINGS.split()))
_JOINED = frozenset(("BR", "IR", "RB", "RI", "BI", "IB"))
_BLOCKS = {"TS": "TE", "EQ": "EN", "de": ".", "de1": ".", "ig": ".", "am": "."}


def manual_text(roff: str) -> str:
    """Return the manual page `roff` as plain text; "" for a page that only refers to another (`.so`)."""
    page = _Page()
    lines = iter(_COMMENT.sub("", roff).replace("\\\n", "").split("\n"))
    for line in lines:
        if line[:1] not in (".", "'"):
            page.text(line)
            continue
        name, _, rest = line[1:].strip().partition(" ")
        if name in _BLOCKS:  # skip a table, an equation or a macro definition
            next((inner for inner in lines if inner.strip() == "." + _BLOCKS[name]), None)
        elif name in ("ie", "if", "el"):  # skip a conditional with its `\{ ... \}` group
            depth = line.count("\\{") - line.count("\\}")
            while depth > 0 and (inner := next(lines, None)) is not None:
                depth += inner.count("\\{") - inner.count("\\}")
        else:
            page.request(name, rest.strip())
    page.close()
    return "\n\n".join(block for block in page.blocks if block.strip())


class _Page:
    """Joins lines into filled paragraphs; between `.nf` and `.fi` lines do not change."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self._lines: list[str] = []
        self._literal = False

    def text(self, line: str) -> None:
        plain = unescape(line)
        if not plain.strip() and not self._literal:
            self.close()
        elif plain or self._literal:
            self._lines.append(plain.rstrip() if self._literal else plain.strip())

    def request(self, name: str, rest: str) -> None:
        if name in ("SH", "SS", "Sh", "Ss"):
            self.close()
            self.blocks.append(unescape(" ".join(arguments(rest))))
        elif name in _LITERAL:
            self.close()
            self._literal = _LITERAL[name]
        elif name in _PARAGRAPHS:
            self.close()
            words = arguments(rest)
            if name == "IP" and words:  # the tag of a list item
                self.text(words[0])
            elif name == "It" and words:
                self.text(_macro("", words))
        elif name not in _IGNORED and (text := _macro(name, arguments(rest))):
            self.text(text)

    def close(self) -> None:
        if self._lines:
            self.blocks.append(("\n" if self._literal else " ").join(self._lines))
        self._lines = []


def arguments(rest: str) -> list[str]:
    """Return the arguments of a macro line; quotes group words, and a doubled quote is a quote."""
    return [plain or quoted.replace('""', '"') for quoted, plain in _ARGUMENT.findall(rest)]


def unescape(text: str) -> str:
    """Return `text` with roff's escapes replaced by their characters; font and size changes are removed."""
    return _ESCAPE.sub(_character, text) if "\\" in text else text


def _character(match: re.Match[str]) -> str:
    if match["one"] is not None:
        return _PLAIN.get(match["one"], match["one"])
    name = match["long"] or match["two"] or match["s1"] or match["s2"]
    if name is None:
        return ""
    if re.fullmatch(r"u[0-9A-F]{4,6}", name):
        return chr(int(name[1:], 16)) if int(name[1:], 16) < 0x110000 else ""
    return _GLYPHS.get(name, "")


def _macro(name: str, words: list[str]) -> str:
    """Return the text of a macro and its arguments, which may contain `mdoc` macros."""
    if name in _JOINED:
        return "".join(words)
    if name in ("UR", "MT", "Lk", "Mt", "B", "I", "SM", "SB"):
        return " ".join(words)
    if name == "Xr" and len(words) > 1:
        return f"{words[0]}({words[1]}){''.join(words[2:])}"
    before, after = _BRACKETS.get(name, ("", ""))
    inner: list[str] = []
    for index, word in enumerate(words):
        if word in _BRACKETS or word == "Xr":
            inner.append(_macro(word, words[index + 1 :]))
            break
        if len(word) > 2 or not re.fullmatch(r"[A-Z][a-z]", word):
            inner.append(word)
    joined = re.sub(r" ([.,;:)\]])(?= |$)", r"\1", " ".join(inner))
    return f"{before}{joined}{after}"


# Prose inside software: translated messages (gettext catalogs, .mo and .po), docstrings, package descriptions.
#
# The messages of a catalog, and the docstrings of a module, keep their order and are joined into documents of about
# 4 kB.

_SHORTEST = 12
"""Minimum bytes of a message: labels such as `Open` teach little. Bytes, so that four Chinese characters are enough."""
_DOCUMENT = 4_000
"""Characters of a document. A whole module in one would repeat its section headings until a filter drops it."""
_LOCALE = re.compile(r"(?:^|/)([a-z]{2,3})(?:_[A-Z][A-Za-z]+)?(?:\.[\w-]+)?(?:@\w+)?(?:/LC_MESSAGES/[^/]+|\.[mp]o)$")
_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_ENTRY = re.compile(r'^(msgid|msgid_plural|msgstr(?:\[\d+\])?) ((?:"(?:[^"\\]|\\.)*"\s*)+)', re.MULTILINE)
_HEADER_CHARSET = re.compile(rb"charset=([\w-]+)")


def catalog_language(name: str) -> str | None:
    """Return the language in a catalog's path (`.../pt_BR/LC_MESSAGES/x.mo`, `po/de.po`), or None."""
    match = _LOCALE.search(name)
    return match[1] if match else None


def read_mo(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (original, translation) of a compiled catalog. Raises ValueError if `data` is not one.

    Layout: magic, revision, count N, offsets of two tables of N (length, offset) pairs. NUL separates plural forms, of
    which the first original and the last translation are used; EOT separates a context from its original.
    """
    order = _MAGIC.get(data[:4])
    if order is None or len(data) < 28:
        raise ValueError("the catalog does not begin with the magic number of a .mo file")
    try:
        count, originals, translated = struct.unpack_from(order + "3I", data, 8)
        tables = [struct.unpack_from(f"{order}{2 * count}I", data, start) for start in (originals, translated)]
    except struct.error as error:
        raise ValueError(f"the catalog is truncated ({error})") from error
    charset = "utf-8"
    for i in range(0, 2 * count, 2):
        original, text = (data[table[i + 1] : table[i + 1] + table[i]] for table in tables)
        if not original and (header := _HEADER_CHARSET.search(text)):
            charset = header[1].decode()
        yield _decode(original.split(b"\x04")[-1].split(b"\0")[0], charset), _decode(text.split(b"\0")[-1], charset)


def read_po(text: str) -> Iterator[tuple[str, str]]:
    """Yield (original, translation) of a catalog in source form, fuzzy and obsolete entries included."""
    original = ""
    for keyword, literals in _ENTRY.findall(text):
        value = ""
        for literal in re.findall(r'"(?:[^"\\]|\\.)*"', literals):
            try:
                value += str(ast.literal_eval(literal))
            except (ValueError, SyntaxError):
                value += literal.strip('"')
        if keyword == "msgid":
            original = value
        elif keyword.startswith("msgstr"):
            yield original, value


def catalog_documents(messages: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Yield documents of about 4 kB of the translations, in catalog order, without repeated translations."""
    seen: set[str] = set()
    lines: list[str] = []
    size = 0
    for original, text in messages:
        if not original or text == original or text in seen or len(text.encode("utf-8", "replace")) < _SHORTEST:
            continue
        seen.add(text)
        lines.append(text.strip())
        size += len(text)
        if size >= _DOCUMENT:
            yield "\n".join(lines)
            lines, size = [], 0
    if lines:
        yield "\n".join(lines)


def _decode(data: bytes, charset: str) -> str:
    try:
        return data.decode(charset, "replace")
    except LookupError:
        return data.decode("utf-8", "replace")


# One regular expression over comments and string literals is ten times as fast as `ast` (70 against 7 MB/s) and reads
# broken files and files for a newer Python. A literal alone on its line counts as a docstring.
_TOKENS = re.compile(
    r"""
    \#[^\n]*
    | ^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(?P<name>\w+)
    | ^[ \t]*[rRuU]?(?P<quote>\"{3}|'{3})(?P<text>.*?)(?:(?<!\\)|(?<=\\\\))(?P=quote)
    | \"{3}(?:[^\\]|\\.)*?\"{3} | '{3}(?:[^\\]|\\.)*?'{3}
    | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*'
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_SHORTEST_DOCSTRING = 60
"""Minimum characters: shorter docstrings mostly repeat the name."""


def docstrings(code: str, module: str) -> Iterator[str]:
    """Yield the docstrings in `code`, each below its name, in documents of about `_DOCUMENT` characters."""
    texts: list[str] = []
    name = module
    for token in _TOKENS.finditer(code):
        if token["name"]:
            name = token["name"]
        elif token["text"] and len(token["text"]) >= _SHORTEST_DOCSTRING:
            texts.append(f"{name}\n\n{inspect.cleandoc(token['text'])}")
            if sum(map(len, texts)) >= _DOCUMENT:
                yield "\n\n\n".join(texts)
                texts = []
    if texts:
        yield "\n\n\n".join(texts)


def description(metadata: str) -> str:
    """Return name, summary and long description of a distribution's METADATA (core metadata, PEP 566)."""
    message = Parser().parsestr(metadata)
    body = message.get_payload()
    long = body if isinstance(body, str) and body.strip() else inspect.cleandoc(message.get("Description", ""))
    return f"{message.get('Name', '')}\n\n{message.get('Summary', '')}\n\n{long}".strip()


SYSTEM_FOLDERS = {"man": Path("/usr/share/man"), "doc": Path("/usr/share/doc"), "locale": Path("/usr/share/locale")}
_LARGEST_FILE = 200_000
"""Maximum bytes: larger files are mostly tables, bundles and generated code."""
_SKIPPED_FOLDERS = frozenset(("__pycache__", "site-packages", "dist-packages", "node_modules"))
PROBLEM_DOCUMENTS = 20_000
"""Generated documents of math without a limit: about 19 MB."""
TRANSLATED_DOCUMENTS = 4_000
"""Generated documents after the real ones of multilingual: about 2.5 MB."""
_PROBLEM_SHARE = 0.6
"""Share of generated problems in the bytes of math, until real text ends."""
_CODE = frozenset(
    (".py", ".pyx", ".pxd", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".js", ".ts", ".f90", ".sh")
)
_LARGEST = 50_000
"""Maximum bytes of an unpacked file: with longer files, a small limit would hold few documents of few packages."""
_PACKED = 3
"""Approximate ratio by which gzip packs manual pages and documentation."""
_PROSE = frozenset((".md", ".rst", ".txt"))
_MATH_PACKAGES = frozenset((
    "numpy", "scipy", "sympy", "mpmath", "networkx", "sklearn", "statsmodels", "gmpy2", "shapely", "contourpy", "cvxpy",
))  # fmt: skip
_MATH_MODULES = frozenset(
    ("statistics.py", "fractions.py", "decimal.py", "_pydecimal.py", "random.py", "numbers.py", "heapq.py", "bisect.py")
)
_NO_PROSE = re.compile(
    r"licen[sc]e|copying|copyright|notice|authors|contributors|maintainers|change|news|history|release|todo|credits|thanks"
    r"|top_level|entry_points|requirements|sources\.txt|/tests?/|/testing/|/data/|test_?data|installed-files",
    re.IGNORECASE,
)
_LONGEST_LINE = 1_000
"""Maximum characters of a line: longer lines mean minified or generated code."""


@dataclass(frozen=True, slots=True)
class InstalledFile:
    """A file of the standard library, a package or the system."""

    path: str
    name: str
    """Place and relative path, equal on machines with the same packages: `packages/numpy/linalg/__init__.py`,
    `stdlib/json/decoder.py`, `man/man1/ls.1.gz`."""
    size: int

    @property
    def ending(self) -> str:
        """The file's suffix in lower case, of the packed file for .gz."""
        return os.path.splitext(self.name.lower().removesuffix(".gz"))[1]

    @property
    def group(self) -> str:
        """The package; for manual pages the section and first letter, for translations the program."""
        parts = self.name.split("/")
        if parts[0] == "man":
            return "/".join(parts[:-1]) + "/" + parts[-1][:1]
        return parts[-1] if parts[0] == "locale" else "/".join(parts[:2])


# Files are listed once per process. Packages in zip files or editable checkouts are not found.


@cache
def package_files() -> tuple[InstalledFile, ...]:
    """Return the files of Python's standard library and of the installed packages, by name."""
    paths = sysconfig.get_paths()
    files = [*_below(paths["stdlib"], "stdlib")]
    for folder in {os.path.realpath(paths[key]) for key in ("purelib", "platlib")}:
        files += _below(folder, "packages")
    return tuple(sorted(files, key=lambda file: file.name))


@cache
def system_files() -> tuple[InstalledFile, ...]:
    """Return the files of the manual, documentation and translation folders that exist, by name."""
    files = [file for root, folder in SYSTEM_FOLDERS.items() for file in _below(str(folder), root)]
    return tuple(sorted(files, key=lambda file: file.name))


@cache
def installed_state(system: bool) -> str:
    """Return a digest of the interpreter's version and of the names and sizes of all these files.

    Which of them a domain reads is not asked: that takes seconds for the 100,000 files of a usual environment.
    """
    files = (*package_files(), *(system_files() if system else ()))
    text = "\0".join([sys.version, *(f"{file.name} {file.size}" for file in files)])
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def spread(files: Iterable[InstalledFile]) -> list[InstalledFile]:
    """Return `files` in a fixed order that takes one of each group in turn, so that a limit keeps some of each."""
    turn: dict[str, int] = {}
    ranked = []
    digests = ((blake2b(file.name.encode("utf-8", "replace")).digest(), file) for file in files)
    for digest, file in sorted(digests, key=lambda pair: pair[0]):
        turn[file.group] = turn.get(file.group, -1) + 1
        ranked.append((turn[file.group], digest, file))
    return [file for _, _, file in sorted(ranked, key=lambda rank: rank[:2])]


@cache
def licenses() -> dict[str, str]:
    """Return the license that each installed package declares, by its top-level folder or module."""
    declared = {}
    for file in package_files():
        if file.name.endswith(".dist-info/METADATA"):
            path = Path(file.path)
            header = path.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
            license = re.search(r"^License(?:-Expression)?: (\S.{0,59})$", header, re.MULTILINE)
            if license:
                distribution, modules = path.parent.name, path.parent / "top_level.txt"
                names = {distribution, distribution.split("-")[0].lower()}
                names |= set(modules.read_text().split()) if modules.exists() else set()
                declared.update(dict.fromkeys(names, license[1]))
    return declared


def _below(folder: str, root: str) -> Iterator[InstalledFile]:
    """Yield the regular files below `folder` that are small enough for text; links would count files twice."""
    try:
        entries = os.scandir(folder)
    except OSError:
        return
    with entries:
        for entry in entries:
            name = f"{root}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _SKIPPED_FOLDERS:
                    yield from _below(entry.path, name)
            elif entry.is_file(follow_symlinks=False) and 0 < (size := entry.stat().st_size) <= _LARGEST_FILE:
                yield InstalledFile(entry.path, name, size)


def installed_documents(domain: Domain, name: str, seed: int, system: bool) -> Iterator[Document]:
    """Yield the documents of `domain` on this machine, under the source name `name`."""
    real = _documents(domain, name, system)
    if domain == "math":  # problems with real documents in between, so that any limit keeps both in their shares
        generated = read = 0
        for index in range(PROBLEM_DOCUMENTS):
            text = document(seed, index)
            yield Document(text, f"{GENERATED}{seed}/{index}", "en", "CC0-1.0", name)
            generated += len(text)
            while generated * (1 - _PROBLEM_SHARE) > read * _PROBLEM_SHARE and (own := next(real, None)) is not None:
                read += own.size
                yield own
    yield from real
    if domain == "multilingual":
        for index in range(TRANSLATED_DOCUMENTS):
            language, text = translated_document(seed, index)
            yield Document(text, f"{GENERATED}{language}/{seed}/{index}", language, "CC0-1.0", name)


@cache
def _files(domain: Domain, system: bool) -> list[InstalledFile]:
    """Return the files that `domain` reads, in the order of `spread`."""
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
    root, _, rest = file.name.partition("/")
    if file.ending != ".py" and file.size * (_PACKED if rest.endswith(".gz") else 1) > _LARGEST:
        return False
    if root == "man":
        return bool(re.match(r"man\d", rest))
    if root == "locale" or _NO_PROSE.search(rest):
        return False
    if root == "doc" and file.ending in (".html", ""):
        return "readme" in rest.lower()
    return file.ending in _PROSE or (root != "doc" and (file.ending == ".py" or rest.endswith(".dist-info/METADATA")))


def _is_translation(file: InstalledFile) -> bool:
    if file.name.startswith("man/"):
        return not re.match(r"man/(man\d|en)", file.name)
    language = catalog_language(file.name) if file.ending in (".mo", ".po") else None
    if language is None or language == "en":
        return False
    return file.ending == ".mo" or not os.path.exists(file.path[:-3] + ".mo")


def _documents(domain: Domain, name: str, system: bool) -> Iterator[Document]:
    declared = licenses()
    for file in _files(domain, system):
        root, _, rest = file.name.partition("/")
        top = rest.split("/")[0]
        license = "PSF-2.0" if root == "stdlib" else declared.get(top, declared.get(top.lower(), "unknown"))
        for number, (text, language) in enumerate(_read(file, domain)):
            if text.strip():
                url = file.name if number == 0 else f"{file.name}#{number}"
                yield Document(text, url, language, license, name, format_of(file.ending[1:]))


def _read(file: InstalledFile, domain: Domain) -> Iterator[tuple[str, str | None]]:
    """Yield (text, language or None) of one file; nothing if it is missing or damaged."""
    try:
        data = Path(file.path).read_bytes()
        data = gzip.decompress(data) if file.name.endswith(".gz") else data
        if file.ending in (".mo", ".po"):
            messages = read_mo(data) if file.ending == ".mo" else read_po(data.decode("utf-8", "replace"))
            language = primary_subtag(catalog_language(file.name) or "")
            yield from ((text, language) for text in catalog_documents(messages))
            return
    except (OSError, EOFError, ValueError):
        return
    text = data.decode("utf-8", "replace")
    if domain == "code":
        if max(map(len, text.split("\n"))) <= _LONGEST_LINE:
            yield text, None
    elif file.name.startswith("man/"):
        folder = file.name.split("/")[1]
        yield manual_text(text), "en" if re.match(r"man\d", folder) else primary_subtag(folder)
    elif file.ending == ".py":
        module = file.name.partition("/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield from ((docstring, None) for docstring in docstrings(text, module))
    else:
        yield description(text) if file.name.endswith("METADATA") else text, None
