"""`herd up`: a Prefect server, an MLflow server and a worker on this machine, with every deployment registered.

Servers that PREFECT_API_URL or MLFLOW_TRACKING_URI name are used instead of starting one. The servers bind to loopback
by default and are children of this process: Ctrl-C or SIGTERM stops all, and one that ends is started again
(children.py). For one person on one machine (SQLite behind both servers); deploy/ has the servers of a team.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast
from uuid import UUID

import httpx
import yaml
from prefect import get_client
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.context import refresh_global_settings_context
from prefect.events.actions import CallWebhook, ChangeFlowRunState, DoNothing, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.types import SecretDict
from prefect.workers.process import ProcessWorker
from pydantic import SecretStr
from rich.console import Console
from rich.markup import escape

from herd.flows.children import Child, Children
from herd.flows.local_server import (
    LOOPBACK,
    PASSWORD,
    POOL,
    WORKING_DIRECTORY,
    NoServer,
    await_answer,
    server_command,
    server_variables,
    sign_in_link,
    worker_command,
    write_access,
)
from herd.llama3.recipe.base import read_plain, read_yaml
from herd.storage.lease import LeaseHeld, lease
from herd.storage.processes import PACKAGE_FOLDER
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole, working
from herd.tasks.tracking.mlflow_store import environment_uri, prepare_database
from herd.tasks.tracking.moved_root import ACCESS, follow_root, former_places

QUEUES = {"default": None, "training": 1, "evaluation": 1}
"""Work queue -> most flow runs at the same time; those of `default` take seconds."""
FILE, PIPELINE = "prefect.yaml", "herd.flows.pipeline.pipeline"
RESULTS = "herd-results"
HEARTBEAT_S = 30
"""What prefect.yaml sets for every deployment; Prefect allows no shorter interval."""
SILENCE_S = 75
WATCHED = "herd"
"""Tag of the deployments whose flow runs have such a heartbeat."""
RETIRED = "herd: resume crashed runs"
"""Automation of earlier versions; the reconciler (tasks/operate/recovery.py) restarts crashed flow runs now."""
EXAMPLE, NOTIFY, BLOCK = "herd: alerts (example)", "herd: notify", "herd-notify"
EVENTS = {"herd.run.ended", "herd.alert.*"}
"""What NOTIFY sends."""
HELLO_S = 20.0
"""Time limit of the first message."""
RECONCILE_S, LOOK_S = 30.0, 0.5
"""Seconds between two passes of the reconciler, and between two looks at the children, while `herd up` runs."""


def setup(root: Root, api: str = "", notify: str = "") -> list[str]:
    """Create the missing objects on the Prefect server `api` (or the configured one); return one line for each object.

    Existing objects are kept, also changed ones; only the address `notify` (see `send_events`) replaces an earlier one.
    Raises ValueError if no server is configured: a temporary one would lose them.
    """
    check_working_directory()
    with temporary_settings({PREFECT_API_URL: api} if api else {}):
        if not PREFECT_API_URL.value():
            raise ValueError(
                "PREFECT_API_URL: is not set; this sets up a server: start one with `herd up`, or name one with "
                "export PREFECT_API_URL=http://127.0.0.1:4200/api"
            )
        created: dict[str, bool] = {}
        with get_client(sync_client=True) as client:
            try:
                client.read_work_pool(POOL)
                created[f"work pool {POOL}"] = False
            except ObjectNotFound:
                template = ProcessWorker.get_default_base_job_template()
                client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
                created[f"work pool {POOL}"] = True
            queues = {queue.name for queue in client.read_work_queues(work_pool_name=POOL)}
            for name, limit in QUEUES.items():
                if name not in queues:
                    client.create_work_queue(name, concurrency_limit=limit, work_pool_name=POOL)
                created[f"work queue {POOL}/{name}"] = name not in queues
            # For results that a user persists; herd's flows persist none. No secret in it: s3fs reads the environment.
            uri = f"{root.uri}/prefect-results"
            block = LocalFileSystem(basepath=uri) if root.is_local else RemoteFileSystem(basepath=uri)
            slug = f"block {block.get_block_type_slug()}/{RESULTS}"
            try:
                known = getattr(type(block).load(RESULTS), "basepath", "")
                created[slug] = known in [f"{place}/prefect-results" for place in former_places(root)]
            except ValueError:
                created[slug] = True
            if created[slug]:
                block.save(RESULTS, overwrite=True)
            for retired in client.read_automations_by_name(RETIRED):
                client.delete_automation(retired.id)
            if notify:
                send_events(client, notify)
                created[f"automation {NOTIFY!r}"] = True
            notifies = bool(client.read_automations_by_name(NOTIFY))
            for automation in (crash_zombies(), *([] if notifies else [example_alert()])):
                missing = not client.read_automations_by_name(automation.name)
                if missing:
                    client.create_automation(automation)
                created[f"automation {automation.name!r}"] = missing
    return [f"{thing}: {'created' if new else 'exists'}" for thing, new in created.items()]


def check_working_directory(folder: Path = WORKING_DIRECTORY) -> None:
    """Raise ValueError if a module in `folder` would be imported in place of herd.

    Prefect puts the folder first on the path of a deployment's process, whatever PYTHONSAFEPATH says.
    """
    for path in (folder / "herd.py", folder / "herd/__init__.py"):
        if path.exists() and not path.samefile(PACKAGE_FOLDER / "__init__.py"):
            raise ValueError(f"{path}: Prefect would import it in place of herd; rename it, or start in another folder")


class DeploymentFile(NamedTuple):
    """A prefect.yaml; paths in its parameters begin at `folder`."""

    name: str
    folder: Path
    deployments: list[dict[str, Any]]


def deployment_files(root: Root, folder: Path) -> list[DeploymentFile]:
    """Return the shipped prefect.yaml and, if they exist, that of the root and that of `folder`.

    A deployment of the later files may be a name, parameters and schedules: the rest is that of the shipped one with
    its entrypoint, by default of `pipeline`; one with the flow and name of an earlier file replaces that. Raises
    ValueError for a file that cannot be read so.
    """
    shipped = PACKAGE_FOLDER / FILE
    files = [DeploymentFile("herd", WORKING_DIRECTORY, read_yaml(shipped, FILE)["deployments"])]
    known = {shipped.resolve()}
    local = (folder / FILE).read_bytes() if (folder / FILE).is_file() else None
    for name, place, text in ((root.join(FILE), root.local, root.read(FILE)), (str(folder / FILE), folder, local)):
        path = (place / FILE).resolve()
        if text is None or path in known:
            continue
        known.add(path)
        check_working_directory(place)
        try:
            data = read_plain(text.decode())
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"{name}: is not YAML: {error}") from error
        own = _filled(data, name, place, files[0].deployments)
        replaced = {(each["entrypoint"], each["name"]) for each in own}
        files = [
            file._replace(deployments=[d for d in file.deployments if (d["entrypoint"], d["name"]) not in replaced])
            for file in files
        ]
        files.append(DeploymentFile(name, place, own))
    return files


def _filled(data: Any, name: str, folder: Path, shipped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the deployments of the file `name` with what herd's flows need. Raises ValueError."""
    entries = data.get("deployments") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not all(isinstance(each, dict) and each.get("name") for each in entries):
        raise ValueError(f"{name}: deployments: must be a list of mappings with a name; see docs/tutorials/schedule.md")
    filled = []
    for entry in entries:
        entry = {**{key: data[key] for key in ("build", "push", "pull") if key in data}, **entry}
        template = next((each for each in shipped if each["entrypoint"] == entry.get("entrypoint", PIPELINE)), None)
        if template is not None:
            schedules = entry.get("schedules") or []
            if not isinstance(schedules, list) or not all(isinstance(each, dict) for each in schedules):
                raise ValueError(f'{name}: {entry["name"]}: schedules: must be a list, such as [{{cron: "0 3 * * *"}}]')
            limit = {"limit": 1, "collision_strategy": "CANCEL_NEW" if schedules else "ENQUEUE"}
            own = {key: template[key] for key in ("entrypoint", "tags", "work_pool")}
            entry = {**own, "concurrency_limit": limit, **entry}
            entry["tags"] = [*dict.fromkeys([*entry["tags"], WATCHED])]
            if schedules:  # by its slug a paused one stays paused
                entry["schedules"] = [{"slug": f"{entry['name']}-{at}", **each} for at, each in enumerate(schedules)]
        directory = {"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}
        filled.append({"pull": [directory], **entry})
    return filled


def deploy(files: list[DeploymentFile], environment: dict[str, str]) -> list[str]:
    """Register the deployments of `files`; return a line for each file. Raises NoServer with Prefect's message."""
    with tempfile.TemporaryDirectory(prefix="herd-deploy-") as folder:
        path = Path(folder, FILE)
        path.write_text(yaml.safe_dump({"deployments": [each for file in files for each in file.deployments]}))
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(path)]
        result = subprocess.run(
            command, cwd=WORKING_DIRECTORY, env=environment, capture_output=True, text=True, check=False
        )
    if result.returncode:
        names = ", ".join(file.name for file in files)
        raise NoServer(f"prefect deploy --all ({names}) failed:\n{result.stdout}{result.stderr}")
    counts = [f"{len(file.deployments)} deployments of {file.name} registered" for file in files[:1]]
    own = [f"{', '.join(each['name'] for each in file.deployments)} of {file.name} registered" for file in files[1:]]
    return [*counts, *own]


def crash_zombies() -> AutomationCore:
    """Automation: a flow run that has sent a heartbeat and then no event for SILENCE_S is Crashed."""
    # The reconciler does not see these deaths: evaluate, promote and maintenance flows, and an attempt before it has
    # its lease, have no record. Running forever, they would keep the only slot of a work queue.
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
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
        description="A flow run without a heartbeat is Crashed, so that it does not show Running forever.",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=message)],
    )


def example_alert() -> AutomationCore:
    """Automation to edit into a notification: its action does nothing until a notification block replaces it."""
    return AutomationCore(
        name=EXAMPLE,
        description="Fires at every herd.alert.* event (loss spike, no progress, straggler, disk, gate, bad node). "
        "`herd setup --notify URL` replaces it by one that tells people. The payload has run, stage, text, position.",
        trigger=EventTrigger(expect={"herd.alert.*"}, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
        actions=[DoNothing()],
    )


# What people are told: how runs end and alerts of runs that work.

TEXT = (
    "{% set p = event.payload %}{{ p.run }}{% if event.event == 'herd.run.ended' %} {{ p.verdict or p.state }}"
    "{% if p.error %}: {{ p.error }}{% endif %}{% else %} {{ p.stage }}: {{ event.event.split('.')[-1] }}: {{ p.text }}"
    "{% endif %}"
)
"""Jinja template of a message: `quickstart-7 failed: TrainingFailed: ...`, `quickstart-7 main: disk: 1.2 GB free`."""
PAYLOAD = (
    "{% set text %}" + TEXT + "{% endset %}"
    '{"text": {{ text|string|tojson }}, "event": {{ event.event|tojson }}, "time": {{ event.occurred|string|tojson }}, '
    '"payload": {{ event.payload|tojson }}}'
)
"""Of a webhook, as JSON: `text` is what chat services show."""


def send_events(client: SyncPrefectClient, url: str) -> None:
    """Send a first message to `url`, and let an automation send the events of runs there.

    An address that Apprise knows (slack://, mailto://, https://hooks.slack.com/...) gets a text, any other http(s)
    address a POST of JSON. It is kept as a secret of a Prefect block. Raises ValueError if it is neither, or if the
    message does not arrive.
    """
    from apprise import Apprise
    from prefect.blocks.notifications import SlackWebhook
    from prefect.blocks.webhook import Webhook

    hello, text = "herd", "herd sends failed, refused and finished runs here, and alerts: stalled, spike, disk"
    scheme = url.partition("://")[0]
    logging.getLogger("apprise").disabled = True  # it prints an address that it does not know
    if Apprise.instantiate(url, suppress_exceptions=True):
        # Of Prefect's blocks this one passes any address of Apprise on.
        block: Block = SlackWebhook(url=SecretStr(url))
        arrived = Apprise([url]).notify(text, title=hello)
    elif scheme in ("http", "https"):
        block = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
        try:
            arrived = httpx.post(url, json={"text": text, "event": "herd.hello"}, timeout=HELLO_S).is_success
        except (httpx.HTTPError, httpx.InvalidURL):
            arrived = False
    else:
        raise ValueError(
            f"--notify: {scheme!r} is not a scheme of a webhook (https://) or of Apprise (slack://, mailto://)"
        )
    if not arrived:
        raise ValueError("--notify: the address does not take messages; check it, and that this machine reaches it")
    identifier = cast("UUID", block.save(BLOCK, overwrite=True))
    action: CallWebhook | SendNotification
    if isinstance(block, Webhook):
        action = CallWebhook(block_document_id=identifier, payload=PAYLOAD)
    else:
        action = SendNotification(block_document_id=identifier, subject="herd: {{ event.payload.run }}", body=TEXT)
    for name in (NOTIFY, EXAMPLE):
        for earlier in client.read_automations_by_name(name):
            client.delete_automation(earlier.id)
    client.create_automation(
        AutomationCore(
            name=NOTIFY,
            description="Sends how runs end, and their alerts, to the address of `herd setup --notify`.",
            trigger=EventTrigger(expect=EVENTS, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
            actions=[action],
        )
    )


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
            lines = deploy(files, environment)
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

    def children(self, root: Root) -> Iterator[Child]:
        """Yield each server to start."""
        if self.mlflow_port is not None:
            command = mlflow_command(root, self.mlflow_port, self.host)
            yield Child("mlflow", command, f"{self.mlflow}/health", vital=False)
        if self.prefect_port is not None:
            command = server_command("--host", self.host, "--port", str(self.prefect_port))
            yield Child("prefect", command, f"{self.api}/health")

    def environment(self, root: Root) -> dict[str, str]:
        """Return the environment of the children; it contains the password of a Prefect server that starts here."""
        names = (_reached(self.host), LOOPBACK, "localhost")
        return {
            **os.environ,
            **(server_variables(root, self.prefect_port, *names) if self.prefect_port is not None else {}),
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
    prepare_database(root)  # a server that is killed while it creates the tables would leave half of them
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    names = [] if host == LOOPBACK else ["--allowed-hosts", f"{_reached(host)}:*,localhost:*,{LOOPBACK}:*"]
    store = ["--backend-store-uri", f"sqlite:///{root.local}/mlflow.db"]
    return [*command, *names, *store, "--artifacts-destination", f"{root.uri}/mlflow-artifacts"]


def _introduce(servers: Servers, root: Root, environment: dict[str, str], chosen: bool) -> Path:
    """Print the addresses; return the file that another shell sources.

    The link with the password is printed to a terminal, not to a log, and not if the user has `chosen` the password.
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
            "everyone on the network can read and change everything there. Put a reverse proxy with TLS and a login "
            "in front of them, or start MLflow yourself with --app-name basic-auth"
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
