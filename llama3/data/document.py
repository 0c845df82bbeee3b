"""Raw documents as a source yields them, before anything is judged: one by one, and as batches of columns.

Reading fills batches, because a column of a thousand texts is one Arrow array that kernels take whole; a `Document`
is made only where somebody looks at single documents (surveys, tests). What this gives up: fields are checked where
they are read (`records.py`), not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

GENERATED = "problems/"
"""How the URL of a generated document begins."""
Format = Literal["text", "html", "md"]
_FORMATS: dict[object, Format] = {"html": "html", "xhtml": "html", "text/html": "html", "md": "md", "markdown": "md"}
Row = tuple[str, str, str, str | None, str, Format, str]
"""text, place, url, language, licence, format, date."""


def format_of(name: object) -> Format:
    """Return the format that a record or a file's ending names; `text` for all that is not markup."""
    return _FORMATS.get(name, "text") if isinstance(name, str) else "text"


class Document(NamedTuple):
    text: str
    """The text as found; HTML or Markdown when `format` says so."""
    url: str
    """Where it was found: a URL, or a path that does not depend on where things are installed."""
    language: str | None
    """What the source says it is written in, or None."""
    licence: str
    source: str
    """Short name of the recipe's source, unique within its domain (`sources.source_names`)."""
    format: Format = "text"
    date: str = ""
    """When it was written or fetched, in ISO 8601 and UTC (`dates.iso_date`); "" where nobody says."""

    @property
    def generated(self) -> bool:
        """Whether it was made by the problem generator rather than found."""
        return self.url.startswith(GENERATED)

    @property
    def size(self) -> int:
        """Bytes of the text in UTF-8; lone surrogates, which have no UTF-8, do not count."""
        return len(self.text) if self.text.isascii() else len(self.text.encode("utf-8", "ignore"))


@dataclass(frozen=True)
class Batch:
    """Documents of one source, as columns of equal length."""

    text: Any
    """Arrow large_string without nulls, valid UTF-8."""
    place: list[str]
    """Where each was read: file and line."""
    url: list[str]
    language: list[str | None]
    licence: list[str]
    format: list[Format]
    date: list[str]

    def __len__(self) -> int:
        return len(self.text)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each text, int64[n]."""
        return np.asarray(pc.binary_length(self.text)).astype(np.int64)

    def keep(self, mask: NDArray[np.bool_]) -> Batch:
        """Return the documents where `mask`, bool[n], is true."""
        if mask.all():
            return self
        columns: tuple[Any, ...] = (self.place, self.url, self.language, self.licence, self.format, self.date)
        return Batch(self.text.filter(pa.array(mask)), *(list(compress(column, mask)) for column in columns))

    def with_text(self, text: Any) -> Batch:
        """Return the same documents with other texts."""
        return Batch(text, self.place, self.url, self.language, self.licence, self.format, self.date)

    def documents(self, source: str) -> Iterator[Document]:
        """Yield the documents one by one."""
        columns = (self.text.to_pylist(), self.url, self.language, self.licence, self.format, self.date)
        for text, url, language, licence, form, date in zip(*columns, strict=True):
            yield Document(text, url, language, licence, source, form, date)


class Gatherer:
    """Gathers rows until they are a batch of about `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most, self._size = most, 0
        self._rows: list[Row] = []

    def add(self, row: Row) -> bool:
        """Take `row` and return whether the batch is full."""
        self._rows.append(row)
        self._size += len(row[0])
        return self._size >= self.most

    def take(self) -> Iterator[Batch]:
        """Yield the batch gathered so far, if it holds anything, and begin the next one."""
        rows, self._rows, self._size = self._rows, [], 0
        if rows:
            yield _batch(rows)


def _batch(rows: list[Row]) -> Batch:
    """Return `rows` as a batch and empty the list, so that no text is held twice for long."""
    texts, *others = map(list, zip(*rows, strict=True))
    rows.clear()
    return Batch(_text_array(texts), *others)


def _text_array(texts: list[str]) -> pa.LargeStringArray:
    """Return `texts` as an Arrow array; `pa.array` imports pandas, which takes a plan half a second."""
    parts = [text.encode() for text in texts]
    ends = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=ends[1:])
    return pa.LargeStringArray.from_buffers(len(parts), pa.py_buffer(ends), pa.py_buffer(b"".join(parts)))
