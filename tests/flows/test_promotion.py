"""The deployment `promote` refuses and rolls back too, by the same code as the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.checkpoint import _refuse, _roll_back, promote
from flows.cli import app
from flows.parameters import PromotionParameters
from llama3.recipe.schedule import Schedule
from storage.processes import free_port
from storage.root import Root
from tasks.promotion_log import read_log
from tasks.promotions import REFUSED, ROLLED_BACK, WAITS
from tests.flows.test_parameters import form, refused
from tests.tasks.mlflow_server import use
from tests.tasks.promotion_samples import FAMILY, add, champions
from tests.tasks.tracked_run import TrackedRun


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root whose MLflow is away: what is decided does not wait for it."""
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    return Root.of(tmp_path)


def test_the_form_offers_three_actions_and_no_other() -> None:
    assert form(promote)["action"]["enum"] == ["promote", "refuse", "roll back"]
    assert refused(promote, {"action": "roll back", "checkpoint": "tiny@champion", "to": "3"}) == []
    assert refused(promote, {"action": "demote"})


@pytest.mark.parametrize(("to", "back_to"), [("", 1), ("1", 0)])
def test_the_deployment_rolls_back_and_says_from_what_to_what(root: Root, to: str, back_to: int) -> None:
    made = champions(root, 3)
    asked = PromotionParameters(
        root=root.uri, action="roll back", checkpoint=f"{FAMILY}@champion", to=to, by="Ada", comment="it loops"
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
    add(root, 1, WAITS, artifact=checkpoint.label, asked=True)
    asked = PromotionParameters(root=root.uri, action="refuse", checkpoint=checkpoint.label, by="Ada")
    assert _refuse(asked).message.startswith(f"tiny-1: refused, {checkpoint.label} stays a candidate")
    add(root, 1, WAITS, artifact=checkpoint.label, asked=True)
    done = CliRunner().invoke(app, ["refuse", "tiny-1", "--root", root.uri, "--by", "Bob"])
    assert done.exit_code == 0, done.output
    assert [record.by for record in read_log(root, FAMILY) if record.kind == REFUSED] == ["Ada", "Bob"]


def test_mistakes_are_told_in_a_line(root: Root) -> None:
    for words, said in (
        (["rollback", FAMILY], "no model of tiny was promoted to champion yet"),
        (["promotions", FAMILY], "family 'tiny' has no promotions"),
        (["approve", "tiny-7"], "run 'tiny-7' does not exist"),
    ):
        done = CliRunner().invoke(app, [*words, "--root", root.uri])
        assert done.exit_code == 2
        assert said in done.output
