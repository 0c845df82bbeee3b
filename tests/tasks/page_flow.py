"""A flow that shows every kind of page: run in the test's process, or as one of its own whose server dies."""

from __future__ import annotations

import sys
import time
from typing import Any

from prefect import flow, get_client, task
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from herd.llama3.train.journal import Record
from herd.tasks.tracking import prefect_artifacts
from herd.tasks.tracking.events import emit

RUN = "paged.x-1"


@task
def train() -> float:
    page = prefect_artifacts.StagePage(RUN, "main", 100, 1000, interval_s=0.0)
    began = time.monotonic()
    for position in range(200, 1200, 100):
        page.update(
            Record(0.0, position, {"train/loss": 5.0, "throughput/tokens_per_s": 2e4, "time/remaining_s": 187.0})
        )
        emit("herd.alert.disk", f"herd.run.{RUN}", RUN, {"run": RUN})
    return time.monotonic() - began


@flow
def shown() -> tuple[float, float, bool]:
    """Show pages; return the seconds that they and the last of them took, and whether the server has them."""
    prefect_artifacts.markdown(f"{RUN}-plan", "# Plan", f"Plan of {RUN}")
    prefect_artifacts.table(f"{RUN}-results", [{"stage": "main", "loss": 5.0}], "Results")
    prefect_artifacts.link(f"{RUN}-mlflow", "http://127.0.0.1:5000/#/run", "MLflow run")
    spent = train()
    began = time.monotonic()
    done = prefect_artifacts.flush()
    return spent, time.monotonic() - began, done


@flow
def deserted() -> tuple[float, float, bool]:
    """Show pages to a server that is killed meanwhile."""
    prefect_artifacts.markdown("plan", "# Plan")
    prefect_artifacts.flush()
    print("ready", flush=True)
    sys.stdin.readline()
    found = shown.fn()
    print(*found, flush=True)
    return found


def pages_of_run() -> dict[str, Any]:
    """Return type, data and description of each page on the server, by the end of its key."""
    start = prefect_artifacts.artifact_key(RUN) + "-"
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(like_=f"{start}%")))
    return {str(page.key).removeprefix(start): (page.type, page.data, page.description) for page in found}


if __name__ == "__main__":
    deserted()
