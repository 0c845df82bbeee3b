"""A rollback gives the alias back at once, is one record, and refuses what cannot be gone back to."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from herd.flows.cli.main import app
from herd.storage.artifact import Artifact
from herd.storage.object_artifact import open_store
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.models.lookup import label_of_alias
from herd.tasks.operate.recovery import reconcile, show_aliases
from herd.tasks.promotion import rollback
from herd.tasks.promotion.log import (
    CANDIDATE,
    CHAMPION,
    COLUMNS,
    PREVIOUS,
    REJECTED,
    ROLLED_BACK,
    Promotion,
    PromotionLog,
    alias_history,
    current_aliases,
    current_label,
    decided,
    promotion_table,
    read_log,
)
from herd.tasks.promotion.registry import SOMEBODY, Registry
from herd.tasks.promotion.rollback import RollbackRequest, roll_back
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.tasks.mlflow_server import use
from tests.tasks.promotion_samples import FAMILY, add, append_to, champions, judged_record
from tests.tasks.standing_root import commit
from tests.tasks.tracked_run import models, two_runs


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root whose MLflow is away: nothing here may need it."""
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    return Root.parse(tmp_path)


def back(root: Root, to: str = "", **more: str) -> str:
    """Roll back and return the label of the champion."""
    record, shown = roll_back(root, RollbackRequest(FAMILY, to=to, by="Ada", **more))
    assert not shown, "MLflow is away"
    assert read_log(root, FAMILY)[-1] == record
    return record.artifact


def test_it_goes_back_one_champion_at_a_time_and_never_to_one_that_was_left(root: Root) -> None:
    first, second, third = (artifact.label for artifact in champions(root, 3))
    assert back(root) == second
    assert label_of_alias(root, FAMILY, CHAMPION) == second
    assert label_of_alias(root, FAMILY, PREVIOUS) == first
    assert back(root, comment="it loops") == first
    record = read_log(root, FAMILY)[-1]
    assert (record.kind, record.champion, record.by, record.comment) == (ROLLED_BACK, second, "Ada", "it loops")
    assert (record.run, record.position, record.against) == ("tiny-1", 100, 4)
    with pytest.raises(ValueError, match=rf"tiny@champion is {first}, no model held it before; name one with --to"):
        back(root)
    assert back(root, to=third) == third  # forward again
    assert back(root) == first
    assert "tiny@champion: rolled back from" in decided(read_log(root, FAMILY)[-1], True)


def test_a_model_is_named_by_its_label_or_by_a_number_of_the_log(root: Root) -> None:
    first, second, third = (artifact.label for artifact in champions(root, 3))
    assert back(root, to="1") == first
    assert back(root, to=second.removeprefix("checkpoint/")) == second
    with pytest.raises(ValueError, match=f"{second} holds tiny@champion already"):
        back(root, to="2")
    refused = add(root, 9, REJECTED)
    for wrong in (refused.artifact, str(refused.n), "99", "checkpoint/tiny-main-12345678"):
        with pytest.raises(ValueError, match=f"'{wrong}' never held tiny@champion; choose .*3 {third}"):
            back(root, to=wrong)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_model_whose_artifact_is_not_there_is_refused_with_those_that_are(root: Root, damage: str) -> None:
    first, second, _ = champions(root, 3)
    if damage == "gone":
        open_store(root).delete(second.label)
    else:
        (second.folder / "data.txt").write_text("x")
    before = read_log(root, FAMILY)
    with pytest.raises(ValueError, match=rf"{second.label}.*; choose --to {first.label}"):
        back(root)
    open_store(root).delete(first.label)
    with pytest.raises(ValueError, match="no other model that held it exists"):
        back(root)
    assert read_log(root, FAMILY) == before


def test_where_nothing_was_promoted_there_is_nothing_to_go_back_to(root: Root) -> None:
    with pytest.raises(ValueError, match="no model of tiny was promoted to champion yet"):
        back(root)
    add(root, 1, REJECTED)
    with pytest.raises(ValueError, match="no model of tiny was promoted to staging yet"):
        roll_back(root, RollbackRequest(FAMILY, "staging"))


def test_a_champion_that_changes_meanwhile_stops_it(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two people who see the same bad champion would go back twice."""
    first, second, third = (artifact.label for artifact in champions(root, 3))
    append, others = PromotionLog.append, iter([third])

    def late(log: PromotionLog, record: Promotion, expected_head: str) -> Promotion:
        if next(others, ""):
            assert back(root) == second  # somebody else was faster
        return append(log, record, expected_head)

    monkeypatch.setattr(PromotionLog, "append", late)
    with pytest.raises(ValueError, match=f"tiny@champion was {third} and is now {second}"):
        back(root)
    assert label_of_alias(root, FAMILY, CHAMPION) == second
    assert label_of_alias(root, FAMILY, PREVIOUS) == first


def test_each_alias_goes_back_among_its_own_holders(root: Root) -> None:
    models = [commit(root, "checkpoint", "tiny-main", {"end": 100}, seed=str(number)).label for number in range(4)]
    for number, (label, alias) in enumerate(zip(models, ("staging", CHAMPION) * 2, strict=True), start=1):
        add(root, number, artifact=label, alias=alias)
    record, _ = roll_back(root, RollbackRequest(FAMILY, "staging"))
    assert (record.alias, record.champion, record.artifact) == ("staging", models[2], models[0])
    assert current_aliases(read_log(root, FAMILY)) == {
        "staging": models[0], CHAMPION: models[3], PREVIOUS: models[1], CANDIDATE: models[3]
    }  # fmt: skip
    open_store(root).delete(models[2])
    with pytest.raises(ValueError, match="no other model that held it exists"):
        roll_back(root, RollbackRequest(FAMILY, "staging", to=models[2]))


@given(st.lists(st.one_of(st.just(""), st.integers(1, 4).map(str)), max_size=8))
def test_whatever_is_asked_the_champion_is_there_and_once_was_promoted(
    tmp_path_factory: pytest.TempPathFactory, asked: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, f"http://127.0.0.1:{free_port()}")
        root = Root.parse(tmp_path_factory.mktemp("root"))
        made = {artifact.label for artifact in champions(root, 4)}
        patch.setattr(rollback, "show_log", lambda *_: False)
        for to in asked:
            log = read_log(root, FAMILY)
            try:
                champion = back(root, to)
            except ValueError:
                assert read_log(root, FAMILY) == log
                continue
            assert champion in made
            assert champion != current_label(log, CHAMPION)
            assert to or champion == alias_history(log, CHAMPION)[-2].artifact


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with two runs whose models were promoted one after the other, shown in its own MLflow."""
    return two_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.fault("F26")
def test_aliases_and_tags_follow_also_after_a_crash_before_they_did(
    runs: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = runs
    tracker = MLflowTracker(root, FAMILY)
    first, second = (record.artifact for record in read_log(root, FAMILY))
    assert models(tracker)["aliases"] == {CHAMPION: second, PREVIOUS: first, "candidate": second}
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            roll_back(root, RollbackRequest(FAMILY, by="Ada"))
    assert label_of_alias(root, FAMILY, CHAMPION) == first, "the log has it"
    assert models(tracker)["aliases"][CHAMPION] == second, "MLflow is behind"
    settled = [line.after for line in reconcile(root, None) if line.run == FAMILY]
    assert sorted(settled) == ["champion: version 1", "previous: none"]
    assert models(tracker)["aliases"] == {CHAMPION: first, "candidate": second}
    assert show_aliases(root, FAMILY) == []

    record, shown = roll_back(root, RollbackRequest(FAMILY, to=second, by="Ada", comment="it was not the model"))
    assert shown
    assert models(tracker)["aliases"] == current_aliases(read_log(root, FAMILY))
    for version in Registry(tracker).versions().values():
        assert f"by Ada at {record.time}: it was not the model\n" in version.description


def test_a_record_that_another_process_adds_while_aliases_are_written_is_shown_too(
    runs: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, (first, second) = PromotionLog(runs, FAMILY), [record.artifact for record in read_log(runs, FAMILY)[:2]]
    other = first if current_label(log.records, CHAMPION) == second else second
    set_aliases, written = Registry.set_aliases, list[int]()

    def set_while_the_log_grows(registry: Registry, log: PromotionLog) -> list[str]:
        changes = set_aliases(registry, log)
        written.append(len(log.records))
        if len(written) == 1:
            add(runs, 3, artifact=other)
        return changes

    monkeypatch.setattr(Registry, "set_aliases", set_while_the_log_grows)
    tracker = MLflowTracker(runs, FAMILY)
    Registry(tracker).publish(log)
    assert models(tracker)["aliases"][CHAMPION] == other
    assert written == [written[0], written[0] + 1]


@pytest.mark.slow
def test_of_many_who_show_the_log_the_last_to_write_has_read_all(runs: Root) -> None:
    root, labels = runs, [record.artifact for record in read_log(runs, FAMILY)[:2]] * 2

    def promoter(number: int) -> None:
        log = PromotionLog(root, FAMILY)
        for label in labels:
            append_to(log, lambda records, label=label: judged_record(number, log=records, artifact=label))  # type: ignore[misc]
            Registry(MLflowTracker(root, FAMILY)).publish(log)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(promoter, range(4)))
    log = read_log(root, FAMILY)
    assert models(MLflowTracker(root, FAMILY))["aliases"] == current_aliases(log)
    assert not [record for record in log if record.by == SOMEBODY], "none of them passes for a person"


def test_the_command_tells_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Artifact] = champions(Root.parse(tmp_path), 2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    words = ["rollback", FAMILY, "--root", str(tmp_path), "--by", "Ada", "--comment", "loops"]
    run = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert run.output.startswith(f"tiny@champion: rolled back from {made[1].label} to {made[0].label}"), run.output
    words = ["promotion-log", FAMILY, "--root", str(tmp_path)]
    assert "rolled back" in CliRunner().invoke(app, words).output
    holds = [row[COLUMNS.index("holds")] for row in promotion_table(Root.parse(tmp_path), FAMILY).rows]
    assert holds == ["", "candidate", "champion"], "the newest record of a model names what it holds"
    for width, told, left_out in ((300, ["rolled back", "Ada", "loops"], False), (80, ["rolled back"], True)):
        console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
        console.print(promotion_table(Root.parse(tmp_path), FAMILY))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        last = next(line for line in shown.splitlines() if line.startswith("3 "))
        assert all(word in last for word in told)
        assert ("no room for: why" in shown) == left_out
