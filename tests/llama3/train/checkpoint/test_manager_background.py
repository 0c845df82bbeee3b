"""Saving while training goes on: one moment is saved, a failure costs only itself, death costs only the save."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from herd.llama3.train.checkpoint.dcp import save_state
from herd.llama3.train.checkpoint.manager import SaveFailed, Snapshot
from herd.llama3.train.checkpoint.manifest import CheckpointManifest
from tests.dist import run
from tests.llama3.train.checkpoint_samples import (
    ALONE,
    State,
    assert_holds,
    die_while_saving,
    fail_then_recover,
    opened,
    resume,
    save_in_the_background,
)


@pytest.mark.parametrize("processes", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))])
def test_what_is_saved_is_one_moment_for_any_number_of_processes(processes: int, tmp_path: Path) -> None:
    """Four saves, the state changed right after each began; loaded on 1, 2 and 3 processes bit for bit."""
    for done in run(processes, save_in_the_background, tmp_path, [5, 6, 7, 9]):
        assert done == [5, 6, 7, 9]
    files = sorted(path.name for path in (tmp_path / f"{9:018}").glob("*.safetensors"))
    assert {name[:5] for name in files} == {f"{rank:05}" for rank in range(processes)}
    assert any(name.endswith("-03.safetensors") for name in files), "four threads write four files"
    for others in (1, 2, 3):
        for position, skipped, arrays in run(others, resume, tmp_path):
            assert (position, skipped) == (9, ())
            assert_holds(arrays, 9)


class Gate:
    """Stops the background thread before it reads the copies, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event, wait = threading.Event(), Snapshot.wait

        def gated(snapshot: Snapshot) -> float:
            assert self.event.wait(30)
            return wait(snapshot)

        monkeypatch.setattr(Snapshot, "wait", gated)


def test_steps_taken_before_a_byte_is_written_do_not_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Later steps, and a later average, change nothing; the files equal those of a synchronous save, byte for byte."""
    gate, state, checkpoints = Gate(monkeypatch), State(position=3), opened(tmp_path / "checkpoints")
    state.make_average(2)
    save_state(tmp_path / "now", state, "main", ALONE)
    checkpoints.begin(state, "main")
    assert checkpoints.poll() == []
    state.train_to(4)
    state.make_average(0)
    gate.event.set()
    (saved,) = checkpoints.finish()
    written = CheckpointManifest.read(tmp_path / "checkpoints" / f"{3:018}")
    assert written.files == CheckpointManifest.read(tmp_path / "now").files
    assert (written.position, written.averaged) == (saved.position, 2) == (3, 2)
    assert saved.bytes == sum(digest.bytes for digest in written.files.values())
    assert 0 < saved.blocked_s <= saved.total_s


def test_a_save_asked_for_too_early_waits_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gate, state, checkpoints = Gate(monkeypatch), State(position=3), opened(tmp_path)
    checkpoints.begin(state, "main")
    state.train_to(4)
    threading.Timer(0.2, gate.event.set).start()
    checkpoints.begin(state, "main")
    first, second = checkpoints.finish()
    assert (first.position, second.position) == (3, 4)
    assert second.waited_s > first.waited_s
    assert_holds(resume(tmp_path)[2], 4)


def test_a_save_is_over_before_older_checkpoints_are_deleted(tmp_path: Path) -> None:
    """Else the other processes would wait for rank 0 at the next step that they take together."""
    checkpoints, delete = opened(tmp_path, last=1), threading.Event()
    prune = checkpoints._prune

    def late() -> None:
        assert delete.wait(30)
        prune()

    checkpoints._prune = late  # type: ignore[method-assign]
    state, done = State(), list[int]()
    for position in (3, 6):
        state.train_to(position)
        checkpoints.begin(state, "main")
        checkpoints._wait()
        done += [saved.position for saved in checkpoints.poll()]
    assert (done, checkpoints.positions()) == ([3, 6], [3, 6])
    delete.set()
    checkpoints.finish()
    assert checkpoints.positions() == [6]


def test_a_state_that_gains_tensors_is_planned_anew(tmp_path: Path) -> None:
    state, checkpoints = State(), opened(tmp_path)
    for position, averaged in ((1, 0), (2, 0), (3, 2), (4, 3), (5, 0)):
        state.make_average(averaged)
        state.train_to(position)
        checkpoints.save(state, "main")
        found = State()
        opened(tmp_path).resume(found)
        assert found.averaged == averaged
        assert found.tensors().keys() == state.tensors().keys()
        assert all(torch.equal(tensor, state.tensors()[name]) for name, tensor in found.tensors().items())


@pytest.mark.fault("F6")
def test_a_full_disk_keeps_the_checkpoint_before_and_is_told(tmp_path: Path) -> None:
    """One of two processes cannot write (its files may not grow); both learn it, the next save works."""
    told, other = run(2, fail_then_recover, tmp_path)
    assert told["lines"][0].startswith("checkpoint failed, 1 in a row")
    assert "process 1: OSError(27, 'File too large')" in told["lines"][0]
    assert other["lines"] == []  # the leader speaks for all
    for result in (told, other):
        assert result["after failure"] == [5]
        assert result["given up at"] == 9
        assert "3 checkpoints in a row could not be saved" in result["given up"]
        assert result["at the end"] == [5, 10]
        assert result["hidden"] == []
    (position, skipped, arrays), _ = run(2, resume, tmp_path)
    assert (position, skipped) == (10, ())
    assert_holds(arrays, 10)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for little; skipped, aloud, where mounting is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=96k", "tmpfs", disk]).returncode:
        pytest.skip("may not mount a small disk here; RLIMIT_FSIZE has the same path tested")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.fault("F6")
def test_no_space_left_on_the_device(small_disk: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    state, checkpoints = State(position=1), opened(small_disk / "checkpoints", log=lines.append)
    checkpoints.save(state, "main")
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(96 * 1024))
    state.train_to(2)
    checkpoints.begin(state, "main")
    assert checkpoints.finish() == []
    assert "No space left on device" in lines[0]
    with pytest.raises(SaveFailed, match="No space left on device"):
        checkpoints.save(state, "main")
    assert checkpoints.positions() == [1]
    assert not list((small_disk / "checkpoints").glob(".*"))
    filler.unlink()
    assert checkpoints.save(state, "main").position == 2
    assert_holds(resume(small_disk / "checkpoints")[2], 2)


@pytest.mark.parametrize(
    ("target", "calls", "after", "left"),
    [
        ("herd.llama3.train.checkpoint.dcp:write_file", 2, False, 5),  # calls of the second save
        pytest.param("herd.llama3.train.checkpoint.dcp:write_file", 4, True, 5, marks=pytest.mark.slow),
        pytest.param("herd.llama3.train.checkpoint.manifest:write_atomic", 1, False, 5, marks=pytest.mark.slow),
        pytest.param("herd.llama3.train.checkpoint.manifest:write_atomic", 1, True, 5, marks=pytest.mark.slow),
        ("herd.llama3.train.checkpoint.storage:sync_folder", 1, False, 6),  # renamed: committed
        pytest.param("shutil:rmtree", 3, False, 6, marks=pytest.mark.slow),  # while an older one is deleted
    ],
)
def test_killed_while_saving(target: str, calls: int, after: bool, left: int, tmp_path: Path) -> None:
    """By SIGKILL, while its files may be written; test_manager_orders.py has every other point."""
    with pytest.raises(RuntimeError, match="died"):
        run(1, die_while_saving, tmp_path, target, calls, after)
    ((position, skipped, arrays),) = run(1, resume, tmp_path)
    assert (position, skipped) == (left, ())
    assert_holds(arrays, left)
    assert not list(tmp_path.glob(".*"))


def test_one_of_two_is_killed_while_saving(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(2, die_while_saving, tmp_path, "herd.llama3.train.checkpoint.dcp:write_file", 2, True, 1)
    for position, _, arrays in run(2, resume, tmp_path):
        assert position == 5
        assert_holds(arrays, 5)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_a_device_are_of_one_moment() -> None:
    """Steps enqueued right behind the copy, before the host has waited for anything, do not show."""
    tensors = {str(n): torch.full((1 << 24,), float(n), device="cuda") for n in range(8)}
    snapshot = Snapshot()
    snapshot.take(tensors)
    for tensor in tensors.values():
        tensor.add_(100)
    assert snapshot.wait() > 0
    for n in range(8):
        assert snapshot.shards[str(n)].is_pinned()
        assert np.all(snapshot.shards[str(n)].numpy() == n)


def test_host_memory_is_taken_once() -> None:
    state, snapshot = State(), Snapshot()
    snapshot.prepare(state.tensors())
    addresses = {name: shard.data_ptr() for name, shard in snapshot.shards.items()}
    snapshot.take(state.tensors())
    assert {name: shard.data_ptr() for name, shard in snapshot.shards.items()} == addresses
