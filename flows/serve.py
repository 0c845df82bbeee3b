"""`herd up`: a Prefect server, an MLflow server and a worker on this machine, with every deployment registered.

Servers that PREFECT_API_URL or MLFLOW_TRACKING_URI name are used instead of starting one. The servers bind to loopback
by default and are children of this process: Ctrl-C or SIGTERM stops all, and one that ends is started again
(children.py). For one person on one machine (SQLite behind both servers); deploy/ has the servers of a team.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import entry_points
from pathlib import Path

from prefect import get_client
from prefect.context import refresh_global_settings_context
from prefect.settings import get_current_settings
from rich.console import Console
from rich.markup import escape

from herd.flows.children import Child, Children
from herd.flows.local_server import (
    LOOPBACK,
    PASSWORD,
    await_answer,
    kept_password,
    server_command,
    server_variables,
    sign_in_link,
    worker_command,
    write_access,
)
from herd.flows.setup import check_working_directory, deploy, deployment_files, setup
from herd.storage.lease import LeaseHeld, lease
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole, working
from herd.tasks.tracking.mlflow_app import APP, LOGIN
from herd.tasks.tracking.mlflow_store import environment_uri, prepare_database
from herd.tasks.tracking.moved_root import ACCESS, SIGN_IN_AT, follow_root

HEARTBEAT_S = 30
"""What prefect.yaml sets for every deployment; Prefect allows no shorter interval."""
RECONCILE_S, LOOK_S = 30.0, 0.5
"""Seconds between two passes of the reconciler, and between two looks at the children, while `herd up` runs."""


console = Console(highlight=False, soft_wrap=True)


def serve(root: Root, prefect_port: int, mlflow_port: int, host: str = LOOPBACK, notify: str = "") -> None:
    """Start the missing servers, print the two addresses, restart what ends, and reconcile runs until a signal.

    Raises ValueError if a port is taken, LeaseHeld if another `herd up` serves the root (both would write one
    database), and GaveUp if the worker or Prefect ends again and again.
    """

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    check_working_directory()
    root.local.mkdir(parents=True, exist_ok=True)
    follow_root(root)
    files = deployment_files(root, Path.cwd())
    with ExitStack() as stack:
        try:
            stack.enter_context(lease(Root.parse(root.local), "up", "herd up"))
        except LeaseHeld as held:
            raise LeaseHeld(f"{held}; its addresses are in {root.local / ACCESS}, and Ctrl-C there ends it") from None
        servers = Servers.from_environment(prefect_port, mlflow_port, host)
        chosen = get_current_settings().server.api.auth_string is not None
        environment = servers.environment(root)
        os.environ.update(environment)
        refresh_global_settings_context()  # this process is a client of the server, too
        signal.signal(signal.SIGTERM, interrupt)
        children = stack.enter_context(Children(root, environment, _say))
        started = {server.health: children.start(server) for server in servers.children(root)}
        with working(TerminalConsole(console), "servers"):
            for health, process in started.items():
                await_answer(health, process)
        for line in setup(root, notify=notify):
            console.print(f"[dim]{line}[/]")
        with working(TerminalConsole(console), "deployments"):
            lines = deploy(files, environment, root)
        for line in lines:
            console.print(f"[dim]{escape(line)}[/]")
        children.start(Child("worker", worker_command()))
        stack.callback(_introduce(servers, root, environment, chosen).unlink, missing_ok=True)
        _run(children, root)


@dataclass(frozen=True)
class Servers:
    """Addresses of the two servers, and the ports of those to start here."""

    prefect: str
    mlflow: str
    prefect_port: int | None
    """None: it runs elsewhere."""
    mlflow_port: int | None
    host: str

    @classmethod
    def from_environment(cls, prefect_port: int, mlflow_port: int, host: str) -> Servers:
        """Return the servers of the environment, and the given ports for the others. Raises ValueError.

        The own address in the environment, from an earlier prefect.env, counts only if a server is there.
        """
        own = {"--prefect-port": f"http://{_reached(host)}:{prefect_port}"}
        own["--mlflow-port"] = f"http://{_reached(host)}:{mlflow_port}"
        given = {"--prefect-port": os.environ.get("PREFECT_API_URL", "").removesuffix("/api")}
        given["--mlflow-port"] = environment_uri()
        for option, port in (("--prefect-port", prefect_port), ("--mlflow-port", mlflow_port)):
            if given[option] not in ("", own[option]):
                continue
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                    given[option] = ""
                except OSError as error:
                    if error.errno == errno.EADDRINUSE and given[option]:
                        continue
                    if error.errno != errno.EADDRINUSE:
                        message = f"--host: {host} is not an address of this machine ({error.strerror})"
                    else:
                        message = f"{option}: port {port} is taken; choose another, such as {option} {port + 1}"
                    raise ValueError(message) from error
        prefect, mlflow = given["--prefect-port"], given["--mlflow-port"]
        return cls(
            prefect or own["--prefect-port"],
            mlflow or own["--mlflow-port"],
            None if prefect else prefect_port,
            None if mlflow else mlflow_port,
            host,
        )

    @property
    def api(self) -> str:
        return f"{self.prefect}/api"

    @property
    def ours(self) -> list[str]:
        """The addresses of the servers that start here."""
        ports = ((self.prefect, self.prefect_port), (self.mlflow, self.mlflow_port))
        return [address for address, port in ports if port is not None]

    def children(self, root: Root) -> Iterator[Child]:
        """Yield each server to start."""
        if self.mlflow_port is not None:
            command = mlflow_command(root, self.mlflow_port, self.host)
            yield Child("mlflow", command, f"{self.mlflow}/health", vital=False)
        if self.prefect_port is not None:
            command = server_command("--host", self.host, "--port", str(self.prefect_port))
            yield Child("prefect", command, f"{self.api}/health")

    def environment(self, root: Root) -> dict[str, str]:
        """Return the environment of the children; it contains the password of the servers that start here."""
        names = (_reached(self.host), LOOPBACK, "localhost")
        prefect, mlflow = dict[str, str](), dict[str, str]()
        if self.prefect_port is not None:
            prefect = {**server_variables(root, self.prefect_port, *names), "PREFECT_UI_URL": f"{self.prefect}/v2"}
        if self.mlflow_port is not None:
            user, _, password = prefect.get(PASSWORD, kept_password(root)).partition(":")
            if not password:
                raise ValueError("PREFECT_SERVER_API_AUTH_STRING: has no colon; write user:password")
            mlflow = dict(zip(LOGIN, (user, password), strict=True))
        return {
            **os.environ,
            **prefect,
            **mlflow,
            SIGN_IN_AT: " ".join(self.ours),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_UI_API_URL": self.api,
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
            "PREFECT_WORKER_QUERY_SECONDS": "5",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,orphans",  # artifacts of the flow runs that gc deletes
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "MLFLOW_TRACKING_URI": self.mlflow,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "HERD_ROOT": root.uri,
        }


def mlflow_command(root: Root, port: int, host: str = LOOPBACK) -> list[str]:
    """Return the command of an MLflow server over the root's database: 1 worker, no job runners (else 15 processes)."""
    if not entry_points(group="mlflow.app", name=APP):
        raise ValueError(
            f"herd: its installation lacks the entry point mlflow.app/{APP}; install this version: pip install "
            "--no-deps --editable ."
        )
    prepare_database(root)  # a server that is killed while it creates the tables would leave half of them
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    names = dict.fromkeys((_reached(host), "localhost", LOOPBACK))
    command += ["--app-name", APP, "--allowed-hosts", ",".join(f"{name}:*" for name in names)]
    store = ["--backend-store-uri", f"sqlite:///{root.local}/mlflow.db"]
    return [*command, *store, "--artifacts-destination", f"{root.uri}/mlflow-artifacts"]


def _introduce(servers: Servers, root: Root, environment: dict[str, str], chosen: bool) -> Path:
    """Print the addresses; return the file that another shell sources.

    The links with the password are printed to a terminal, not to a log, and not if the user has `chosen` the password.
    """
    shell, password = ["PREFECT_API_URL", "MLFLOW_TRACKING_URI", "HERD_ROOT"], ""
    if servers.prefect_port is not None:
        shell, password = [*shell, "PREFECT_UI_URL", PASSWORD], environment[PASSWORD]
    if servers.mlflow_port is not None:
        shell, password = [*shell, *LOGIN], ":".join(environment[name] for name in LOGIN)
    links = [sign_in_link(address, password) for address in servers.ours]
    access = write_access(root, links, {name: environment[name] for name in shell})
    shown = dict(zip(servers.ours, links, strict=True)) if console.is_terminal and not chosen else {}
    experiments = f"{servers.mlflow}/#/experiments?workflowType=machine_learning"
    console.print(f"Prefect  {shown.get(servers.prefect, f'{servers.prefect}/v2/deployments')}", markup=False)
    console.print(f"MLflow   {shown.get(servers.mlflow, experiments)}", markup=False)
    if servers.ours and not shown:
        console.print(f"         (a password is asked for; links with it are in {access})", markup=False)
    console.print(f"shell    source {access}", markup=False)
    console.print(f"logs     {root.local / 'logs'}", markup=False)
    if servers.host != LOOPBACK:
        console.print(
            f"[yellow]warning[/]  the servers listen on {servers.host} without TLS: who can read the network's traffic "
            "reads the password. Put a reverse proxy with TLS in front of them"
        )
    console.print("Ctrl-C stops what was started here")
    return access


def _reached(host: str) -> str:
    """Return the host name for browsers and workers of a server that binds to `host`."""
    return socket.gethostname() if host == "0.0.0.0" else host


def _say(line: str) -> None:
    console.print(f"[yellow]{datetime.now():%H:%M:%S}[/]  {escape(line)}")


def _run(children: Children, root: Root) -> None:
    """Restart children that end, and reconcile runs at once and every RECONCILE_S, until the user stops this process.

    Raises GaveUp.
    """
    # In a thread: calls to a server that is away take a minute, in which its restart would wait.
    threading.Thread(target=_reconcile, args=(root,), name="reconcile", daemon=True).start()
    try:
        while True:
            children.look(time.monotonic())
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        console.print("stopping")


def _reconcile(root: Root) -> None:
    from herd.tasks.operate.recovery import reconcile

    first = True
    while True:
        try:
            with get_client(sync_client=True) as client:
                reconcile(root, client, cleanup=first)
            first = False
        except Exception as error:  # a server is busy or away: the next pass does it
            console.print(f"[dim]reconcile: {type(error).__name__}: {escape(str(error))}[/]")
        time.sleep(RECONCILE_S)
