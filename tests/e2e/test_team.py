"""The services of a team for real: Postgres, Prefect and MLflow with a password, files on S3, a worker; up and down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from herd.deploy.services import Team, postgres_program
from herd.deploy.team import settings, surroundings
from herd.storage.processes import free_port
from tests.e2e.conftest import kill_all
from tests.storage.s3 import environment, moto_server

pytestmark = [pytest.mark.timeout(600)]
PASSWORD = "c0rrect/horse:b@ttery %41"
"""With what URIs, ini files and shells have a meaning for."""


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Path]:
    """A file of settings for a team of the test's own; whatever it left running is killed."""
    try:
        postgres_program("initdb")
    except ValueError as error:
        pytest.skip(f"NOT TESTED: no Postgres here: {error}")
    folder = Path(tempfile.mkdtemp(prefix="herd-team-"))  # Postgres' user must be able to enter it
    folder.chmod(0o755)
    with moto_server(tmp_path) as endpoint:
        given = {
            "HERD_TEAM": str(folder),
            "HERD_ROOT": "s3://herd/team",
            "HERD_SCRATCH": str(tmp_path / "scratch"),
            "HERD_DB_PASSWORD": f"database {PASSWORD}",
            "HERD_AUTH": f"herd:{PASSWORD}",
            **{f"HERD_{name}_PORT": str(free_port()) for name in ("POSTGRES", "PREFECT", "MLFLOW")},
            **environment(endpoint),
        }
        file = tmp_path / "team.env"
        file.write_text("# a comment\n" + "".join(f"{name}={value}\n" for name, value in given.items()))
        file.chmod(0o600)
        try:
            yield file
        finally:
            for pid in (folder / "run").glob("*.pid"):
                kill_all(int(pid.read_text().split()[0]))
            shutil.rmtree(folder, ignore_errors=True)


def command(file: Path, *words: str, status: int = 0) -> str:
    """Run `python -m herd.deploy.team words...`, check its exit status and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "herd.deploy.team", *words, "--env", str(file)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def answer(url: str, body: dict[str, object] | None, password: str = "") -> int:
    """Return the HTTP status of a POST, or of a GET without a body, with or without the account."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if password:
        request.add_header("Authorization", f"Basic {b64encode(password.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.timeout(900)  # a minute and a half on a machine that does nothing else
@pytest.mark.slow
def test_up_run_down(team: Path, tmp_path: Path) -> None:
    command(team, "up")
    assert command(team, "status").count(" up ") == 4
    client = Team(settings(team)).client()
    prefect, mlflow = client["PREFECT_API_URL"], client["MLFLOW_TRACKING_URI"]
    searches = [
        (f"{prefect}/admin/version", None),  # a change needs a token (CSRF), too
        (f"{mlflow}/api/2.0/mlflow/experiments/search", {"max_results": 1}),
    ]
    for url, body in searches:
        assert [answer(url, body), answer(url, body, "herd:guess"), answer(url, body, f"herd:{PASSWORD}")] == [
            401, 401, 200,
        ]  # fmt: skip
    assert not any(PASSWORD in word for process in psutil.process_iter(["cmdline"])
                   for word in process.info["cmdline"] or ())  # fmt: skip

    surroundings = {**os.environ, **client, "PREFECT_HOME": str(tmp_path / "home")}
    watched = subprocess.run(
        [sys.executable, "-m", "prefect", "deployment", "run", "reconcile/reconcile", "--watch"],
        env=surroundings, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert watched.returncode == 0, watched.stdout + watched.stderr
    script = "import mlflow; mlflow.set_experiment('e'); mlflow.start_run(); mlflow.log_text('hello', 'a.txt')"
    script += "; mlflow.end_run(); mlflow.delete_run(mlflow.last_active_run().info.run_id)"
    subprocess.run([sys.executable, "-c", script], env=surroundings, check=True, capture_output=True, timeout=400)
    assert "permanently deleted" not in command(team, "purge"), "it is new"

    ids = [int(file.read_text().split()[0]) for file in (Team(settings(team)).folder / "run").glob("*.pid")]
    everything = [
        child for pid in ids for child in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    ]
    again = command(team, "up")  # finds all four and starts none
    assert again.count(" up ") == 4
    assert {process.pid for process in everything if process.is_running()} >= set(ids)
    assert command(team, "down").count("stopped") == 4
    assert not [process for process in everything if process.is_running()]
    assert command(team, "status", status=3).count("down") == 4


def test_a_service_knows_no_password_that_it_does_not_need(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd puts the whole file into the environment of every service; flow runs inherit their worker's."""
    given = settings(team)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    known = surroundings(Team(given).service("worker").environment)
    assert "HERD_DB_PASSWORD" not in known
    assert {name for name, value in known.items() if PASSWORD in value} == {
        "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD",
    }  # fmt: skip


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "team.env"
    file.write_text(f"HERD_TEAM={tmp_path}\nHERD_ROOT=s3://herd/team\n")
    assert "chmod 600" in command(file, "status", status=2)
    file.chmod(0o600)
    assert "HERD_DB_PASSWORD, HERD_AUTH: not set" in command(file, "status", status=2)
    file.write_text(f"{file.read_text()}HERD_DB_PASSWORD=x\nHERD_AUTH=herd:short\n")
    assert "12 characters" in command(file, "status", status=2)
    file.write_text(f"{file.read_text()}HERD_AUTH=herd:long enough for it\n")
    assert "no such service" in command(file, "run", "redis", status=2)


def test_units_run_the_services() -> None:
    """systemd's own check of the example units; each runs one of the services."""
    units = list(Path("deploy").glob("*.service"))
    assert units
    for unit in units:
        assert f"-m herd.deploy.team run {unit.stem.removeprefix('herd-')}" in unit.read_text()
    if not shutil.which("systemd-analyze"):
        pytest.skip("NOT TESTED: no systemd-analyze here")
    words = ["systemd-analyze", "verify", *map(str, units)]
    told = subprocess.run(words, capture_output=True, text=True).stderr.splitlines()
    assert [line for line in told if "is not executable" not in line] == []  # the checkout is elsewhere


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
@pytest.mark.parametrize("unit", sorted(Path("deploy").glob("*.service")), ids=lambda unit: unit.stem)
def test_units_give_away_little(unit: Path) -> None:
    """By systemd's own scale of exposure, from 0 to 10; without the lines for it, each has 8.9."""
    worker = unit.stem == "herd-worker"
    most = 55 if worker else 35
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={most}", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    lines = unit.read_text().splitlines()
    assert any(line.startswith("MemoryMax=") for line in lines)
    assert ("User=herd-worker" if worker else "User=herd") in lines
