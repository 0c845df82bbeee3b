"""A person has the last word on a promotion: in Prefect's form, or by `herd approve`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.deployments.runner import RunnerDeployment
from prefect.flow_runs import resume_flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from herd.storage.root import Root
from herd.tasks.promotion.log import (
    APPROVAL,
    CHALLENGER,
    PROMOTED,
    Promotion,
    PromotionLog,
    current_aliases,
    last_promotion,
    read_log,
)
from herd.tasks.promotion.registry import Registry
from herd.tasks.runs.records import PENDING_APPROVAL, Runs
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.dist import Forked
from tests.e2e.conftest import Herd, NewHerd, copy_artifacts, record

pytestmark = pytest.mark.slow
ASKED = "promote.approval=manual"


@pytest.fixture(scope="module")
def herd(herd: Herd, new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Herd:
    """A root of this module's own, with a champion: what is decided here would change what other modules find."""
    made = new_herd(tmp_path_factory.mktemp("approval") / "root")
    copy_artifacts(herd, made.root, "checkpoint/*", "evaluation/*")
    made("run", made.recipe)
    return made


@pytest.fixture
def client(herd: Herd) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: herd.api}), get_client(sync_client=True) as found:
        yield found


def newest(herd: Herd) -> str:
    return Runs(Root.parse(herd.root)).all()[-1].name


def decision(herd: Herd, run: str) -> Promotion:
    found = last_promotion(Root.parse(herd.root), run)
    assert found is not None
    return found


def holder(herd: Herd, alias: str) -> str:
    version = Registry(MLflowTracker(Root.parse(herd.root), "tiny")).version_with_alias(alias)
    return "" if version is None else str(version.tags["herd.artifact"])


def execute(herd: Herd, client: SyncPrefectClient, flow_run: UUID) -> State:
    """Do what a worker does with a flow run, and return the state in which it leaves it."""
    environment = {**herd.environment, "PREFECT_API_URL": herd.api}
    printed, _ = Forked("prefect", "flow-run", "execute", str(flow_run), environment=environment).communicate(560)
    state = client.read_flow_run(flow_run).state
    assert state is not None, printed
    return state


def test_a_deployed_run_is_suspended_until_somebody_answers_its_form(herd: Herd, client: SyncPrefectClient) -> None:
    champion = holder(herd, "champion")
    deployment = RunnerDeployment.from_entrypoint("herd.flows.pipeline.pipeline", name="approval").apply()
    assert isinstance(deployment, UUID)
    changes = [ASKED, "stages.anneal.weight_averaging=last 3"]
    config = {"recipe": herd.recipe, "overrides": changes, "root": str(herd.root), "cluster": {"threads": 1}}
    flow_run = client.create_flow_run_from_deployment(deployment, parameters={"config": config}).id

    state = execute(herd, client, flow_run)
    assert (state.type.value, state.name) == ("PAUSED", "Suspended")
    run = client.read_flow_run(flow_run).name
    waiting = decision(herd, run)
    assert (waiting.kind, waiting.champion) == (PENDING_APPROVAL, champion)
    assert not waiting.decision.accepted
    assert waiting.decision.refusals == ["waits for approval by a person"]
    assert (holder(herd, CHALLENGER), holder(herd, "champion")) == (waiting.artifact, champion)
    assert "challenger" in herd("status")

    for wrong in ({"decision": "perhaps", "name": "Ada"}, {"decision": "approve", "name": ""}, {}):
        with pytest.raises(RuntimeError, match="Validation failed"):
            resume_flow_run(flow_run, run_input=wrong)
    resume_flow_run(flow_run, run_input={"decision": "approve", "name": "Ada", "comment": "reads well"})
    assert execute(herd, client, flow_run).name == "Completed"

    done = decision(herd, run)
    assert (done.kind, done.by, done.comment) == ("promoted", "Ada", "reads well")
    assert len([record for record in read_log(Root.parse(herd.root), "tiny") if record.run == run]) == 2
    assert (holder(herd, "champion"), holder(herd, CHALLENGER)) == (done.artifact, "")
    ended = record(herd, run)
    assert (ended.state, ended.verdict, newest(herd)) == ("finished", "promoted", run)  # no second run was begun
    version = Registry(MLflowTracker(Root.parse(herd.root), "tiny")).version_with_alias("champion")
    assert version is not None
    assert "approved by Ada" in version.description


def test_without_a_terminal_the_run_ends_with_a_challenger_and_herd_approve_decides(herd: Herd) -> None:
    champion = holder(herd, "champion")
    printed = herd("run", herd.recipe, "--set", ASKED, "--set", "stages.anneal.weight_averaging=last 4")
    run = newest(herd)
    assert re.search(rf"decide with: \S*herd approve {run}", printed)
    assert record(herd, run).verdict == PENDING_APPROVAL
    assert holder(herd, CHALLENGER) == decision(herd, run).artifact

    assert f"{run}: rejected" in herd("reject", run, "--by", "Ada", "--comment", "not yet")
    done = decision(herd, run)
    assert (done.kind, done.by, done.comment, record(herd, run).verdict) == ("rejected", "Ada", "not yet", "rejected")
    assert [row.passed for row in done.decision.rows if row.metric == APPROVAL] == [False]
    assert (holder(herd, "champion"), holder(herd, CHALLENGER)) == (champion, "")
    printed = herd("approve", run, status=2)
    assert f"run {run} does not wait for approval: it is rejected" in printed

    printed = herd("rerun", run, "--from", "promote")
    assert record(herd, newest(herd)).verdict == PENDING_APPROVAL  # a new run, so a new question


def test_an_approval_that_rests_on_a_comparison_with_a_former_champion_is_refused(herd: Herd) -> None:
    herd("run", herd.recipe, "--set", ASKED, "--set", "stages.anneal.weight_averaging=last 5")
    run = newest(herd)
    waiting = decision(herd, run)
    if waiting.kind != PENDING_APPROVAL:
        pytest.fail(f"the gate rejected it: {waiting.decision.refusals}")
    log = PromotionLog(Root.parse(herd.root), "tiny")
    other = next(one for one in log.records if one.artifact not in (waiting.artifact, waiting.champion))
    log.append(other.model_copy(update={"kind": PROMOTED, "id": "another promoter"}), log.head)
    printed = herd("approve", run, status=2)
    assert f"the champion is {other.artifact} now" in printed
    assert f"herd promote {run}" in printed
    assert decision(herd, run).model_dump_json() == waiting.model_dump_json()


def test_a_rollback_and_an_override_are_commands_of_seconds(herd: Herd) -> None:
    root = Root.parse(herd.root)
    printed = herd("rollback", "tiny", "--by", "Ada", "--comment", "it loops")
    back = read_log(root, "tiny")[-1]
    assert printed.startswith(f"tiny@champion: rolled back from {back.champion} to {back.artifact}")
    assert {alias: holder(herd, alias) for alias in current_aliases(read_log(root, "tiny"))} == current_aliases(
        read_log(root, "tiny")
    )
    assert herd("generate", "tiny@champion", "--tokens", "3")
    printed = herd("promote", back.champion, "--by", "Ada", "--override", "it was the prompt")
    forth = read_log(root, "tiny")[-1]
    assert (forth.artifact, forth.kind, forth.by) == (back.champion, PROMOTED, "Ada")
    assert forth.evidence is not None
    assert forth.evidence.decide() == forth.gate
    assert "is the champion" in printed
    printed = herd("promotion-log", "tiny")
    assert "rolled back" in printed
    assert "it loops" in printed


def test_this_process_asks_no_server() -> None:
    """Else the approvals above would go to whichever server this machine has."""
    assert "PREFECT_API_URL" not in os.environ
