"""One `herd up`, from the form of a deployment to a promotion that a person approves.

The root has what the tiny recipe makes, so nothing is trained; test_deployments.py, test_browser.py and
test_approval.py train, in `make test-all`. A browser fills in the form where there is one: the UI sends back every
default and leaves out what was emptied, which once made the form useless.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from mlflow import MlflowClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_runs import resume_flow_run

from herd.flows.local_server import PASSWORD, PASSWORD_FILE
from herd.tasks.promotion.log import CHALLENGER, current_aliases, last_promotion, read_log
from herd.tasks.runs.records import PENDING_APPROVAL
from herd.tasks.tracking.moved_root import ACCESS
from tests.e2e.conftest import Herd, NewHerd, copy_artifacts, read_until, wait_for
from tests.e2e.test_browser import CHROMIUM, Pages, opened_pages, try_from_elsewhere
from tests.e2e.up import Up, running_up

pytestmark = pytest.mark.slow  # the forms themselves: tests/flows/test_recipe_form.py

ASKED = "promote.approval=manual"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the pages are not looked at")


@pytest.fixture(scope="module")
def up(herd: Herd, new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    made = new_herd(tmp_path_factory.mktemp("up") / "root")
    made.home = tmp_path_factory.mktemp("up-home")
    copy_artifacts(herd, made.root, "checkpoint/*", "evaluation/*")
    (made.root / "prefect.yaml").write_text("deployments: [{name: own, schedules: [{cron: '0 3 1 1 *'}]}]")
    with running_up(made) as running:
        running.pause_evaluations()
        yield running


@pytest.fixture(scope="module")
def pages(up: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages | None]:
    if CHROMIUM is None:
        yield None
        return
    with opened_pages(up, Path(os.environ.get("HERD_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def sent(up: Up, pages: Pages | None) -> FlowRun:
    """The flow run of the form of `pipeline`, by a browser or by the call that it makes."""
    if pages is None:
        return up.start("pipeline/pipeline", overrides=[ASKED], cluster={"threads": 1}, root=str(up.herd.root))
    pages.open_form("pipeline/pipeline", up)
    pages.fill("Recipe", up.herd.recipe)
    pages.fill("Peak learning rate", "3e-3")
    for title in ("Seed", "Stop after"):
        pages.fill(title, "1")
        pages.fill(title, "")
    pages.fill("Root", str(up.herd.root))
    pages.fill("Threads", "1")
    pages.add("Other changes", ASKED)
    return pages.send(up)


@pytest.fixture(scope="module")
def suspended(up: Up, sent: FlowRun, pages: Pages | None) -> FlowRun:
    if pages is not None:
        pages.rest()
    return up.await_state(sent.id, "PAUSED")


def test_every_deployment_is_there_and_takes_what_its_form_offers(up: Up) -> None:
    wanted = {entry["name"]: entry for entry in yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]}
    found = {deployment.name: deployment for deployment in up.client.read_deployments()}
    own, shipped = found.pop("own"), found["pipeline"]
    assert (own.work_queue_name, own.tags, own.entrypoint) == (
        shipped.work_queue_name,
        shipped.tags,
        shipped.entrypoint,
    )
    assert own.schedules[0].slug == "own-0"
    assert str(up.herd.root) in str(own.pull_steps)
    assert set(found) == set(wanted)
    for name, deployment in found.items():
        assert {s.slug for s in deployment.schedules} == {s["slug"] for s in wanted[name].get("schedules", [])}
    for wrong, told in (({"change": {"every": "10 minutes"}}, "10 minutes"), ({"recepie": "x"}, "recepie")):
        with pytest.raises(PrefectHTTPStatusError, match=told):
            up.start("pipeline/pipeline", **wrong)
    with pytest.raises(PrefectHTTPStatusError, match="'recepie' is not a parameter; write it below config"):
        up.client.create_flow_run_from_deployment(found["pipeline"].id, parameters={"recepie": "x"})


def test_a_foreign_name_is_refused_also_with_the_password(up: Up) -> None:
    login = tuple(up.password.split(":", 1))
    names = {"127.0.0.1": 200, "localhost": 200, "evil.example": 400, "127.0.0.1.evil.example": 400}
    for name, status in names.items():
        headers = {"Host": f"{name}:{up.ports[0]}"}
        assert httpx.get(f"{up.herd.api}/admin/version", headers=headers, auth=login).status_code == status, name
    assert httpx.get(f"{up.herd.api}/admin/version").status_code == 401


@needs_browser
def test_a_page_of_another_site_neither_reads_nor_starts_anything(up: Up, pages: Pages) -> None:
    try_from_elsewhere(up, pages)


@needs_browser
def test_the_form_sends_what_was_filled_in_and_no_nulls(sent: FlowRun, up: Up) -> None:
    config = sent.parameters["config"]
    assert (config["recipe"], config["root"], config["change"]["peak"]) == (up.herd.recipe, str(up.herd.root), "3e-3")
    assert (config["cluster"]["threads"], config["overrides"]) == (1, [ASKED])
    assert "None" not in str(config)
    assert not {"rerun_of", "from_step", "until"} & set(config)


def answer(flow_run: FlowRun, given: dict[str, str]) -> None:
    resume_flow_run(flow_run.id, run_input=given, _sync=True)  # the browser's loop runs in this thread


def test_a_run_from_the_form_reuses_what_is_there_and_waits_for_a_person(up: Up, suspended: FlowRun) -> None:
    record = up.record_of(suspended)
    assert record.name == "tiny-1"
    assert {step.outcome for step in record.steps.values()} == {"reused"}
    waiting = last_promotion(up.root, "tiny-1")
    assert waiting is not None
    assert (suspended.state_name, waiting.kind, waiting.decision.accepted) == ("Suspended", PENDING_APPROVAL, False)
    assert waiting.decision.refusals == ["waits for approval by a person"]
    held = current_aliases(read_log(up.root, "tiny"))
    assert (held[CHALLENGER], held.get("champion")) == (waiting.artifact, None)
    for wrong in ({"decision": "perhaps", "name": "Ada"}, {"decision": "approve", "name": ""}, {}):
        with pytest.raises(RuntimeError, match="Validation failed"):
            answer(suspended, wrong)


@pytest.mark.slow
def test_once_approved_the_run_promotes_and_is_linked_both_ways(up: Up, suspended: FlowRun) -> None:
    answer(suspended, {"decision": "approve", "name": "Ada", "comment": "reads well"})
    ended = up.await_state(suspended.id, "COMPLETED")
    done, record = last_promotion(up.root, "tiny-1"), up.record_of(ended)
    assert done is not None
    assert (done.kind, done.by, done.comment) == ("promoted", "Ada", "reads well")
    held = current_aliases(read_log(up.root, "tiny"))
    assert (held["champion"], held.get(CHALLENGER)) == (done.artifact, None)
    assert (record.name, record.state, record.verdict) == ("tiny-1", "finished", "promoted")
    assert [run.name for run in up.runs.all()] == ["tiny-1"]
    assert str(ended.state and ended.state.message).startswith("tiny-1 promoted, bpb ")
    mlflow = MlflowClient(f"http://127.0.0.1:{up.ports[1]}")
    assert mlflow.get_run(record.mlflow_run).data.tags["prefect.flow_run_id"] == str(ended.id)
    assert mlflow.get_model_version_by_alias("tiny", "champion").tags["herd.artifact"] == done.artifact


def test_the_password_is_in_private_files_and_on_no_command_line(up: Up, sent: FlowRun) -> None:
    secret = up.password.partition(":")[2]
    files = [path for folder in (up.herd.root, up.herd.home) for path in folder.rglob("*") if path.is_file()]
    private = {up.herd.root / ACCESS, up.herd.root / PASSWORD_FILE}
    assert {path for path in files if secret.encode() in path.read_bytes()} == private
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    assert not any(secret in word for process in up.below() for word in process.cmdline())
    assert PASSWORD in up.below()[0].environ()


def test_what_is_killed_is_started_again_and_named(up: Up) -> None:
    addresses = {"mlflow": f"http://127.0.0.1:{up.ports[1]}/health", "prefect": f"{up.herd.api}/health", "worker": ""}
    words = {"mlflow": "mlflow", "prefect": "herd.flows.prefect_app:create_app", "worker": "worker"}
    for name, address in addresses.items():
        (dead,) = [each for each in psutil.Process(up.process.pid).children() if words[name] in each.cmdline()]
        dead.kill()
        assert f"{name} ended by SIGKILL; it starts again in 1 s" in read_until(up.process, f"{name} ended by SIGKILL")

        def again(name: str = name, address: str = address) -> bool:
            started = [each for each in psutil.Process(up.process.pid).children() if words[name] in each.cmdline()]
            with suppress(httpx.HTTPError):
                return bool(started) and (not address or httpx.get(address).status_code == 200)
            return False

        wait_for(again, f"{name} to answer again", 120, every_s=0.3)
    assert up.process.poll() is None
    verified = up.start("verify/scrub", run="tiny-1", root=str(up.herd.root))
    up.await_state(verified.id, "COMPLETED")


def test_it_stops_cleanly(up: Up) -> None:
    servers = up.below()
    os.kill(up.process.pid, signal.SIGINT)
    assert up.process.wait(60) == 0
    _, alive = psutil.wait_procs(servers, timeout=20)
    assert not alive
    for port in up.ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port))
