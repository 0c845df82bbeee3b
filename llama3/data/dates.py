"""Dates of records in one spelling, so that the newest of several copies is the greatest text.

Data sets write ISO 8601 with any offset, HTTP dates, seconds or milliseconds since 1970, or the fourteen digits of web
archives. A date without a time stays one: it sorts before every time of its day. What this gives up: a time without an
offset counts as UTC, and fractions of a second go.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from email.utils import parsedate_to_datetime

FIELDS = ("date", "timestamp", "crawl_date", "fetch_time", "warc_date", "created", "created_at", "published")
"""Record fields that are asked for a date, in this order."""
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_DIGITS = re.compile(r"(\d{4})[-/]?(\d\d)[-/]?(\d\d)(?:(\d\d)(\d\d)(\d\d))?")
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


def _from_text(text: str) -> str:
    if _DAY.fullmatch(text):
        return date.fromisoformat(text).isoformat()
    if text[:4].isdigit() and len(text) <= 40:
        digits = _DIGITS.fullmatch(text)
        if digits is None:
            return _spelled(datetime.fromisoformat(text.replace(" UTC", "+00:00")))
        numbers = [int(part) for part in digits.groups(default="-1")]
        return date(*numbers[:3]).isoformat() if numbers[3] < 0 else _spelled(datetime(*numbers))  # type: ignore[arg-type]
    return _spelled(parsedate_to_datetime(text)) if 0 < len(text) <= 40 else ""


def _from_number(value: float) -> str:
    seconds = value / 1000 if value >= _LAST else value
    return _spelled(datetime.fromtimestamp(seconds, UTC)) if _FIRST <= seconds < _LAST else ""


def _spelled(moment: datetime) -> str:
    moment = moment.astimezone(UTC) if moment.tzinfo else moment
    return f"{moment.replace(microsecond=0, tzinfo=None).isoformat()}Z"
