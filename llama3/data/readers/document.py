"""Raw documents as a source yields them: one by one (`Document`), and as batches of columns (`DocumentBatch`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from email.utils import parsedate_to_datetime
from itertools import compress
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

GENERATED = "problems/"
"""Prefix of the URL of a generated document."""
Format = Literal["text", "html", "md", "tex"]
_FORMATS: dict[object, Format] = {
    **{"html": "html", "xhtml": "html", "text/html": "html", "md": "md", "markdown": "md"},
    **{"tex": "tex", "latex": "tex"},
}
Row = tuple[str, str, str, str | None, str, Format, str]
"""text, location, url, language, license, format, date."""


def format_of(name: object) -> Format:
    """Return the format named by a record or a file's ending; `text` for everything that is not markup."""
    return _FORMATS.get(name, "text") if isinstance(name, str) else "text"


class Document(NamedTuple):
    text: str
    """The raw text; HTML, Markdown or LaTeX if `format` says so."""
    url: str
    """A URL, or a path that does not depend on where packages are installed."""
    language: str | None
    """The language that the source states, or None."""
    license: str
    source: str
    """Short name of the recipe's source, unique within its domain (`sources.source_names`)."""
    format: Format = "text"
    date: str = ""
    """Date of writing or fetching in ISO 8601 and UTC (`iso_date`); "" if unknown."""

    @property
    def generated(self) -> bool:
        """Whether the problem generator wrote it."""
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
    location: list[str]
    """File and line of each."""
    url: list[str]
    language: list[str | None]
    license: list[str]
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
        columns: tuple[Any, ...] = (self.location, self.url, self.language, self.license, self.format, self.date)
        return DocumentBatch(self.text.filter(pa.array(mask)), *(list(compress(column, mask)) for column in columns))

    def with_text(self, text: Any) -> DocumentBatch:
        """Return the same documents with other texts."""
        return replace(self, text=text)

    def documents(self, source: str) -> Iterator[Document]:
        """Yield the documents one by one."""
        columns = (self.text.to_pylist(), self.url, self.language, self.license, self.format, self.date)
        for text, url, language, license, form, newest in zip(*columns, strict=True):
            yield Document(text, url, language, license, source, form, newest)


class BatchBuilder:
    """Collects rows into batches of about `most` characters."""

    def __init__(self, most: int) -> None:
        self.most, self._size = most, 0
        self._rows: list[Row] = []

    def add(self, row: Row) -> bool:
        """Add `row` and return whether the batch is full."""
        self._rows.append(row)
        self._size += len(row[0])
        return self._size >= self.most

    def take(self) -> Iterator[DocumentBatch]:
        """Yield the rows so far as a batch, if there are any, and begin the next one."""
        rows, self._rows, self._size = self._rows, [], 0
        if rows:
            yield _batch(rows)


def _batch(rows: list[Row]) -> DocumentBatch:
    """Return `rows` as a batch and empty the list, so that no text of 200 MB stays in memory twice."""
    texts, *columns = map(list, zip(*rows, strict=True))
    rows.clear()
    texts.reverse()
    data = [texts.pop().encode() for _ in range(len(texts))]
    # Not `pa.array`, which imports pandas: 0.5 s of a plan.
    ends = np.zeros(len(data) + 1, np.int64)
    np.cumsum([len(text) for text in data], out=ends[1:])
    text = pa.LargeStringArray.from_buffers(len(data), pa.py_buffer(ends), pa.py_buffer(b"".join(data)))
    return DocumentBatch(text, *columns)


# Dates of records in one notation, so that the newest of several copies compares greatest as text. Input: ISO 8601 with
# any offset, HTTP dates, seconds or milliseconds since 1970, the fourteen digits of web archives, or words. A date
# without a time stays one and sorts before every time of its day. A time without an offset counts as UTC, fractions of
# a second are dropped, and 01/02/2024 is not a date, because it is ambiguous.

FIELDS = ("date", "timestamp", "crawl_date", "fetch_time", "warc_date", "created", "created_at", "published")
"""Record fields that may have a date, in this order."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_DIGITS = re.compile(r"(\d{4})[-/]?(\d\d)[-/]?(\d\d)(?:(\d\d)(\d\d)(\d\d))?")
_NUMBER = re.compile(r"\d{9,13}(\.\d+)?")
_SLASHES = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")
_LETTER = re.compile(r"[^\W\d_]")
_WORDS = ("%b %d, %Y", "%B %d, %Y", "%d %b %Y", "%d %B %Y")
UNREAD = "?"
"""Date of a record whose date cannot be read; `prepare` counts it and writes none."""
_FIRST, _LAST = 31_536_000, 10**10
"""Range of numbers that are seconds since 1970; larger ones are milliseconds, smaller ones a year or a version."""


def iso_date(value: object) -> str:
    """Return `value` as YYYY-MM-DD or YYYY-MM-DDTHH:MM:SSZ in UTC, or "" if it is not a date."""
    try:
        if isinstance(value, str):
            return _from_text(value.strip())
        if isinstance(value, datetime):
            return _format(value)
        if isinstance(value, date):
            return value.isoformat()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _from_number(value)
    except (ValueError, OverflowError, TypeError):  # 31 February, the year 0, an offset of 25 hours
        pass
    return ""


def record_date(record: dict[str, Any]) -> str:
    """Return the date in the first field of a record that has one, UNREAD if none of its date fields can be read."""
    date = ""
    for name in FIELDS:
        if name in record:
            if read := iso_date(record[name]):
                return read
            if record[name] not in (None, ""):
                date = UNREAD
    return date


def _from_text(text: str) -> str:
    if not 0 < len(text) <= 40:
        return ""
    if _NUMBER.fullmatch(text):
        return _from_number(float(text))
    if slashes := _SLASHES.fullmatch(text):
        first, second, year = map(int, slashes.groups())
        day, month = (first, second) if first > 12 else (second, first)
        return date(year, month, day).isoformat() if first > 12 or second > 12 or first == second else ""
    if _LETTER.search(text[:6]):  # `Jan 5, 2024` or `5 January 2024`, with a time or without
        clock = ("", " %H:%M", " %H:%M:%S")[min(text.count(":"), 2)]
        forms = _WORDS[2:] if text[0].isdigit() else () if text.split(None, 1)[0].endswith(",") else _WORDS[:2]
        for form in forms:
            with suppress(ValueError):
                moment = datetime.strptime(text, form + clock)
                return _format(moment) if clock else moment.date().isoformat()
    if _DAY.fullmatch(text):
        return date.fromisoformat(text).isoformat()
    if not text[:4].isdigit():
        return _format(parsedate_to_datetime(text))
    digits = _DIGITS.fullmatch(text)
    if digits is None:
        return _format(datetime.fromisoformat(text.replace(" UTC", "+00:00")))
    numbers = [int(number) for number in digits.groups(default="-1")]
    return date(*numbers[:3]).isoformat() if numbers[3] < 0 else _format(datetime(*numbers))  # type: ignore[arg-type]


def _from_number(value: float) -> str:
    seconds = value / 1000 if value >= _LAST else value
    return _format(datetime.fromtimestamp(seconds, UTC)) if _FIRST <= seconds < _LAST else ""


def _format(moment: datetime) -> str:
    moment = moment.astimezone(UTC) if moment.tzinfo else moment
    return f"{moment.replace(microsecond=0, tzinfo=None).isoformat()}Z"
