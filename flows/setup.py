"""What herd needs on a Prefect server: work pool, queues, automations, notifications, deployments (`herd setup`).

The server may be one that other people use, too: every object that is not herd's stays, and the names of herd's may
begin with a prefix.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
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
from prefect.events.actions import CallWebhook, ChangeFlowRunState, DoNothing, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types import SecretDict
from prefect.workers.process import ProcessWorker
from pydantic import SecretStr

from herd.flows.local_server import POOL, WORKING_DIRECTORY, NoServer
from herd.llama3.recipe.base import read_plain, read_yaml
from herd.storage.processes import PACKAGE_FOLDER
from herd.storage.root import Root
from herd.tasks.operate.owners import TAG
from herd.tasks.tracking.events import ROOT_LABEL
from herd.tasks.tracking.moved_root import former_places

QUEUES = {"default": None, "training": 1, "evaluation": 1}
"""Work queue -> most flow runs at the same time; those of `default` take seconds."""
FILE, PIPELINE = "prefect.yaml", "herd.flows.pipeline.pipeline"
RESULTS = "herd-results"
SHARED = ("MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL")
"""Variables that flow runs in a work pool of others get from the registration, beside the root; never a secret."""
IMAGE_FOLDER = "/home/herd"
"""Working directory of flow runs in a work pool of containers: that of the image."""
RETIRED_FLOWS = re.compile("herd.flows.pipeline.(curate|tokenize|pretrain)")
"""Entrypoints of earlier versions."""
INSTEAD = "use pipeline, with 'Stop after'"
WITHOUT_AUTOMATIONS = (
    "a flow run whose machine dies shows Running until `reconcile` settles it, and new checkpoints are scored by their "
    "run only"
)
PAGE = 200
SILENCE_S = 75
RETIRED = "herd: resume crashed runs"
"""Automation of earlier versions; the reconciler (tasks/operate/recovery.py) restarts crashed flow runs now."""
EXAMPLE, NOTIFY, BLOCK = "herd: alerts (example)", "herd: notify", "herd-notify"
EVENTS = {"herd.run.ended", "herd.alert.*"}
"""What NOTIFY sends."""
HELLO_S = 20.0
"""Time limit of the first message."""


class Place(NamedTuple):
    """Where herd's objects are on a Prefect server that others may use, too."""

    pool: str = POOL
    """Work pool; one with another name must exist."""
    prefix: str = ""
    """Begins the names of deployments, queues, blocks and automations."""

    def name(self, plain: str) -> str:
        return f"{self.prefix}{plain}"

    def queue(self, plain: str) -> str:
        """Return the name of a queue; every work pool of Prefect has `default`."""
        return plain if plain == "default" else self.name(plain)


def setup(root: Root, api: str = "", notify: str = "", place: Place = Place()) -> list[str]:  # noqa: B008
    """Create the missing objects on the Prefect server `api` (or the configured one); return one line for each object.

    Existing objects are kept, also changed ones; only the address `notify` (see `send_events`) replaces an earlier one.
    Raises ValueError if no server is configured: a temporary one would lose them; and if it lacks the work pool.
    """
    check_working_directory()
    if not re.fullmatch("[a-z0-9-]*", place.prefix):  # Prefect's rule for the names of blocks
        raise ValueError(
            f"--prefix: {place.prefix!r} has other characters than a-z, 0-9 and -; write for example team-"
        )
    with temporary_settings({PREFECT_API_URL: api} if api else {}):
        if not PREFECT_API_URL.value():
            raise ValueError(
                "PREFECT_API_URL: is not set; this sets up a server: start one with `herd up`, or name one with "
                "export PREFECT_API_URL=http://127.0.0.1:4200/api"
            )
        with get_client(sync_client=True) as client:
            created: dict[str, bool | None] = {f"work pool {place.pool}": _create_pool(client, place.pool)}
            queues = {queue.name: queue for queue in client.read_work_queues(work_pool_name=place.pool)}
            for name, limit in QUEUES.items():
                queue = place.queue(name)
                if queue not in queues:
                    client.create_work_queue(queue, concurrency_limit=limit, work_pool_name=place.pool)
                elif limit is not None and queues[queue].concurrency_limit != limit:
                    queue += f" (limit {queues[queue].concurrency_limit}, herd's is {limit})"
                created[f"work queue {place.pool}/{queue}"] = place.queue(name) not in queues
            # For results that a user persists; herd's flows persist none. No secret in it: s3fs reads the environment.
            uri, results = f"{root.uri}/prefect-results", place.name(RESULTS)
            block = LocalFileSystem(basepath=uri) if root.is_local else RemoteFileSystem(basepath=uri)
            slug = f"block {block.get_block_type_slug()}/{results}"
            try:
                known = getattr(type(block).load(results), "basepath", "")
                created[slug] = known in [f"{old}/prefect-results" for old in former_places(root)]
            except ValueError:
                created[slug] = True
            if created[slug]:
                block.save(results, overwrite=True)
            try:
                created |= _create_automations(client, notify, place)
            except PrefectHTTPStatusError as error:  # of a plan or an account without them
                if error.response.status_code not in (401, 402, 403, 404, 405):
                    raise
                created[f"automations: the server refuses them ({error.response.status_code})"] = None
    states = {True: ": created", False: ": exists", None: f"; {WITHOUT_AUTOMATIONS}"}
    return [f"{thing}{states[new]}" for thing, new in created.items()]


def _create_pool(client: SyncPrefectClient, pool: str) -> bool:
    """Return whether the work pool was created. Raises ValueError if it is missing and not herd's own."""
    try:
        client.read_work_pool(pool)
        return False
    except ObjectNotFound:
        if pool != POOL:
            there = ", ".join(each.name for each in client.read_work_pools()) or "none"
            raise ValueError(
                f"--pool: the server has no work pool {pool} (there: {there}); write one of them, or make it: "
                f"prefect work-pool create {pool} --type process"
            ) from None
    template = ProcessWorker.get_default_base_job_template()
    client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
    return True


def _create_automations(client: SyncPrefectClient, notify: str, place: Place) -> dict[str, bool | None]:
    """Create the missing automations; return what they are called, and whether they were created."""
    created: dict[str, bool | None] = {}
    for retired in client.read_automations_by_name(RETIRED):
        client.delete_automation(retired.id)
    if notify:
        send_events(client, notify, place)
        created[f"automation {place.name(NOTIFY)!r}"] = True
    notifies = bool(client.read_automations_by_name(place.name(NOTIFY)))
    for automation in (crash_zombies(), *([] if notifies else [example_alert(place)])):
        missing = not client.read_automations_by_name(automation.name)
        if missing:
            client.create_automation(automation)
        created[f"automation {automation.name!r}"] = missing
    return created


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
            entry["tags"] = [*dict.fromkeys([*entry["tags"], TAG])]
            if schedules:  # by its slug a paused one stays paused
                entry["schedules"] = [{"slug": f"{entry['name']}-{at}", **each} for at, each in enumerate(schedules)]
        directory = {"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}
        filled.append({"pull": [directory], **entry})
    return filled


def deploy(files: list[DeploymentFile], environment: dict[str, str], root: Root, place: Place = Place()) -> list[str]:  # noqa: B008
    """Register the deployments of `files`; return a line for each file, and for what an earlier version left.

    Raises NoServer with Prefect's message, and ValueError if a deployment of others has the name of one of them.
    """
    with get_client(sync_client=True) as client:
        pool = client.read_work_pool(place.pool)
        entries = [_placed(each, environment, root, place, pool.type) for file in files for each in file.deployments]
        left = check_names(client, entries)
    with tempfile.TemporaryDirectory(prefix="herd-deploy-") as folder:
        path = Path(folder, FILE)
        path.write_text(yaml.safe_dump({"deployments": entries}))
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(path)]
        result = subprocess.run(
            command, cwd=WORKING_DIRECTORY, env=environment, capture_output=True, text=True, check=False
        )
    if result.returncode:
        names = ", ".join(file.name for file in files)
        raise NoServer(f"prefect deploy --all ({names}) failed:\n{result.stdout}{result.stderr}")
    counts = [f"{len(file.deployments)} deployments of {file.name} registered" for file in files[:1]]
    own = [f"{', '.join(each['name'] for each in file.deployments)} of {file.name} registered" for file in files[1:]]
    return [*counts, *own, *left]


def _placed(
    entry: dict[str, Any], environment: Mapping[str, str], root: Root, place: Place, pool_type: str
) -> dict[str, Any]:
    """Return a deployment for the work pool of `place`, whose workers need not know the root.

    One that names another work pool than herd's keeps it.
    """
    pool = entry.get("work_pool") or {}
    if place == Place() or pool.get("name", POOL) != POOL:
        return entry
    shared = {name: environment[name] for name in SHARED if environment.get(name)} | {"HERD_ROOT": root.uri}
    variables = pool.get("job_variables") or {}
    job = {**variables, "env": {**shared, **(variables.get("env") or {})}}
    queue = place.queue(pool.get("work_queue_name", "default"))
    entry = {**entry, "work_pool": {**pool, "name": place.pool, "work_queue_name": queue, "job_variables": job}}
    if pool_type != "process":
        entry["pull"] = [{"prefect.deployments.steps.set_working_directory": {"directory": IMAGE_FOLDER}}]
    triggers = [
        {**each, "name": place.name(each["name"]), "match": {**each["match"], ROOT_LABEL: root.uri}}
        for each in entry.get("triggers") or []
    ]
    return {**entry, "name": place.name(entry["name"]), **({"triggers": triggers} if triggers else {})}


def check_names(client: SyncPrefectClient, entries: Sequence[dict[str, Any]]) -> list[str]:
    """Raise ValueError if the server has a deployment of others under a name of `entries`.

    Returns a line for each deployment of a flow that herd had in earlier versions; those without a schedule go.
    """
    names, lines = {(flow_of(each["entrypoint"]), each["name"]): each["entrypoint"] for each in entries}, []
    offset = 0
    while page := client.read_deployments(limit=PAGE, offset=offset):
        offset += len(page)
        for known in page:
            flow, entrypoint = flow_of(known.entrypoint or ""), known.entrypoint or ""
            if TAG not in known.tags and names.get((flow, known.name), entrypoint) != entrypoint:
                raise ValueError(
                    f"deployment {flow}/{known.name}: the server has one of others ({entrypoint}); choose a prefix "
                    "for herd's names: herd setup --prefix herd-"
                )
            if TAG in known.tags and RETIRED_FLOWS.fullmatch(entrypoint):
                if known.schedules:
                    lines.append(f"{flow}/{known.name}: this version has no such flow; {INSTEAD}, and delete it")
                else:
                    client.delete_deployment(known.id)
                    offset -= 1
                    lines.append(f"{flow}/{known.name} deleted; {INSTEAD}")
    return lines


def flow_of(entrypoint: str) -> str:
    """Return the name of the flow of an entrypoint of herd, such as herd.flows.checkpoint.evaluate_checkpoint."""
    return re.split("[.:]", entrypoint)[-1].replace("_", "-")


def crash_zombies() -> AutomationCore:
    """Automation: a flow run that has sent a heartbeat and then no event for SILENCE_S is Crashed."""
    # The reconciler does not see these deaths: evaluate, promote and maintenance flows, and an attempt before it has
    # its lease, have no record. Running forever, they would keep the only slot of a work queue.
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
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


def example_alert(place: Place) -> AutomationCore:
    """Automation to edit into a notification: its action does nothing until a notification block replaces it."""
    return AutomationCore(
        name=place.name(EXAMPLE),
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


def send_events(client: SyncPrefectClient, url: str, place: Place) -> None:
    """Send a first message to `url`, and let an automation send the events of runs there.

    An address that Apprise knows (slack://, mailto://, https://hooks.slack.com/...) gets a text, any other http(s)
    address a POST of JSON. It is kept as a secret of a Prefect block. Raises ValueError if it is neither, or if the
    message does not arrive.
    """
    from apprise import Apprise
    from prefect.blocks.notifications import SlackWebhook
    from prefect.blocks.webhook import Webhook

    hello, text = "herd", "herd sends failed, rejected and finished runs here, and alerts: stalled, spike, disk"
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
    identifier = cast("UUID", block.save(place.name(BLOCK), overwrite=True))
    action: CallWebhook | SendNotification
    if isinstance(block, Webhook):
        action = CallWebhook(block_document_id=identifier, payload=PAYLOAD)
    else:
        action = SendNotification(block_document_id=identifier, subject="herd: {{ event.payload.run }}", body=TEXT)
    for name in (NOTIFY, EXAMPLE):
        for earlier in client.read_automations_by_name(place.name(name)):
            client.delete_automation(earlier.id)
    client.create_automation(
        AutomationCore(
            name=place.name(NOTIFY),
            description="Sends how runs end, and their alerts, to the address of `herd setup --notify`.",
            trigger=EventTrigger(expect=EVENTS, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
            actions=[action],
        )
    )
