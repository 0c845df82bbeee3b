"""Text that grows token by token, given out in pieces that never have to be taken back.

A token may end within a character, and a stop text may begin in one token and end in another. So what is not certain
yet is held: the first bytes of a character, and an end of the text with which a stop text begins. The pieces joined are
what the whole text would be; how it was cut into tokens makes no difference.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Pieces:
    """One text on its way."""

    def __init__(self, until: Sequence[str] = ()) -> None:
        """Make an empty text that ends where the first of `until` to be complete begins; none of them is empty."""
        self.ended = False
        """Whether a stop text was found; nothing is added after it."""
        self._until = tuple(until)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, data: bytes) -> str:
        """Add bytes; return what has become certain, often nothing. What is not UTF-8 becomes U+FFFD."""
        return "" if self.ended else self._certain(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what was held: no more will come. A character that was cut off becomes U+FFFD."""
        if self.ended:
            return ""
        text = self._certain(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _certain(self, new: str) -> str:
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._until if (at := text.find(stop)) >= 0]
        if found:
            self.ended, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - max((_begun(text, stop) for stop in self._until), default=0)
        self._held = text[certain:]
        return text[:certain]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
