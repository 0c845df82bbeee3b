"""A running `herd up`: what people do on its pages, done by the calls of the server's API that those pages make."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from herd.flows.local_server import PASSWORD
from herd.storage.processes import free_ports
from herd.storage.root import Root
from herd.tasks.runs.records import RunRecord, Runs
from herd.tasks.tracking.mlflow_app import LOGIN
from herd.tasks.tracking.moved_root import ACCESS
from tests.e2e.conftest import Found, Herd, Started, read_until, trainers, wait_for

QUESTION = '{"query": "2 + 2 =", "choices": ["4", "5"], "gold": 0}\n'
"""A file of `evaluate.tasks`."""
EVALUATES = "herd: evaluate new checkpoints"
"""The automation of prefect.yaml."""


@dataclass
class Up:
    """A running `herd up`."""

    process: Started
    ports: tuple[int, int]
    herd: Herd
    client: SyncPrefectClient
    password: str
    sign_in: str
    """Address that opens the pages of both servers, first Prefect's."""

    @property
    def root(self) -> Root:
        return Root.parse(self.herd.root)

    @property
    def runs(self) -> Runs:
        return Runs(self.root)

    def start(self, deployment: str, **config: Any) -> FlowRun:
        """Do what the button Run does, with a form in which `config` was filled in."""
        if deployment.startswith("pipeline/"):
            config = {"recipe": self.herd.recipe, **config}
        found = self.client.read_deployment_by_name(deployment)
        return self.client.create_flow_run_from_deployment(found.id, parameters={"config": config})

    def pause_evaluations(self) -> None:
        """Have no new checkpoint evaluated on the side from now on: two processors are few."""
        (automation,) = self.client.read_automations_by_name(EVALUATES)
        self.client.pause_automation(automation.id)

    def await_state(self, flow_run: UUID, *types: str, seconds: float = 250) -> FlowRun:
        return await_true(lambda: self._in_state(flow_run, types), f"{types}", seconds)

    def _in_state(self, flow_run: UUID, types: tuple[str, ...]) -> FlowRun | None:
        now = self.client.read_flow_run(flow_run)
        assert now.state_type is not None
        ended = now.state_type.value in ("FAILED", "CRASHED") and now.state_type.value not in types
        assert not ended, now.state
        return now if now.state_type.value in types else None

    def await_training(self, run: str, lines: int) -> psutil.Process:
        """Wait until `run` trains and its current stage has so many steps; return the trainer."""

        def trains() -> psutil.Process | None:
            journals = (self.herd.root / "work").glob("*/journal.jsonl")
            steps = max((len(path.read_text().splitlines()) for path in journals), default=0)
            return next(iter(self.trainers()), None) if steps >= lines else None

        return await_true(trains, f"{run} to train", 150)

    def trainers(self) -> list[psutil.Process]:
        return trainers(self.process.pid)

    def below(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def record_of(self, flow_run: FlowRun) -> RunRecord:
        return next(record for record in self.runs.all() if record.prefect_run == str(flow_run.id))

    def log(self, flow_run: FlowRun) -> str:
        """Return what the page of the flow run shows as its log."""
        lines = self.client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])))
        assert lines
        return "\n".join(line.message for line in lines)


@contextmanager
def running_up(herd: Herd) -> Iterator[Up]:
    """Run `herd up` on free ports; however the block ends, nothing of it is left."""
    prefect, mlflow = free_ports(2)
    process = herd.start("up", "--prefect-port", str(prefect), "--mlflow-port", str(mlflow), server=False)
    try:
        printed = read_until(process, "Ctrl-C stops")
        assert f"http://127.0.0.1:{prefect}/v2/deployments" in printed
        assert f"http://127.0.0.1:{mlflow}/" in printed
        herd.api = f"http://127.0.0.1:{prefect}/api"
        access = (herd.root / ACCESS).read_text()
        password = next(word for word in shlex.split(access) if word.startswith(f"{PASSWORD}=")).partition("=")[2]
        assert password not in printed
        sign_in, _ = re.findall(r"http\S+/sign-in#\S+", access)
        login = dict(zip(LOGIN, password.split(":", 1), strict=True))
        herd.variables |= {PASSWORD: password, **login}
        known = {PREFECT_API_URL: herd.api, PREFECT_API_AUTH_STRING: password}
        with temporary_settings(known), get_client(sync_client=True) as client, pytest.MonkeyPatch.context() as patch:
            for name, value in login.items():  # of MLflow's clients in this process
                patch.setenv(name, value)
            yield Up(process, (prefect, mlflow), herd, client, password, sign_in)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            herd.stop_all()


def await_true(condition: Callable[[], Found | None], what: str, seconds: float) -> Found:
    """Wait for what a server is asked, less often than for a file: it has other work."""
    return wait_for(condition, what, seconds, every_s=0.3)
