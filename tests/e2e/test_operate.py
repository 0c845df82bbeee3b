"""`herd up` refuses what cannot work before it starts anything."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    temporary_settings,
)

from herd.flows.local_server import DATABASE, server_variables, sign_in_link, write_access
from herd.flows.serve import Servers, mlflow_command
from herd.flows.setup import check_working_directory
from herd.storage.lease import lease
from herd.storage.processes import free_port
from herd.storage.root import Root
from tests.e2e.conftest import NewHerd


def test_a_taken_port_is_refused(new_herd: NewHerd, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        printed = new_herd(tmp_path / "root")("up", "--prefect-port", str(port), status=2, server=False)
    assert f"port {port} is taken; choose another" in printed


def test_a_second_up_on_a_root_is_refused(new_herd: NewHerd, tmp_path: Path) -> None:
    root = Root.parse(tmp_path / "root")
    with lease(root, "up", "herd up"):
        printed = new_herd(root.local)("up", "--prefect-port", str(free_port()), status=1, server=False)
    told = " ".join(printed.split())
    assert f"is used by herd up (process {os.getpid()}" in told
    assert f"its addresses are in {root.local / 'prefect.env'}" in told


def test_a_module_that_would_be_imported_in_place_of_herd_is_named(tmp_path: Path) -> None:
    (tmp_path / "herd").mkdir()
    check_working_directory(tmp_path)
    for name in ("herd/__init__.py", "herd.py"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=f"{name}: Prefect would import it in place of herd; rename it"):
            check_working_directory(tmp_path)
    check_working_directory()


def test_servers_that_run_elsewhere_are_used_and_none_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.lab:4200/api")
    port = free_port()
    half = Servers.from_environment(1, port, "127.0.0.1")
    assert [server.name for server in half.children(Root.parse(tmp_path))] == ["mlflow"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.lab:5000")
    both = Servers.from_environment(1, 1, "127.0.0.1")
    environment = both.environment(Root.parse(tmp_path))
    assert list(both.children(Root.parse(tmp_path))) == []
    assert environment["PREFECT_API_URL"] == "http://prefect.lab:4200/api"
    assert environment["MLFLOW_TRACKING_URI"] == "http://mlflow.lab:5000"


def test_everything_binds_to_loopback_unless_somebody_asks_otherwise(tmp_path: Path) -> None:
    root, port, other = Root.parse(tmp_path), free_port(), free_port()
    for server in Servers.from_environment(port, other, "127.0.0.1").children(root):
        assert server.command[server.command.index("--host") + 1] == "127.0.0.1"
        assert server.health.startswith("http://127.0.0.1:")
    with pytest.raises(ValueError, match=r"--host: 203\.0\.113\.7 is not an address of this machine"):
        Servers.from_environment(port, other, "203.0.113.7")


def test_mlflow_keeps_artifacts_of_a_remote_root_there_and_its_database_here(tmp_path: Path) -> None:
    command = mlflow_command(Root.parse("s3://bucket/herd", scratch=str(tmp_path)), 5000)
    assert command[command.index("--artifacts-destination") + 1] == "s3://bucket/herd/mlflow-artifacts"
    assert command[command.index("--backend-store-uri") + 1] == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_environment_of_what_is_started_names_the_root_and_a_fast_heartbeat(tmp_path: Path) -> None:
    port, other = free_port(), free_port()
    environment = Servers.from_environment(port, other, "127.0.0.1").environment(Root.parse(tmp_path))
    assert environment["HERD_ROOT"] == str(tmp_path)
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert set(os.environ) <= set(environment)


def test_a_root_keeps_the_password_and_the_database_of_its_servers(tmp_path: Path) -> None:
    stores = [Root.parse(f"s3://bucket/{name}", scratch=str(tmp_path)) for name in ("herd", "other")]
    roots = [Root.parse(tmp_path), Root.parse(tmp_path), *stores, Root.parse(tmp_path / "new")]
    first, again, remote, beside, new = (
        Servers.from_environment(free_port(), free_port(), "127.0.0.1").environment(root) for root in roots
    )
    assert first["PREFECT_API_AUTH_STRING"] == first["PREFECT_SERVER_API_AUTH_STRING"]
    assert len(first["PREFECT_API_AUTH_STRING"]) > 40
    assert first["PREFECT_API_AUTH_STRING"] == again["PREFECT_API_AUTH_STRING"], "open pages and runs go on"
    assert first["PREFECT_API_AUTH_STRING"] != new["PREFECT_API_AUTH_STRING"]
    assert (tmp_path / "prefect.password").stat().st_mode & 0o777 == 0o600
    assert first[DATABASE] == again[DATABASE] == f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
    assert len({first[DATABASE], remote[DATABASE], beside[DATABASE]}) == 3


def test_what_the_user_chose_of_a_server_stays(tmp_path: Path) -> None:
    chosen = {
        PREFECT_SERVER_API_AUTH_STRING: "me:mine",
        PREFECT_SERVER_DATABASE_CONNECTION_URL: "sqlite+aiosqlite:////srv/prefect.db",
        PREFECT_SERVER_CORS_ALLOWED_ORIGINS: "https://prefect.example.org",
    }
    with temporary_settings(chosen):
        variables = server_variables(Root.parse(tmp_path), 4200, "127.0.0.1")
    assert (variables["PREFECT_API_AUTH_STRING"], DATABASE in variables) == ("me:mine", False)
    assert variables["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "https://prefect.example.org"


@pytest.mark.parametrize("password", [{}, {"PREFECT_API_AUTH_STRING": "herd:it's secret"}])
def test_another_shell_learns_the_servers_from_a_file_of_its_owner(tmp_path: Path, password: dict[str, str]) -> None:
    variables = {"PREFECT_API_URL": "http://127.0.0.1:4200/api", "HERD_ROOT": str(tmp_path), **password}
    (tmp_path / "prefect.env").touch(0o644)
    links = [sign_in_link("http://127.0.0.1:4200", secret) for secret in password.values()]
    file = write_access(Root.parse(tmp_path), links, variables)
    assert file.stat().st_mode & 0o777 == 0o600
    assert ("/sign-in#" in file.read_text()) == bool(password)
    printed = subprocess.run(["bash", "-c", f"source {file}; env"], env={}, capture_output=True, text=True).stdout
    assert {f"{name}={value}" for name, value in variables.items()} <= set(printed.splitlines())
