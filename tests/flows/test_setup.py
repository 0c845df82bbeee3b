from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.filesystems import RemoteFileSystem
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.attempts import RESUMED
from flows.children import POOL, await_answer, child, prefect_command
from flows.setup import QUEUES, RESULTS, setup
from storage.processes import free_port
from storage.root import Root


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server of this module's own: what is set up here must not reach other tests."""
    home, port = tmp_path_factory.mktemp("prefect"), free_port()
    with child("prefect", prefect_command(port), home, {**os.environ, "PREFECT_HOME": str(home)}) as server:
        await_answer(f"http://127.0.0.1:{port}/api/health", server)
        yield f"http://127.0.0.1:{port}/api"


@pytest.fixture
def client(api: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
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
    made = setup(Root.of(tmp_path), api)
    before = ids(client)
    again = setup(Root.of(tmp_path), api)

    assert ids(client) == before
    assert {line.rsplit(": ", 1)[1] for line in again} == {"is there"}
    assert [line.rsplit(": ", 1)[0] for line in made] == [line.rsplit(": ", 1)[0] for line in again]
    assert {f"block {RESULTS}", "herd: crash zombie runs", "herd: resume crashed runs"} < set(before)


def test_heavy_queues_run_one_at_a_time_and_a_new_pool_has_the_template_of_its_worker(
    client: SyncPrefectClient, api: str, tmp_path: Path
) -> None:
    setup(Root.of(tmp_path), api)
    limits = {queue.name: queue.concurrency_limit for queue in client.read_work_queues(work_pool_name=POOL)}
    assert limits == QUEUES
    assert "command" in client.read_work_pool(POOL).base_job_template["variables"]["properties"]


def test_what_somebody_changed_stays(client: SyncPrefectClient, api: str, tmp_path: Path) -> None:
    setup(Root.of(tmp_path), api)
    (alerts,) = client.read_automations_by_name("herd: alerts (example)")
    client.pause_automation(alerts.id)
    setup(Root.of(tmp_path), api)
    assert not client.read_automations_by_name("herd: alerts (example)")[0].enabled


def test_a_crashed_run_is_resumed_with_words_that_tell_it_from_a_retry_by_a_person(
    client: SyncPrefectClient, api: str, tmp_path: Path
) -> None:
    setup(Root.of(tmp_path), api)
    (resume,) = client.read_automations_by_name("herd: resume crashed runs")
    assert [action.message for action in resume.actions] == [RESUMED]  # type: ignore[union-attr]


def test_results_of_a_remote_root_lie_below_it_without_a_secret(
    client: SyncPrefectClient, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    setup(Root.of("s3://bucket/herd", scratch=str(tmp_path)), api)
    block = RemoteFileSystem.load(RESULTS)
    assert isinstance(block, RemoteFileSystem)
    assert block.basepath == "s3://bucket/herd/prefect-results"
    stored = client.request("POST", "/block_documents/filter", json={"include_secrets": True}).text
    assert RESULTS in stored
    assert "canary" not in stored


def test_without_a_server_it_says_which_one_it_needs(tmp_path: Path) -> None:
    with temporary_settings({PREFECT_API_URL: None}), pytest.raises(ValueError, match="PREFECT_API_URL: is not set"):
        setup(Root.of(tmp_path))
