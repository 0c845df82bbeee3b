"""datatrove's near-duplicate removal: its four stages, 14 bands of 8 hashes over shingles of 5 words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig

from benchmarks.peers.steps import reader, run_steps

BANDS, ROWS, SHINGLE = 14, 8, 5
CONFIG = MinhashConfig(
    n_grams=SHINGLE, num_buckets=BANDS, hashes_per_bucket=ROWS, hash_config=HashConfig(hash_fc="xxhash", precision=64)
)


def find_pairs(source: Path, folder: Path) -> str:
    """Run the first two stages over `source` and return the folder of the pairs that share a bucket."""
    signatures, buckets = str(folder / "signatures"), str(folder / "buckets")
    run_steps([reader(source), MinhashDedupSignature(signatures, config=CONFIG)], folder, "signatures")
    run_steps([MinhashDedupBuckets(signatures, buckets, config=CONFIG)], folder, "buckets", BANDS)
    return buckets


def find_clusters(source: Path, folder: Path) -> str:
    """Run the first three stages over `source` and return the folder that says what is to go."""
    buckets, remove = find_pairs(source, folder), str(folder / "remove")
    run_steps([MinhashDedupCluster(buckets, remove, config=CONFIG)], folder, "clusters")
    return remove


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Write the documents that stay as jsonl; return how many."""
    remove = find_clusters(source, folder)
    kept = folder / "kept"
    steps = [reader(source), MinhashDedupFilter(remove), JsonlWriter(str(kept), compression=None)]
    run_steps(steps, folder, "filter")
    with (kept / "00000.jsonl").open("rb") as lines:
        return {"kept": sum(1 for _ in lines)}
