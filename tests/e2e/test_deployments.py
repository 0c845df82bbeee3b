"""The three ways herd is used through Prefect, on one `herd up`: schedules, runs and reruns from the UI, Retry.

What the UI does is a call of the server's API, and these tests make the same calls. They share one root on which the
tiny recipe is run once, so they stand in the order of a story.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from mlflow import MlflowClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import AwaitingRetry, Cancelling

from herd.flows.setup import deploy, deployment_files
from herd.tasks.runs.records import RunRecord
from tests.e2e.conftest import NewHerd
from tests.e2e.up import QUESTION, Up, await_true, running_up

pytestmark = pytest.mark.slow
STARTED_S = 90
"""A worker asks every 5 s, and a flow's process needs some to import what it runs."""


@pytest.fixture(scope="module")
def up(new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    herd = new_herd(tmp_path_factory.mktemp("up") / "root")
    herd.home = tmp_path_factory.mktemp("home")
    with running_up(herd) as running:
        yield running


@pytest.fixture(scope="module")
def cron(up: Up) -> DeploymentSchedule:
    """The deployment `reconcile`, every minute: by the end of the first run, the schedule has fired."""
    reconcile = up.client.read_deployment_by_name("reconcile/reconcile")
    every_minute = CronSchedule(cron="* * * * *", timezone="UTC")
    (made,) = up.client.create_deployment_schedules(reconcile.id, [(every_minute, True)])
    return made


@pytest.fixture(scope="module")
def first(up: Up, cron: DeploymentSchedule) -> FlowRun:
    """The tiny recipe, run once from the form."""
    return up.await_state(up.start("pipeline/pipeline", cluster={"threads": 1}).id, "COMPLETED")


def test_every_deployment_is_there_and_deploying_again_keeps_the_schedules(up: Up) -> None:
    wanted = {entry["name"]: entry for entry in yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]}
    before = {deployment.name: deployment for deployment in up.client.read_deployments()}
    assert set(before) == set(wanted)
    assert all(not deployment.parameters.get("required") for deployment in before.values())

    deploy(deployment_files(up.root, up.herd.folder), {**up.herd.environment, "PREFECT_API_URL": up.herd.api})
    after = {deployment.name: deployment for deployment in up.client.read_deployments()}
    for name, deployment in after.items():
        assert deployment.id == before[name].id
        assert {s.id for s in deployment.schedules} == {s.id for s in before[name].schedules}
        assert {s.slug for s in deployment.schedules} == {s["slug"] for s in wanted[name].get("schedules", [])}
    assert sum(len(deployment.schedules) for deployment in after.values()) >= 2


def test_a_run_from_the_form_ends_promoted_and_is_linked_both_ways(up: Up, first: FlowRun) -> None:
    record = up.record_of(first)
    assert (record.name, record.state, record.verdict) == ("tiny-1", "finished", "promoted")
    assert first.state is not None
    assert first.state.message is not None
    assert first.state.message.startswith("tiny-1 promoted, bpb ")
    mlflow = MlflowClient(f"http://127.0.0.1:{up.ports[1]}")
    assert mlflow.get_run(record.mlflow_run).data.tags["prefect.flow_run_id"] == str(first.id)


def test_a_cron_schedule_has_really_run(up: Up, cron: DeploymentSchedule) -> None:
    deployment = cron.deployment_id
    assert deployment is not None

    def scheduled() -> FlowRun | None:
        runs = up.client.read_flow_runs(deployment_filter=DeploymentFilter(id={"any_": [deployment]}))
        done = [run for run in runs if run.auto_scheduled and run.state is not None and run.state.is_completed()]
        return done[0] if done else None

    assert await_true(scheduled, "a scheduled run", 100).work_pool_name == "local"
    up.client.update_deployment_schedule(deployment, cron.id, active=False)  # the tests below need the processors


def test_every_checkpoint_was_evaluated_by_its_event(up: Up, first: FlowRun) -> None:
    def evaluated() -> list[FlowRun]:
        named = DeploymentFilter(name=DeploymentFilterName(any_=["evaluate"]))
        runs = up.client.read_flow_runs(deployment_filter=named)
        ended = [run for run in runs if run.state is not None and run.state.is_final()]
        return ended if len(ended) >= 3 else []

    runs = await_true(evaluated, "three evaluations", 240)
    assert {str(run.state and run.state.type.value) for run in runs} == {"COMPLETED"}, [run.state for run in runs]
    record = up.runs.find("tiny-1")
    assert {run.parameters["config"]["checkpoint"] for run in runs} == {
        record.steps[stage].artifact for stage in ("ramp", "main", "anneal")
    }
    artifacts = {path.parent.name for path in (up.herd.root / "evaluation").glob("tiny-ramp-*/manifest.json")}
    assert len(artifacts) == 1  # the run itself leaves this stage out
    up.pause_evaluations()  # what the tests below train is not looked at


def test_wrong_parameters_are_refused_by_the_schema_or_in_one_line_by_the_flow(up: Up, first: FlowRun) -> None:
    with pytest.raises(PrefectHTTPStatusError, match="10 minutes"):
        up.start("pipeline/pipeline", change={"every": "10 minutes"})
    with pytest.raises(PrefectHTTPStatusError, match="recepie"):
        up.start("pipeline/pipeline", recepie="x")

    wrong = up.start("pipeline/pipeline", change={"mixes": [{"name": "base", "math": "20%"}]})
    failed = up.await_state(wrong.id, "FAILED", seconds=STARTED_S)
    assert failed.state is not None
    assert failed.state.message is not None
    assert "the shares of base sum to 95%; change them until they sum to 100%" in failed.state.message
    assert len(failed.state.message.splitlines()) == 1
    assert "Traceback" not in up.log(wrong)
    assert len(up.runs.all()) == 1


def test_a_rerun_that_failed_is_retried_and_goes_on_with_what_it_made(up: Up, first: FlowRun, tmp_path: Path) -> None:
    questions = tmp_path / "facts.jsonl"
    questions.write_text(QUESTION)
    change = {"stages": [{"name": "main", "until": "96Ki"}]}
    begun = up.start(
        "rerun/rerun",
        run="tiny-1",
        from_step="main",
        change=change,
        overrides=[f"evaluate.tasks=[{questions}]"],
        cluster={"threads": 1},
    )
    up.await_training("tiny-2", 1)
    questions.write_text("{\n")  # what the check before the run found good
    failed = up.await_state(begun.id, "FAILED", seconds=200)
    before = up.record_of(begun)
    assert (before.name, before.rerun_of, before.state) == ("tiny-2", "tiny-1", "failed")
    assert {step: entry.outcome for step, entry in before.steps.items()} == {
        **dict.fromkeys(("collect", "annotate", "curate", "tokenizer", "tokenize", "ramp"), "reused"),
        "main": "created",
    }
    assert failed.state is not None
    assert "facts.jsonl:1: is not JSON" in str(failed.state.message)
    assert "Traceback" not in up.log(begun)

    questions.write_text(QUESTION)
    up.client.set_flow_run_state(begun.id, AwaitingRetry(), force=True)  # the button Retry
    done = up.await_state(begun.id, "COMPLETED")
    record = up.record_of(begun)
    assert (done.run_count, record.name, record.attempts, record.state) == (2, "tiny-2", 2, "finished")
    assert record.steps["main"].artifact == before.steps["main"].artifact
    assert [entry.name for entry in up.runs.all()] == ["tiny-1", "tiny-2"]


def test_a_cancelled_run_leaves_no_trainer(up: Up, first: FlowRun) -> None:
    change = {"peak": "1e-3", "stages": [{"name": "main", "until": "3M"}]}
    begun = up.start("pipeline/pipeline", change=change, until="pretrain")
    up.await_training("tiny-3", 40)
    up.client.set_flow_run_state(begun.id, Cancelling())  # the button Cancel
    up.await_state(begun.id, "CANCELLED", seconds=120)
    await_true(lambda: not up.trainers(), "the trainer to leave", 20)
    record = await_true(lambda: _settled(up.record_of(begun)), "the record to say so", 30)
    assert (record.name, record.state, record.until) == ("tiny-3", "cancelled", "anneal")


def _settled(record: RunRecord) -> RunRecord | None:
    return record if record.state != "running" else None


def test_a_part_of_the_chain_reuses_what_is_there_and_stops(up: Up, first: FlowRun) -> None:
    done = up.await_state(
        up.start("pipeline/pipeline", change={"jaccard": "70%"}, until="tokenize").id, "COMPLETED", seconds=150
    )
    record = up.record_of(done)
    assert list(record.steps) == ["collect", "annotate", "curate", "tokenizer", "tokenize"]
    assert [record.steps[step].outcome for step in ("collect", "annotate", "curate")] == ["reused", "reused", "created"]
    assert record.state == "finished"
    assert done.state is not None
    assert str(done.state.message).startswith(f"{record.name} stopped after tokenize, as asked")


def test_promote_and_report_belong_to_the_run_that_made_the_checkpoint(up: Up, first: FlowRun) -> None:
    judged = up.start("promote/promote", checkpoint="tiny-1")
    page = Path(up.herd.root / "runs" / "tiny-1" / "report.html")
    page.unlink()
    written = up.start("report/report", run="tiny-1")
    states = [up.await_state(run.id, "COMPLETED", seconds=150).state for run in (judged, written)]
    assert "checkpoint/tiny-anneal-" in str(states[0] and states[0].message)
    assert page.is_file()
    assert up.runs.find("tiny-1").prefect_run == str(first.id)


def test_a_checkpoint_is_put_to_another_suite(up: Up, first: FlowRun) -> None:
    suite = up.herd.root / "bits.yaml"
    suite.write_text("built_in: [bits]\n")
    scored = up.start("evaluate/evaluate", checkpoint="tiny-1", suite=str(suite))
    state = up.await_state(scored.id, "COMPLETED", seconds=150).state
    assert "bpb_macro" in str(state and state.message)
    assert "arithmetic" not in str(state and state.message)
    usual, other = (up.runs.find("tiny-1").steps[step].artifact for step in ("evaluate-anneal", "evaluate-anneal-bits"))
    assert usual != other


def test_it_stops_cleanly(up: Up) -> None:
    servers = up.below()
    os.kill(up.process.pid, signal.SIGINT)
    assert up.process.wait(60) == 0
    _, alive = psutil.wait_procs(servers, timeout=20)
    assert not alive
    for port in up.ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port))
