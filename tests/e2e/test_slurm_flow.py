"""A run on a real Slurm: its job outlives a killed engine, the next engine follows it, and a stop cancels it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from herd.llama3.train.job import read_outcomes
from herd.llama3.train.journal import read_journal
from tests.e2e.conftest import Herd, NewHerd, copy_artifacts, lies, read_until, wait_for
from tests.tasks.slurm_daemons import slurm_for_children
from tests.test_tutorials import blocks

(PRINTED,) = (yaml.safe_load(text) for text in blocks(Path("docs/tutorials/slurm.md")))
HERE = {
    "partition": "train",
    "account": "",
    "processes_per_node": 1,
    "gpus": False,
    "cpus_per_process": 1,
    "poll_s": 0.3,
    "environment": {**PRINTED["slurm"]["environment"], "GLOO_SOCKET_IFNAME": "lo"},  # this machine has no ib0
}
CLUSTER = {**PRINTED, "processes": 2, "slurm": {**PRINTED["slurm"], **HERE}}
"""The file of the tutorial as printed, but for the size of the machine: two nodes of one process, which tp splits."""
LONG = ["--set", "stages.main.until=1600Ki"]
"""800 steps: more than the test needs, and no text is read more often than the recipe allows."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster file for a Slurm of this module's own, which the environment names."""
    with slurm_for_children():
        file = tmp_path_factory.mktemp("cluster") / "slurm.yaml"
        file.write_text(yaml.safe_dump(CLUSTER))
        yield str(file)


def queue() -> list[str]:
    """Return the ids of Slurm's jobs."""
    listed = subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True, text=True, check=True)
    return listed.stdout.split()


def last_position(root: Path) -> int:
    """Return how far stage `main` has come."""
    journals = list((root / "work").glob("main-*/journal.jsonl"))
    return max((record.position for journal in journals for record in read_journal(journal)), default=-1)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute and a half on a machine that does nothing else
def test_job_outlives_its_engine_is_adopted_and_cancelled(
    cluster: str, herd: Herd, new_herd: NewHerd, tmp_path: Path
) -> None:
    again = new_herd(tmp_path / "root")
    copy_artifacts(herd, again.root, "checkpoint/tiny-ramp-*")
    command = ["run", again.recipe, "--cluster", cluster, *LONG]
    first = again.start(*command)
    wait_for(lambda: first.poll() is not None or last_position(again.root) > 0, "a step", 280)
    assert first.poll() is None, first.communicate()[0]
    (job,) = queue()
    first.kill()  # the engine alone: its group holds nothing of the trainer
    first.wait()
    reached = last_position(again.root)
    wait_for(lambda: last_position(again.root) > reached, "the orphan's next step")
    assert queue() == [job]

    second = again.start(*command)
    printed = read_until(second, f"main: follows Slurm job {job}")
    assert "continuing tiny-1" in printed
    assert queue() == [job]
    reached = last_position(again.root)
    wait_for(lambda: last_position(again.root) > reached, "a step that is followed")

    second.send_signal(signal.SIGTERM)  # as Prefect does when a run is cancelled
    printed, _ = second.communicate(timeout=400)
    assert second.returncode in (143, -15), printed
    assert queue() == []
    assert lies(again) == []
    (logs,) = (again.root / "runs" / "tiny-1" / "logs" / "main").glob("attempt-*")
    assert [told.status for told in read_outcomes(logs)] == [143, 143]  # both nodes saved and left
    (saved,) = (again.root / "work").glob("main-*/checkpoints")
    assert max(int(folder.name) for folder in saved.iterdir()) == last_position(again.root)
