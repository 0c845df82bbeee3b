"""Text that was decoded wrongly (mojibake: `Ã©` for é, `â€™` for an apostrophe), set right line by line.

ftfy knows how, but at 4 MB/s it would cost more than all the rest of reading, so it sees only lines in which a sign of
wrong decoding stands: a letter that UTF-8's first bytes become in Latin-1 or Windows-1252, followed by one of those
that the next bytes become, or a C1 control. Line by line, because wrong and right text is often mixed in one document.
What this gives up: text decoded with other code pages (KOI8-R, Shift JIS) stays as it is.
"""

from __future__ import annotations

import re

_NEXT = "\x80-\xbfŒœŠšŸŽžƒˆ˜–—\u2018-\u2022…‰‹›€™"
"""What the bytes 80 to BF are in Latin-1 and in Windows-1252."""
SIGNS = re.compile(f"[ÂÃÄÅÎÏÐÑ×ØÙ][{_NEXT}]|[âãäåæçèéð][{_NEXT}][{_NEXT}]|[\x80-\x84\x86-\x9f]")
"""A document without any of these is never touched."""


def repair(text: str) -> str:
    """Return `text` with its wrongly decoded lines set right; lines without SIGNS as they are."""
    if not SIGNS.search(text):
        return text
    from ftfy import fix_encoding  # 60 ms, and most processes never need it

    return "\n".join(fix_encoding(line) if SIGNS.search(line) else line for line in text.split("\n"))
