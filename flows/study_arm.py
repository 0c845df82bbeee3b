"""Run one arm of a study in its own process: `python -m flows.study_arm JOB.json`.

Its lines go to a log beside the study's record. It works in the folder of the study's process, so that paths of sources
mean the same. What this gives up: six seconds of imports for each run, and the place below the study's flow run in
Prefect; in exchange every run has its own signals, leases and watchdog.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from flows.recipe_form import PipelineParameters
from storage.processes import die_with_parent
from tasks.cluster import Cluster
from tasks.runs.records import StudyPart


class ArmJob(BaseModel):
    """What one run of an arm is."""

    recipe: str
    """Its resolved recipe, a YAML file."""
    part: StudyPart
    root: str
    cluster: Cluster

    def parameters(self) -> PipelineParameters:
        """Return the parameters of its pipeline: up to the evaluation, since the gate has no say about an arm."""
        plain = {"recipe": self.recipe, "root": self.root, "cluster": self.cluster, "study": self.part}
        return PipelineParameters(**plain, until="evaluate")


class Apart:
    """Runs in processes of their own, which end with this one."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, job: Path, log: Path) -> int:
        """Run a job to its end and return its exit status; several threads may."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as lines:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.study_arm", str(job)],
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        self._running.add(process)
        if self._stopped:  # told between the start and this line
            process.terminate()
        try:
            return process.wait()
        finally:
            self._running.discard(process)

    def stop(self) -> None:
        """Tell all to end, those too that are just starting; each saves a checkpoint first."""
        self._stopped = True
        for process in list(self._running):
            process.terminate()


def main(words: list[str]) -> int:
    """Run the job that `words` names; return 0 if it came to its end."""
    from flows.local_server import quiet_prefect
    from flows.pipeline import pipeline

    quiet_prefect()
    job = ArmJob.model_validate_json(Path(words[0]).read_text())
    try:
        print(pipeline(job.parameters()))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
