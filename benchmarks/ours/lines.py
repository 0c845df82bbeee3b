"""Our line rule: hashes of all lines, counts in buckets, and the texts without the lines that stand too often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.ours.setup import one_shard, write_attributes, write_kept
from herd.llama3.data.dedup.lines import LineDedup, bad_lines, line_hashes, strip_lines
from herd.llama3.data.work_items import run_serial


def work(source: Path, folder: Path, max_copies: int = 6, min_chars: int = 8) -> dict[str, Any]:
    """Write the stripped documents as Parquet; return how many lines went."""
    job = one_shard(source, folder, {"lines": {"max_copies": max_copies, "min_chars": min_chars}}, LineDedup())
    documents = pq.read_table(source)
    write_attributes(job, documents, lines=line_hashes(documents["text"], min_chars))
    LineDedup().run(run_serial, job)
    columns = (documents[name] for name in ("text", "domain", "language", "id"))
    stripped = strip_lines(job, bad_lines(job, 0), *columns)
    place = documents.schema.get_field_index("text")
    write_kept(documents.set_column(place, "text", stripped.texts), folder / "kept.parquet")
    return {"lines": int(stripped.lines.sum()), "documents": str(folder / "kept.parquet")}
