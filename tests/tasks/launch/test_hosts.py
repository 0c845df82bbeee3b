"""The ledger of hosts: what excludes one, on a disk and in an object store; whom an attempt's end accuses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from herd.flows.cli.main import app
from herd.llama3.recipe.load import RecipeError
from herd.llama3.train.health import HealthSample
from herd.llama3.train.job import AttemptResult
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.errors import TrainingFailed
from herd.tasks.launch import hosts as ledger
from herd.tasks.launch.hosts import FOLDER, Hosts, accused
from herd.tasks.launch.local import Agents, LocalLauncher
from herd.tasks.operate.preflight import check_run
from tests.tasks.standing_root import tiny

XID = "GPU 3: Xid 79, the GPU fell off the bus"


@pytest.mark.parametrize("place", ["disk", "store"])
def test_two_deaths_or_one_fault_exclude_a_host_until_it_is_cleared(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    uri = str(tmp_path) if place == "disk" else f"{request.getfixturevalue('bucket')}/hosts"
    one, other = (Hosts(Root.parse(uri, scratch=str(tmp_path / "scratch"))) for _ in range(2))  # two supervisors
    assert one.excluded() == {}
    one.record("n1", "died", "killed", "tiny-1")
    assert other.excluded() == {}
    other.record("n1", "died", "bad node", "tiny-2")
    assert one.record("n2", "fault", XID, "tiny-1")
    assert not other.record("n2", "fault", XID, "tiny-2"), "a fault that is known"
    excluded = {"n1": "2 attempts died there: killed, bad node", "n2": XID}
    assert one.excluded() == other.excluded() == excluded
    other.decide("n1", "cleared", "new power supply")
    other.decide("n3", "excluded", "reserved")
    assert one.excluded() == {"n2": XID, "n3": "reserved"}
    one.record("n1", "died", "killed", "tiny-1")
    assert "n1" not in one.excluded(), "what was before it was cleared counts"
    other.decide("n2", "cleared")
    assert one.record("n2", "fault", XID), "a fault that returns"
    assert one.excluded()["n2"] == XID


def test_deaths_are_forgotten_after_a_month_and_damaged_documents_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(Root.parse(tmp_path))
    for _ in range(2):
        hosts.record("n1", "died", "killed")
    (tmp_path / FOLDER / "00000000000.000-damaged.json").write_text('{"time": 1')
    assert list(Hosts(hosts.root).excluded()) == ["n1"]
    later = time.time() + ledger.WITHIN_S + 1
    monkeypatch.setattr(ledger.time, "time", lambda: later)
    assert hosts.excluded() == {}


@pytest.mark.parametrize("host", ["n1,n2", "n 1", "n1\n", "", "-w", "n1\ntouch PWNED"])
def test_what_is_no_name_of_a_host_is_refused(host: str, tmp_path: Path) -> None:
    hosts = Hosts(Root.parse(tmp_path))
    with pytest.raises(ValueError, match="is not the name of a host"):
        hosts.decide(host, "excluded")
    with pytest.raises(ValueError, match="host"):
        hosts.record(host, "died", "killed")


def logs_of(folder: Path, *nodes: str, left: tuple[int, ...] = ()) -> Path:
    """Return the logs of an attempt on `nodes`; those with a number in `left` wrote no result."""
    for number, host in enumerate(nodes):
        sample = HealthSample(time=1.0, host=host, node=number)
        (folder / f"health-{number}.jsonl").write_text(sample.model_dump_json() + "\n")
        if number not in left:
            (folder / f"node-{number}.json").write_text(AttemptResult(status=143).model_dump_json())
    return folder


def test_whom_an_end_accuses(tmp_path: Path) -> None:
    def ended(message: str, status: int = 1) -> AttemptResult:
        return AttemptResult(status=status, message=message, host="n2")

    whole, one, two = (tmp_path / name for name in ("whole", "one", "two"))
    for folder, left in ((whole, ()), (one, (2,)), (two, (0, 2))):
        folder.mkdir()
        logs_of(folder, "n1", "n2", "n3", left=left)
    killed, reset = ended("rank 1 was killed", -9), ended("Connection reset by peer")
    assert accused(whole, killed, scheduled=True) == "n2"
    assert accused(whole, killed, scheduled=False) == "", "a person may have killed it"
    assert accused(whole, ended(f"hardware error: {XID}"), scheduled=False) == "n2"
    assert accused(whole, reset, scheduled=True) == "", "a peer reports it about another"
    assert accused(one, reset, scheduled=True) == "n3", "the only one that left no result"
    assert accused(two, reset, scheduled=True) == ""
    for text in ("torch.OutOfMemoryError", "KeyError: 'x'", "No space left on device"):
        assert accused(one, ended(text), scheduled=True) == ""
    lost = AttemptResult(status=-9, message="Slurm job 7 ended (NODE_FAIL) and not every node said how")
    assert accused(one, lost, scheduled=True) == "n3"


def test_an_excluded_machine_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERD_HOST", "desk")
    hosts = Hosts(Root.parse(tmp_path))
    hosts.record("desk", "fault", XID)
    with pytest.raises(RecipeError, match=rf"^host desk is excluded: {XID}; repair it and write herd hosts --clear"):
        check_run(tiny(), Cluster(), hosts.root)
    with Agents(tmp_path / "agent.log") as agents:
        launcher = LocalLauncher(Cluster(), agents, excluded=hosts.excluded)
        with pytest.raises(TrainingFailed, match=r"^host desk is excluded"):
            launcher.start(tmp_path / "job.json", 1, tmp_path / "logs")
    hosts.decide("desk", "cleared")
    check_run(tiny(), Cluster(), hosts.root)


def test_the_command_lists_excludes_and_clears(tmp_path: Path) -> None:
    def herd(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["hosts", "--root", str(tmp_path), *words])
        return done.exit_code, done.output

    assert herd() == (0, "no attempt died of a host, and no fault was seen\n")
    hosts = Hosts(Root.parse(tmp_path))
    hosts.record("n1", "died", "killed", "tiny-1")
    hosts.record("n2", "fault", XID, "tiny-1")
    status, printed = herd("--exclude", "n4", "--reason", "a [fan] is loud")
    assert status == 0
    rows = [line.split()[:2] for line in printed.splitlines() if line.startswith(("n1", "n2", "n4"))]
    assert rows == [["n2", "excluded"], ["n4", "excluded"], ["n1", "in"]]
    assert "a [fan] is loud" in printed
    assert herd("--clear", "n2")[0] == 0
    assert list(hosts.excluded()) == ["n4"]
    assert herd("--clear", "n9") == (2, "error  host: nothing is known of n9; write one of: n1, n2, n4\n")
