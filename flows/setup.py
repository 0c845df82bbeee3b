"""What a Prefect server needs for herd: work pool, queues, result storage and automations. Run it as often as you like.

What is there already is left as it is, also if somebody changed it: delete it and run this again to get ours back.
Two of the automations are what a server of one's own lacks. One calls a flow run crashed when its heartbeats stop (the
process, its worker or its machine is gone), the other starts a crashed run again where it stood. What this gives up:
a flow run without a heartbeat for 75 s is declared dead even if only the server could not listen; should its process
live on, the run's lease keeps the next attempt waiting until it ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, DoNothing
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from flows.attempts import RESUMED
from flows.children import CHECKOUT, POOL
from flows.resume import AUTO_RESUME, FIRST_REPORT, RULE
from storage.root import Root

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
    """A crashed flow run of a training deployment is scheduled again; flows/attempts.py ends a loop of crashes.

    But not at a worker's first report of a killed process: flows/resume.py says why.
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
