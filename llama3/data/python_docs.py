"""Prose inside Python code: the docstrings of a module as documents, and a distribution's description.

Docstrings are found with one regular expression over comments and string literals, not with `ast`: ten times as fast
(70 against 7 MB/s), and a file for a newer Python, or a broken one, is read too. What this gives up: a literal
that stands alone on its line inside an expression counts as a docstring, which is text all the same.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from email.parser import Parser

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
_SHORTEST = 60
"""Characters; shorter docstrings mostly repeat the name."""
_DOCUMENT = 4_000
"""A whole module in one document would repeat its section headings (Parameters, Returns) until a filter drops it."""


def docstrings(code: str, module: str) -> Iterator[str]:
    """Yield the docstrings in `code`, each below the name it describes, about `_DOCUMENT` characters at a time."""
    parts: list[str] = []
    name = module
    for token in _TOKENS.finditer(code):
        if token["name"]:
            name = token["name"]
        elif token["text"] and len(token["text"]) >= _SHORTEST:
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
