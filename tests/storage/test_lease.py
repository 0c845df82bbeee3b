"""Leases with real processes: killed, stopped, racing, on a local folder and on an S3 server."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from storage.beats import Watch
from storage.holder import Holder
from storage.lease import LeaseHeld, LeaseLost, Timing, folder_lease, holders, lease
from storage.root import Root
from tests.storage.fault_proxy import Rule
from tests.storage.fault_world import faulty_moto
from tests.storage.s3 import BUCKET, moto, pointed_at

FAST = Timing(beat_s=0.2, silence_s=1.5, settle_s=0.05)
SPAWN = multiprocessing.get_context("spawn")
HOLD = """
import json, sys
from storage.lease import LeaseLost, Timing, lease
from storage.root import Root
root, name, timing = sys.argv[1], sys.argv[2], Timing(*map(float, sys.argv[3:6]))
try:
    with lease(Root.of(root), name, "quickstart-1", print, timing=timing) as held:
        print("held", held.fence, flush=True)
        for line in sys.stdin:
            if line == "end\\n":
                break
            held.check()
            print("ours", flush=True)
    print("released", flush=True)
except LeaseLost as error:
    print("lost", error, flush=True)
"""


class Other:
    """Another process that holds a lease and does what it is told."""

    def __init__(self, root: Root, name: str) -> None:
        words = [sys.executable, "-c", HOLD, root.uri, name, str(FAST.beat_s), str(FAST.silence_s), str(FAST.settle_s)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def told(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.hears()


@contextmanager
def other(root: Root, name: str) -> Iterator[Other]:
    """Yield another process that tries to hold `name`; it is killed in the end."""
    made = Other(root, name)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto(tmp_path_factory.mktemp("moto")) as uri:
        yield uri


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    if request.param == "local":
        return Root.of(tmp_path / "root")
    return Root.of(f"{request.getfixturevalue('bucket')}/{tmp_path.name}", str(tmp_path))


def test_the_holder_is_named_and_release_is_immediate(root: Root) -> None:
    with other(root, "runs/a-1") as holder:
        assert holder.hears() == "held 1"
        pattern = rf"runs/a-1 is used by quickstart-1 \(process {holder.process.pid} on \S+ since 20"
        with pytest.raises(LeaseHeld, match=pattern), lease(root, "runs/a-1", "mine", timing=FAST):
            pass
        assert list(holders(root, ["runs/a-1", "runs/b-1"], FAST)) == ["runs/a-1"]
        assert holder.told("end") == "released"
        assert not holders(root, ["runs/a-1"], FAST)
        with lease(root, "runs/a-1", "mine", timing=FAST) as held:
            assert held.fence == 2
            held.check()


def test_a_killed_holder_frees_it_at_once_on_its_own_machine(root: Root) -> None:
    with other(root, "checkpoint/x-1") as holder:
        assert holder.hears() == "held 1"
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait()
        assert not holders(root, ["checkpoint/x-1"], FAST)
        with lease(root, "checkpoint/x-1", "mine", timing=FAST) as held:
            assert held.fence == 2


def test_waiting_is_told_once_and_ends_with_the_holder(root: Root) -> None:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        threading.Thread(target=holder.told, args=("end",)).start()

    with other(root, "tokens/x-1") as holder:
        assert holder.hears() == "held 1"
        with lease(root, "tokens/x-1", "mine", tell, timing=FAST) as held:
            assert held.fence == 2
        assert [text.partition(" (")[0] for text in told] == ["quickstart-1"]


def test_an_error_inside_releases(root: Root) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), lease(root, "runs/a-1", "mine", timing=FAST):
            raise KeyError


def test_a_name_that_leaves_the_root_is_refused(root: Root) -> None:
    with pytest.raises(ValueError, match="no name below a root"), lease(root, "../a", "mine"):
        pass


def race(uri: str, scratch: str, number: int, barrier: Any, wins: Any) -> None:
    """Try 50 leases, each together with the other process, and hold them until both have tried."""
    root = Root.of(uri, scratch)
    for turn in range(50):
        barrier.wait(60)
        with suppress(LeaseHeld), lease(root, f"runs/race-{turn}", f"racer-{number}", timing=FAST):
            wins[turn * 2 + number] = 1
            barrier.wait(60)
            continue
        barrier.wait(60)


def test_two_racing_processes_have_one_winner(root: Root) -> None:
    barrier, wins = SPAWN.Barrier(2), SPAWN.Array("i", 100)
    racers = [SPAWN.Process(target=race, args=(root.uri, str(root.local), n, barrier, wins)) for n in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(120)
        assert racer.exitcode == 0
    assert [wins[turn * 2] + wins[turn * 2 + 1] for turn in range(50)] == [1] * 50


def test_a_stopped_holder_of_a_remote_lease_wakes_up_to_find_it_lost(bucket: str, tmp_path: Path) -> None:
    root = Root.of(f"{bucket}/{tmp_path.name}", str(tmp_path))
    with other(root, "checkpoint/x-1") as holder:
        assert holder.hears() == "held 1"
        assert holder.told("check") == "ours"
        holder.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with lease(root, "checkpoint/x-1", "mine", lambda _: None, timing=FAST) as held:
            assert held.fence == 2
            assert time.monotonic() - began >= FAST.silence_s
            holder.process.send_signal(signal.SIGCONT)
            words = holder.told("check")
            assert words.startswith("lost lease")
            assert "mine" in words
            held.check()


def test_the_loser_is_told_without_asking(bucket: str, tmp_path: Path) -> None:
    root, lost = Root.of(f"{bucket}/{tmp_path.name}", str(tmp_path)), threading.Event()
    with lease(root, "runs/a-1", "mine", lost=lost.set, timing=FAST) as held:
        theirs = Holder.parse(root.read("leases", "runs", "a-1", "1.json") or b"")
        assert theirs is not None
        other = theirs.model_copy(update={"token": "other", "fence": 2})
        root.write(other.text(), "leases", "runs", "a-1", "2.json")
        assert lost.wait(10)
        with pytest.raises(LeaseLost, match="fence 2"):
            held.check()
    assert json.loads(root.read("leases", "runs", "a-1", "2.json") or b"{}")["released"] is False


def test_a_dead_holder_of_another_machine_is_believed_after_the_silence(bucket: str, tmp_path: Path) -> None:
    root = Root.of(f"{bucket}/{tmp_path.name}", str(tmp_path))
    with lease(root, "runs/a-1", "theirs", timing=FAST):
        pass
    theirs = Holder.parse(root.read("leases", "runs", "a-1", "1.json") or b"")
    assert theirs is not None
    root.write(
        theirs.model_copy(update={"released": False, "machine": "another"}).text(), "leases", "runs", "a-1", "1.json"
    )
    began = time.monotonic()
    with lease(root, "runs/a-1", "mine", timing=FAST) as held:
        assert held.fence == 2
        assert time.monotonic() - began >= FAST.silence_s
    assert root.names("leases", "runs", "a-1") == ["2.json"]


def test_a_removed_lock_file_is_noticed(tmp_path: Path) -> None:
    root = Root.of(tmp_path)
    with lease(root, "runs/a-1", "mine") as held:
        (tmp_path / "leases" / "runs" / "a-1").unlink()
        with lease(root, "runs/a-1", "theirs"), pytest.raises(LeaseLost, match="its file was removed"):
            held.check()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker of a pool outlives its killed parent for a moment, or for ever."""
    with folder_lease(tmp_path, "mine"):
        if not (child := os.fork()):
            time.sleep(20)
            os._exit(0)
        with pytest.raises(LeaseHeld), folder_lease(tmp_path, "theirs"):
            pass
    with folder_lease(tmp_path, "theirs") as held:
        assert held.fence == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    text = Holder.here("quickstart-1", fence=3).text().encode()
    for bit in range(8 * len(text)):
        data = bytearray(text)
        data[bit // 8] ^= 1 << bit % 8
        assert Holder.parse(bytes(data)) is None, bytes(data)
    assert Holder.parse(text) is not None


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_a_bit_that_flips_on_the_way_neither_refuses_ourselves_nor_takes_a_live_lease(
    tmp_path: Path, skip: int
) -> None:
    with faulty_moto(tmp_path) as proxy, pointed_at({"HERD_S3_CHECKSUMS": "when_required"}):
        root = Root.of(f"s3://{BUCKET}/{tmp_path.name}", str(tmp_path))
        (rule,) = proxy.use(Rule("flip", "GET", r"1\.json$", skip=skip))
        with lease(root, "runs/a-1", "mine", timing=Timing(60, 60, 0.05)) as held:
            for _ in range(3):
                held.check()
                assert Watch(root, "runs/a-1", FAST).look() == "held"
            assert rule.done == 1
            with pytest.raises(LeaseHeld, match="mine"), lease(root, "runs/a-1", "other", timing=FAST):
                pass
