"""What our near-duplicate removal found, for the comparison with the true pairs. Not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.ours.minhash import work as remove
from benchmarks.ours.setup import one_shard
from llama3.data.dedup.minhash import verdict_files


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Return the cluster of each row, named by the document that stays, and the verified pairs of rows."""
    remove(source, folder)
    job = one_shard(source, folder, {})
    clusters = pa.concat_tables([pq.read_table(file) for file in job.files("near/clusters")])
    pairs = set()
    for file in verdict_files(job):
        alike = pq.read_table(file).filter(pc.field("alike"))
        ends = zip(alike["centre"].to_pylist(), alike["row"].to_pylist(), strict=True)
        pairs |= {(min(pair), max(pair)) for pair in ends}
    clustered = dict(zip(clusters["id"].to_pylist(), clusters["cluster"].to_pylist(), strict=True))
    ids = pq.read_table(source, columns=["id"])["id"].to_pylist()  # exact copies share their id
    return {
        "clusters": [clustered.get(one, one) for one in ids],
        "pairs": sorted(pairs),
    }
