"""Daft's side of the job of the `scale/peers` rows (a data frame engine in Rust), as its guide to deduplication has it.

Its text is made lower case and loses its punctuation before words are counted. Documents that share a band are joined
to the smallest of them, and components are found by union-find here: its guide takes several passes of data frames for
that, which on one machine only cost time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import daft
from daft import col
from daft.functions import length, minhash, monotonically_increasing_id, normalize, split

BANDS, ROWS, SHINGLE = 14, 8, 5


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Write the documents that stay; return their URLs."""
    documents = daft.read_json(str(source)).select("text", "url", "date")
    words = col("words").list_count()
    mean = (length(col("clean")) - words + 1) / words
    documents = (
        documents.with_column("clean", normalize(col("text"), remove_punct=True, lowercase=True, white_space=True))
        .with_column("words", split(col("clean"), " "))
        .where((words >= 50) & (words <= 100_000) & (mean >= 3) & (mean <= 10))
        .groupby("text")
        .agg(col("url").min(), col("date").min(), col("clean").any_value())
        .with_column("id", monotonically_increasing_id())
        .collect()
    )
    signatures = minhash(col("clean"), num_hashes=BANDS * ROWS, ngram_size=SHINGLE, hash_function="xxhash")
    edges = (
        documents.select(col("id"), signatures.alias("hashes"))
        .with_column("band", col("hashes").chunk(ROWS))
        .with_column("number", daft.lit(list(range(BANDS))))
        .explode("band", "number")
        .groupby("band", "number")
        .agg(col("id").list_agg().alias("ids"))
        .where(col("ids").list_count() > 1)
        .select("ids")
        .to_pydict()["ids"]
    )
    parent: dict[int, int] = {}

    def find(one: int) -> int:
        while (above := parent.setdefault(one, one)) != one:
            parent[one] = one = parent.get(above, above)
        return one

    for ids in edges:
        first = find(min(ids))
        for other in ids:
            root = find(other)
            first, root = min(first, root), max(first, root)
            parent[root] = first
    gone = [one for one in parent if find(one) != one]
    kept = documents.where(~col("id").is_in(gone)) if gone else documents
    kept.select("text", "url", "date").write_parquet(str(folder / "kept"))
    return {"kept": kept.select("url").to_pydict()["url"]}
