"""What a reader does about bad input: stop with a message that says where and what to do, or leave it out and count it.

Silent loss is worse than a late error, so stopping is the default and skipping names every thing that it left out, up
to MOST_NAMED of a kind in a file; the rest of that kind are one line with the file's name and their number.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pyarrow as pa

OVER_LIMIT = "over_limit"
EMPTY = "empty"
PASSED_OVER = "passed_over"
NO_PAGE = "no_page"
UNREAD_DATE = "unread_date"
"""Reason of a row that counts documents which were read, but whose date was not."""
NO_LOSS = (OVER_LIMIT, EMPTY, PASSED_OVER, NO_PAGE)
"""Reasons that are no fault of the input."""
REMEDY = "or set curate.on_error: skip"
MOST_NAMED = 10_000
SCHEMA = pa.schema(
    {
        "domain": pa.string(),
        "source": pa.string(),
        "place": pa.string(),
        "reason": pa.string(),
        "documents": pa.int64(),
        "bytes": pa.int64(),
    }
)
"""`place` is a file and a line or row of it, or "" for all of a source; `bytes` those of the line or text as found."""


class SourceError(ValueError):
    """A source that cannot be read; the text names the file, what is wrong and what to do."""


class Fault(NamedTuple):
    """Something that cannot be read."""

    reason: str
    """Name to count it under: bad_json, null_text, ..."""
    said: str
    """What is wrong and how to repair it; follows the place in a sentence."""


class Skips:
    """What was left out of one item: (place, reason) -> documents and bytes."""

    def __init__(self, fail: bool = True) -> None:
        self.fail = fail
        self.documents: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.unread_dates = 0
        self._named: Counter[tuple[str, str]] = Counter()

    def fault(self, file: str, place: str, fault: Fault, size: int = 0, documents: int = 1) -> None:
        """Leave out something faulty. Raises SourceError if bad input is to stop the run."""
        if self.fail:
            raise SourceError(
                f"{place!r} {fault.said}, {REMEDY}" if place == file else f"{place} {fault.said}, {REMEDY}"
            )
        self.count(file, place, fault.reason, size, documents)

    def count(self, file: str, place: str, reason: str, size: int, documents: int = 1) -> None:
        """Count what is left out without being an error."""
        self._named[file, reason] += 1
        key = (place if self._named[file, reason] <= MOST_NAMED else file), reason
        self.documents[key] += documents
        self.bytes[key] += size

    def rows(self, domain: str, source: str) -> list[tuple[str, str, str, str, int, int]]:
        """Return what was left out as rows of SCHEMA, in order."""
        dates = [(domain, source, "", UNREAD_DATE, self.unread_dates, 0)] if self.unread_dates else []
        keys = sorted(self.documents)
        return [*dates, *((domain, source, *key, self.documents[key], self.bytes[key]) for key in keys)]
