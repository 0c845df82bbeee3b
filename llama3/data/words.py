"""What a word is, for every count that depends on it: repetition filters and near-duplicate detection.

A word is a run of letters, digits and underscores, where every character beyond ASCII counts as a letter: a rule like
[a-z0-9] would delete all scripts but one. Scripts written without spaces (Chinese, Japanese, Thai, Lao) give one word
per character, otherwise a whole sentence would be one word. The pattern means the same in Python's `re` and in RE2.
"""

from __future__ import annotations

import re

_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_JOINED = "0-9A-Za-z_\u0080-\u0dff\u0f00-\u2fff\u3100-\u33ff\ua000-\uf8ff\ufb00-\U0010ffff"
PATTERN = f"[{_UNSPACED}]|[{_JOINED}]+"
WORD = re.compile(PATTERN)


def words(text: str) -> list[str]:
    """Return the words of `text` in lower case, in order."""
    return WORD.findall(text.lower())
