"""Our MinHash up to candidates: bands of every document and the documents that share a bucket, before verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.ours.setup import one_shard, write_attributes
from herd.llama3.data.dedup.minhash import MinHash, choose_pairs, map_bands, round_shuffles
from herd.llama3.data.kernels.shingles import band_hashes


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Return how many documents share a bucket of 14 bands of 8 hashes with another."""
    job = one_shard(source, folder, {"dedup": {"bands": 14, "rows": 8}}, MinHash())
    documents = pq.read_table(source, columns=["row", "id", "language", "text"])
    bands = band_hashes(documents["text"], job.recipe.curate.dedup)
    write_attributes(job, documents, bands=bands, rank=np.zeros(len(documents)))
    map_bands(job, 0)
    choose_pairs(0, job, 0)
    pairs = round_shuffles(job, 0).pairs.read(job, 0)
    return {"candidates": len(np.union1d(pairs["member"].to_numpy(), pairs["center"].to_numpy()))}
