"""What a person decides is one record; what is shown follows it, also after a crash in between."""

from __future__ import annotations

from pathlib import Path

import pytest

import herd.tasks.promotion.approval
from herd.storage.lease import lease
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.operate.recovery import show_aliases
from herd.tasks.promotion.approval import Approval, append_answer, decide, question
from herd.tasks.promotion.log import CHALLENGER, PROMOTED, REJECTED, Promotion, PromotionLog, read_log
from herd.tasks.promotion.registry import Registry
from herd.tasks.runs.records import OPEN, PENDING_APPROVAL, Runs
from herd.tasks.stages.promote import decided_before
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.tasks.mlflow_server import use
from tests.tasks.promotion_samples import FAMILY, add, judged_record
from tests.tasks.tracked_run import TrackedRun, models


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with one run, whose model is the champion."""
    root = Root.parse(tmp_path_factory.mktemp("root"))
    TrackedRun(root).all()
    return root


def waiting(root: Root) -> Promotion:
    """Have the model of the run wait for a person, as a second look at it would."""
    champion = read_log(root, FAMILY)[0]
    return add(root, 1, PENDING_APPROVAL, artifact=champion.artifact, asked=True)


def test_an_approval_and_a_rejection_are_recorded_and_shown(root: Root) -> None:
    first = waiting(root)
    show_aliases(root, FAMILY)
    assert models(MLflowTracker(root, FAMILY))["aliases"][CHALLENGER] == first.artifact
    assert "passed the gate. Make it the **champion**" in question(first)
    made, shown = decide(root, "tiny-1", True, "Ada", "reads well")
    assert (made.kind, made.by, made.comment, shown) == (PROMOTED, "Ada", "reads well", True)
    assert Runs(root).find("tiny-1").verdict == "promoted"
    found = models(MLflowTracker(root, FAMILY))
    assert CHALLENGER not in found["aliases"]
    assert found["versions"][first.artifact]["verdict"] == "promoted"
    (version,) = Registry(MLflowTracker(root, FAMILY)).versions().values()
    assert "| approval/person | a person approves | approved by Ada at" in version.description
    waiting(root)
    made, _ = decide(root, "tiny-1", False, "Ada")
    assert (made.kind, Runs(root).find("tiny-1").verdict) == (REJECTED, "rejected")
    with pytest.raises(ValueError, match="tiny-1 does not wait for approval: it is rejected"):
        decide(root, "tiny-1", True, "Bob")


def test_a_crash_before_it_is_shown_is_made_good_by_the_next_command(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting(root)
    with monkeypatch.context() as patch:
        patch.setattr(herd.tasks.promotion.approval, "apply", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            decide(root, "tiny-1", True, "Ada")
    assert read_log(root, FAMILY)[-1].kind == PROMOTED
    assert Runs(root).find("tiny-1").verdict == "rejected", "as before"
    with pytest.raises(ValueError, match="it is promoted"):
        decide(root, "tiny-1", True, "Ada")
    assert Runs(root).find("tiny-1").verdict == "promoted"


def test_without_mlflow_it_is_decided_all_the_same_and_marked_for_later(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting(root)
    root.remove(OPEN, "tiny-1")
    with monkeypatch.context() as patch:
        use(patch, f"http://127.0.0.1:{free_port()}")
        made, shown = decide(root, "tiny-1", False, "Ada")
    assert (made.kind, shown) == (REJECTED, False)
    assert Runs(root).find("tiny-1").mlflow_stale
    assert "tiny-1" in root.names(OPEN), "reconcile will look at it"


def test_a_run_that_is_worked_on_or_never_was_decided_on_is_refused(root: Root) -> None:
    with lease(root, "runs/tiny-1", "somebody"), pytest.raises(ValueError, match="tiny-1 is being worked on"):
        decide(root, "tiny-1", True)
    TrackedRun(root)
    with pytest.raises(ValueError, match="tiny-2 does not wait for approval: it has no decision yet"):
        decide(root, "tiny-2", True)


def test_an_approval_is_refused_once_the_champion_is_another(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    TrackedRun(root)
    add(root, 8)
    challenger = add(root, 1, PENDING_APPROVAL, asked=True)
    other = add(root, 9)
    with pytest.raises(ValueError, match=f"the champion is {other.artifact} now, .*herd promote tiny-1"):
        decide(root, "tiny-1", True)
    assert read_log(root, FAMILY)[-1] == other
    assert decide(root, "tiny-1", False)[0].artifact == challenger.artifact, "a refusal rests on no comparison"


def test_an_answer_follows_what_another_process_has_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, append, tries = Root.parse(tmp_path), PromotionLog.append, list[str]()
    add(root, 1, PENDING_APPROVAL, asked=True)
    log = PromotionLog(root, FAMILY)

    def rivaled(log: PromotionLog, record: Promotion, expected_head: str) -> Promotion:
        tries.append(record.kind)
        assert len(tries) < 3, "it does not read what was added"
        if len(tries) == 1:
            append(other := PromotionLog(root, FAMILY), judged_record(3, REJECTED, other.records), other.head)
        return append(log, record, expected_head)

    add(root, 2, REJECTED)
    monkeypatch.setattr(PromotionLog, "append", rivaled)
    made = append_answer(log, "tiny-1", Approval(True, "Ada"))
    assert (made.n, made.against, made.kind, made.by) == (4, 3, PROMOTED, "Ada")


def test_a_run_that_died_after_it_was_decided_on_is_not_judged_again(tmp_path: Path) -> None:
    log = PromotionLog(Root.parse(tmp_path), FAMILY)
    assert decided_before(log.records, "tiny-1", judged_record(1).artifact) is None
    first = log.append(judged_record(1, log=log.records), log.head)
    assert decided_before(log.records, "tiny-1", first.artifact) == first
    assert decided_before(log.records, "tiny-2", first.artifact) is None, "another run asks anew"
    second = log.append(judged_record(2, PENDING_APPROVAL, log.records), log.head)
    assert decided_before(log.records, "tiny-2", second.artifact) == second
    log.append(judged_record(3, log=log.records), log.head)
    assert decided_before(log.records, "tiny-2", second.artifact) is None, "what it was compared with is gone"
