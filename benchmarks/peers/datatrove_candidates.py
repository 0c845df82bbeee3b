"""datatrove's MinHash up to candidates: its first two stages, signatures and buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.datatrove_minhash import find_pairs


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Leave the pairs of documents that share a bucket; return the bytes of their files."""
    pairs = Path(find_pairs(source, folder))
    return {"bytes": sum(path.stat().st_size for path in pairs.rglob("*") if path.is_file())}
