"""`herd up`: a Prefect server, an MLflow server and one worker on this machine, with every deployment registered.

Servers that PREFECT_API_URL or MLFLOW_TRACKING_URI name are used instead of starting one. Ours bind to loopback unless
asked otherwise and are children of this process: Ctrl-C, SIGTERM or the death of one stops all. For one person on one
machine (SQLite behind both servers); deploy/ has the servers of a team.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.context import refresh_global_settings_context
from prefect.events.actions import ChangeFlowRunState, DoNothing
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.workers.process import ProcessWorker
from rich.console import Console

from flows.crash_recovery import AUTO_RESUME, FIRST_REPORT, RESUMED, RULE
from flows.local_server import (
    CHECKOUT,
    LOOPBACK,
    PASSWORD,
    POOL,
    await_answer,
    child,
    server_command,
    server_variables,
    sign_in_link,
    worker_command,
    write_access,
)
from storage.root import Root
from tasks.tracking.mlflow_store import chosen_uri, prepare_database

# What a Prefect server needs for herd: work pool, queues, result storage, automations. Existing objects are kept, also
# changed ones. Two automations are features of Prefect Cloud that a self-hosted server lacks: one calls a flow run
# crashed when its heartbeats stop for 75 s, the other resumes a crashed run. If a process lives on without heartbeats,
# the run's lease keeps the next attempt waiting until it ends.

QUEUES = {"default": None, "training": 1, "evaluation": 1}
"""Work queue -> how many of its flow runs work at the same time; those of `default` take seconds."""
RESULTS = "herd-results"
HEARTBEAT_S = 30
"""What prefect.yaml asks of every deployment; Prefect allows no faster one."""
SILENCE_S = 75
WATCHED = "herd"
"""Tag of the deployments whose flow runs have such a heartbeat."""


def setup(root: Root, api: str = "") -> list[str]:
    """Make what is missing on the Prefect server `api` (or the configured one); return one line for each thing.

    Raises ValueError if no server is configured: it would be lost with a temporary one.
    """
    with _server(api), get_client(sync_client=True) as client:
        return [_pool(client), *_queues(client), _results(root), *_automations(client)]


def deploy(environment: dict[str, str]) -> None:
    """Register every deployment of prefect.yaml. Raises RuntimeError with Prefect's message."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"prefect deploy --all failed:\n{done.stdout}{done.stderr}")


@contextmanager
def _server(api: str) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: api} if api else {}):
        if not PREFECT_API_URL.value():
            raise ValueError(
                "PREFECT_API_URL: is not set; this sets up a server: start one with `herd up`, or name one with "
                "export PREFECT_API_URL=http://127.0.0.1:4200/api"
            )
        yield


def _pool(client: SyncPrefectClient) -> str:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
        return f"work pool {POOL}: made"
    return f"work pool {POOL}: is there"


def _queues(client: SyncPrefectClient) -> Iterator[str]:
    there = {queue.name for queue in client.read_work_queues(work_pool_name=POOL)}
    for name, limit in QUEUES.items():
        if name not in there:
            client.create_work_queue(name, concurrency_limit=limit, work_pool_name=POOL)
        yield f"work queue {POOL}/{name}: {'is there' if name in there else 'made'}"


def _results(root: Root) -> str:
    """Make the block for results that somebody wants persisted; it holds no secret (s3fs reads the environment).

    None of herd's flows persists any: their artifacts are what a retry stands on.
    """
    place = f"{root.uri}/prefect-results"
    block = LocalFileSystem(basepath=place) if root.is_local else RemoteFileSystem(basepath=place)
    slug = f"{block.get_block_type_slug()}/{RESULTS}"
    try:
        type(block).load(RESULTS)
    except ValueError:
        block.save(RESULTS)
        return f"block {slug}: made"
    return f"block {slug}: is there"


def _automations(client: SyncPrefectClient) -> Iterator[str]:
    for wanted in (crash_zombies(), resume_crashed(), example_alert()):
        there = client.read_automations_by_name(wanted.name)
        if not there:
            client.create_automation(wanted)
        yield f"automation {wanted.name!r}: {'is there' if there else 'made'}"


SIGNS = (
    *("heartbeat", "Running", "Completed", "Failed", "Cancelling", "Cancelled", "Paused", "Suspended"),
    *("Scheduled", "AwaitingRetry", "AwaitingConcurrencySlot", "Pending", "Submitting"),
)
"""Whatever else a watched flow run may say, but `Crashed`: two automations that take in one event spoil it on SQLite.

The action of the one writes while the other reads and then writes: `database is locked`, four times in a row, after
which the server puts the event away and holds back those that follow it for 15 minutes (Prefect 3.8.8)."""


def crash_zombies() -> AutomationCore:
    """A flow run of ours that has sent a heartbeat and then nothing at all has lost its process: Crashed."""
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={f"prefect.flow-run.{sign}" for sign in SIGNS},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{WATCHED}"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENCE_S),
    )
    message = f"no heartbeat for {SILENCE_S} s: the process, its worker or its machine is gone"
    return AutomationCore(
        name="herd: crash zombie runs",
        description="A flow run without a heartbeat is Crashed, so that nothing shows Running for ever.",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=message)],
    )


def resume_crashed() -> AutomationCore:
    """A crashed flow run of a training deployment is scheduled again; flows/crash_recovery.py ends a loop of crashes.

    But not at a worker's first report of a killed process: flows/crash_recovery.py says why.
    """
    trigger = EventTrigger(
        expect={"prefect.flow-run.Crashed"},
        match={"prefect.resource.id": "prefect.flow-run.*", "prefect.state-message": f"!{FIRST_REPORT}*"},
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{AUTO_RESUME}"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )
    return AutomationCore(
        name=RULE,
        description="A crashed training run goes on from its newest good checkpoint, as long as it gets further.",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message=RESUMED)],
    )


def example_alert() -> AutomationCore:
    """What to change into a message to people: its action does nothing until a notification block takes its place."""
    return AutomationCore(
        name="herd: alerts (example)",
        description="Fires at every herd.alert.* event (loss spike, no progress, straggler, disk, failed gate). "
        "Replace the action by 'Send a notification'; the payload has run, stage, text and position.",
        trigger=EventTrigger(expect={"herd.alert.*"}, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
        actions=[DoNothing()],
    )


FIRST = "reconcile/reconcile"
"""Deployment that is run once at the start: what died with the last server still shows Running there."""
console = Console(highlight=False, soft_wrap=True)


def serve(root: Root, prefect_port: int, mlflow_port: int, host: str = LOOPBACK) -> None:
    """Start what is not running yet, print the two addresses, and wait until it is stopped.

    Raises ValueError if a port is taken or this is no checkout.
    """
    if not (CHECKOUT / "prefect.yaml").is_file():
        raise ValueError(f"herd up: {CHECKOUT} has no prefect.yaml; run it from a checkout (make run installs one)")
    servers = Servers.found(prefect_port, mlflow_port, host)
    root.local.mkdir(parents=True, exist_ok=True)
    chosen = get_current_settings().server.api.auth_string is not None
    environment = servers.environment(root)
    os.environ.update(environment)
    refresh_global_settings_context()  # this process is a client of the server, too
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as children:
        answering = [
            (health, children.enter_context(child(name, command, root.local, environment)))
            for name, command, health in servers.commands(root)
        ]
        for health, process in answering:
            await_answer(health, process)
        started = [process for _, process in answering]
        for line in setup(root):
            console.print(f"[dim]{line}[/]")
        deploy(environment)
        started.append(children.enter_context(child("worker", worker_command(), root.local, environment)))
        _run_first()
        children.callback(_introduce(servers, root, environment, chosen).unlink, missing_ok=True)
        _wait(started)


@dataclass(frozen=True)
class Servers:
    """The two servers: where they answer, and which of them are to be started here."""

    prefect: str
    mlflow: str
    prefect_port: int | None
    """None: it runs elsewhere already."""
    mlflow_port: int | None
    host: str

    @classmethod
    def found(cls, prefect_port: int, mlflow_port: int, host: str) -> Servers:
        """Return the servers that the environment names, and free ports for the others. Raises ValueError."""
        api, tracking = os.environ.get("PREFECT_API_URL", ""), chosen_uri()
        for option, port, elsewhere in (
            ("--prefect-port", prefect_port, api),
            ("--mlflow-port", mlflow_port, tracking),
        ):
            if not elsewhere:
                _check_free(option, port, host)
        return cls(
            api.removesuffix("/api") or f"http://{_reached(host)}:{prefect_port}",
            tracking or f"http://{_reached(host)}:{mlflow_port}",
            None if api else prefect_port,
            None if tracking else mlflow_port,
            host,
        )

    @property
    def api(self) -> str:
        return f"{self.prefect}/api"

    def commands(self, root: Root) -> Iterator[tuple[str, list[str], str]]:
        """Yield name, command and health address of what is to be started."""
        if self.mlflow_port is not None:
            yield "mlflow", mlflow_command(root, self.mlflow_port, self.host), f"{self.mlflow}/health"
        if self.prefect_port is not None:
            yield "prefect", server_command("--host", self.host, "--port", str(self.prefect_port)), f"{self.api}/health"

    def environment(self, root: Root) -> dict[str, str]:
        """Return the environment of everything that is started; it holds the password of a Prefect server of ours."""
        names = (_reached(self.host), LOOPBACK, "localhost")
        return {
            **os.environ,
            **(server_variables(root, self.prefect_port, *names) if self.prefect_port is not None else {}),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_UI_API_URL": self.api,
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
            "PREFECT_WORKER_QUERY_SECONDS": "5",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "MLFLOW_TRACKING_URI": self.mlflow,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "HERD_ROOT": root.uri,
        }


def mlflow_command(root: Root, port: int, host: str = LOOPBACK) -> list[str]:
    """Return the command of an MLflow server over the root's database: 1 worker, no job runners (15 processes else)."""
    prepare_database(root)  # a server that is killed while it makes the tables would leave half of them
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    names = [] if host == LOOPBACK else ["--allowed-hosts", f"{_reached(host)}:*,localhost:*,{LOOPBACK}:*"]
    store = ["--backend-store-uri", f"sqlite:///{root.local}/mlflow.db"]
    return [*command, *names, *store, "--artifacts-destination", f"{root.uri}/mlflow-artifacts"]


def _run_first() -> None:
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(FIRST)
        client.create_flow_run_from_deployment(deployment.id)


def _introduce(servers: Servers, root: Root, environment: dict[str, str], chosen: bool) -> Path:
    """Print where everything is; return the file that tells it to another shell.

    The link with the password is for a terminal, not for a log, and not if the user has `chosen` the password.
    """
    ours = servers.prefect_port is not None
    shell = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "HERD_ROOT", *([PASSWORD] if ours else []))
    access = write_access(root, servers.prefect, {name: environment[name] for name in shell})
    pages = f"{servers.prefect}/v2/deployments"
    if ours and console.is_terminal and not chosen:
        pages = sign_in_link(servers.prefect, environment[PASSWORD])
    elif ours:
        pages += f"  (it asks for a password; a link with it is in {access})"
    console.print(f"Prefect  {pages}", markup=False)
    console.print(f"MLflow   {servers.mlflow}/#/experiments?workflowType=machine_learning")
    console.print(f"shell    source {access}", markup=False)
    console.print(f"logs     {root.local / 'logs'}", markup=False)
    if servers.host != LOOPBACK:
        console.print(
            f"[yellow]warning[/]  the servers listen on {servers.host} without TLS, and MLflow without a password: "
            "whoever reaches it can read and change everything there. Put a reverse proxy with TLS and a login before "
            "them, or start MLflow yourself with --app-name basic-auth"
        )
    console.print("Ctrl-C stops what was started here")
    return access


def _check_free(option: str, port: int, host: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ValueError(f"--host: {host} is no address of this machine ({error.strerror})") from error
            raise ValueError(f"{option}: port {port} is taken; choose another, such as {option} {port + 1}") from error


def _reached(host: str) -> str:
    """Return the name by which browsers and workers reach a server that binds to `host`."""
    return socket.gethostname() if host == "0.0.0.0" else host


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _wait(started: list[subprocess.Popen[bytes]]) -> None:
    try:
        while all(process.poll() is None for process in started):
            time.sleep(0.5)
        console.print("[red]one of the servers ended; stopping the others[/] (see the logs folder)")
    except KeyboardInterrupt:
        console.print("stopping")
