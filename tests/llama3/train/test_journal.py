"""The journal: torn lines, tailing, and the table made from it."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.train import journal as module
from herd.llama3.train.journal import (
    Entry,
    Journal,
    Record,
    Rewind,
    Tail,
    add_attempt,
    device_hours,
    discard_after,
    end_attempt,
    iter_journal,
    read_attempts,
    read_journal,
    read_rewinds,
    to_parquet,
    valid_records,
)
from herd.llama3.train.metrics_log import Replay
from tests.storage.commit_samples import disk_calls


def record(step: int, loss: float = 1.5) -> Record:
    return Record(1000.0 + step, step * 100, {"train/loss": loss, "train/grad_norm": 0.1})


def write(path: Path, count: int) -> None:
    with Journal(path) as journal:
        for step in range(1, count + 1):
            journal.add(record(step))


def test_round_trip_and_after(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert read_journal(path) == []
    write(path, 5)
    assert read_journal(path) == [record(step) for step in range(1, 6)]
    assert read_journal(path, after=300) == [record(4), record(5)]
    assert read_journal(path, after=500) == []
    assert json.loads(path.read_text().splitlines()[0]) == {
        "time": 1001.0,
        "position": 100,
        "metrics": {"train/loss": 1.5, "train/grad_norm": 0.1},
    }


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_torn_last_line_is_skipped_and_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 3)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_journal(path) == [record(1), record(2)]
    with Journal(path) as journal:
        journal.add(record(3))
    assert read_journal(path) == [record(1), record(2), record(3)]


def test_broken_line_in_the_middle_is_not_hidden(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 3)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{oops", lines[2], ""]))
    with pytest.raises(ValueError, match="is not a record"):
        read_journal(path)


@given(count=st.integers(0, 40), after=st.integers(-1, 45), block=st.integers(1, 400))
def test_reading_from_the_end_finds_the_same(
    count: int, after: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("j") / "journal.jsonl"
    write(path, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FIRST_READ", block)
        assert read_journal(path, after * 100) == [record(step) for step in range(1, count + 1) if step > after]


def histories() -> st.SearchStrategy[list[Entry]]:
    """Return journals as a trainer writes them: steps one after the other, and now and then back to one of them."""

    def play(back: list[int | None]) -> list[Entry]:
        entries: list[Entry] = []
        step = 0
        for number, steps in enumerate(back):
            if steps is None:
                step += 1
                entries.append(Record(1000.0 + number, step * 100, {"train/loss": float(number)}))
            else:
                step = max(0, step - steps)
                entries.append(Rewind(1000.0 + number, step * 100, step * 100 + 300))
        return entries

    return st.lists(st.sampled_from([None, None, None, 0, 1, 6]), min_size=4, max_size=40).map(play)


@given(entries=histories(), after=st.integers(-1, 40), block=st.integers(1, 600), seen=st.lists(st.integers(0, 40)))
def test_later_truth_replaces_the_earlier(
    entries: list[Entry], after: int, block: int, seen: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("j") / "journal.jsonl"
    tail, told = Tail(path), []
    with Journal(path) as journal:
        for number, entry in enumerate(entries):
            journal.add(entry)
            if number in seen:
                told += tail.new()
    assert told + tail.new() == entries
    truth: dict[int, Record] = {}
    for entry in entries:
        if isinstance(entry, Record):
            truth[entry.position] = entry
        else:
            truth = {position: record for position, record in truth.items() if position <= entry.position}
    assert valid_records(entries) == list(truth.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FIRST_READ", block)
        assert read_journal(path, after * 100) == [r for position, r in truth.items() if position > after * 100]
    assert read_rewinds(path) == [entry for entry in entries if isinstance(entry, Rewind)]


def test_a_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    line = record(1).line()
    path.write_bytes(line[:10])
    assert tail.new() == []
    path.write_bytes(line)
    assert tail.new() == [record(1)]


def test_a_number_that_is_none_cannot_be_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal, pytest.raises(ValueError, match="JSON"):
        journal.add(record(1, float("nan")))


def test_table(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl", 2)
    to_parquet(tmp_path / "journal.jsonl", tmp_path / "metrics.parquet")
    table = pq.read_table(tmp_path / "metrics.parquet")
    assert table.column_names == ["time", "position", "key", "value"]
    assert table.to_pylist()[2] == {"time": 1002.0, "position": 200, "key": "train/loss", "value": 1.5}
    (tmp_path / "journal.jsonl").write_text("")
    to_parquet(tmp_path / "journal.jsonl", tmp_path / "metrics.parquet")
    assert pq.read_table(tmp_path / "metrics.parquet").num_rows == 0


def test_a_table_is_written_in_groups_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_ROWS", 4)
    write(tmp_path / "journal.jsonl", 5)
    to_parquet(tmp_path / "journal.jsonl", tmp_path / "metrics.parquet")
    file = pq.ParquetFile(tmp_path / "metrics.parquet")
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [4, 4, 2]
    assert file.read()["position"].to_pylist() == [100 * step for step in range(1, 6) for _ in range(2)]


def test_no_reader_holds_a_whole_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 711K records takes 1.6 GB, and 7 GB as objects."""
    path, alive = tmp_path / "journal.jsonl", weakref.WeakSet[object]()
    write(path, 500)

    def parse(path: Path, line: bytes) -> Entry:
        alive.add(entry := original(path, line))
        assert len(alive) < 10
        return entry

    original = module._parse
    monkeypatch.setattr(module, "_parse", parse)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read whole"))
    monkeypatch.setattr(Record, "__hash__", object.__hash__)
    assert sum(1 for _ in iter_journal(path)) == 500
    to_parquet(path, tmp_path / "metrics.parquet")
    assert read_rewinds(path) == []
    Journal(path)


def test_records_of_another_future_are_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    discard_after(path, 300)
    assert not path.exists()
    with Journal(path) as journal:
        for entry in (record(1), record(4), record(6), Rewind(1.0, 400, 500), record(2), record(4), record(5)):
            journal.add(entry)
    monkeypatch.setattr(Record, "__eq__", lambda *_: pytest.fail("each record is compared with each that is moved"))
    before = path.read_bytes()
    discard_after(path, 500)
    assert path.read_bytes() == before
    discard_after(path, 300)
    lines = before.splitlines(keepends=True)
    assert path.read_bytes() == b"".join(lines[index] for index in (0, 2, 3, 4)), "void records stay in their place"
    (moved,) = tmp_path.glob("abandoned-*.jsonl")
    assert moved.read_bytes() == b"".join(lines[index] for index in (1, 5, 6))


def test_replay_knows_old_steps_and_measures_them() -> None:
    replay = Replay([record(step) for step in range(1, 6)], 200)
    assert replay.knows(record(3))
    assert replay.knows(record(4, loss=1.75))
    assert replay.knows(record(5))
    assert not replay.knows(record(6))
    assert replay.metrics(2) == {
        "recovery/restarts": 2.0,
        "recovery/lost_tokens": 300.0,
        "recovery/replay_max_abs_diff": 0.25,
    }
    assert replay.metrics(0, 1)["recovery/rollbacks"] == 1.0
    assert Replay([], 0).metrics(0) == {}
    assert Replay([], 0).metrics(1) == {"recovery/restarts": 1.0, "recovery/lost_tokens": 0.0}


def test_a_step_that_was_good_once_and_bad_once_is_a_difference() -> None:
    bad = Record(1.0, 300, {"train/skipped_steps": 1.0})
    for first, second in ((bad, record(3)), (record(3), bad)):
        replay = Replay([first], 200)
        assert replay.knows(second)
        assert replay.largest == 1.5
    replay = Replay([bad], 200)
    assert replay.knows(bad)
    assert replay.largest == 0.0


def test_attempts_survive_a_torn_line(tmp_path: Path) -> None:
    add_attempt(tmp_path, {"time": 1.0, "pid": 7, "processes": 2})
    add_attempt(tmp_path, {"ended": 3.0})
    path = tmp_path / "attempts.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time": 4.0, "environment": {"torch": "2.13"}')
    add_attempt(tmp_path, {"time": 5.0, "pid": 8, "processes": 1})
    assert [(each["time"], each.get("ended")) for each in read_attempts(tmp_path)] == [(1.0, 3.0), (5.0, None)]


def test_device_hours_are_those_of_every_attempt(tmp_path: Path) -> None:
    """One whose agent saw its end, hang included; one whose machine died after a record; one that goes on."""
    assert device_hours(tmp_path) == 0.0
    with Journal(tmp_path / "journal.jsonl") as journal:
        for time in (1000.0, 5000.0, 6000.0, 9000.0):
            journal.add(Record(time, int(time), {}))
    add_attempt(tmp_path, {"time": 0.0, "pid": 1, "processes": 4})
    add_attempt(tmp_path, {"ended": 3600.0})
    add_attempt(tmp_path, {"time": 4200.0, "pid": 2, "processes": 2})
    end_attempt(tmp_path, 3)  # refused before it could write a start
    add_attempt(tmp_path, {"time": 7200.0, "pid": 4, "processes": 1})
    assert device_hours(tmp_path) == pytest.approx((4 * 3600 + 2 * 1800 + 1 * 1800) / 3600)


def test_sync_returns_when_the_lines_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "journal.jsonl", disk_calls(monkeypatch)
    with Journal(path) as journal:
        journal.add(record(1))
        assert calls == []
        journal.sync()
    assert calls == [path.stat().st_ino]


def test_a_journal_replaced_by_that_of_another_machine_is_read_from_its_start(tmp_path: Path) -> None:
    path, other = tmp_path / "journal.jsonl", tmp_path / "other.jsonl"
    with Journal(path) as journal:
        for position in (10, 20, 30):
            journal.add(Record(1.0, position, {"train/loss": 5.0}))
    tail = Tail(path)
    assert len(tail.new()) == 3
    with Journal(other) as journal:
        for position in (10, 20, 30, 40):
            journal.add(Record(2.5, position, {"train/loss": 5.25, "train/lr": 1e-3}))
    other.rename(path)
    with Journal(path) as journal:
        journal.add(Record(3.0, 50, {"train/loss": 5.0}))
    assert [entry.position for entry in tail.new()] == [10, 20, 30, 40, 50]
    assert tail.new() == []
