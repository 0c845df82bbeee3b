"""One spelling of a text: line ends, control characters, Unicode composition, blank space at line ends.

Equal texts must be equal bytes before they are hashed. Nothing that carries meaning changes: indentation, tabs,
letter case and punctuation stay. NFC and not NFKC, which would turn x² into x2.
"""

from __future__ import annotations

import re
import unicodedata

_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff\ud800-\udfff]")
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile("\n{4,}")


def normalise(text: str) -> str:
    """Return `text` in NFC with \\n line ends, no control characters but tab, and at most two blank lines in a row."""
    text = _CONTROLS.sub("", _LINE_ENDS.sub("\n", text))
    text = unicodedata.normalize("NFC", text)
    return _BLANK_LINES.sub("\n\n\n", _TRAILING.sub("", text)).strip("\n")
