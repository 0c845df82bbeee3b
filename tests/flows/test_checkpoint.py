"""The deployment `promote` refuses and rolls back too, by the same code as the commands."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from herd.flows.checkpoint import _reject, _roll_back, promote
from herd.flows.cli.errors import REFUSED as REFUSED_STATUS
from herd.flows.cli.errors import exit_as_judged, mistakes
from herd.flows.cli.main import app
from herd.flows.recipe_form import PromotionParameters
from herd.llama3.evaluate.gate import CheckUnfinished
from herd.llama3.recipe.schedule import Schedule
from herd.storage.lease import LeaseHeld
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.errors import GateFailed, TrainingFailed
from herd.tasks.promotion.log import PROMOTED, REJECTED, ROLLED_BACK, read_log
from herd.tasks.runs.records import PENDING_APPROVAL, Runs
from tests.flows.test_recipe_form import form, refused
from tests.tasks.mlflow_server import use
from tests.tasks.promotion_samples import FAMILY, add, champions
from tests.tasks.tracked_run import TrackedRun


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root whose MLflow is away: what is decided does not wait for it."""
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    return Root.parse(tmp_path)


def test_the_form_offers_three_actions_and_no_other() -> None:
    assert form(promote)["action"]["enum"] == ["promote", "reject", "roll back"]
    assert refused(promote, {"action": "roll back", "checkpoint": "tiny@champion", "to": "3"}) == []
    assert refused(promote, {"action": "demote"})
    assert "Roll back: the family, such as quickstart" in form(promote)["checkpoint"]["description"]


@pytest.mark.parametrize(
    ("to", "back_to", "named"), [("", 1, f"{FAMILY}@champion"), ("1", 0, f"{FAMILY}@champion"), ("", 1, f" {FAMILY} ")]
)
def test_the_deployment_rolls_back_and_says_from_what_to_what(root: Root, to: str, back_to: int, named: str) -> None:
    made = champions(root, 3)
    asked = PromotionParameters(
        root=root.uri, action="roll back", checkpoint=named, to=to, by="Ada", comment="it loops"
    )
    outcome = _roll_back(asked)
    record = read_log(root, FAMILY)[-1]
    assert (record.kind, record.artifact, record.by) == (ROLLED_BACK, made[back_to].label, "Ada")
    assert outcome.message.startswith(f"tiny@champion: rolled back from {made[2].label} to {made[back_to].label}")
    assert "MLflow does not show it yet" in outcome.message


def test_the_deployment_and_the_command_refuse_a_challenger(root: Root) -> None:
    run = TrackedRun(root)
    span = Schedule(run.context.recipe).trained[0]
    checkpoint = run.stage(span, run.tokens(), None)
    add(root, 1, PENDING_APPROVAL, artifact=checkpoint.label, asked=True)
    asked = PromotionParameters(root=root.uri, action="reject", checkpoint=checkpoint.label, by="Ada")
    assert _reject(asked).message.startswith(f"tiny-1: rejected, {checkpoint.label} stays a candidate")
    add(root, 1, PENDING_APPROVAL, artifact=checkpoint.label, asked=True)
    done = CliRunner().invoke(app, ["reject", "tiny-1", "--root", root.uri, "--by", "Bob"])
    assert done.exit_code == 0, done.output
    assert [record.by for record in read_log(root, FAMILY) if record.kind == REJECTED] == ["Ada", "Bob"]


def test_mistakes_are_told_in_a_line(root: Root) -> None:
    for words, said in (
        (["rollback", FAMILY], "no model of tiny was promoted to champion yet"),
        (["promotion-log", FAMILY], "family 'tiny' has no promotions"),
        (["approve", "tiny-7"], "run 'tiny-7' does not exist"),
    ):
        done = CliRunner().invoke(app, [*words, "--root", root.uri])
        assert done.exit_code == 2
        assert said in done.output


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (TrainingFailed("stage main: no new step"), 1),
        (CheckUnfinished("serving: killed"), 1),
        (LeaseHeld("runs/tiny-1 is used by process 7"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (ValueError("until: 'x' is not a step"), 2),
        (GateFailed("stages.main.gates: does not pass"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_status_says_how_it_ended(error: BaseException | None, status: int) -> None:
    command = typer.Typer()

    @command.command()
    def work() -> None:
        with mistakes():
            if error is not None:
                raise error

    assert CliRunner().invoke(command, []).exit_code == status


@pytest.mark.parametrize(("verdict", "status"), [(PROMOTED, 0), (PENDING_APPROVAL, 0), (REJECTED, 3), ("", 0)])
def test_a_refused_model_is_no_success(root: Root, verdict: str, status: int) -> None:
    run = TrackedRun(root).context.record
    run.verdict = verdict
    Runs(root).save(run)
    left = 0
    with contextlib.suppress(typer.Exit):
        left = REFUSED_STATUS
        exit_as_judged(root, run.name)
        left = 0
    assert left == status
