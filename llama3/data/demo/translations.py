"""Translated messages of programs (gettext catalogues, .mo and .po) joined into documents of sensible length.

One message is a line or a paragraph; the messages of one catalogue keep their order and are packed into documents of
about 4 kB. What this gives up: the English originals, and messages so short that they are only labels.
"""

from __future__ import annotations

import ast
import inspect
import re
import struct
from collections.abc import Iterator
from email.parser import Parser

_SHORTEST = 12
"""Bytes of a message; labels such as `Open` teach little. Bytes, so that a Chinese phrase of four signs counts."""
_DOCUMENT = 4_000
_LOCALE = re.compile(r"(?:^|/)([a-z]{2,3})(?:_[A-Z][A-Za-z]+)?(?:\.[\w-]+)?(?:@\w+)?(?:/LC_MESSAGES/[^/]+|\.[mp]o)$")
_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_ENTRY = re.compile(r'^(msgid|msgid_plural|msgstr(?:\[\d+\])?) ((?:"(?:[^"\\]|\\.)*"\s*)+)', re.MULTILINE)
_HEADER_CHARSET = re.compile(rb"charset=([\w-]+)")


def catalogue_language(name: str) -> str | None:
    """Return the language in a catalogue's path (`.../pt_BR/LC_MESSAGES/x.mo`, `po/de.po`), or None."""
    match = _LOCALE.search(name)
    return match[1] if match else None


def read_mo(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (original, translation) of a compiled catalogue. Raises ValueError if `data` is not one.

    Layout: magic, revision, count N, offsets of two tables of N (length, offset) pairs. Plural forms are split by NUL,
    a context stands before the original, split off by EOT; of plurals, the first original meets the last translation.
    """
    order = _MAGIC.get(data[:4])
    if order is None or len(data) < 28:
        raise ValueError("the catalogue does not begin with the magic number of a .mo file")
    try:
        count, originals, translated = struct.unpack_from(order + "3I", data, 8)
        tables = [struct.unpack_from(f"{order}{2 * count}I", data, start) for start in (originals, translated)]
    except struct.error as error:
        raise ValueError(f"the catalogue is cut short ({error})") from error
    charset = "utf-8"
    for i in range(0, 2 * count, 2):
        original, text = (data[table[i + 1] : table[i + 1] + table[i]] for table in tables)
        if not original and (found := _HEADER_CHARSET.search(text)):
            charset = found[1].decode()
        yield _decode(original.split(b"\x04")[-1].split(b"\0")[0], charset), _decode(text.split(b"\0")[-1], charset)


def read_po(text: str) -> Iterator[tuple[str, str]]:
    """Yield (original, translation) of a catalogue in source form; fuzzy and obsolete entries are not told apart."""
    original = ""
    for keyword, literals in _ENTRY.findall(text):
        value = "".join(map(_literal, re.findall(r'"(?:[^"\\]|\\.)*"', literals)))
        if keyword == "msgid":
            original = value
        elif keyword.startswith("msgstr"):
            yield original, value


def catalogue_documents(messages: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Yield documents of about 4 kB made of the translations, in catalogue order, each translation once."""
    seen: set[str] = set()
    part: list[str] = []
    size = 0
    for original, text in messages:
        if not original or text == original or text in seen or len(text.encode("utf-8", "replace")) < _SHORTEST:
            continue
        seen.add(text)
        part.append(text.strip())
        size += len(text)
        if size >= _DOCUMENT:
            yield "\n".join(part)
            part, size = [], 0
    if part:
        yield "\n".join(part)


def _decode(data: bytes, charset: str) -> str:
    try:
        return data.decode(charset, "replace")
    except LookupError:
        return data.decode("utf-8", "replace")


def _literal(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text.strip('"')


# Prose inside Python code: the docstrings of a module as documents, and a distribution's description.
#
# Docstrings are found with one regular expression over comments and string literals, not with `ast`: ten times as
# fast (70 against 7 MB/s), and a file for a newer Python, or a broken one, is read too. What this gives up: a
# literal that stands alone on its line inside an expression counts as a docstring, which is text all the same.

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
"""Characters; shorter docstrings mostly repeat the name."""

"""A whole module in one document would repeat its section headings (Parameters, Returns) until a filter drops it."""


def docstrings(code: str, module: str) -> Iterator[str]:
    """Yield the docstrings in `code`, each below the name it describes, about `_DOCUMENT` characters at a time."""
    parts: list[str] = []
    name = module
    for token in _TOKENS.finditer(code):
        if token["name"]:
            name = token["name"]
        elif token["text"] and len(token["text"]) >= _SHORTEST_DOCSTRING:
            parts.append(f"{name}\n\n{inspect.cleandoc(token['text'])}")
            if sum(map(len, parts)) >= _DOCUMENT:
                yield "\n\n\n".join(parts)
                parts = []
    if parts:
        yield "\n\n\n".join(parts)


def description(metadata: str) -> str:
    """Return name, summary and long description of a distribution's METADATA (core metadata, PEP 566)."""
    message = Parser().parsestr(metadata)
    body = message.get_payload()
    long = body if isinstance(body, str) and body.strip() else inspect.cleandoc(message.get("Description", ""))
    return f"{message.get('Name', '')}\n\n{message.get('Summary', '')}\n\n{long}".strip()
