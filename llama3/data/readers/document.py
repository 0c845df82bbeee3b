"""Raw documents as a source yields them, before anything is judged: one by one, and as batches of columns.

Reading fills batches, because a column of a thousand texts is one Arrow array that kernels take whole; a `Document`
is made only where somebody looks at single documents (surveys, tests). What this gives up: fields are checked where
they are read (`records.py`), not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from email.utils import parsedate_to_datetime
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
class DocumentBatch:
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

    def keep(self, mask: NDArray[np.bool_]) -> DocumentBatch:
        """Return the documents where `mask`, bool[n], is true."""
        if mask.all():
            return self
        columns: tuple[Any, ...] = (self.place, self.url, self.language, self.licence, self.format, self.date)
        return DocumentBatch(self.text.filter(pa.array(mask)), *(list(compress(column, mask)) for column in columns))

    def with_text(self, text: Any) -> DocumentBatch:
        """Return the same documents with other texts."""
        return DocumentBatch(text, self.place, self.url, self.language, self.licence, self.format, self.date)

    def documents(self, source: str) -> Iterator[Document]:
        """Yield the documents one by one."""
        columns = (self.text.to_pylist(), self.url, self.language, self.licence, self.format, self.date)
        for text, url, language, licence, form, newest in zip(*columns, strict=True):
            yield Document(text, url, language, licence, source, form, newest)


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

    def take(self) -> Iterator[DocumentBatch]:
        """Yield the batch gathered so far, if it holds anything, and begin the next one."""
        rows, self._rows, self._size = self._rows, [], 0
        if rows:
            yield _batch(rows)


def _batch(rows: list[Row]) -> DocumentBatch:
    """Return `rows` as a batch and empty the list, so that no text is held twice for long."""
    texts, *others = map(list, zip(*rows, strict=True))
    rows.clear()
    return DocumentBatch(_text_array(texts), *others)


def _text_array(texts: list[str]) -> pa.LargeStringArray:
    """Return `texts` as an Arrow array; `pa.array` imports pandas, which takes a plan half a second."""
    parts = [text.encode() for text in texts]
    ends = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=ends[1:])
    return pa.LargeStringArray.from_buffers(len(parts), pa.py_buffer(ends), pa.py_buffer(b"".join(parts)))


# Dates of records in one spelling, so that the newest of several copies is the greatest text.
#
# Data sets write ISO 8601 with any offset, HTTP dates, seconds or milliseconds since 1970, the fourteen digits of
# web archives, or words. A date without a time stays one: it sorts before every time of its day. What this gives
# up: a time without an offset counts as UTC, fractions of a second go, and 01/02/2024, which is two dates, is none.

FIELDS = ("date", "timestamp", "crawl_date", "fetch_time", "warc_date", "created", "created_at", "published")
"""Record fields that are asked for a date, in this order."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_DIGITS = re.compile(r"(\d{4})[-/]?(\d\d)[-/]?(\d\d)(?:(\d\d)(\d\d)(\d\d))?")
_NUMBER = re.compile(r"\d{9,13}(\.\d+)?")
_SLASHES = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")
_WORDS = ("%b %d, %Y", "%B %d, %Y", "%d %b %Y", "%d %B %Y")
UNREAD = "?"
"""Instead of a date, where a record has one that cannot be read; `prepare` counts it and writes none."""
_FIRST, _LAST = 31_536_000, 10**10
"""Seconds since 1970 between which a number is taken for a time; above, for milliseconds. Below: a year, a version."""


def iso_date(value: object) -> str:
    """Return `value` as YYYY-MM-DD or YYYY-MM-DDTHH:MM:SSZ in UTC, or "" if it is no date."""
    try:
        if isinstance(value, str):
            return _from_text(value.strip())
        if isinstance(value, datetime):
            return _spelled(value)
        if isinstance(value, date):
            return value.isoformat()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _from_number(value)
    except (ValueError, OverflowError, TypeError):  # 31 February, the year 0, an offset of 25 hours
        pass
    return ""


def record_date(record: dict[str, Any]) -> str:
    """Return the date in the first field of a record that gives one, UNREAD if it has such fields and none does."""
    date = ""
    for name in FIELDS:
        if name in record:
            if found := iso_date(record[name]):
                return found
            if record[name] not in (None, ""):
                date = UNREAD
    return date


def _from_text(text: str) -> str:
    if len(text) > 40:
        return ""
    if _NUMBER.fullmatch(text):
        return _from_number(float(text))
    if slashes := _SLASHES.fullmatch(text):
        first, second, year = map(int, slashes.groups())
        day, month = (first, second) if first > 12 else (second, first)
        return date(year, month, day).isoformat() if first > 12 or second > 12 or first == second else ""
    if any(letter.isalpha() for letter in text[:6]) and (words := _from_words(text)):
        return words
    if _DAY.fullmatch(text):
        return date.fromisoformat(text).isoformat()
    if text[:4].isdigit() and len(text) <= 40:
        digits = _DIGITS.fullmatch(text)
        if digits is None:
            return _spelled(datetime.fromisoformat(text.replace(" UTC", "+00:00")))
        numbers = [int(part) for part in digits.groups(default="-1")]
        return date(*numbers[:3]).isoformat() if numbers[3] < 0 else _spelled(datetime(*numbers))  # type: ignore[arg-type]
    return _spelled(parsedate_to_datetime(text)) if 0 < len(text) <= 40 else ""


def _from_words(text: str) -> str:
    """Return the date in `Jan 5, 2024` or `5 January 2024`, with hours and minutes or without; "" if it is none."""
    for form in _WORDS:
        for clock in ("", " %H:%M", " %H:%M:%S"):
            with suppress(ValueError):
                moment = datetime.strptime(text, form + clock)
                return _spelled(moment) if clock else moment.date().isoformat()
    return ""


def _from_number(value: float) -> str:
    seconds = value / 1000 if value >= _LAST else value
    return _spelled(datetime.fromtimestamp(seconds, UTC)) if _FIRST <= seconds < _LAST else ""


def _spelled(moment: datetime) -> str:
    moment = moment.astimezone(UTC) if moment.tzinfo else moment
    return f"{moment.replace(microsecond=0, tzinfo=None).isoformat()}Z"
