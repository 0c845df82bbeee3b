"""herd on servers that people have, which others use, too.

A Prefect behind a path with a login, or as Prefect Cloud answers; an MLflow with accounts; artifacts on S3, through
MLflow or direct.
"""

from __future__ import annotations

import base64
import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from mlflow import MlflowClient

from herd.flows.local_server import await_answer, child, prefect_command
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from herd.tasks.tracking.chart_views import ALL_RUNS, TAG
from tests.e2e.conftest import wait_for
from tests.storage.s3 import environment as s3_environment
from tests.storage.s3 import moto_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LOGIN = "team:a long password"
KEY = "pnu_key-of-an-account"
PATHS = {"prefix": "/lab/prefect", "cloud": "/api/accounts/1c0d/workspaces/77aa"}
POOL = "shared"
THEIRS = """
from prefect import flow

@flow
def pipeline(config: str = ""):
    print("of others")
"""
RECONCILE = """
import sys
from prefect import get_client
from herd.flows.crash_recovery import thin_out
from herd.storage.root import Root
from herd.tasks.operate.recovery import reconcile
with get_client(sync_client=True) as client:
    print(reconcile(Root.parse(sys.argv[1]), client, full=True), [*thin_out(client)])
"""


@dataclass
class Front:
    """A reverse proxy before a Prefect server: a path, a login, and what a hosted service refuses."""

    kind: str
    upstream: int
    requests: int = 0
    refused: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yield the address of the API."""
        front, path = self, PATHS[self.kind]
        basic = f"Basic {base64.b64encode(LOGIN.encode()).decode()}"

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                known = f"Bearer {KEY}" if front.kind == "cloud" else basic
                if self.headers.get("Authorization") != known:
                    return self.answer(401, b"{}", {})
                if not self.path.startswith(f"{path}/"):
                    return self.answer(404, b"{}", {})
                front.requests += 1
                plain = self.path.removeprefix(path)
                if front.kind == "cloud":
                    if front.requests % 9 == 0:
                        front.refused.append(f"429 {plain}")
                        return self.answer(429, b"{}", {"Retry-After": "0"})
                    if plain.startswith("/automations"):
                        front.refused.append(f"404 {plain}")
                        return self.answer(404, b"{}", {})
                upstream = http.client.HTTPConnection("127.0.0.1", front.upstream, timeout=60)
                kept = {
                    n: v for n, v in self.headers.items() if n.lower() not in ("host", "connection", "accept-encoding")
                }
                upstream.request(self.command, f"/api{plain}", body, {**kept, "Authorization": basic})
                got = upstream.getresponse()
                text = got.read()
                kept = {n: v for n, v in got.getheaders() if n.lower() in ("content-type", "location")}
                upstream.close()
                return self.answer(got.status, text, kept)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

            def log_message(self, *words: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}{path}"
            server.shutdown()


@pytest.fixture(params=["prefix", "cloud"])
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Front]:
    port = free_port()
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path / "their-prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": LOGIN,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    with child("prefect", prefect_command(port), tmp_path, environment) as process:
        await_answer(f"http://127.0.0.1:{port}/api/health", process)
        yield Front(request.param, port)


@contextmanager
def their_mlflow(folder: Path, artifacts: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Yield the address of an MLflow server with accounts."""
    folder.mkdir()
    port = free_port()
    (folder / "auth.ini").write_text(
        "[mlflow]\ndefault_permission = READ\nadmin_username = herd\nadmin_password = a long password\n"
        f"database_uri = sqlite:///{folder}/auth.db\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    own = {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "of a test",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--app-name", "basic-auth", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", *artifacts]
    with child("mlflow", command, folder, {**os.environ, **environment, **own}) as process:
        await_answer(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"


def test_a_run_on_servers_of_others_takes_nothing_over(front: Front, tmp_path: Path) -> None:
    through = ["--artifacts-destination", "s3://herd/mlflow"]
    direct = ["--no-serve-artifacts", "--default-artifact-root", "s3://herd/mlflow"]
    with ExitStack() as stack:
        s3 = s3_environment(stack.enter_context(moto_server(tmp_path)))
        api = stack.enter_context(front.running())
        artifacts = through if front.kind == "prefix" else direct
        mlflow = stack.enter_context(their_mlflow(tmp_path / "their-mlflow", artifacts, s3))
        known = {
            "PREFECT_HOME": str(tmp_path / "home"),
            "PREFECT_API_URL": api,
            **({"PREFECT_API_AUTH_STRING": LOGIN} if front.kind == "prefix" else {"PREFECT_API_KEY": KEY}),
            "MLFLOW_TRACKING_URI": mlflow,
            "MLFLOW_TRACKING_USERNAME": "herd",
            "MLFLOW_TRACKING_PASSWORD": "a long password",
            "HERD_SCRATCH": str(tmp_path / "scratch"),
            **s3,
        }
        if front.kind == "cloud":
            known["PREFECT_CLOUD_API_URL"] = api.partition("/accounts")[0]
        surroundings = {**os.environ, **known}
        root = "s3://herd/team"
        login = {"Authorization": f"Bearer {KEY}"} if front.kind == "cloud" else {}

        def ask(path: str, body: dict[str, Any] | None = None) -> Any:
            auth = httpx.BasicAuth(*LOGIN.split(":", 1)) if not login else None
            for _ in range(20):
                answer = httpx.request("POST" if body is not None else "GET", f"{api}/{path}", json=body, auth=auth,
                                       headers=login, timeout=60)  # fmt: skip
                if answer.status_code != 429:
                    break
            assert answer.is_success, answer.text
            return answer.json()

        def command(*words: str, status: int = 0) -> str:
            done = subprocess.run(
                [sys.executable, "-m", *words], env=surroundings, cwd=tmp_path, capture_output=True, text=True,
                timeout=600,
            )  # fmt: skip
            assert done.returncode == status, done.stdout + done.stderr
            return done.stdout + done.stderr

        # What is there before herd comes: a pool with a queue, a deployment, and flow runs without a worker.
        (tmp_path / "theirs.py").write_text(THEIRS)
        command("prefect", "work-pool", "create", POOL, "--type", "process")
        command("prefect", "work-queue", "create", "training", "--pool", POOL, "--limit", "7")
        deploy = ["prefect", "--no-prompt", "deploy", "theirs.py:pipeline", "-n", "pipeline", "--pool", POOL]
        command(*deploy, "--work-queue", "training")
        for _ in range(2):
            command("prefect", "deployment", "run", "pipeline/pipeline")
        theirs = {run["id"]: run["state_type"] for run in ask("flow_runs/filter", {})}
        submitted = next(iter(theirs))
        ask(f"flow_runs/{submitted}/set_state", {"state": {"type": "PENDING", "name": "Pending"}, "force": True})
        theirs[submitted] = "PENDING"

        setup = ("herd.flows.cli.main", "setup", "--root", root)
        secret = "PREFECT_API_KEY" if front.kind == "cloud" else "PREFECT_API_AUTH_STRING"
        surroundings[secret] = "team:of an earlier time"
        assert f"{secret}: the Prefect server at" in command(*setup, status=2)
        surroundings[secret] = known[secret]
        assert "--pool: the server has no work pool gone (there: shared)" in command(*setup, "--pool", "gone", status=2)
        told = command(*setup, "--pool", POOL, status=2)
        assert "deployment pipeline/pipeline: the server has one of others (theirs.py:pipeline)" in told
        assert "herd setup --prefix" in told
        told = command(*setup, "--pool", POOL, "--prefix", "llm-")
        assert f"work queue {POOL}/llm-training: created" in told
        assert ("the server refuses them (404)" in told) == (front.kind == "cloud")
        command(*setup, "--pool", POOL, "--prefix", "llm-")
        found = {each["name"]: each for each in ask("deployments/filter", {})}
        shipped = {each["name"] for each in yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]}
        assert set(found) == {"pipeline", *(f"llm-{name}" for name in shipped)}
        assert found["pipeline"]["entrypoint"] == "theirs.py:pipeline"
        variables = found["llm-pipeline"]["job_variables"]["env"]
        assert (variables["HERD_ROOT"], variables["MLFLOW_TRACKING_URI"]) == (root, mlflow)
        assert not any("password" in str(each) or KEY in str(each) for each in found.values())

        config = {"recipe": str(Path("tests/e2e/tiny.yaml").resolve()), "cluster": {"threads": 1}}
        begun = ask(f"deployments/{found['llm-pipeline']['id']}/create_flow_run", {"parameters": {"config": config}})
        worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--work-queue", "llm-training"]
        with child("worker", worker, tmp_path, surroundings):

            def ended() -> str:
                state = ask(f"flow_runs/{begun['id']}")["state"]
                return str(state["type"]) if state["type"] in ("COMPLETED", "FAILED", "CRASHED") else ""

            assert wait_for(ended, "the run to end", 400, every_s=2.0) == "COMPLETED"
        command("herd.flows.cli.main", "status", "--root", root)
        subprocess.run([sys.executable, "-c", RECONCILE, root], env=surroundings, check=True, timeout=300)
        assert {run: ask(f"flow_runs/{run}")["state_type"] for run in theirs} == theirs
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", *s3):
            patch.setenv(name, known[name])
        record = Runs(Root.parse(root, scratch=str(tmp_path / "scratch"))).find("tiny-1")
        assert (record.state, record.prefect_run) == ("finished", begun["id"])
        client = MlflowClient(mlflow)
        run = client.get_run(record.mlflow_run)
        assert run.info.status == "FINISHED"
        assert run.info.artifact_uri.startswith("mlflow-artifacts:/" if front.kind == "prefix" else "s3://herd/mlflow")
        assert TAG + ALL_RUNS in client.get_experiment(record.mlflow_experiment).tags
        assert client.get_model_version_by_alias("tiny", "champion").tags["herd.run"] == "tiny-1"
        assert (front.kind == "cloud") == any(line.startswith("429") for line in front.refused)
