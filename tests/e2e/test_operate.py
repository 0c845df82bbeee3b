"""`herd up` refuses what cannot work before it starts anything."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from flows.operate import Servers, mlflow_command
from storage.processes import free_port
from storage.root import Root
from tests.e2e.conftest import NewHerd


@pytest.mark.slow
def test_a_taken_port_is_refused(new_herd: NewHerd, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        printed = new_herd(tmp_path / "root")("up", "--prefect-port", str(port), status=2, server=False)
    assert f"port {port} is taken; choose another" in printed


def test_servers_that_run_elsewhere_are_used_and_none_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.lab:4200/api")
    port = free_port()
    half = Servers.found(1, port, "127.0.0.1")
    assert [name for name, _, _ in half.commands(Root.of(tmp_path))] == ["mlflow"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.lab:5000")
    both = Servers.found(1, 1, "127.0.0.1")
    environment = both.environment(Root.of(tmp_path))
    assert list(both.commands(Root.of(tmp_path))) == []
    assert environment["PREFECT_API_URL"] == "http://prefect.lab:4200/api"
    assert environment["MLFLOW_TRACKING_URI"] == "http://mlflow.lab:5000"


def test_everything_binds_to_loopback_unless_somebody_asks_otherwise(tmp_path: Path) -> None:
    root, port, other = Root.of(tmp_path), free_port(), free_port()
    for _, command, health in Servers.found(port, other, "127.0.0.1").commands(root):
        assert command[command.index("--host") + 1] == "127.0.0.1"
        assert health.startswith("http://127.0.0.1:")
    with pytest.raises(ValueError, match=r"--host: 203\.0\.113\.7 is no address of this machine"):
        Servers.found(port, other, "203.0.113.7")


def test_mlflow_keeps_artifacts_of_a_remote_root_there_and_its_database_here(tmp_path: Path) -> None:
    command = mlflow_command(Root.of("s3://bucket/herd", scratch=str(tmp_path)), 5000)
    assert command[command.index("--artifacts-destination") + 1] == "s3://bucket/herd/mlflow-artifacts"
    assert command[command.index("--backend-store-uri") + 1] == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_environment_of_what_is_started_names_the_root_and_a_fast_heartbeat(tmp_path: Path) -> None:
    port, other = free_port(), free_port()
    environment = Servers.found(port, other, "127.0.0.1").environment(Root.of(tmp_path))
    assert environment["HERD_ROOT"] == str(tmp_path)
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert set(os.environ) <= set(environment)
