"""The temporary Prefect server: there when none is known, gone with its process, told in a line when it fails."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import urllib.request
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
from prefect.server.concurrency.lease_storage import get_concurrency_lease_storage
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE, temporary_settings

from herd.flows.local_server import (
    LEASES,
    await_answer,
    child,
    is_temporary,
    server_command,
    server_variables,
    start_temporary_server,
)
from herd.storage.processes import free_port
from herd.storage.root import Root
from tests.dist import Forked

BEGIN = """
import sys, time
from pathlib import Path
from herd.flows.local_server import is_temporary, start_temporary_server
from herd.storage.root import Root
start_temporary_server(Root.parse(sys.argv[1]))()
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
assert is_temporary()
print(PREFECT_API_URL.value(), PREFECT_API_AUTH_STRING.value(), flush=True)
time.sleep(60)
"""


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PREFECT_HOME": str(folder / "prefect"), "PREFECT_LOGGING_LEVEL": "CRITICAL", **more}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_none_is_started_where_one_is_known(tmp_path: Path) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        start_temporary_server(Root.parse(tmp_path))()
    assert not is_temporary()
    assert not (tmp_path / "logs").exists()


class Busy(BaseHTTPRequestHandler):
    """Answers health checks, and to all else that it has too much to do."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith("/health") else 503)
        self.send_header("Retry-After", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.mark.slow
def test_a_busy_server_is_told_in_a_line_and_asked_again(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        program = (
            "import herd.flows.cli.errors as t; t.PAUSES_S = (0.1, 0.1); import herd.flows.cli.main as c; c.main()"
        )
        words = ["run", "tests/e2e/tiny.yaml", "--root", str(tmp_path / "root")]
        known = surroundings(tmp_path, PREFECT_API_URL=url)
        process = Forked("-c", program, *words, environment=known)
        printed, _ = process.communicate(timeout=400)
        server.shutdown()
    assert process.returncode == 1, printed
    assert printed.count("Prefect is busy (503)") == 2
    assert "the Prefect server does not answer as it should" in printed
    assert "Traceback" not in printed


def status(api: str, path: str, password: str = "", **headers: str) -> int:
    auth = tuple(password.split(":")) if password else None
    return httpx.get(f"{api}/{path}", headers=headers, auth=auth, timeout=30).status_code


@pytest.mark.slow
def test_it_answers_its_own_process_and_ends_with_it(tmp_path: Path) -> None:
    environment = surroundings(tmp_path, PREFECT_API_AUTH_STRING="of:another server", HOME=str(tmp_path))
    del environment["PREFECT_HOME"]
    process = Forked("-c", BEGIN, str(tmp_path / "root"), environment=environment)
    try:
        # on a busy machine it says first what it waits for
        api, password = next(line for line in process.stdout if line.startswith("http")).split()
        health = f"{api}/health"
        assert answers(health)
        assert status(api, "admin/version") == status(api, "admin/version", "of:another server") == 401
        assert status(api, "admin/version", password) == 200
        assert status(api, "admin/version", password, Host="evil.example") == 400
        policy = httpx.get(health).headers["content-security-policy"]
        assert (
            policy == f"connect-src 'self' {api.removesuffix('/api')} {api.replace('http', 'ws').removesuffix('/api')}"
        )
        assert (
            httpx.post(f"{api}/flows/filter", auth=tuple(password.split(":")), json={}).status_code == 403
        )  # no token
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{api}/flows/filter", headers=asked).status_code == 400
        assert password not in str(psutil.Process(process.pid).children()[0].cmdline())
        assert (tmp_path / "root" / "prefect.db").stat().st_size > 0
        assert not list(tmp_path.rglob(".prefect/prefect.db"))
    finally:
        process.kill()
    deadline = time.monotonic() + 30
    while answers(health):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_one_that_cannot_start_is_told_in_a_line(tmp_path: Path) -> None:
    broken = surroundings(tmp_path, PREFECT_API_DATABASE_CONNECTION_URL="sqlite+aiosqlite:////proc/none/prefect.db")
    words = ["herd.flows.cli.main", "run", "tests/e2e/tiny.yaml", "--root", str(tmp_path / "root")]
    process = Forked(*words, environment=broken)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1, printed
    assert "the server ended with status" in printed
    assert "logs" in printed
    assert "Traceback" not in printed
    assert (tmp_path / "root" / "logs" / "prefect.log").stat().st_size > 0


@pytest.mark.slow
def test_another_password_is_told_in_two_lines(tmp_path: Path) -> None:
    """By a shell that knows the server's address alone."""
    port = free_port()
    server = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_API_AUTH_STRING": "herd:secret"}
    with child("prefect", server_command("--host", "127.0.0.1", "--port", str(port)), tmp_path, server) as process:
        await_answer(f"http://127.0.0.1:{port}/api/health", process)
        known = surroundings(tmp_path, PREFECT_API_URL=f"http://127.0.0.1:{port}/api")
        words = ["herd.flows.cli.main", "run", "tests/e2e/tiny.yaml", "--root", str(tmp_path / "root")]
        herd = Forked(*words, environment=known)
        printed, _ = herd.communicate(timeout=200)
    assert herd.returncode == 2, printed
    assert f"PREFECT_API_AUTH_STRING: the Prefect server at 127.0.0.1:{port} takes another password" in printed
    assert "Traceback" not in printed


def test_a_slot_is_known_to_the_next_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect ends a flow run whose lease of a slot is lost; by default they are in the memory of its server."""
    variables = server_variables(Root.parse(tmp_path), 4200)
    monkeypatch.setenv(LEASES, variables[LEASES])
    storage = variables["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"]

    async def renewed() -> bool | None:
        lease = await get_concurrency_lease_storage().create_lease([uuid4()], timedelta(minutes=5))
        assert list(tmp_path.rglob(f"{lease.id}.json"))
        return await get_concurrency_lease_storage().renew_lease(lease.id, timedelta(minutes=5))

    with temporary_settings({PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE: storage}):
        assert asyncio.run(renewed())
