"""Dates of records in one spelling, so that the newest of several copies is the greatest text.

Data sets write ISO 8601 with any offset, HTTP dates, seconds or milliseconds since 1970, the fourteen digits of web
archives, or words. A date without a time stays one: it sorts before every time of its day. What this gives up: a time
without an offset counts as UTC, fractions of a second go, and 01/02/2024, which is two dates, is none.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, date, datetime
from email.utils import parsedate_to_datetime
from typing import Any

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
