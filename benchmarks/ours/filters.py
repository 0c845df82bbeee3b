"""Our filters: every statistic of every document in one pass, then the bounds of the three rule sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.ours.setup import MEMORY, quality
from herd.llama3.data.annotate import document_statistics
from herd.llama3.data.filters import outcome_sql
from herd.llama3.data.mapreduce import duckdb_session
from herd.llama3.recipe.data_schema import Curate, Quality

_SETS = ("gopher", "repetition", "fineweb")


def work(source: Path, folder: Path, alphabetic: float) -> dict[str, Any]:
    """Return, by rule set, the outcome of each document ("" if kept), and the file of the statistics."""
    read = pq.read_table(source, columns=["text", "domain", "language"])
    statistics = document_statistics(read["text"])
    pq.write_table(statistics, folder / "statistics.parquet", compression="zstd")
    documents = statistics.append_column("place", pa.array(np.arange(len(statistics))))
    for name in ("domain", "language"):
        documents = documents.append_column(name, read[name])
    outcomes = ", ".join(f"coalesce({_outcome(name, alphabetic)}, '') AS {name}" for name in _SETS)
    with duckdb_session(folder / "spill", MEMORY, 1) as connection:
        connection.register("documents", documents)
        found = connection.sql(f"SELECT {outcomes} FROM documents ORDER BY place").to_arrow_table()
    reasons = {f"reasons_{name}": found[name].to_pylist() for name in _SETS}
    return {**reasons, "statistics": str(folder / "statistics.parquet")}


def _outcome(rules: str, alphabetic: float) -> str:
    """Return SQL for the first bound of `rules` that a document breaks, or NULL."""
    section = quality([rules], alphabetic if rules == "gopher" else None)
    return outcome_sql(Curate(quality=Quality.model_validate(section)))
