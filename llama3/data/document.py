"""One raw document as a source yields it, before anything is judged.

A plain tuple and not a pydantic model: millions pass through a single Python loop, and building one costs a fraction
of a microsecond. What this gives up: its fields are checked where they are read (`files.py`), not here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

GENERATED = "problems/"
"""How the URL of a generated document begins."""


class Document(NamedTuple):
    text: str
    """The text as found; HTML when `format` says so."""
    url: str
    """Where it was found: a URL, or a path that does not depend on where things are installed."""
    language: str | None
    """What the source says it is written in, or None."""
    licence: str
    source: str
    """Short name of the recipe's source, unique within its domain (`sources.source_names`)."""
    format: Literal["text", "html"] = "text"

    @property
    def generated(self) -> bool:
        """Whether it was made by the problem generator rather than found."""
        return self.url.startswith(GENERATED)

    @property
    def size(self) -> int:
        """Bytes of the text in UTF-8; lone surrogates, which have no UTF-8, count as one."""
        return len(self.text) if self.text.isascii() else len(self.text.encode("utf-8", "replace"))
