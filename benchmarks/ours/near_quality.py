"""What our near-duplicate removal found, for the comparison with the true pairs. Not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.ours.setup import one_shard, write_attributes
from herd.llama3.data.dedup.exact import Exact
from herd.llama3.data.dedup.minhash import CLUSTERS, MinHash, round_shuffles
from herd.llama3.data.kernels.shingles import band_hashes
from herd.llama3.data.work_items import read_table, run_serial


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Return the cluster of each row, named by its first document, and the verified pairs of rows."""
    job = one_shard(source, folder, {"dedup": {"jaccard": 0.8}}, Exact(), MinHash())
    documents = pq.read_table(source)
    bands = band_hashes(documents["text"], job.recipe.curate.dedup)
    write_attributes(job, documents, bands=bands, rank=np.zeros(len(documents)))
    Exact().run(run_serial, job)
    MinHash().passes(run_serial, job)  # `run` would remove the verdicts
    clusters = read_table(job.file(job.by_partition(CLUSTERS), 0))
    pairs = set()
    for number in range(len(list(Path(job.folder, "minhash").glob("*/open")))):
        similar = round_shuffles(job, number).verdicts.read(job, 0).filter(pc.field("edge"))
        ends = zip(similar["center"].to_pylist(), similar["row"].to_pylist(), strict=True)
        pairs |= {(min(pair), max(pair)) for pair in ends}
    clustered = dict(zip(clusters["id"].to_pylist(), clusters["cluster"].to_pylist(), strict=True))
    return {
        "clusters": [clustered.get(id_, id_) for id_ in documents["id"].to_pylist()],  # exact copies share their id
        "pairs": sorted(pairs),
    }
