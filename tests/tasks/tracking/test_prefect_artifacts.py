"""Pages reach a Prefect server, and a server that dies costs a run nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from herd.flows.local_server import await_answer, child, prefect_command
from herd.llama3.train import metrics
from herd.llama3.train.journal import Record
from herd.storage.processes import free_port
from herd.tasks.format import format_duration
from herd.tasks.tracking.prefect_artifacts import Outbox, StagePage, artifact_key
from tests.tasks.page_flow import RUN, pages_of_run, shown


def events_on(api: str, name: str) -> list[dict[str, Any]]:
    """Return the events of that name about the run, once all ten have arrived; the server takes a moment."""
    about = {"event": {"name": [name]}, "resource": {"id": [f"herd.run.{RUN}"]}}
    found: list[dict[str, Any]] = []
    for _ in range(200):
        found = httpx.post(f"{api}/events/filter", json={"filter": about}).raise_for_status().json()["events"]
        if len(found) == 10:
            break
        time.sleep(0.1)
    return found


def test_plan_table_link_and_progress_are_on_the_page(prefect_server: dict[str, str]) -> None:
    api = prefect_server["api"]
    with temporary_settings({PREFECT_API_URL: api}):
        _, _, done = shown()
        found = pages_of_run()
    assert done
    assert found["plan"] == ("markdown", "# Plan", f"Plan of {RUN}")
    assert json.loads(found["results"][1]) == [{"stage": "main", "loss": 5.0}]
    assert found["mlflow"][1] == "[MLflow run](http://127.0.0.1:5000/#/run)"
    events = events_on(api, "herd.alert.disk")
    assert [event["resource"]["prefect.resource.id"] for event in events] == [f"herd.run.{RUN}"] * 10
    assert events[0]["payload"] == {"run": RUN}
    assert "prefect.flow-run" in str(events[0]["related"])  # so that an automation may go by the flow run's tags
    kind, percent, words = found["main"]
    assert (kind, float(percent)) == ("progress", 100.0)
    assert words == "stage **main**: 1K of 1K tokens, mean loss 5.000, 20K tokens/s, 3:07 min left"


@pytest.mark.slow
def test_a_server_that_dies_neither_stalls_nor_fails_what_shows_pages(tmp_path: Path) -> None:
    port = free_port()
    variables = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    with child("prefect", prefect_command(port), tmp_path, variables) as server:
        await_answer(f"http://127.0.0.1:{port}/api/health", server)
        variables |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_LOGGING_LEVEL": "CRITICAL"}
        flow = subprocess.Popen(
            [sys.executable, "-m", "tests.tasks.page_flow"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            start_new_session=True,
        )
        assert flow.stdout is not None
        assert flow.stdout.readline() == "ready\n"
        os.killpg(server.pid, 9)
        server.wait()
        assert flow.stdin is not None
        flow.stdin.write("\n")
        flow.stdin.flush()
        spent, flushed, done = flow.stdout.readline().split()
        os.killpg(flow.pid, 9)
        flow.wait()
    assert done == "False"
    assert float(spent) < 5.0
    assert float(flushed) < 4.0


def test_a_newer_job_takes_the_place_of_a_waiting_one() -> None:
    outbox, done = Outbox(), list[int]()
    outbox.put("slow", lambda: time.sleep(0.2))
    for number in range(5):
        outbox.put("bar", lambda number=number: done.append(number))  # type: ignore[misc]
    assert outbox.flush(5)
    assert done[-1] == 4
    assert len(done) < 5


def test_what_failed_is_tried_again_and_flush_does_not_wait_for_the_pause() -> None:
    outbox, tries = Outbox(retry_s=60), list[int]()

    def job() -> None:
        tries.append(1)
        if len(tries) < 2:
            raise OSError("no server")

    outbox.put("page", job)
    while not outbox.failed:
        time.sleep(0.01)
    assert outbox.flush(5)
    assert len(tries) == 2


def test_pages_outside_of_a_flow_are_no_error() -> None:
    page = StagePage("tiny-1", "main", 0, 10)
    page.update(Record(0.0, 10, {metrics.LOSS: 1.0}))
    assert page.describe(Record(0.0, 5, {})) == "stage **main**: 5 of 10 tokens"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.2, "3 s"), (187, "3:07 min"), (18_720, "5:12 h"), (273_600, "3 d 4 h"), (-1, "0 s")],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_keys_are_what_prefect_takes() -> None:
    assert artifact_key("Tiny.x-1", "long_2") == "tiny-x-1-long-2"
