"""Leases with real processes: killed, stopped, racing, on a local folder and on an S3 server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from herd.storage.lease import (
    LeaseHeld,
    LeaseLost,
    LeaseObservation,
    LeaseRecord,
    LeaseTiming,
    folder_lease,
    lease,
    lease_holders,
)
from herd.storage.root import Root
from tests.storage.commit_samples import started
from tests.storage.fault_proxy import FaultProxy, Rule
from tests.storage.s3 import pointed_at

FAST = LeaseTiming(beat_s=0.2, lease_timeout_s=1.5, grace_s=0.05)


def hold(pipe: Connection, root: Root, name: str) -> None:
    """In a process: hold a lease, and check it whenever told, until told `end`."""
    pipe.send("ready")
    try:
        with lease(root, name, "quickstart-1", print, timing=FAST) as held:
            pipe.send(f"held {held.fence}")
            while pipe.recv() != "end":
                held.check()
                pipe.send("ours")
        pipe.send("released")
    except LeaseLost as error:
        pipe.send(f"lost {error}")


class Other:
    """Another process that holds a lease and does what it is told."""

    def __init__(self, root: Root, name: str) -> None:
        self.process, self.pipe = started(hold, root, name)

    def hears(self) -> str:
        return str(self.pipe.recv())

    def reply(self, word: str) -> str:
        self.pipe.send(word)
        return self.hears()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def other(root: Root, name: str) -> Iterator[Other]:
    """Yield another process that tries to hold `name`; it is killed in the end."""
    other = Other(root, name)
    try:
        yield other
    finally:
        other.process.kill()
        other.process.join()


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    if request.param == "local":
        return Root.parse(tmp_path / "root")
    return Root.parse(f"{request.getfixturevalue('bucket')}/{tmp_path.name}", str(tmp_path))


def test_the_holder_is_named_and_release_is_immediate(root: Root) -> None:
    with other(root, "runs/a-1") as holder:
        assert holder.hears() == "held 1"
        pattern = rf"runs/a-1 is used by quickstart-1 \(process {holder.process.pid} on \S+ since 20"
        with pytest.raises(LeaseHeld, match=pattern), lease(root, "runs/a-1", "mine", timing=FAST):
            pass
        assert list(lease_holders(root, ["runs/a-1", "runs/b-1"], FAST)) == ["runs/a-1"]
        assert holder.reply("end") == "released"
        assert not lease_holders(root, ["runs/a-1"], FAST)
        with lease(root, "runs/a-1", "mine", timing=FAST) as held:
            assert held.fence == 2
            held.check()


def test_a_killed_holder_frees_it_at_once_on_its_own_machine(root: Root) -> None:
    with other(root, "checkpoint/x-1") as holder:
        assert holder.hears() == "held 1"
        holder.process.kill()
        holder.process.join()
        assert not lease_holders(root, ["checkpoint/x-1"], FAST)
        with lease(root, "checkpoint/x-1", "mine", timing=FAST) as held:
            assert held.fence == 2


def test_waiting_is_told_once_and_ends_with_the_holder(root: Root) -> None:
    messages: list[str] = []

    def tell(text: str) -> None:
        messages.append(text)
        threading.Thread(target=holder.reply, args=("end",)).start()

    with other(root, "tokens/x-1") as holder:
        assert holder.hears() == "held 1"
        with lease(root, "tokens/x-1", "mine", tell, timing=FAST) as held:
            assert held.fence == 2
        assert [text.partition(" (")[0] for text in messages] == ["quickstart-1"]


def test_an_error_inside_releases(root: Root) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), lease(root, "runs/a-1", "mine", timing=FAST):
            raise KeyError


def test_a_name_that_leaves_the_root_is_refused(root: Root) -> None:
    with pytest.raises(ValueError, match="not a name below a root"), lease(root, "../a", "mine"):
        pass


def race(pipe: Connection, root: Root, number: int) -> None:
    """In a process: try a lease whenever told, say whether it is ours, and hold it until told to go on."""
    pipe.send("ready")
    while turn := pipe.recv():
        with suppress(LeaseHeld), lease(root, f"runs/race-{turn}", f"racer-{number}", timing=FAST):
            pipe.send(True)
            pipe.recv()
            continue
        pipe.send(False)
        pipe.recv()


def test_two_racing_processes_have_one_winner(root: Root) -> None:
    racers = [started(race, root, number) for number in range(2)]
    for turn in range(1, 11):
        for _, pipe in racers:
            pipe.send(turn)
        assert sum(pipe.recv() for _, pipe in racers) == 1, f"turn {turn}"
        for _, pipe in racers:
            pipe.send("go on")
    for process, pipe in racers:
        pipe.send(0)
        process.join()
        assert process.exitcode == 0


@pytest.mark.slow
def test_a_stopped_holder_of_a_remote_lease_wakes_up_to_find_it_lost(bucket: str, tmp_path: Path) -> None:
    root = Root.parse(f"{bucket}/{tmp_path.name}", str(tmp_path))
    with other(root, "checkpoint/x-1") as holder:
        assert holder.hears() == "held 1"
        assert holder.reply("check") == "ours"
        holder.signal(signal.SIGSTOP)
        began = time.monotonic()
        with lease(root, "checkpoint/x-1", "mine", lambda _: None, timing=FAST) as held:
            assert held.fence == 2
            assert time.monotonic() - began >= FAST.lease_timeout_s
            holder.signal(signal.SIGCONT)
            reply = holder.reply("check")
            assert reply.startswith("lost lease")
            assert "mine" in reply
            held.check()


def test_the_loser_is_told_without_asking(bucket: str, tmp_path: Path) -> None:
    root, lost = Root.parse(f"{bucket}/{tmp_path.name}", str(tmp_path)), threading.Event()
    with lease(root, "runs/a-1", "mine", lost=lost.set, timing=FAST) as held:
        theirs = LeaseRecord.parse(root.read("leases", "runs", "a-1", "1.json") or b"")
        assert theirs is not None
        other = theirs.model_copy(update={"token": "other", "fence": 2})
        root.write(other.text(), "leases", "runs", "a-1", "2.json")
        assert lost.wait(10)
        with pytest.raises(LeaseLost, match="fence 2"):
            held.check()
    assert json.loads(root.read("leases", "runs", "a-1", "2.json") or b"{}")["released"] is False


def test_a_dead_holder_of_another_machine_is_believed_after_the_silence(bucket: str, tmp_path: Path) -> None:
    root = Root.parse(f"{bucket}/{tmp_path.name}", str(tmp_path))
    with lease(root, "runs/a-1", "theirs", timing=FAST):
        pass
    theirs = LeaseRecord.parse(root.read("leases", "runs", "a-1", "1.json") or b"")
    assert theirs is not None
    root.write(
        theirs.model_copy(update={"released": False, "machine": "another"}).text(), "leases", "runs", "a-1", "1.json"
    )
    began = time.monotonic()
    with lease(root, "runs/a-1", "mine", timing=FAST) as held:
        assert held.fence == 2
        assert time.monotonic() - began >= FAST.lease_timeout_s
    assert root.names("leases", "runs", "a-1") == ["2.json"]


def test_a_removed_lock_file_is_noticed(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
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
    text = LeaseRecord.here("quickstart-1", fence=3).text().encode()
    for bit in range(8 * len(text)):
        data = bytearray(text)
        data[bit // 8] ^= 1 << bit % 8
        assert LeaseRecord.parse(bytes(data)) is None, bytes(data)
    assert LeaseRecord.parse(text) is not None


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_a_bit_that_flips_on_the_way_neither_refuses_ourselves_nor_takes_a_live_lease(
    proxy: FaultProxy, tmp_path: Path, skip: int
) -> None:
    with pointed_at({"HERD_S3_CHECKSUMS": "when_required"}):
        root = Root.parse(f"{proxy.uri}/{tmp_path.name}", str(tmp_path))
        (rule,) = proxy.use(Rule("flip", "GET", r"1\.json$", skip=skip))
        with lease(root, "runs/a-1", "mine", timing=LeaseTiming(60, 60, 0.05)) as held:
            for _ in range(3):
                held.check()
                assert LeaseObservation(root, "runs/a-1", FAST).look() == "held"
            assert rule.done == 1
            with pytest.raises(LeaseHeld, match="mine"), lease(root, "runs/a-1", "other", timing=FAST):
                pass
