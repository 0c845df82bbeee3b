"""datasketch's near-duplicate search: 112 hashes a document, then MinHashLSH with 14 bands of 8.

Shingles of 5 words are cut in Python, as its documentation does; the hashes of a document are one `update_batch`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasketch import MinHash, MinHashLSH

BANDS, ROWS, SHINGLE = 14, 8, 5
_WORD = re.compile(r"\w+")


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Return how many documents have no earlier near-duplicate."""
    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    kept = 0
    for place, text in enumerate(pq.read_table(source, columns=["text"])["text"].to_pylist()):
        words = _WORD.findall(text.lower())
        shingles = {" ".join(words[at : at + SHINGLE]).encode() for at in range(max(1, len(words) - SHINGLE + 1))}
        signature = MinHash(num_perm=BANDS * ROWS)
        signature.update_batch(list(shingles))
        kept += not index.query(signature)
        index.insert(place, signature)
    return {"kept": kept}
