"""The line rule in plain Python, to compare with: strings, dictionaries and lists, no hash and no kernel.

One bucket, one domain and one language, as the benchmark's corpus is. What this gives up: the bucket's limit is not
exercised here (it is in the tests of the rule).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_BLANKS = "".join(map(chr, range(0x21)))
_LOWER = {upper: upper + 32 for upper in range(0x41, 0x5B)}


def without_common_lines(texts: Sequence[str], max_copies: int, min_chars: int) -> list[str]:
    """Return `texts` without every line that stands more than `max_copies` times in them together.

    Lines are compared without blanks at both ends and without ASCII case; those of fewer than `min_chars` characters
    stay. Blank lines that stood around a removed paragraph go with it, so that one gap is left.
    """
    copies = Counter(_compared(line) for text in texts for line in text.split("\n"))
    common = {line for line, count in copies.items() if count > max_copies and len(line) >= min_chars}
    return [_without(text.split("\n"), common) for text in texts]


def _compared(line: str) -> str:
    return line.strip(_BLANKS).translate(_LOWER)


def _without(lines: list[str], common: set[str]) -> str:
    """Return `lines` that are not in `common` as a text; unchanged if none is."""
    kept: list[str] = []
    solid, gap, blank_before = 0, False, True
    for line in lines:
        compared = _compared(line)
        if compared in common:
            gap = True
        elif compared or not (gap and blank_before):
            kept.append(line)
            blank_before = not compared
            gap, solid = (gap, solid) if blank_before else (False, len(kept))
    return "\n".join(kept[:solid] if gap else kept)
