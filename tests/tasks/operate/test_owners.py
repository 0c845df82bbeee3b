"""Whether something works on a flow run, and what the reconciler does where nothing does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Completed, Pending, Running, State, Suspended

from herd.llama3.recipe.load import load_recipe
from herd.storage.processes import process_alive, process_name
from herd.storage.root import Root
from herd.tasks.operate import owners, recovery
from herd.tasks.operate.doctor import check_server
from herd.tasks.operate.owners import PROCESS, TAG, WORKER, Owners, Verdict, judge
from herd.tasks.operate.queues import held_slots
from herd.tasks.operate.recovery import AUTO_RESUME, GONE_SINCE, ROOT, reconcile
from herd.tasks.operate.slots import FILE, read_slots, slots_table, write_slots
from herd.tasks.runs.records import Runs
from tests.servers import only_flow_runs_of

PENDING, RUNNING, CANCELLING = StateType.PENDING, StateType.RUNNING, StateType.CANCELLING
POOL = f"owned-{uuid4().hex[:8]}"


@flow(name="owned")
def pipeline() -> None:
    """What flow runs of these tests are runs of; it never runs."""


def test_who_owns_a_flow_run() -> None:
    table: dict[tuple[bool | None, bool | None], tuple[Verdict, Verdict, Verdict]] = {
        # process, worker        Pending    Running    Cancelling
        (True, True): ("alive", "alive", "alive"),
        (True, False): ("alive", "alive", "unheard"),
        (True, None): ("alive", "alive", "alive"),
        (False, True): ("reporting", "reporting", "reporting"),
        (False, False): ("dead", "dead", "dead"),
        (False, None): ("unknown", "unknown", "unknown"),
        (None, True): ("alive", "alive", "alive"),
        (None, False): ("dead", "unknown", "dead"),
        (None, None): ("unknown", "unknown", "unknown"),
    }
    for (process, worker), verdicts in table.items():
        for state, verdict in zip((PENDING, RUNNING, CANCELLING), verdicts, strict=True):
            assert judge(state, process, worker) == verdict, (state, process, worker)


def test_a_process_is_known_by_its_name_and_another_machine_is_not() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "from herd.storage.processes import process_name; print(process_name()); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    assert process_alive(name) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_alive(name) is False, "a zombie"
    child.communicate()
    assert process_alive(name) is False
    own = process_name()
    host, pid, ticks, machine = own.rsplit("-", 3)
    assert process_alive(own) is True
    assert process_alive(f"{host}-{pid}-{int(ticks) + 1}-{machine}") is False, "a later process with the same id"
    assert process_alive(f"{host}-{pid}-{ticks}-{'0' * 8}") is None
    assert process_alive("ProcessWorker 6f7c1d2e-aaaa-bbbb-cccc-0123456789ab") is None


@pytest.fixture(scope="module")
def client(prefect_server: dict[str, str]) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: prefect_server["api"]}), get_client(sync_client=True) as made:
        made.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        with only_flow_runs_of(pipeline, made):
            yield made


@pytest.fixture(scope="module")
def dead() -> str:
    """The name of a process of this machine that has ended."""
    code = "from herd.storage.processes import process_name; print(process_name())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class Deployed:
    """Flow runs of a deployment with one slot."""

    def __init__(self, client: SyncPrefectClient, *tags: str, queue: str | None = None, pool: str = POOL) -> None:
        self.client, name = client, f"owned-{uuid4().hex[:8]}"
        self.id = client.create_deployment(
            client.create_flow(pipeline),
            name=name,
            tags=[TAG, *tags],
            work_pool_name=pool,
            work_queue_name=queue,
            concurrency_limit=1,
        )

    def submitted(self, worker: str, state: State[None], root: Root, name: str = "Submitting") -> FlowRun:
        """Return a flow run that `worker` has submitted, now in `state`."""
        made = self.client.create_flow_run_from_deployment(self.id, parameters={"config": {"root": root.uri}})
        assert self.client.set_flow_run_state(made.id, Pending()).state.name == "Pending"  # type: ignore[union-attr]
        self.client.update_flow_run_labels(made.id, {WORKER: worker})
        if name == "Submitting":
            self.client.set_flow_run_state(made.id, Pending(name="Submitting"))
        if not state.is_pending():
            self.client.set_flow_run_state(made.id, state, force=True)
        return self.client.read_flow_run(made.id)

    @property
    def slots(self) -> int:
        limit = self.client.read_deployment(self.id).global_concurrency_limit
        assert limit is not None
        return limit.active_slots


def state_of(client: SyncPrefectClient, flow_run: UUID) -> str:
    state = client.read_flow_run(flow_run).state
    assert state is not None
    return state.name or ""


def passes(root: Root, client: SyncPrefectClient, made: FlowRun, count: int = 2) -> str:
    """Return the state of a flow run after some passes of the reconciler."""
    for _ in range(count):
        reconcile(root, client, cleanup=False)
    return state_of(client, made.id)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.parse(tmp_path)


@pytest.mark.fault("F16")
@pytest.mark.parametrize(
    ("state", "tags", "after"),
    [
        (Pending(), ("herd",), "Crashed"),
        (Pending(), ("herd", AUTO_RESUME), "AwaitingRetry"),
        (Running(), ("herd",), "Crashed"),
        (Cancelling(), ("herd", AUTO_RESUME), "Cancelled"),
    ],
)
def test_without_process_and_worker_a_flow_run_ends_and_frees_its_slot(
    client: SyncPrefectClient, root: Root, dead: str, state: State[None], tags: tuple[str, ...], after: str
) -> None:
    deployed = Deployed(client, *tags)
    made = deployed.submitted(dead, state, root)
    assert deployed.slots == 1
    client.send_worker_heartbeat(POOL, process_name())  # another worker, which came later
    assert passes(root, client, made) == after
    assert deployed.slots == 0
    other = client.create_flow_run_from_deployment(deployed.id)
    client.set_flow_run_state(other.id, Pending())
    assert state_of(client, other.id) == "Pending"


def test_a_pending_flow_run_may_be_of_any_worker_that_lived_then(
    client: SyncPrefectClient, root: Root, dead: str
) -> None:
    """Its labels are those of the attempt before: the worker writes them a moment later."""
    client.send_worker_heartbeat(POOL, process_name())
    made = Deployed(client, "herd").submitted(dead, Pending(), root, "Pending")
    assert Owners(client).of(made).verdict == "reporting"
    assert passes(root, client, made) == "Pending"


Engine = Callable[[SyncPrefectClient, FlowRun], "subprocess.Popen[bytes]"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Starts what looks like the process of a flow run."""
    monkeypatch.setattr(owners, "ENGINE", re.compile("time.sleep"))
    started: list[subprocess.Popen[bytes]] = []

    def start(client: SyncPrefectClient, made: FlowRun) -> subprocess.Popen[bytes]:
        environment = {**os.environ, owners.FLOW_RUN: str(made.id)}
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment))
        while Owners(client).of(made).pid != started[-1].pid:
            time.sleep(0.01)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_an_import_of_any_length_is_left_alone(
    client: SyncPrefectClient, root: Root, dead: str, engine: Engine
) -> None:
    made = Deployed(client, "herd").submitted(dead, Pending(), root)
    process = engine(client, made)
    assert passes(root, client, made) == "Submitting"
    process.kill()
    process.wait()
    assert passes(root, client, made) == "Crashed"


def test_a_living_worker_has_a_minute_to_report_a_death(client: SyncPrefectClient, root: Root) -> None:
    made = Deployed(client, "herd").submitted(process_name(), Running(), root)
    assert passes(root, client, made) == "Running"
    long_ago = (datetime.now(UTC) - timedelta(seconds=recovery.REPORT_S)).isoformat()
    client.update_flow_run_labels(made.id, {GONE_SINCE: f"{made.state_id} {long_ago}"})
    assert passes(root, client, made) == "Crashed"


def test_a_worker_elsewhere_is_asked_by_its_heartbeat(client: SyncPrefectClient, root: Root) -> None:
    client.send_worker_heartbeat(POOL, "elsewhere")
    deployed = Deployed(client, "herd")
    made = deployed.submitted("elsewhere", Pending(), root)
    assert Owners(client).of(made).verdict == "alive"
    silent = Deployed(client, "herd").submitted("never seen", Pending(), root)
    assert Owners(client).of(silent).verdict == "unknown"
    assert (passes(root, client, made), state_of(client, silent.id)) == ("Submitting", "Submitting")


def test_a_cancellation_that_no_worker_carries_out_reaches_the_process(
    client: SyncPrefectClient, root: Root, dead: str, engine: Engine
) -> None:
    made = Deployed(client, "herd", AUTO_RESUME).submitted(dead, Cancelling(), root)
    process = engine(client, made)
    assert passes(root, client, made) == "Cancelled"
    assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("state", [Pending(), Running()])
def test_a_killed_herd_run_does_not_show_running_for_ever(
    client: SyncPrefectClient, root: Root, dead: str, state: State[None]
) -> None:
    killed, works, elsewhere = (
        client.create_flow_run(pipeline, state=state, tags=[f"{PROCESS}{name}"])
        for name in (dead, process_name(), f"{dead[:-8]}{'0' * 8}")
    )
    assert passes(root, client, killed) == "Crashed"
    assert {state_of(client, made.id) for made in (works, elsewhere)} == {state.name}


def test_of_a_superseded_flow_run_no_other_attempt_begins(client: SyncPrefectClient, root: Root, dead: str) -> None:
    record = Runs(root).begin(load_recipe(Path("recipes/quickstart.yaml")), "code")
    record.prefect_run = str(uuid4())
    Runs(root).save(record)
    made = Deployed(client, "herd", AUTO_RESUME).submitted(dead, Running(), root)
    client.update_flow_run(made.id, name=record.name)
    client.update_flow_run_labels(made.id, {ROOT: root.uri})
    assert passes(root, client, made) == "Cancelled"


def test_an_approval_of_a_deleted_run_or_root_is_not_waited_for(
    client: SyncPrefectClient, root: Root, dead: str, tmp_path: Path
) -> None:
    record = Runs(root).begin(load_recipe(Path("recipes/quickstart.yaml")), "code")
    gone, kept, unsaid = (Deployed(client, "herd").submitted(dead, Suspended(), root) for _ in range(3))
    record.prefect_run = str(kept.id)
    Runs(root).save(record)
    for made in (gone, kept):
        client.update_flow_run_labels(made.id, {ROOT: root.uri})
    other = Deployed(client, "herd").submitted(dead, Suspended(), root)
    client.update_flow_run_labels(other.id, {ROOT: str(tmp_path / "deleted")})
    passes(root, client, gone)
    states = [state_of(client, made.id) for made in (gone, kept, unsaid, other)]
    assert states == ["Cancelled", "Suspended", "Suspended", "Cancelled"]


def test_what_ends_while_a_pass_looks_at_it_keeps_its_end(
    client: SyncPrefectClient, root: Root, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Deployed(client, "herd").submitted(dead, Running(), root)
    client.set_flow_run_state(made.id, Completed(), force=True)
    monkeypatch.setattr(recovery, "unfinished_flow_runs", lambda client: iter([made]))
    assert passes(root, client, made) == "Completed"


def test_a_worker_that_came_later_did_not_submit_it(client: SyncPrefectClient, root: Root, dead: str) -> None:
    pool = f"later-{uuid4().hex[:8]}"
    client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    made = Deployed(client, "herd", pool=pool).submitted(process_name(), Pending(), root, "Pending")
    client.send_worker_heartbeat(pool, process_name())
    assert Owners(client).of(made).verdict == "dead"
    assert passes(root, client, made, 1) == "Crashed"


def test_what_blocks_a_queue_is_named_and_seen_without_a_server(
    client: SyncPrefectClient, root: Root, dead: str
) -> None:
    queue = f"training-{uuid4().hex[:8]}"
    client.create_work_queue(queue, concurrency_limit=1, work_pool_name=POOL)
    client.send_worker_heartbeat(POOL, process_name())
    holder, behind = Deployed(client, "herd", queue=queue), Deployed(client, "herd", queue=queue)
    made = holder.submitted(dead, Pending(), root)
    client.create_flow_run_from_deployment(behind.id)
    client.create_flow_run_from_deployment(holder.id)
    (slot,) = [each for each in held_slots(client) if each.where == f"queue {queue}"]
    assert (slot.holder, slot.state, slot.waiting, slot.blocked) == (made.name, "Submitting", 2, True)
    assert re.match(rf"blocked by {made.name} since \d\d-\d\d [\d:]+ \(Submitting; it has no process, and", str(slot))
    (row,) = [each for each in check_server(root, client) if each.check == slot.where]
    assert (row.state, row.what) == ("warn", str(slot))
    write_slots(root, [slot])
    assert list(slots_table(root).rows)
    assert not list(slots_table(Root.parse(root.local / "other")).rows)
    write_slots(root, [slot.model_copy(update={"seen": datetime.now(UTC) - timedelta(hours=1)})])
    assert read_slots(root) == []
    passes(root, client, made)
    assert not [each for each in held_slots(client) if each.where == f"queue {queue}"]
    assert root.read(FILE) is None or made.name.encode() not in (root.read(FILE) or b"")
