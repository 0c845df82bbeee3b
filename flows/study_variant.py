"""Run one variant of a study in its own process: `python -m herd.flows.study_variant JOB.json`.

The process has its own signals, leases and watchdog. It works in the folder of the study's process, so that relative
paths of sources mean the same. Its output goes to a log beside the study's record.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from herd.flows.recipe_form import PipelineParameters
from herd.storage.processes import die_with_parent
from herd.tasks.cluster import Cluster
from herd.tasks.runs.records import StudyPart


class VariantJob(BaseModel):
    """One run of a variant; `recipe` is the YAML file of its resolved recipe."""

    recipe: str
    part: StudyPart
    root: str
    cluster: Cluster

    def parameters(self) -> PipelineParameters:
        """Return the parameters of its pipeline, up to the evaluation: no gate judges a variant."""
        return PipelineParameters(
            recipe=self.recipe, root=self.root, cluster=self.cluster, study=self.part, until="evaluate"
        )


class Apart:
    """Runs in their own processes, which end with this one."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, job: Path, log: Path) -> int:
        """Run a job to its end and return its exit status; threads may call it concurrently."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as lines:
            process = subprocess.Popen(
                [sys.executable, "-m", "herd.flows.study_variant", str(job)],
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        self._running.add(process)
        if self._stopped:  # `stop` was called between the start and this line
            process.terminate()
        try:
            return process.wait()
        finally:
            self._running.discard(process)

    def stop(self) -> None:
        """Terminate all, also those that are just starting; each saves a checkpoint first."""
        self._stopped = True
        for process in list(self._running):
            process.terminate()


def main(words: list[str]) -> int:
    """Run the job of the file `words[0]`; return 0 if it finished."""
    from prefect import tags

    from herd.flows.local_server import quiet_prefect
    from herd.flows.pipeline import pipeline
    from herd.tasks.operate.owners import process_tag

    quiet_prefect()
    job = VariantJob.model_validate_json(Path(words[0]).read_text())
    try:
        with tags(process_tag()):
            print(pipeline(job.parameters()))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
