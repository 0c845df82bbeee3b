from __future__ import annotations

import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herd.llama3.data.mapreduce import CurationJob
from herd.llama3.data.shuffle import Shuffle, key_partitions
from herd.llama3.data.work_items import do_pieces, run_serial
from herd.storage.filesystem import StoreError

Sent = dict[int, list[int]]


def job_in(folder: Path, fan: int = 256) -> CurationJob:
    return CurationJob(None, (), str(folder), fan=fan)  # type: ignore[arg-type]  # a shuffle reads no recipe


def shuffled(job: CurationJob, shuffle: Shuffle, seed: int, item_pieces: int = 1) -> Sent:
    """Send numbered rows from the pieces of every item to pieces of chance; return the numbers by piece."""
    sent: Sent = {}
    for item in range(shuffle.items):
        do_pieces(shuffle.step(), item_pieces, partial(_send, shuffle, seed, sent), job, item, item_pieces)
    shuffle.merge(run_serial, job)
    return sent


def _send(shuffle: Shuffle, seed: int, sent: Sent, job: Any, index: int) -> None:
    rng = random.Random(seed * 1000 + index)
    pieces = [rng.randrange(shuffle.partitions * shuffle.pieces) for _ in range(rng.randrange(6))]
    numbers = [index * 10 + place for place in range(len(pieces))]
    texts = [f"row {number}" for number in numbers]
    table = pa.table({"number": pa.array(numbers, pa.int64()), "text": pa.array(texts, pa.string())})
    shuffle.write(job, index, table, np.array(pieces, np.int64))
    for number, piece in zip(numbers, pieces, strict=True):
        sent.setdefault(piece, []).append(number)


@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 3), st.integers(2, 7), st.sampled_from([1, 10**6]))
def test_every_row_arrives_once_and_in_its_piece(
    tmp_path_factory: pytest.TempPathFactory, items: int, partitions: int, pieces: int, fan: int, buffer: int
) -> None:
    shuffle = Shuffle("test/rows", items, partitions, fan, pieces=pieces)
    job = job_in(tmp_path_factory.mktemp("shuffle"), fan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("herd.llama3.data.shuffle.BUFFER", buffer)
        sent = shuffled(job, shuffle, items, item_pieces=1 + partitions % 3)
    for piece in range(partitions * pieces):
        table = shuffle.read(job, piece)
        assert table.column_names == ["number", "text"]
        assert sorted(table["number"].to_pylist()) == sorted(sent.get(piece, []))
        assert table["text"].to_pylist() == [f"row {number}" for number in table["number"].to_pylist()]


def test_files_and_reads_grow_as_the_corpus_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the items and partitions: files and reads at most four times as many, and a level of merging more."""
    reads: Counter[int] = Counter()

    def counted(uri: str, start: int, stop: int) -> bytes:
        reads[size] += 1
        return Path(uri).read_bytes()[start:stop]

    monkeypatch.setattr("herd.llama3.data.shuffle.read_range", counted)
    files = {}
    for size in (16, 64, 256):
        shuffle, job = Shuffle("test/rows", size, size, fan=4), job_in(tmp_path / str(size), 4)
        shuffled(job, shuffle, size)
        for partition in range(size):
            shuffle.read(job, partition)
        levels = [len(list(Path(job.folder, shuffle.step(level)).glob("*.parquet"))) for level in range(shuffle.levels)]
        files[size] = sum(levels)
        # Of each level, one file for each range that is read again, one read of each of its `fan` ranges that is not
        # empty, and of its index; of each four files, the schema.
        assert files[size] == size * shuffle.levels
        assert reads[size] <= (4 + 1 + 0.25) * size * shuffle.levels
    assert [Shuffle("", size, size, 4).levels for size in files] == [2, 3, 4]
    assert [Shuffle("", size, size).levels for size in (40, 41, 1600, 64_000, 1_000_000)] == [1, 2, 2, 3, 4]
    assert [Shuffle("", size, 1).width for size in (1, 40, 41, 1600, 15_000)] == [1, 40, 7, 40, 25]


def test_bytes_that_changed_are_refused(tmp_path: Path) -> None:
    shuffle, job = Shuffle("test/rows", 1, 2), job_in(tmp_path)
    table = pa.table({"number": pa.array(range(100), pa.int64())})
    shuffle.write(job, 0, table, np.arange(100) % 2)
    shuffle.merge(run_serial, job)
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


def test_a_file_that_a_late_worker_writes_again_is_read(tmp_path: Path) -> None:
    shuffle, job = Shuffle("test/rows", 2, 2), job_in(tmp_path)
    for item in range(2):
        shuffle.write(job, item, pa.table({"number": np.arange(100)}), np.arange(100) % 2)
    shuffle.merge(run_serial, job)
    shuffle.write(job, 1, pa.table({"number": np.arange(100)[::-1]}), np.arange(100)[::-1] % 2)
    for piece in range(2):
        assert sorted(shuffle.read(job, piece)["number"].to_pylist()) == sorted([*range(piece, 100, 2)] * 2)


def test_a_failed_item_leaves_no_file(tmp_path: Path) -> None:
    shuffle, job = Shuffle("test/rows", 1, 2), job_in(tmp_path)

    def work(job: CurationJob, index: int) -> None:
        shuffle.write(job, index, pa.table({"number": np.arange(9)}), np.arange(9) % 2)
        job.write("beside", index, pa.table({"number": np.arange(9)}))
        if index == 2:
            raise RuntimeError("the third piece")

    with pytest.raises(RuntimeError, match="third"):
        do_pieces(shuffle.step(), 3, work, job, 0, 3)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    do_pieces(shuffle.step(), 3, work, job, 0, 2)
    assert [job.read("beside", 0).num_rows, len(job.files(shuffle.step()))] == [9, 1]


def test_the_file_of_the_step_comes_after_all_others_of_its_item(tmp_path: Path) -> None:
    shuffle, job = Shuffle("test/rows", 1, 2), job_in(tmp_path)

    def work(job: CurationJob, index: int) -> None:
        shuffle.write(job, index, pa.table({"number": np.arange(9)}), np.arange(9) % 2)
        job.write("beside", index, pa.table({"number": np.arange(9)}))
        shutil.rmtree(tmp_path / "beside")  # it cannot be written

    with pytest.raises(FileNotFoundError):
        do_pieces(shuffle.step(), 1, work, job, 0, 1)
    assert not job.files(shuffle.step())


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 10_000))
def test_partitions_of_keys_are_ranges(keys: list[int], partitions: int) -> None:
    found = key_partitions(np.array(sorted(keys), np.uint64), partitions)
    assert found.min() >= 0
    assert found.max() < partitions
    assert (np.diff(found) >= 0).all()
    assert [int(partition) for partition in found] == [(key >> 32) * partitions >> 32 for key in sorted(keys)]
