"""Servers on this machine: no client of herd sends their requests to a proxy, and a wait for one says why."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import herd
from herd.flows import local_server
from herd.flows.local_server import NoServer, await_answer, failed_answer
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks import console
from herd.tasks.tracking import mlflow as tracking
from herd.tasks.tracking.mlflow import CircuitBreaker, MLflowTracker


class Counted(ThreadingHTTPServer):
    """Answers every request with `status`, and counts them."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status, self.requests = status, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Counted

    def do_GET(self) -> None:
        self.server.requests += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.server.status)
        body = b"<ListBucketResult/>" if self.path.startswith("/bucket") else b"{}"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_HEAD = do_CONNECT = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Counted]:
    with Counted(200) as server:
        yield server
        server.shutdown()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """The proxy of the environment, which reaches nothing."""
    with Counted(503) as proxy:
        for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.setenv("no_proxy", ".corp.example")
        yield proxy
        proxy.shutdown()


def by_urllib(url: str) -> None:
    with urllib.request.urlopen(url, timeout=20):
        pass


def by_prefect(url: str) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    with SyncPrefectClient(f"{url}/api") as client:
        client._client.get("/health")


def by_prefect_events(url: str) -> None:
    from prefect._internal.websockets import websocket_connect

    async def connect() -> None:
        async with websocket_connect(url.replace("http", "ws")):
            pass

    with suppress(Exception):  # the server speaks no websockets
        asyncio.run(connect())


def by_mlflow(url: str) -> None:
    from mlflow import MlflowClient

    MlflowClient(url).search_experiments()


def by_mlflow_rest(url: str) -> None:
    from herd.tasks.tracking.mlflow_store import call_server

    call_server(url, "experiments/search")


def by_s3(url: str) -> None:
    from herd.storage.s3 import BoundedS3

    BoundedS3(endpoint_url=url, key="k", secret="s").call_s3("list_objects_v2", Bucket="bucket")


def by_hub(url: str) -> None:
    from huggingface_hub import get_session
    from huggingface_hub.utils import close_session

    close_session()  # an earlier test's has its proxies
    get_session().get(url)
    close_session()


def by_torch(url: str) -> None:
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", free_port(), is_master=True).set("key", "value")
    by_urllib(url)


CLIENTS = [by_urllib, by_prefect, by_prefect_events, by_mlflow, by_mlflow_rest, by_s3, by_hub, by_torch]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_no_client_sends_requests_to_this_machine_through_a_proxy(
    client: Callable[[str], None], server: Counted, proxy: Counted
) -> None:
    herd.bypass_proxy(*herd.LOOPBACK)
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        before = server.requests
        client(url)
        assert proxy.requests == 0
        assert server.requests > before


def test_importing_herd_bypasses_proxies_and_keeps_what_was_bypassed_before() -> None:
    program = "import herd, os; print(os.environ.get('no_proxy'), os.environ.get('NO_PROXY'))"

    def lists(**variables: str) -> str:
        known = {"PYTHONPATH": ":".join(sys.path), **variables}
        done = subprocess.run([sys.executable, "-Pc", program], env=known, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    loopback = "127.0.0.1,localhost,::1"
    assert lists() == "None None"
    assert lists(HTTPS_proxy="http://p:1") == f"{loopback} {loopback}"
    assert lists(all_proxy="http://p:1", NO_PROXY="a, localhost") == " ".join(["a,localhost,127.0.0.1,::1"] * 2)
    assert lists(http_proxy="http://p:1", NO_PROXY="a", no_proxy="b") == f"b,{loopback} a,{loopback}"
    assert lists(http_proxy="http://p:1", no_proxy="*") == "* *"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A server that lives."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_wait_says_what_it_waits_for_and_what_answered_last(
    proxy: Counted,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(console, "QUIET_S", 0.2)
    monkeypatch.setattr(local_server, "START_TIMEOUT_S", 0.5)
    url = f"http://127.0.0.1:{free_port()}/health"
    monkeypatch.delenv("all_proxy")
    with pytest.raises(NoServer, match=r"no answer within 0.5 s \(the last: the proxy answered 503\)"):
        await_answer(url, process)
    assert capsys.readouterr().err.count(f"waits for {url} for 0 s: the proxy answered 503\n") == 1
    herd.bypass_proxy(*herd.LOOPBACK)
    with pytest.raises(NoServer, match=r"\(the last: connection refused\)"):
        await_answer(url, process)
    with Counted(500) as broken, pytest.raises(NoServer, match=r"\(the last: status 500\)"):
        await_answer(broken.url, process)


def test_a_machine_without_loopback_is_told_at_once(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", connect)
    began = time.monotonic()
    with pytest.raises(
        NoServer, match=r"127\.0\.0\.1: this machine has no loopback interface; start it: ip link set lo up"
    ):
        await_answer("http://127.0.0.1:9/health", process)
    assert time.monotonic() - began < 2
    assert failed_answer("http://127.0.0.1:9/health") == "network is unreachable"


def test_a_wait_for_mlflow_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(tracking, "WAIT_INTERVAL_S", 0.01)
    said: list[str] = []
    assert not MLflowTracker(Root.parse(tmp_path), "f").reach.wait(2, said.append)
    assert said == ["waits for MLflow, at most 2 s: Connection refused"]


def test_after_a_stop_calls_of_mlflow_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "MLFLOW_STOPPED_S", 0.3)
    hangs = threading.Event()
    reach = CircuitBreaker(hangs.wait)
    assert reach.attempt(lambda: "sent", "") == "sent"
    assert reach.hurry() > 9
    assert reach.attempt(lambda: "sent", "") == "sent"
    began = time.monotonic()
    assert not reach.attempt(hangs.wait, False)
    assert reach.away
    assert not reach.wait(0, print)
    assert not reach.attempt(hangs.wait, False)
    assert time.monotonic() - began < 5
    assert reach.stale
    assert reach.hurry() < 10
    hangs.set()


def test_an_error_of_mlflows_database_is_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = MLflowTracker(Root.parse(tmp_path), "f")
    assert tracker.experiment
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("alter table experiments rename to former")
    tracker._experiment = ""
    assert not tracker.experiment
    assert "no such table: experiments" in tracker.reach.why
    assert "Traceback" not in "".join(capfd.readouterr())
