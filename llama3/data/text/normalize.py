"""Normalize text: line ends, control characters, Unicode composition, trailing blanks, wrong decoding.

Equal texts must be equal bytes before they are hashed. Indentation, tabs, case and punctuation do not change. NFC, not
NFKC, which would turn x² into x2. `normalize` is the definition, at about 20 MB/s; `normalize_texts` does the same to a
column with `kernels/text.py` and calls Python only where letters may be decoded wrongly.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from herd.llama3.data.kernels.arrow import Bytes, Offsets, text_buffers
from herd.llama3.data.kernels.text import (
    GARBLED,
    IS_MARK,
    LONG_RUN,
    MOST_MARKS,
    UNCLEAN,
    UNCOMPOSED,
    clean,
    compose,
    composition,
    scan,
)

_NEXT = "\x80-\xbfŒœŠšŸŽžƒˆ˜–—\u2018-\u2022…‰‹›€™"
"""The bytes 80 to BF decoded as Latin-1 and as Windows-1252."""
SIGNS = re.compile(f"[ÂÃÄÅÎÏÐÑ×ØÙ][{_NEXT}]|[âãäåæçèéð][{_NEXT}][{_NEXT}]|[\x80-\x84\x86-\x9f]")
"""UTF-8 that was decoded as Latin-1 or Windows-1252 (`Ã©` for é), or a C1 control."""


def fix_mojibake(text: str) -> str:
    """Return `text` with its wrongly decoded lines corrected; lines without SIGNS do not change."""
    if not SIGNS.search(text):
        return text
    from ftfy import fix_encoding  # 60 ms to import, and only 4 MB/s, so it gets only lines with SIGNS

    # Line by line, because right and wrong text is often mixed in one document.
    return "\n".join(fix_encoding(line) if SIGNS.search(line) else line for line in text.split("\n"))


_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff\ud800-\udfff]")
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)
_RUN = re.compile(f"[{''.join(map(chr, np.flatnonzero(IS_MARK)))}]{{{MOST_MARKS}}}")
"""Composition sorts the marks on a letter in quadratic time, so a joiner (U+034F) splits runs of them, as in Unicode's
stream-safe format, which splits after 30. No language writes 1000."""
_BLANK_LINES = re.compile("\n{4,}")


def normalize(text: str) -> str:
    """Return `text` in NFC with \\n line ends, no control characters but tab, and at most two blank lines in a row."""
    text = _CONTROLS.sub("", _LINE_ENDS.sub("\n", text))
    text = unicodedata.normalize("NFC", _split_runs(text))
    return _BLANK_LINES.sub("\n\n\n", _TRAILING.sub("", text)).strip("\n")


def normalize_texts(texts: Any, repairing: bool = False) -> Any:
    """Return the normalized large_string column of `texts` (large_string, no nulls), first repaired on request."""
    data, starts, stops, flags = _scan(texts)
    garbled = np.flatnonzero(flags & GARBLED)
    if repairing and len(garbled):
        texts, changed = replace_texts(texts, garbled.tolist(), fix_mojibake)
        if changed:
            data, starts, stops, flags = _scan(texts)
    if (flags & UNCLEAN).any() or int((stops - starts).sum()) != len(data):
        out, ends = np.empty(int((stops - starts).sum()), np.uint8), np.zeros(len(starts) + 1, np.int64)
        clean(data, starts, stops, flags, out, ends)
        texts = pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(ends), pa.py_buffer(out))

    # _RUN takes 20 times as long as all else, so it sees only the texts where the scan counted marks.
    texts, _ = replace_texts(texts, np.flatnonzero(flags & LONG_RUN).tolist(), _split_runs)
    return _composed(texts, flags) if (flags & UNCOMPOSED).any() else texts


def _split_runs(text: str) -> str:
    return _RUN.sub("\\g<0>\u034f", text)


def _composed(texts: Any, flags: Bytes) -> Any:
    data, offsets = text_buffers(texts)
    unsure = np.diff(offsets)[(flags & UNCOMPOSED) != 0].sum()
    out, ends = np.empty(int(offsets[-1] - offsets[0] + 2 * unsure), np.uint8), np.zeros(len(offsets), np.int64)
    if not compose(data, offsets, flags, composition(), out, ends):
        return texts
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(out[: ends[-1]]))


def replace_texts(texts: Any, indices: Iterable[int], change: Callable[[str], str]) -> tuple[Any, bool]:
    """Return the string column with `change(text)` at `indices`, and whether any text has changed."""
    changed: dict[int, str] = {}
    for index in indices:
        before = texts[index].as_py()
        after = change(before)
        if after != before:
            changed[index] = after
    if not changed:
        return texts, False
    mask = np.zeros(len(texts), np.bool_)
    mask[list(changed)] = True
    values = pa.array([changed[index] for index in sorted(changed)], texts.type)
    return pc.replace_with_mask(texts, pa.array(mask), values), True


def _scan(texts: Any) -> tuple[Bytes, Offsets, Offsets, Bytes]:
    data, offsets = text_buffers(texts)
    starts, stops, flags = offsets[:-1].copy(), offsets[1:].copy(), np.zeros(len(texts), np.uint8)
    scan(data, starts, stops, flags)
    return data, starts, stops, flags
