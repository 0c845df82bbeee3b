"""What herd sets up on a Prefect server, who goes first where schedules fire too fast, and what becomes of a crash.

The tests are in this order because each part changes what the next finds on the one real server.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_client, tags, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.exceptions import ObjectNotFound
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect.runtime import task_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelled, Crashed, Pending, Running

from herd.flows import run_lifecycle
from herd.flows.cli.errors import with_retries
from herd.flows.crash_recovery import steps_back, thin_out, was_resumed
from herd.flows.local_server import POOL
from herd.flows.serve import Servers
from herd.flows.setup import (
    EXAMPLE,
    IMAGE_FOLDER,
    NOTIFY,
    QUEUES,
    RESULTS,
    RETIRED,
    check_names,
    crash_zombies,
    deployment_files,
    setup,
)
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.storage.lease import lease
from herd.storage.processes import PACKAGE_FOLDER, free_port
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.operate.owners import TAG, process_tag
from herd.tasks.operate.recovery import AUTO_RESUME, FIRST_REPORT, FRUITLESS, RESUMED, reconcile, restart
from herd.tasks.runs.records import Runs, mark_open
from herd.tasks.stages.alerts import Alert, emit_alert
from herd.tasks.tracking.events import run_ended
from herd.tasks.tracking.moved_root import follow_root
from tests.dist import Forked
from tests.servers import only_flow_runs_of

QUEUE = "training"
BEGAN = timedelta(minutes=10)


@flow(name="served")
def pipeline() -> None:
    """What flow runs of these tests are runs of; it never runs."""


@pytest.fixture
def api(prefect_server: dict[str, str]) -> str:
    """The server of the whole run: others have flow runs there, but neither work pools nor automations."""
    return prefect_server["api"]


@pytest.fixture
def client(api: str) -> Iterator[SyncPrefectClient]:
    settings = temporary_settings({PREFECT_API_URL: api})
    with settings, get_client(sync_client=True) as client, only_flow_runs_of(pipeline, client):
        yield client


def ids(client: SyncPrefectClient) -> dict[str, str]:
    """Return the id of everything that `setup` makes."""
    queues = client.read_work_queues(work_pool_name=POOL)
    blocks = client.read_block_documents()
    return {
        POOL: str(client.read_work_pool(POOL).id),
        **{f"queue {queue.name}": str(queue.id) for queue in queues},
        **{f"block {block.name}": str(block.id) for block in blocks},
        **{automation.name: str(automation.id) for automation in client.read_automations()},
    }


def test_a_second_time_changes_nothing(client: SyncPrefectClient, api: str, tmp_path: Path) -> None:
    made = setup(Root.parse(tmp_path), api)
    before = ids(client)
    again = setup(Root.parse(tmp_path), api)

    assert ids(client) == before
    assert {line.rsplit(": ", 1)[1] for line in again} == {"exists"}
    assert [line.rsplit(": ", 1)[0] for line in made] == [line.rsplit(": ", 1)[0] for line in again]
    assert {f"block {RESULTS}", "herd: crash zombie runs", "herd: alerts (example)"} < set(before)


def test_heavy_queues_run_one_at_a_time_and_a_new_pool_has_the_template_of_its_worker(
    client: SyncPrefectClient, api: str, tmp_path: Path
) -> None:
    setup(Root.parse(tmp_path), api)
    limits = {queue.name: queue.concurrency_limit for queue in client.read_work_queues(work_pool_name=POOL)}
    assert limits == QUEUES
    assert "command" in client.read_work_pool(POOL).base_job_template["variables"]["properties"]


def test_what_somebody_changed_stays(client: SyncPrefectClient, api: str, tmp_path: Path) -> None:
    setup(Root.parse(tmp_path), api)
    (alerts,) = client.read_automations_by_name("herd: alerts (example)")
    client.pause_automation(alerts.id)
    setup(Root.parse(tmp_path), api)
    assert not client.read_automations_by_name("herd: alerts (example)")[0].enabled


def test_the_automation_of_earlier_versions_goes(client: SyncPrefectClient, api: str, tmp_path: Path) -> None:
    old = crash_zombies()
    old.name = RETIRED
    client.create_automation(old)
    setup(Root.parse(tmp_path), api)
    assert not client.read_automations_by_name(RETIRED)


def test_results_of_a_remote_root_lie_below_it_without_a_secret(
    client: SyncPrefectClient, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    setup(Root.parse("s3://bucket/herd", scratch=str(tmp_path)), api)
    block = RemoteFileSystem.load(RESULTS)
    assert isinstance(block, RemoteFileSystem)
    assert block.basepath == "s3://bucket/herd/prefect-results"
    stored = client.request("POST", "/block_documents/filter", json={"include_secrets": True}).text
    assert RESULTS in stored
    assert "canary" not in stored


def test_results_of_a_copy_lie_in_the_copy(client: SyncPrefectClient, api: str, tmp_path: Path) -> None:
    for name in ("root", "other", "copy"):
        (tmp_path / name).mkdir()
    root, copy, other = (Root.parse(tmp_path / name) for name in ("root", "copy", "other"))
    LocalFileSystem(basepath=f"{root.uri}/prefect-results").save(RESULTS, overwrite=True)
    setup(other, api)
    assert LocalFileSystem.load(RESULTS).basepath == f"{root.uri}/prefect-results", "it was not copied"
    follow_root(root)
    (copy.local / ".location").write_bytes((root.local / ".location").read_bytes())
    follow_root(copy)
    setup(copy, api)
    assert LocalFileSystem.load(RESULTS).basepath == f"{copy.uri}/prefect-results"


def test_without_a_server_it_says_which_one_it_needs(tmp_path: Path) -> None:
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(ValueError, match="PREFECT_API_URL: is not set"):
        setup(Root.parse(tmp_path))


OWN = """
deployments:
  - name: mine
    parameters: {config: {recipe: my.yaml}}
    schedules: [{cron: "0 3 * * *", timezone: Europe/Berlin}]
  - {name: nightly, tags: [late]}
  - {name: other, entrypoint: "flow.py:other", work_pool: {name: cluster}}
"""


def test_own_deployments_of_folder_and_root_get_what_flows_of_herd_need(tmp_path: Path) -> None:
    root, folder = Root.parse(tmp_path / "root"), tmp_path / "folder"
    for place in (root.local, folder):
        place.mkdir()
    assert [file.name for file in deployment_files(root, folder)] == ["herd"]
    (root.local / "prefect.yaml").write_text("deployments: [{name: mine}, {name: of-root}]")
    (folder / "prefect.yaml").write_text(OWN)
    shipped, of_root, own = deployment_files(root, folder)
    assert [own.name, of_root.name] == [f"{place}/prefect.yaml" for place in (folder, root.local)]
    names = {each["name"]: each for each in shipped.deployments}
    assert "nightly" not in names, "the own one replaces it"
    assert [each["name"] for each in of_root.deployments] == ["of-root"], "the folder's file comes last"
    mine, nightly, other = own.deployments
    for key in ("entrypoint", "work_pool"):
        assert mine[key] == names["pipeline"][key]
    assert mine["tags"] == ["herd", "auto-resume"]
    assert mine["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW"
    assert mine["schedules"][0]["slug"] == "mine-0"
    assert mine["pull"][0]["prefect.deployments.steps.set_working_directory"]["directory"] == str(folder)
    assert nightly["tags"] == ["late", "herd"]
    assert "schedules" not in nightly, "one added in the UI stays"
    assert {"tags", "concurrency_limit"}.isdisjoint(other), "it is of another project"
    (folder / "prefect.yaml").unlink()
    (folder / "prefect.yaml").symlink_to(PACKAGE_FOLDER / "prefect.yaml")
    assert [file.name for file in deployment_files(root, folder)] == ["herd", of_root.name]
    assert [file.name for file in deployment_files(root, root.local)] == ["herd", of_root.name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("deployments: {name: x}", "deployments: must be a list of mappings with a name"),
        ("deployments: [{entrypoint: x}]", "deployments: must be a list of mappings with a name"),
        ("deployments: [{name: x, schedules: {cron: x}}]", "x: schedules: must be a list"),
    ],
)
def test_a_file_of_deployments_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "prefect.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path}/prefect.yaml: {message}"):
        deployment_files(Root.parse(tmp_path / "root"), tmp_path)


@pytest.fixture
def quiet(client: SyncPrefectClient, api: str, tmp_path: Path) -> Iterator[SyncPrefectClient]:
    """The server with nothing in its work pool that waits."""
    setup(Root.parse(tmp_path), api)
    yield client
    for each in runs_of_pool(client):
        client.delete_flow_run(each.id)


def runs_of_pool(client: SyncPrefectClient) -> list[FlowRun]:
    return client.read_flow_runs(work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])))


def deployment(client: SyncPrefectClient, every: timedelta | None = None, tags: tuple[str, ...] = (TAG,)) -> UUID:
    """Return a deployment; with a schedule it has fired for ten minutes while its queue had no room."""
    schedules = [(IntervalSchedule(interval=every), True)] if every else None
    made = client.create_deployment(
        client.create_flow(pipeline),
        name=f"often-{uuid4().hex[:8]}",
        tags=list(tags),
        work_pool_name=POOL,
        work_queue_name=QUEUE,
        schedules=[{"schedule": schedule, "active": active} for schedule, active in schedules or []],  # type: ignore[misc]
    )
    if every:
        now = datetime.now(UTC)
        span = {"start_time": str(now - BEGAN), "end_time": str(now), "max_runs": 5, "min_runs": 5}
        client.request("POST", "/deployments/{id}/schedule", path_params={"id": made}, json=span).raise_for_status()
    return made


def next_ones(client: SyncPrefectClient) -> list[FlowRun]:
    """Return what a worker would begin now, in its order; room is made for all."""
    queue = client.read_work_queue_by_name(QUEUE, work_pool_name=POOL)
    client.update_work_queue(queue.id, concurrency_limit=50)
    found = client.get_scheduled_flow_runs_for_work_pool(POOL, [QUEUE], datetime.now(UTC) + timedelta(seconds=5))
    client.update_work_queue(queue.id, concurrency_limit=1)
    return [each.flow_run for each in found]


def begun(client: SyncPrefectClient) -> FlowRun:
    """Let the next one begin, as a worker does."""
    first = next_ones(client)[0]
    client.set_flow_run_state(first.id, Running(), force=True)
    return client.read_flow_run(first.id)


def test_the_first_of_a_schedule_that_begins_cancels_those_behind_it(quiet: SyncPrefectClient) -> None:
    often, other = deployment(quiet, timedelta(minutes=2)), deployment(quiet, timedelta(minutes=2))
    waiting = next_ones(quiet)
    assert [sum(each.deployment_id == made for each in waiting) for made in (often, other)] == [5, 5]
    own = begun(quiet)
    assert not steps_back(quiet, own)
    left = next_ones(quiet)
    assert {each.deployment_id for each in left} == {often, other} - {own.deployment_id}
    assert len(left) == 5
    cancelled = [each for each in runs_of_pool(quiet) if each.state is not None and each.state.is_cancelled()]
    assert len(cancelled) == 4
    assert all(own.name in str(each.state and each.state.message) for each in cancelled)


def test_a_person_goes_first_and_once(quiet: SyncPrefectClient) -> None:
    deployment(quiet, timedelta(minutes=2))
    by_hand = quiet.create_flow_run_from_deployment(deployment(quiet))
    assert next_ones(quiet)[-1].id == by_hand.id  # five are before it
    own = begun(quiet)
    assert steps_back(quiet, own)
    again = quiet.read_flow_run(own.id)
    assert again.state is not None
    assert again.state.is_scheduled()
    assert again.next_scheduled_start_time is not None
    assert by_hand.next_scheduled_start_time is not None
    assert again.next_scheduled_start_time > by_hand.next_scheduled_start_time
    assert begun(quiet).id == by_hand.id
    assert not steps_back(quiet, quiet.read_flow_run(by_hand.id))
    waiting = [each for each in runs_of_pool(quiet) if each.state is not None and each.state.is_scheduled()]
    assert [each.id for each in waiting if each.next_scheduled_start_time < datetime.now(UTC)] in ([], [own.id])  # type: ignore[operator]


@pytest.mark.slow
def test_what_people_started_is_never_cancelled_and_of_a_schedule_one_is_left(quiet: SyncPrefectClient) -> None:
    plain = deployment(quiet)
    by_hand = [quiet.create_flow_run_from_deployment(plain).id for _ in range(3)]
    deployment(quiet, timedelta(minutes=2))
    assert len(list(thin_out(quiet))) == 4
    assert [each.id for each in next_ones(quiet)][1:] == by_hand
    assert list(thin_out(quiet)) == []


def test_flow_runs_of_others_on_the_server_are_left_alone(quiet: SyncPrefectClient, tmp_path: Path) -> None:
    """They wait, nothing works on them, and one asks to be resumed with a word that is also herd's."""
    deployment(quiet, timedelta(minutes=2), tags=("theirs",))
    submitted = quiet.create_flow_run_from_deployment(deployment(quiet, tags=(AUTO_RESUME,))).id
    quiet.set_flow_run_state(submitted, Pending(), force=True)
    root = Root.parse(tmp_path)
    gone = crashed(quiet, "no heartbeat", tags=(AUTO_RESUME,), root=root)
    before = {each.id: each.state_type for each in runs_of_pool(quiet)}  # Prefect itself calls waiting ones Late
    assert len(before) >= 6  # Prefect's scheduler may have added later ones of the schedule
    assert list(thin_out(quiet)) == []
    assert reconcile(root, quiet, cleanup=False) == []
    deployment(quiet, timedelta(minutes=1))
    assert not steps_back(quiet, next(each for each in runs_of_pool(quiet) if TAG in each.tags))
    assert {each.id: each.state_type for each in runs_of_pool(quiet) if each.id in before} == before
    assert state(quiet, gone).name == "Crashed"


def test_the_working_directory_in_a_container_is_the_image_s() -> None:
    text = (PACKAGE_FOLDER / "Dockerfile").read_text()
    assert re.findall(r"^WORKDIR (\S+)", text, re.MULTILINE)[-1] == IMAGE_FOLDER


def test_names_of_others_are_an_error_and_flows_of_earlier_versions_go(client: SyncPrefectClient) -> None:
    def registered(name: str, entrypoint: str, tag: str, **more: Any) -> UUID:
        flow = client.create_flow(pipeline)
        return client.create_deployment(flow, name=name, entrypoint=entrypoint, tags=[tag], **more)

    wanted = [{"entrypoint": "herd.flows.pipeline.pipeline", "name": f"named-{uuid4().hex[:8]}"}]
    schedule = {"schedule": IntervalSchedule(interval=timedelta(hours=9)), "active": False}
    plain = registered("curate", "herd.flows.pipeline.curate", TAG)
    scheduled = registered("tokenize", "herd.flows.pipeline.tokenize", TAG, schedules=[schedule])
    theirs = registered("curate-theirs", "herd.flows.pipeline.curate", "theirs")
    said = sorted(check_names(client, wanted))
    assert [line.partition(";")[0] for line in said] == [
        "curate/curate deleted", "tokenize/tokenize: this version has no such flow",
    ]  # fmt: skip
    with pytest.raises(ObjectNotFound):
        client.read_deployment(plain)
    assert client.read_deployment(scheduled).schedules
    taken = registered(wanted[0]["name"], "flows/train.py:pipeline", "theirs")
    with pytest.raises(
        ValueError, match=f"pipeline/{wanted[0]['name']}: the server has one of others .*--prefix herd-"
    ):
        check_names(client, wanted)
    for each in (scheduled, theirs, taken):
        client.delete_deployment(each)
    assert check_names(client, wanted) == []


def crashed(
    client: SyncPrefectClient, message: str, tags: tuple[str, ...] = (TAG, AUTO_RESUME), root: Root | None = None
) -> UUID:
    """Return a flow run of a deployment whose first attempt crashed."""
    deployment = client.create_deployment(client.create_flow(pipeline), name="tests", tags=list(tags))
    parameters = {"config": {"root": root.uri}} if root else {}
    made = client.create_flow_run_from_deployment(deployment, parameters=parameters).id
    client.set_flow_run_state(made, Running(), force=True)
    client.set_flow_run_state(made, Crashed(message=message), force=True)
    return made


def restarted(client: SyncPrefectClient, flow_run: UUID) -> bool:
    return restart(client, client.read_flow_run(flow_run))


def state(client: SyncPrefectClient, flow_run: UUID) -> State[None]:
    found = client.read_flow_run(flow_run).state
    assert found is not None
    return found


def test_a_first_report_is_answered_with_a_start_some_seconds_ahead(client: SyncPrefectClient) -> None:
    flow_run = crashed(client, f"{FIRST_REPORT}: -9")
    assert restarted(client, flow_run)
    now = state(client, flow_run)
    assert (now.name, now.message) == ("AwaitingRetry", RESUMED)
    assert now.state_details.scheduled_time is not None
    assert now.state_details.scheduled_time > datetime.now(UTC) + timedelta(seconds=20)
    assert was_resumed(client.read_flow_run_states(flow_run))
    assert not restarted(client, flow_run)


def test_other_crashes_are_answered_at_once(client: SyncPrefectClient) -> None:
    flow_run = crashed(client, "its process is gone")
    assert restarted(client, flow_run)
    now = state(client, flow_run)
    assert (now.name, now.message) == ("AwaitingRetry", RESUMED)
    assert now.state_details.scheduled_time is not None
    assert now.state_details.scheduled_time < datetime.now(UTC) + timedelta(seconds=5)
    assert not restarted(client, flow_run)


def test_what_nobody_asked_to_resume_stays(client: SyncPrefectClient) -> None:
    assert not restarted(client, crashed(client, "its process is gone", tags=("herd",)))
    later = crashed(client, "its process is gone")
    client.set_flow_run_state(later, Cancelled(), force=True)
    assert not restarted(client, later)


def test_a_pass_restarts_what_crashed_before_it_had_a_record_but_not_for_ever(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    root = Root.parse(tmp_path)
    flow_run, other = crashed(client, "no heartbeat", root=root), crashed(client, "no heartbeat")
    for _ in range(FRUITLESS):
        assert [line.after for line in reconcile(root, client, cleanup=False)] == ["AwaitingRetry"]
        assert state(client, flow_run).name == "AwaitingRetry"
        client.set_flow_run_state(flow_run, Crashed(message="no heartbeat"), force=True)
    assert reconcile(root, client, cleanup=False) == []
    assert state(client, other).is_crashed()  # of another root


def test_a_flow_run_that_is_called_crashed_while_its_process_lives_is_running(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    """A busy worker reports a death a second time when the next attempt works already."""
    root = Root.parse(tmp_path)
    flow_run = crashed(client, "Flow run infrastructure exited", root=root)
    record = Runs(root).begin(load_recipe(Path("recipes/quickstart.yaml")), "code")
    record.prefect_run = str(flow_run)
    Runs(root).save(record)
    mark_open(root, record.name)
    with lease(root, f"runs/{record.name}", record.name):
        assert [line.after for line in reconcile(root, client, cleanup=False)] == ["Running"]
    assert state(client, flow_run).is_running()
    assert [line.after for line in reconcile(root, client, grace_s=0, cleanup=False)] == [
        "interrupted",
        "Crashed",
        "AwaitingRetry",
    ]


CLAIM = """
import sys
from pathlib import Path
import herd.flows.crash_recovery
import herd.flows.run_lifecycle
from herd.flows.recipe_form import PipelineParameters
from herd.llama3.recipe.load import load_recipe
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.runs.records import Runs, mark_open
from herd.tasks.operate.recovery import AUTO_RESUME, FIRST_REPORT, FRUITLESS, RESUMED, reconcile, restart
herd.flows.crash_recovery.LEAVE_S = 1.0
config, recipe = PipelineParameters(root=sys.argv[1]), load_recipe(Path("recipes/quickstart.yaml"))
runs = Runs(Root.parse(sys.argv[1]))
with herd.flows.run_lifecycle.acquire_run(config, recipe, runs, TerminalConsole()) as (record, fence):
    print("works on", record.name, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_machine", [True, False])
def test_of_two_processes_of_one_flow_run_the_later_leaves_if_a_machine_began_it(
    client: SyncPrefectClient, tmp_path: Path, by_machine: bool
) -> None:
    """A late report of the first death begins another attempt beside the one that works; a Retry waits for its end."""
    flow_run, root = crashed(client, "its process is gone"), Root.parse(tmp_path)
    client.set_flow_run_state(flow_run, AwaitingRetry(message=RESUMED if by_machine else "retried"), force=True)
    record = Runs(root).begin(load_recipe(Path("recipes/quickstart.yaml")), "code")
    record.prefect_run = str(flow_run)
    Runs(root).save(record)
    surroundings = {**os.environ, "PREFECT_API_URL": str(client.api_url), "PREFECT__FLOW_RUN_ID": str(flow_run)}
    with lease(root, f"runs/{record.name}", record.name):
        process = Forked("-c", CLAIM, str(tmp_path), environment=surroundings)
        said = process.stdout.readline()
        if by_machine:
            assert process.wait(120) == 0
    said += process.communicate(timeout=120)[0]
    assert process.returncode == 0
    assert ("an earlier process of this flow run: this one leaves" in said) == by_machine
    assert (f"works on {record.name}" in said) != by_machine
    assert Runs(root).find(record.name).attempts == (1 if by_machine else 2)


def test_a_deployment_that_fails_before_it_has_a_run_is_announced(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr("herd.tasks.tracking.events.emit", lambda *words: said.append(words))
    monkeypatch.setattr(run_lifecycle, "RECORDED", threading.Event())

    def work() -> run_lifecycle.FlowResult:
        raise RecipeError("recipe nope: no such file")

    @flow(name="nightly", flow_run_name="nightly-1")
    def nightly() -> str:
        return run_lifecycle.flow_state(work)

    with temporary_settings({PREFECT_API_URL: api}):
        assert nightly(return_state=True).is_failed()
        assert said == [], "somebody watches the terminal"
        monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__NAME", "nightly")
        nightly(return_state=True)
        run_lifecycle.RECORDED.set()
        nightly(return_state=True)
    ((event, _, name, payload),) = said
    assert (event, name, payload["state"]) == ("herd.run.ended", "nightly-1", "failed")
    assert payload["error"] == "recipe nope: no such file"


def test_the_tasks_of_a_flow_have_no_tag_of_its_process(api: str) -> None:
    """Prefect asks its server for a slot of each tag when a task begins: without the server the run would end."""

    @task
    def step() -> list[str]:
        return task_run.tags

    @flow(name="tagged", flow_run_name="tagged-1")
    def tagged() -> str:
        return run_lifecycle.flow_state(lambda: run_lifecycle.FlowResult(",".join(step()), "of the user"))

    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        with tags("mine"):
            assert with_retries(tagged) == "mine"
        (found,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["tagged-1"])))
    assert sorted(found.tags) == sorted(["mine", process_tag()])


class Inbox(BaseHTTPRequestHandler):
    """A webhook; what it gets is in `server.got`, by path."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.setdefault(self.path, []).append(body)  # type: ignore[attr-defined]
        self.send_response(404 if "nowhere" in self.path else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def inbox() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Inbox) as server:
        server.got = {}  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_webhook_and_an_apprise_address_are_told_how_runs_go(
    client: SyncPrefectClient,
    api: str,
    prefect_server: dict[str, str],
    inbox: ThreadingHTTPServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    root, port, got = Root.parse(tmp_path), inbox.server_port, inbox.got  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"--notify: 'foo' is not a scheme of a webhook"):
        setup(root, api, "foo://canary")
    with pytest.raises(ValueError, match=r"--notify: the address does not take messages; check it") as refused:
        setup(root, api, f"http://127.0.0.1:{port}/nowhere/canary")
    assert "canary" not in str(refused.value)
    hook = f"/canary-{uuid4().hex}"
    lines = [*setup(root, api, f"http://127.0.0.1:{port}/old"), *setup(root, api, f"http://127.0.0.1:{port}{hook}")]
    assert [message["event"] for message in got[hook]] == ["herd.hello"]
    record = Runs(root).begin(load_recipe(Path("recipes/quickstart.yaml")), "code")

    def told(path: str, send: Callable[[], object], text: str) -> dict[str, Any]:
        """Return the message with `text`. A server that has just got an automation may miss an event: repeat it."""
        for _ in range(20):
            send()
            for _ in range(10):
                for message in got.get(path, []):
                    if text == message.get("text", message.get("message")):
                        return message
                time.sleep(0.1)
        pytest.fail(f"{text!r} did not come: {got}")

    try:
        record.state, record.error = "failed", 'TrainingFailed: rank 1 said "no"'
        text = 'quickstart-1 failed: TrainingFailed: rank 1 said "no"'
        message = told(hook, lambda: run_ended(record, root.uri), text)
        assert (message["event"], message["payload"]["run"]) == ("herd.run.ended", "quickstart-1")
        alert = Alert(time=0.0, kind="disk", run="quickstart-1", stage="main", text="1.2 GB free", position=5)
        told(hook, lambda: emit_alert(root, TerminalConsole(), alert), "quickstart-1 main: disk: 1.2 GB free")

        assert not client.read_automations_by_name(EXAMPLE)
        lines += setup(root, api, f"json://127.0.0.1:{port}{hook}-2")
        record.state, record.error, record.verdict = "finished", "", "rejected"
        message = told(f"{hook}-2", lambda: run_ended(record, root.uri), "quickstart-1 rejected")
        assert message["title"] == "herd: quickstart-1"
        assert len(client.read_automations_by_name(NOTIFY)) == 1
        assert setup(root, api)[-1] == "automation 'herd: crash zombie runs': exists"
        assert not client.read_automations_by_name(EXAMPLE), "an address is known"
    finally:
        for each in client.read_automations_by_name(NOTIFY):
            client.delete_automation(each.id)
    assert set(got) == {"/nowhere/canary", "/old", hook, f"{hook}-2"}
    assert len(got["/old"]) == 1, "it was replaced"
    assert "canary" not in "".join(capfd.readouterr())
    shown = json.dumps([each.model_dump(mode="json") for each in client.read_automations()]) + str(lines)
    shown += client.request("POST", "/block_documents/filter", json={}).text
    assert hook not in shown
    files = [path for path in Path(prefect_server["home"]).rglob("*") if path.is_file()]
    assert any(path.name == "prefect.db" for path in files)
    assert not [path for path in files if hook.encode() in path.read_bytes()], "it is encrypted, and in no log"


def test_the_own_address_of_a_server_that_ended_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `source prefect.env`, in the same shell."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Inbox) as taken:
        free, port = free_port(), taken.server_port
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free}/api")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        servers = Servers.from_environment(free, port, "127.0.0.1")
        assert (servers.prefect_port, servers.mlflow_port) == (free, None), "one is there, the other is not"
        assert (servers.prefect, servers.mlflow) == (f"http://127.0.0.1:{free}", f"http://127.0.0.1:{port}")
        other = Servers.from_environment(free_port(), free_port(), "127.0.0.1")
        assert (other.prefect_port, other.mlflow_port) == (None, None)
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
        with pytest.raises(ValueError, match=f"--mlflow-port: port {port} is taken"):
            Servers.from_environment(free, port, "127.0.0.1")
