"""datatrove's Gopher quality, Gopher repetition and FineWeb filters, each on every document.

Published thresholds but for the share of words with a letter: datatrove counts a punctuation mark as a word, so 0.8
drops plain English with many commas; 0.6 on both sides asks for the same thing. datatrove remembers the words of the
last texts, so they are found once for the three filters, as they would be in one pipeline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

from benchmarks.peers.steps import reader


def work(source: Path, folder: Path, alphabetic: float) -> dict[str, Any]:
    """Return, by rule set, whether each document is kept, in the order of the file."""
    filters = {
        "gopher": GopherQualityFilter(max_non_alpha_words_ratio=alphabetic),
        "repetition": GopherRepetitionFilter(),
        "fineweb": FineWebQualityFilter(),
    }
    kept: dict[str, list[str]] = {name: [] for name in filters}
    for document in reader(source).run():
        for name, rule in filters.items():
            kept[name].append(_reason(rule.filter(document)))
    return {f"reasons_{name}": reasons for name, reasons in kept.items()}


def _reason(answer: bool | tuple[bool, str]) -> str:
    """Return why a filter drops a document, or nothing if it keeps it."""
    return answer[1] if isinstance(answer, tuple) else "" if answer else "dropped"
