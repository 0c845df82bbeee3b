"""Pages reach a Prefect server, and a server that dies costs a run nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.children import await_answer, child, prefect_command
from llama3.train import metrics
from llama3.train.journal import Record
from storage.processes import free_port
from tasks.pages import Outbox, StagePage, page_key
from tasks.words import clock

FLOW = """
import json, sys, time
from prefect import flow, get_client, task
from prefect.client.schemas.filters import ArtifactFilter
from llama3.train.journal import Record
from tasks import pages
from tasks.events import emit

@task
def train() -> float:
    page = pages.StagePage("tiny.x-1", "main", 100, 1000, interval_s=0.0)
    began = time.monotonic()
    for position in range(200, 1200, 100):
        page.see(Record(0.0, position, {"train/loss": 5.0, "throughput/tokens_per_s": 2e4, "time/remaining_s": 187.0}))
        emit("herd.alert.disk", "herd.run.tiny.x-1", "tiny.x-1", {"run": "tiny.x-1"})
    return time.monotonic() - began

@flow
def shown() -> float:
    pages.markdown("plan", "# Plan", "Plan of tiny.x-1")
    pages.table("tiny.x-1-results", [{"stage": "main", "loss": 5.0}], "Results")
    pages.link("mlflow-run", "http://127.0.0.1:5000/#/run", "MLflow run")
    spent = train()
    began = time.monotonic()
    done = pages.flush()
    if not done:
        print(json.dumps({"spent": spent, "flush": time.monotonic() - began, "done": done}), flush=True)
        return spent
    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    rows = {a.key: [a.type, a.data, a.description] for a in found}
    print(json.dumps({"spent": spent, "flush": time.monotonic() - began, "done": done, "pages": rows}), flush=True)
    return spent

@flow
def deserted() -> float:
    pages.markdown("plan", "# Plan")
    pages.flush()
    print("ready", flush=True)
    sys.stdin.readline()
    return shown.fn()

if __name__ == "__main__":
    {"shown": shown, "deserted": deserted}[sys.argv[1]]()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "flow.py").write_text(FLOW)
    return folder


@pytest.fixture
def server(home: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    with child("prefect", prefect_command(port), home, {**os.environ, "PREFECT_HOME": str(home)}) as process:
        await_answer(f"http://127.0.0.1:{port}/api/health", process)
        yield f"http://127.0.0.1:{port}/api", process


def events_on(api: str, name: str) -> list[dict[str, Any]]:
    """Return the events of that name, once all ten have arrived; the server takes a moment."""
    found: list[dict[str, Any]] = []
    for _ in range(40):
        answer = httpx.post(f"{api}/events/filter", json={"filter": {"event": {"name": [name]}}}).raise_for_status()
        found = answer.json()["events"]
        if len(found) == 10:
            break
        time.sleep(0.5)
    return found


def started(home: Path, api: str, which: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": api,
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ["PYTHONPATH"]]),
    }
    return subprocess.Popen(
        [sys.executable, str(home / "flow.py"), which],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def test_plan_table_link_and_progress_are_on_the_page(home: Path, server: tuple[str, subprocess.Popen[bytes]]) -> None:
    printed, _ = started(home, server[0], "shown").communicate(timeout=120)
    found = json.loads(printed.splitlines()[-1])
    assert found["done"]
    shown = found["pages"]
    assert shown["plan"] == ["markdown", "# Plan", "Plan of tiny.x-1"]
    assert json.loads(shown["tiny-x-1-results"][1]) == [{"stage": "main", "loss": 5.0}]
    assert shown["mlflow-run"][1] == "[MLflow run](http://127.0.0.1:5000/#/run)"
    events = events_on(server[0], "herd.alert.disk")
    assert [event["resource"]["prefect.resource.id"] for event in events] == ["herd.run.tiny.x-1"] * 10
    assert events[0]["payload"] == {"run": "tiny.x-1"}
    assert "prefect.flow-run" in str(events[0]["related"])  # so that an automation may go by the flow run's tags
    kind, percent, words = shown["tiny-x-1-main"]
    assert (kind, float(percent)) == ("progress", 100.0)
    assert words == "stage **main**: 1K of 1K tokens, mean loss 5.000, 20K tokens/s, 3:07 min left"


def test_a_server_that_dies_neither_stalls_nor_fails_what_shows_pages(
    home: Path, server: tuple[str, subprocess.Popen[bytes]]
) -> None:
    api, process = server
    flow = started(home, api, "deserted")
    assert flow.stdout is not None
    assert flow.stdout.readline() == "ready\n"
    os.killpg(process.pid, 9)
    process.wait()
    assert flow.stdin is not None
    flow.stdin.write("\n")
    flow.stdin.flush()
    found = json.loads(flow.stdout.readline())
    os.killpg(flow.pid, 9)
    flow.wait()
    assert not found["done"]
    assert found["spent"] < 5.0
    assert found["flush"] < 4.0


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
    page.see(Record(0.0, 10, {metrics.LOSS: 1.0}))
    assert page.described(Record(0.0, 5, {})) == "stage **main**: 5 of 10 tokens"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.2, "3 s"), (187, "3:07 min"), (18_720, "5:12 h"), (273_600, "3 d 4 h"), (-1, "0 s")],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_keys_are_what_prefect_takes() -> None:
    assert page_key("Tiny.x-1", "long_2") == "tiny-x-1-long-2"
