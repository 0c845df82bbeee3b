"""The journal kept in an object store: whatever happened to machines and folders, a checkpoint has its whole past."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import herd.llama3.train.checkpoint.journal_upload as journal_upload
from herd.llama3.train.checkpoint.journal_upload import JournalUpload
from herd.llama3.train.checkpoint.manifest import DamagedCheckpoint, JournalChunk
from herd.llama3.train.journal import Journal, Record, Rewind, SkippedRange, SkippedRanges, discard_after, read_journal
from herd.storage.digests import digest_bytes


class Machine:
    """A stage's folder, in which attempts follow each other; the store is a folder that all machines see."""

    def __init__(self, store: Path, work: Path) -> None:
        (store / "journal").mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        self.store, self.work, self.saves = store, work, 0

    def start(self, segment: JournalChunk | None, attempt: str) -> bool:
        self.kept = JournalUpload(str(self.store), self.work, attempt)
        return segment is not None and self.kept.restore(segment)

    def train(self, first: int, count: int, loss: float) -> None:
        with Journal(self.work / "journal.jsonl") as journal:
            for position in range(first, first + count):
                journal.add(Record(0.0, position, {"train/loss": loss}))

    def rewind(self, position: int) -> None:
        skips = SkippedRanges.read(self.work).plus(
            SkippedRange(start=position, end=position + 1, spike=position, reason="spike")
        )
        skips.write(self.work)
        with Journal(self.work / "journal.jsonl") as journal:
            journal.add(Rewind(0.0, position, position + 1))

    def save(self, position: int) -> JournalChunk:
        self.saves += 1
        return self.kept.store(position, self.saves, self.kept.mark())

    @property
    def position(self) -> int:
        records = read_journal(self.work / "journal.jsonl")
        return records[-1].position if records else 0

    def state(self) -> dict[str, bytes]:
        names = [name for name in ("journal.jsonl", "skips.json") if (self.work / name).exists()]
        return {name: (self.work / name).read_bytes() for name in names}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 4)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("fail"), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(1, 3)),
        st.tuples(st.just("restart"), st.integers(0, 2)),
        st.tuples(st.just("abandon"), st.just(0)),
    ),
    max_size=25,
)


@given(operations=OPERATIONS, piece=st.sampled_from([64, 2**25]))
def test_every_checkpoint_has_its_past(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]], piece: int
) -> None:
    """Attempts on three machines take turns, go on from the newest checkpoint, go back, fail, and change the recipe."""
    folder = tmp_path_factory.mktemp("stage")
    machines = [Machine(folder / "store", folder / f"machine-{n}") for n in range(3)]
    machine, saved, attempt = machines[0], list[tuple[JournalChunk, int, dict[str, bytes]]](), 0
    machine.start(None, "attempt-0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_upload, "CHUNK_BYTES", piece)
        for what, number in operations:
            if what == "train":
                machine.train(machine.position + 1, number, attempt)
            elif what in ("save", "fail") and machine.kept.mark():
                segment = machine.save(machine.position)
                if what == "save":  # else the journal is stored and the checkpoint is not committed
                    saved.append((segment, machine.position, machine.state()))
            elif what == "rewind" and machine.position > number:
                back = machine.position - number
                saved = [kept for kept in saved if kept[1] <= back]  # the trainer deletes the checkpoints past it first
                machine.rewind(back)
            elif what == "restart" and saved:
                machine, attempt = machines[number], attempt + 1
                segment, position, state = saved[-1]
                before = machine.state()
                restored = machine.start(segment, f"attempt-{attempt}")
                assert machine.state() == (state if restored else before)
                held = [r.position for r in read_journal(machine.work / "journal.jsonl")]
                assert held == sorted(held)
                assert position == 0 or position in held
            elif what == "abandon" and saved and machine.position > saved[-1][1]:
                discard_after(machine.work / "journal.jsonl", saved[-1][1])
                machine.start(saved[-1][0], f"attempt-{attempt}b")
        for number, (segment, _, state) in enumerate(saved):
            fresh = Machine(folder / "store", folder / f"fresh-{number}")
            assert fresh.start(segment, "fresh")
            assert fresh.state() == state


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path / "store", tmp_path / "a")
    machine.start(None, "one")
    return machine


def test_only_what_is_new_is_stored(machine: Machine) -> None:
    machine.train(1, 100, 0.0)
    (machine.work / "recipe.yaml").write_text("name: x")
    machine.save(100)
    machine.train(101, 1, 0.0)
    machine.save(101)
    sizes = [path.stat().st_size for path in sorted((machine.store / "journal").iterdir())]
    assert len(sizes) == 2
    assert sizes[1] < 400 < sizes[0]
    machine.kept = JournalUpload(str(machine.store), machine.work, "two")  # started again on the same machine
    newest = sorted((machine.store / "journal").iterdir())[-1]
    assert not machine.kept.restore(JournalChunk(name=newest.name, sha256=digest_bytes(newest.read_bytes()).sha256))
    machine.train(102, 1, 0.0)
    segment = machine.save(102)
    assert (machine.store / "journal" / segment.name).stat().st_size < 500


def test_what_another_branch_left_is_moved_aside(machine: Machine, tmp_path: Path) -> None:
    """The first machine trained on after its last checkpoint, and skipped something; the second did not."""
    machine.train(1, 3, 0.0)
    common = machine.save(3)
    other = Machine(machine.store, tmp_path / "b")
    assert other.start(common, "two")
    other.train(4, 3, 2.0)
    newest = other.save(6)
    machine.train(4, 2, 1.0)
    machine.rewind(4)
    assert machine.start(newest, "three")
    assert [r.metrics["train/loss"] for r in read_journal(machine.work / "journal.jsonl")] == [0.0] * 3 + [2.0] * 3
    assert SkippedRanges.read(machine.work).ranges == ()
    (aside,) = machine.work.glob("abandoned-*")
    assert [r.metrics["train/loss"] for r in read_journal(aside / "journal.jsonl")] == [0.0] * 3 + [1.0]
    assert len(SkippedRanges.read(aside).ranges) == 1


def test_a_segment_that_is_lost_is_named_and_may_be_given_up(machine: Machine, tmp_path: Path) -> None:
    machine.train(1, 3, 0.0)
    first = machine.save(3)
    machine.train(4, 3, 0.0)
    segment = machine.save(6)
    place = machine.store / "journal" / first.name
    data = place.read_bytes()
    fresh = Machine(machine.store, tmp_path / "b")
    place.write_bytes(data[:-2] + b" \n")
    with pytest.raises(DamagedCheckpoint, match=f"{first.name}: has changed since it was written"):
        fresh.start(segment, "two")
    place.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{first.name}: is missing, .* or an empty one"):
        fresh.start(segment, "two")
    assert list(fresh.work.iterdir()) == []
    place.touch()
    assert fresh.start(segment, "two")
    assert [r.position for r in read_journal(fresh.work / "journal.jsonl")] == [4, 5, 6]
    fresh.train(7, 1, 0.0)
    after = fresh.save(7)
    shutil.rmtree(fresh.work)
    last = Machine(machine.store, tmp_path / "c")
    assert last.start(after, "three")
    assert [r.position for r in read_journal(last.work / "journal.jsonl")] == [4, 5, 6, 7]


def test_a_segment_cannot_write_elsewhere(machine: Machine, tmp_path: Path) -> None:
    name, head = "000-x.jsonl", b'{"before": null, "start": 0, "files": {"../evil.json": "x"}}\n'
    (machine.store / "journal" / name).write_bytes(head)
    with pytest.raises(DamagedCheckpoint, match=r"holds a file '../evil.json'"):
        machine.start(JournalChunk(name=name, sha256=digest_bytes(head).sha256), "two")
    with pytest.raises(ValueError, match="name"):
        JournalChunk(name="../x", sha256="")
