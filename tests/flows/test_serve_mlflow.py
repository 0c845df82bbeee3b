"""MLflow of `herd up`: behind the password of its clients, opened by a link, closed to other users of the machine."""

from __future__ import annotations

import base64
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient

from herd.flows.local_server import PASSWORD_FILE, await_answer, child, kept_password, write_access
from herd.flows.serve import Servers, mlflow_command
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.report.compare import compare_runs, comparison_url
from herd.tasks.tracking.mlflow_app import LOGIN
from tests.tasks.tracked_run import TrackedRun


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and password of an MLflow server as `herd up` starts it."""
    folder = tmp_path_factory.mktemp("mlflow")
    folder.chmod(0o755)
    root, port = Root.parse(folder), free_port()
    servers = Servers("http://127.0.0.1:4200", f"http://127.0.0.1:{port}", None, port, "127.0.0.1")
    environment = servers.environment(root)
    with child("mlflow", mlflow_command(root, port), folder, environment) as process:
        await_answer(f"{servers.mlflow}/health", process)
        yield servers.mlflow, kept_password(root)


CALLS = [
    ("GET", "/", None),
    ("GET", "/version", None),
    ("GET", "/api/2.0/mlflow/experiments/get?experiment_id=0", None),
    ("POST", "/api/2.0/mlflow/experiments/create", {"name": "of nobody", "artifact_location": "file:///"}),
    ("POST", "/api/2.0/mlflow/experiments/delete", {"experiment_id": "0"}),
    ("DELETE", "/api/2.0/mlflow/registered-models/alias", {"name": "tiny", "alias": "champion"}),
    ("GET", "/ajax-api/2.0/mlflow/experiments/search?max_results=1", None),
    ("GET", "/api/2.0/mlflow-artifacts/artifacts", None),
    ("GET", "/graphql", None),
    ("GET", "/%2e%2e/health/../api/2.0/mlflow/experiments/get?experiment_id=0", None),
    ("GET", "//health", None),
    ("GET", "/health/", None),
]


def test_without_the_password_mlflow_answers_nothing(mlflow: tuple[str, str]) -> None:
    address, password = mlflow
    wrong = [None, httpx.BasicAuth("herd", "guess"), httpx.BasicAuth("", "")]
    with httpx.Client(base_url=address) as http:
        for method, path, body in CALLS:
            for login in wrong:
                answer = http.request(method, path, json=body, auth=login)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Basic realm="herd"'), path
            forged = {"Cookie": f"herd-mlflow={'0' * 64}"}
            assert http.request(method, path, json=body, headers=forged).status_code == 401
        assert http.get("/health").text == "OK"
        user, _, secret = password.partition(":")
        assert http.get("/version", auth=(user, secret)).status_code == 200


def test_mlflow_s_client_reads_the_password_from_the_environment(
    mlflow: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, password = mlflow
    for name, value in zip(LOGIN, password.split(":", 1), strict=True):
        monkeypatch.setenv(name, value)
    assert MlflowClient(address).search_experiments()[0].name == "Default"


def test_a_browser_signs_in_once_and_its_cookie_is_not_the_password(mlflow: tuple[str, str]) -> None:
    address, password = mlflow
    key = base64.b64encode(password.encode()).decode()
    with httpx.Client(base_url=address) as http:
        assert key not in http.get("/sign-in").text
        assert http.post("/sign-in", content=key[:-4]).status_code == 401
        assert not http.cookies
        cookie = http.post("/sign-in", content=key).headers["set-cookie"]
        assert {"HttpOnly", "SameSite=lax"} <= set(cookie.split("; "))
        assert password.partition(":")[2] not in cookie
        assert key not in cookie
        assert http.get("/").status_code == 200
        change = {"name": "of another page"}
        for origin in ("http://evil.example", "http://127.0.0.1:9", "http://localhost:9"):
            answer = http.post("/api/2.0/mlflow/experiments/create", json=change, headers={"Origin": origin})
            assert answer.status_code == 401, origin
        own = http.post("/api/2.0/mlflow/experiments/create", json=change, headers={"Origin": address})
        assert own.status_code == 200


def test_a_comparison_finds_the_password_in_the_root(
    mlflow: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shell that has not sourced prefect.env."""
    address, password = mlflow
    login, root = dict(zip(LOGIN, password.split(":", 1), strict=True)), Root.parse(tmp_path)
    with monkeypatch.context() as patch:
        for name, value in {"MLFLOW_TRACKING_URI": address, **login}.items():
            patch.setenv(name, value)
        for better in (0.0, 0.5):
            TrackedRun(root, better=better, name="opened").all()
    compared = compare_runs(root, ["opened-1", "opened-2"])
    write_access(root, [], {"MLFLOW_TRACKING_URI": address})
    assert comparison_url(compared) is None
    write_access(root, [], {"MLFLOW_TRACKING_URI": address, **login})
    assert str(comparison_url(compared)).startswith(f"{address}/#/experiments/")


NOBODY = """
import sys, urllib.request, urllib.error
address, access = sys.argv[1:]
for path, body in (("/api/2.0/mlflow/experiments/search?max_results=1", None),
                   ("/api/2.0/mlflow/experiments/create", b'{"name": "of nobody"}')):
    try:
        urllib.request.urlopen(urllib.request.Request(address + path, body, {"Content-Type": "application/json"}))
        print("open")
    except urllib.error.HTTPError as error:
        print(error.code)
try:
    open(access).read()
    print("read")
except PermissionError:
    print("private")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_reads_and_changes_nothing(mlflow: tuple[str, str], tmp_path: Path) -> None:
    address, _ = mlflow
    nobody = pwd.getpwnam("nobody")
    tmp_path.chmod(0o755)
    kept_password(Root.parse(tmp_path))
    command = ["/usr/bin/env", "python3", "-c", NOBODY, address, str(tmp_path / PASSWORD_FILE)]
    done = subprocess.run(
        command, user=nobody.pw_uid, group=nobody.pw_gid, extra_groups=[], capture_output=True, text=True
    )
    assert done.stdout.split() == ["401", "401", "private"], done.stderr
