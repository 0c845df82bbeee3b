"""One spelling of a text: line ends, control characters, Unicode composition, blank space at line ends.

Equal texts must be equal bytes before they are hashed. Nothing that carries meaning changes: indentation, tabs,
letter case and punctuation stay. NFC and not NFKC, which would turn x² into x2. `normalise` is the plain definition, at
about 20 MB/s; `normalise_texts` does the same to a column by `kernels/scan.py` and looks at single texts only where
Unicode composition or wrong decoding may matter.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llama3.data.kernels.arrow import Bytes, Offsets, text_buffers
from llama3.data.kernels.text import GARBLED, UNCLEAN, UNCOMPOSED, clean, scan

# Text that was decoded wrongly (mojibake: `Ã©` for é, `â€™` for an apostrophe), set right line by line.
#
# ftfy knows how, but at 4 MB/s it would cost more than all the rest of reading, so it sees only lines in which a
# sign of wrong decoding stands: a letter that UTF-8's first bytes become in Latin-1 or Windows-1252, followed by
# one of those that the next bytes become, or a C1 control. Line by line, because wrong and right text is often
# mixed in one document. What this gives up: text decoded with other code pages (KOI8-R, Shift JIS) stays as it is.

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


_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff\ud800-\udfff]")
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)
_COMBINING = "".join(chr(code) for code in range(0x300, 0x1F000) if unicodedata.combining(chr(code)))
_RUN = re.compile(f"[{_COMBINING}]{{1000}}")
"""Marks on one letter, which composition sorts in a time that grows with their square; a joiner (U+034F) parts them, as
Unicode's stream-safe form has it after 30. No language writes so many."""
_BLANK_LINES = re.compile("\n{4,}")


def normalise(text: str) -> str:
    """Return `text` in NFC with \\n line ends, no control characters but tab, and at most two blank lines in a row."""
    text = _CONTROLS.sub("", _LINE_ENDS.sub("\n", text))
    text = unicodedata.normalize("NFC", _RUN.sub("\\g<0>\u034f", text))
    return _BLANK_LINES.sub("\n\n\n", _TRAILING.sub("", text)).strip("\n")


def normalise_texts(texts: Any, repairing: bool = False) -> Any:
    """Return the normalised large_string column of `texts` (large_string, no nulls), repaired first if asked to."""
    data, starts, stops, flags = _scanned(texts)
    garbled = np.flatnonzero(flags & GARBLED)
    if repairing and len(garbled):
        texts, changed = replaced(texts, garbled.tolist(), repair)
        if changed:
            data, starts, stops, flags = _scanned(texts)
    if (flags & UNCLEAN).any() or int((stops - starts).sum()) != len(data):
        texts = _cleaned(data, starts, stops, flags)
    uncomposed = np.flatnonzero(flags & UNCOMPOSED)
    return replaced(texts, uncomposed.tolist(), _composed)[0]


def replaced(texts: Any, places: Iterable[int], change: Callable[[str], str]) -> tuple[Any, bool]:
    """Return the column with `change(text)` in `places`, and whether any text there is another one now."""
    changed: dict[int, str] = {}
    for place in places:
        before = texts[place].as_py()
        after = change(before)
        if after != before:
            changed[place] = after
    if not changed:
        return texts, False
    mask = np.zeros(len(texts), np.bool_)
    mask[list(changed)] = True
    values = pa.array([changed[place] for place in sorted(changed)], pa.large_string())
    return pc.replace_with_mask(texts, pa.array(mask), values), True


def _scanned(texts: Any) -> tuple[Bytes, Offsets, Offsets, Bytes]:
    data, offsets = text_buffers(texts)
    starts, stops, flags = offsets[:-1].copy(), offsets[1:].copy(), np.zeros(len(texts), np.uint8)
    scan(data, starts, stops, flags)
    return data, starts, stops, flags


def _cleaned(data: Bytes, starts: Offsets, stops: Offsets, flags: Bytes) -> Any:
    out = np.empty(int((stops - starts).sum()), np.uint8)
    ends = np.zeros(len(starts) + 1, np.int64)
    clean(data, starts, stops, flags, out, ends)
    return pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(ends), pa.py_buffer(out))


def _composed(text: str) -> str:
    text = _RUN.sub("\\g<0>\u034f", text)
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
