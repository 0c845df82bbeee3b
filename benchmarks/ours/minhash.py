"""Our removal of exact and near copies: bands, candidates verified by true Jaccard, and the documents that stay.

Exact copies are a step before in ours and part of the same one in the peers, so both steps are measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.ours.setup import one_shard, write_attributes, write_kept
from herd.llama3.data.dedup.exact import Exact
from herd.llama3.data.dedup.minhash import MinHash
from herd.llama3.data.kernels.shingles import band_hashes
from herd.llama3.data.mapreduce import CurationJob, run_serial


def prepare(source: Path, folder: Path, jaccard: float = 0.8) -> CurationJob:
    """Write the bands of the text shard `source` and return the job of both stages."""
    job = one_shard(source, folder, {"dedup": {"jaccard": jaccard}}, Exact(), MinHash())
    documents = pq.read_table(source)
    bands = band_hashes(documents["text"], job.recipe.curate.dedup)
    write_attributes(job, documents, bands=bands, rank=np.zeros(len(documents)))
    return job


def work(source: Path, folder: Path, jaccard: float = 0.8) -> dict[str, Any]:
    """Write the documents that stay as Parquet; return how many, and the folder of the steps."""
    job = prepare(source, folder, jaccard)
    for stage in job.stages:
        stage.run(run_serial, job)
    documents = pq.read_table(source)
    kept = np.isin(documents["row"].to_numpy(), job.fates(0, "end")["row"].to_numpy(), invert=True)
    write_kept(documents.filter(pa.array(kept)), folder / "kept.parquet")
    return {"kept": int(kept.sum()), "steps": job.folder}
