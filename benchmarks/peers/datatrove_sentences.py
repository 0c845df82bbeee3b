"""datatrove's repeated-sentence removal with spans of one sentence and else its defaults: three stages.

What its users run in the place of a line rule. Sentences are found by spaCy, which takes most of the time; for the same
unit as ours see `datatrove_lines.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.datatrove_lines import remove_repeated


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Write the documents without repeated sentences as jsonl; return how many there are."""
    return remove_repeated(source, folder, sentences=True)
