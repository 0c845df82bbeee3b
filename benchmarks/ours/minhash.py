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
from llama3.data.dedup.exact import map_exact, reduce_exact
from llama3.data.dedup.minhash import near_duplicates
from llama3.data.kernels.shingles import band_hashes
from llama3.data.mapreduce import in_turn, run


def work(source: Path, folder: Path, jaccard: float = 0.8) -> dict[str, Any]:
    """Write the documents that stay as Parquet; return how many, and the drops' file."""
    job = one_shard(source, folder, {"dedup": {"jaccard": jaccard}})
    documents = pq.read_table(source)
    bands = band_hashes(documents["text"], job.recipe.curate.dedup)
    write_attributes(job, documents, bands=bands, rank=np.zeros(len(documents)))
    run(in_turn, job, "exact/map", map_exact, [0])
    run(in_turn, job, "exact/drop", reduce_exact, [0])
    near_duplicates(in_turn, job)
    files = [*job.files("exact/drop"), *job.files("near/drop")]
    dropped = pa.concat_tables([pq.read_table(file, columns=["row"]) for file in files])
    kept = np.isin(documents["row"].to_numpy(), dropped["row"].to_numpy(), invert=True)
    write_kept(documents.filter(pa.array(kept)), folder / "kept.parquet")
    return {"kept": int(kept.sum()), "steps": str(job.folder)}
