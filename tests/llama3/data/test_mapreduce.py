from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herd.llama3.data.mapreduce import CurationJob, Shuffle, aggregate, key_partitions, run_serial, write_table
from herd.storage.filesystem import StoreError


def job_in(folder: Path, fan: int = 256) -> CurationJob:
    return CurationJob(None, (), str(folder), fan=fan)  # type: ignore[arg-type]  # a shuffle reads no recipe


def shuffled(job: CurationJob, shuffle: Shuffle, seed: int) -> dict[int, list[int]]:
    """Send numbered rows to random partitions; return the numbers by partition."""
    rng, sent = random.Random(seed), dict[int, list[int]]()
    for item in range(shuffle.items):
        partitions = [rng.randrange(shuffle.partitions) for _ in range(rng.randrange(6))]
        numbers = [item * 10 + place for place in range(len(partitions))]
        texts = [f"row {number}" for number in numbers]
        table = pa.table({"number": pa.array(numbers, pa.int64()), "text": pa.array(texts, pa.string())})
        shuffle.write(job, item, table, np.array(partitions, np.int64))
        for number, partition in zip(numbers, partitions, strict=True):
            sent.setdefault(partition, []).append(number)
    shuffle.merge(run_serial, job)
    return sent


@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(2, 7), st.integers(0, 99))
def test_every_row_arrives_once_and_in_its_partition(
    tmp_path_factory: pytest.TempPathFactory, items: int, partitions: int, fan: int, seed: int
) -> None:
    shuffle = Shuffle("test/rows", items, partitions, fan)
    job = job_in(tmp_path_factory.mktemp("shuffle"), fan)
    sent = shuffled(job, shuffle, seed)
    for partition in range(partitions):
        table = shuffle.read(job, partition)
        assert table.column_names == ["number", "text"]
        assert sorted(table["number"].to_pylist()) == sorted(sent.get(partition, []))
        assert table["text"].to_pylist() == [f"row {number}" for number in table["number"].to_pylist()]


def test_files_and_reads_grow_as_the_corpus_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the items and partitions: files and reads at most four times as many, and a level of merging more."""
    reads: Counter[int] = Counter()

    def counted(uri: str, start: int, stop: int) -> bytes:
        reads[size] += 1
        return Path(uri).read_bytes()[start:stop]

    monkeypatch.setattr("herd.llama3.data.mapreduce.read_range", counted)
    files = {}
    for size in (16, 64, 256):
        shuffle, job = Shuffle("test/rows", size, size, fan=4), job_in(tmp_path / str(size), 4)
        shuffled(job, shuffle, size)
        for partition in range(size):
            shuffle.read(job, partition)
        files[size] = len(list(Path(job.folder).rglob("*.parquet")))
        # Of each level, one file for each range that is read again, and two reads of each of its `fan` ranges.
        assert files[size] == size * shuffle.levels
        assert reads[size] <= 2 * 4 * size * shuffle.levels + size
    assert [Shuffle("", size, size, 4).levels for size in files] == [2, 3, 4]
    assert [Shuffle("", size, size).levels for size in (32, 33, 1024, 1_000_000)] == [1, 2, 2, 4]


def test_bytes_that_changed_are_refused(tmp_path: Path) -> None:
    shuffle, job = Shuffle("test/rows", 1, 2), job_in(tmp_path)
    table = pa.table({"number": pa.array(range(100), pa.int64())})
    shuffle.write(job, 0, table, np.arange(100) % 2)
    path = Path(job.file(shuffle.step(), 0))
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    assert shuffle.read(job, 0)["number"].to_pylist() == list(range(0, 100, 2))
    with pytest.raises(StoreError, match="not those that were written; delete the file"):
        shuffle.read(job, 1)
    path.write_bytes(data[:-1])
    with pytest.raises(OSError, match=r"ends at .*; delete the file"):
        shuffle.read(job, 1)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 10_000))
def test_partitions_of_keys_are_ranges(keys: list[int], partitions: int) -> None:
    found = key_partitions(np.array(sorted(keys), np.uint64), partitions)
    assert found.min() >= 0
    assert found.max() < partitions
    assert (np.diff(found) >= 0).all()
    assert [int(partition) for partition in found] == [(key >> 32) * partitions >> 32 for key in sorted(keys)]


@pytest.mark.parametrize("count", [1, 5, 70])
def test_sums_of_sums_are_the_sum(tmp_path: Path, count: int) -> None:
    job, seen = job_in(tmp_path, 4), list[int]()

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
