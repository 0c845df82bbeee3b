from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from herd.llama3.data.mapreduce import CurationJob, aggregate
from herd.llama3.data.work_items import run_serial, write_table


@pytest.mark.parametrize("most", [10**9, 1])
@pytest.mark.parametrize("count", [1, 5, 70])
def test_sums_of_sums_are_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, most: int) -> None:
    monkeypatch.setattr("herd.llama3.data.mapreduce.AGGREGATED", most)
    job, seen = CurationJob(None, (), str(tmp_path), fan=4), list[int]()  # type: ignore[arg-type]

    def runner(job: Any, step: str, work: Any, items: Any) -> None:
        seen.extend(items)
        run_serial(job, step, work, items)

    for item in range(count):
        write_table(pa.table({"name": ["a", f"b{item % 3}"], "count": [item, 1]}), job.file("counts", item))
    query = 'SELECT name, sum("count")::BIGINT AS "count" FROM rows GROUP BY name ORDER BY name'
    rows = aggregate(runner, job, "counts", count, query).to_pylist()
    expected = Counter({"a": sum(range(count))}) + Counter(f"b{item % 3}" for item in range(count))
    assert {row["name"]: row["count"] for row in rows if row["count"]} == dict(expected)
    assert len(seen) <= count // 3 + 3
