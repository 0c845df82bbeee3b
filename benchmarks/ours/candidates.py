"""Our MinHash up to candidates: bands of every document and the documents that share a bucket, before verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.ours.setup import one_shard, write_attributes
from llama3.data.dedup.minhash import BANDS, map_bands, reduce_candidates
from llama3.data.kernels.shingles import band_hashes
from llama3.data.mapreduce import run_serial, run_step


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Return how many documents share a bucket of 14 bands of 8 hashes with another."""
    job = one_shard(source, folder, {"dedup": {"bands": 14, "rows": 8}})
    documents = pq.read_table(source, columns=["row", "id", "language", "text"])
    bands = band_hashes(documents["text"], job.recipe.curate.dedup)
    write_attributes(job, documents, bands=bands, rank=np.zeros(len(documents)))
    run_step(run_serial, job, BANDS, map_bands, [0])
    run_step(run_serial, job, "near/candidates", reduce_candidates, [0])
    return {"candidates": sum(pq.read_metadata(file).num_rows for file in job.files("near/candidates"))}
