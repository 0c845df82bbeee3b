"""A candidate is vetted and weighed against the champion of the moment; what is seeded into it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from herd.llama3.evaluate.gate import Evidence
from herd.llama3.model.files import WEIGHTS
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.sections import Promote
from herd.llama3.tokens.tokenizer import train_tokenizer
from herd.storage.artifact import Artifact
from herd.storage.processes import free_port
from herd.tasks.models import export
from herd.tasks.promotion.log import PROMOTED, REJECTED, Log, Promotion, PromotionLog
from herd.tasks.promotion.registry import gate_table
from herd.tasks.runs.records import PENDING_APPROVAL
from herd.tasks.stages import gate, promote
from herd.tasks.stages.evaluate import evaluate_model
from herd.tasks.stages.gate import (
    CHAMPION,
    ChampionModel,
    Override,
    decide,
    measure_candidate,
    measure_champion,
    vet,
)
from herd.tasks.stages.promote import append_decision
from tests.llama3.export.export_samples import TEXTS
from tests.tasks.mlflow_server import use
from tests.tasks.promotion_workspace import PromotionWorkspace

CHECKS = ["integrity/files", "integrity/reload", "integrity/export", "integrity/tokenizer", "serving", "contamination"]


@pytest.fixture(autouse=True)
def outside_of_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score without a flow around it, and with MLflow away: no judgement needs either.

    Serving takes a process that loads MLflow: test_served_model.py has it.
    """
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(gate, "evaluate_model", evaluate_model.fn)
    monkeypatch.setattr(export, "smoke_test", lambda folder: None)


@pytest.fixture
def workspace(tmp_path: Path) -> PromotionWorkspace:
    return PromotionWorkspace(tmp_path, "promote.when={eval/bpb: better}")


def judge_of(
    workspace: PromotionWorkspace, checkpoint: Artifact, scored: Artifact | None = None, **said: str
) -> Callable[[Log], Promotion]:
    """Return the decision on `checkpoint` by a log, with the scores of another model where its own cannot be had."""
    evaluation = workspace.evaluation(scored or checkpoint)
    candidate = measure_candidate(workspace.context, checkpoint, evaluation, workspace.curated)

    def judge(log: Log) -> Promotion:
        champion = measure_champion(workspace.context, log, evaluation, workspace.curated)
        return decide(candidate, champion, workspace.recipe.promote, Override(**said), "2026-11-25T10:00:00+00:00")

    return judge


class Rivals:
    """Appends records of other promoters just before a promoter appends its own; tells what was measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *records: Promotion) -> None:
        self.records, self.measured = list(records), list[str]()
        self.append = PromotionLog.append
        monkeypatch.setattr(PromotionLog, "append", lambda *args: self._append(*args))
        monkeypatch.setattr(promote, "measure_champion", self._measure)

    def _append(self, log: PromotionLog, record: Promotion, expected_head: str) -> Promotion:
        if self.records:
            self.append(PromotionLog(log.root, log.family), self.records.pop(), expected_head)
        return self.append(log, record, expected_head)

    def _measure(self, *args: Any) -> ChampionModel:
        champion = measure_champion(*args)
        self.measured.append(champion.artifact)
        return champion


def failed(record: Promotion) -> list[str]:
    return [row.metric for row in record.decision.rows if not row.passed]


def test_a_whole_candidate_is_promoted_where_there_is_no_champion(workspace: PromotionWorkspace) -> None:
    record = judge_of(workspace, workspace.checkpoint())([])
    assert (record.kind, record.champion, record.by) == (PROMOTED, "", "")
    assert [row.metric for row in record.decision.rows] == [*CHECKS, "integrity/finite", "eval/bpb"]
    reasons = {row.metric: row.reason for row in record.decision.rows}
    unchecked = [row for row in record.decision.rows if row.verdict == "not checked"]
    assert [(row.metric, row.checked, row.reason) for row in unchecked] == [
        ("contamination", False, "curate.decontaminate names no evaluation sets")
    ]
    assert "| contamination | must hold | not checked: curate.decontaminate names no" in gate_table(
        record.decision.rows
    )
    assert record.evidence is not None
    assert Evidence.model_validate_json(record.evidence.model_dump_json()).decide() == record.gate
    assert reasons["serving"] == "loads in a fresh process without pickle, and generates text"


def test_it_is_judged_again_against_a_champion_that_was_made_meanwhile(
    workspace: PromotionWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workspace.checkpoint(1), workspace.checkpoint(2)
    rivals = Rivals(monkeypatch, judge_of(workspace, first)([]))
    log, evaluation = PromotionLog(workspace.root, "quickstart"), workspace.evaluation(second)
    record = append_decision(workspace.context, log, second, evaluation, workspace.curated, Override())
    assert rivals.measured == ["", first.label]
    assert (record.n, record.against, record.champion) == (2, 1, first.label)
    assert record.evidence is not None
    assert record.evidence.champion is not None
    assert record.evidence.differences is not None
    assert "eval/bpb" in record.evidence.differences
    assert record.evidence.decide() == record.gate
    assert record.evidence.used == 1, "the winner was judged on the same documents"


def test_a_champion_that_was_trained_on_other_lengths_is_told_in_a_row(workspace: PromotionWorkspace) -> None:
    def shorten(model: Path) -> None:
        config = model / "config.json"
        config.write_text(config.read_text().replace('"max_seq_len": 512', '"max_seq_len": 256'))

    log = PromotionLog(workspace.root, "quickstart")
    log.append(judge_of(workspace, workspace.checkpoint(1, shorten))([]), log.head)
    rows = {row.metric: row for row in judge_of(workspace, workspace.checkpoint(2))(log.records).decision.rows}
    assert rows["champion/window"].reason == "the candidate reads 512 positions at once, the champion 256"
    assert rows["champion/window"].passed
    assert rows["eval/bpb"].reason.partition("%, ")[2].startswith("4 documents)")


def test_a_judgement_survives_records_that_change_no_champion(
    workspace: PromotionWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workspace.checkpoint(1), workspace.checkpoint(2)
    log, evaluation = PromotionLog(workspace.root, "quickstart"), workspace.evaluation(second)
    champion = log.append(judge_of(workspace, first)([]), log.head)
    before = judge_of(workspace, second)(log.records)
    rivals = Rivals(monkeypatch, champion.model_copy(update={"kind": REJECTED}))
    after = append_decision(workspace.context, log, second, evaluation, workspace.curated, Override())
    assert rivals.measured == [first.label]
    assert (after.n, after.against, after.evidence, after.gate) == (3, 1, before.evidence, before.gate)


def test_a_later_run_that_changes_nothing_is_not_judged_again(workspace: PromotionWorkspace) -> None:
    first, second = workspace.checkpoint(1), workspace.checkpoint(2)
    log = PromotionLog(workspace.root, "quickstart")

    def judged(run: str, checkpoint: Artifact, override: Override = Override()) -> tuple[str, int]:  # noqa: B008
        workspace.context.record.name, evaluation = run, workspace.evaluation(checkpoint)
        record = append_decision(workspace.context, log, checkpoint, evaluation, workspace.curated, override)
        return record.run, record.n

    def rule(text: str) -> None:
        policy = Promote.model_validate({"when": {"eval/bpb": text}})
        workspace.context.recipe = workspace.recipe.model_copy(update={"promote": policy})

    assert judged("quickstart-1", first) == ("quickstart-1", 1)
    assert judged("quickstart-2", first) == ("quickstart-1", 1), "it is the champion"
    rule("at most 0.1")
    assert judged("quickstart-3", second) == ("quickstart-3", 2)
    assert log.records[-1].kind == REJECTED
    assert judged("quickstart-4", second) == ("quickstart-3", 2)
    assert judged("quickstart-4", second, Override(rejudge=True)) == ("quickstart-4", 3), "a person asks"
    rule("at most 0.2")
    assert judged("quickstart-5", second) == ("quickstart-5", 4), "the rules have changed"


def rewritten(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(model: Path) -> None:
        state = load_file(model / WEIGHTS)
        change(state)
        save_file(state, model / WEIGHTS)

    return rewrite


def test_weights_that_are_not_finite_are_refused(workspace: PromotionWorkspace) -> None:
    whole = workspace.checkpoint(1)
    broken = workspace.checkpoint(2, rewritten(lambda state: state["norm.weight"][0].fill_(float("nan"))))
    record = judge_of(workspace, broken, whole)([])
    assert record.kind == REJECTED
    assert "integrity/reload" in failed(record)


def test_a_damaged_file_is_refused(workspace: PromotionWorkspace) -> None:
    checkpoint = workspace.checkpoint()
    scores = workspace.evaluation(checkpoint)
    path = checkpoint.path / "model" / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x01
    path.write_bytes(data)
    candidate = measure_candidate(workspace.context, checkpoint, scores, workspace.curated)
    record = decide(candidate, ChampionModel("", []), workspace.recipe.promote, Override(), "noon")
    assert failed(record) == ["integrity/files"]
    assert "model.safetensors changed since it was committed" in record.why


def test_another_tokenizer_is_refused(workspace: PromotionWorkspace) -> None:
    other = train_tokenizer([text.upper() for text in TEXTS], 290)
    assert other.vocab_size == workspace.coder.vocab_size
    record = judge_of(workspace, workspace.checkpoint(change=other.save))([])
    assert (record.kind, failed(record)) == (REJECTED, ["integrity/tokenizer"])


@pytest.mark.parametrize(
    ("action", "confirmed", "passes"), [("report", 0, True), ("report", 1, False), ("drop", 9, True)]
)
def test_examples_that_were_trained_on_are_refused(
    workspace: PromotionWorkspace, action: str, confirmed: int, passes: bool
) -> None:
    workspace.curated = workspace.with_benchmark(action, confirmed)
    record = judge_of(workspace, workspace.checkpoint())([])
    assert failed(record) == ([] if passes else ["contamination/trivia"])
    (row,) = [row for row in record.decision.rows if row.metric == "contamination/trivia"]
    assert row.reason.startswith(f"trivia: {confirmed} of 50 examples are in the documents")


def test_a_model_that_cannot_be_served_is_refused_with_what_it_said(
    workspace: PromotionWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "smoke_test", lambda folder: "serving: no")
    checkpoint = workspace.checkpoint()
    evaluation = workspace.evaluation(checkpoint)
    found = {check.metric: check for check in vet(workspace.context, checkpoint, evaluation, workspace.curated)}
    assert (found["serving"].passed, found["serving"].reason) == (False, "serving: no")
    monkeypatch.setattr(gate, "place_evaluation", lambda recipe, cluster: (Layout(tp=2), 2))  # it fits no device
    found = {check.metric: check for check in vet(workspace.context, checkpoint, evaluation, workspace.curated)}
    assert found["serving"].passed
    assert "on tp 2 x pp 1" in found["serving"].reason


def test_a_person_may_decide_against_the_gate_but_not_against_integrity(workspace: PromotionWorkspace) -> None:
    workspace.curated = workspace.with_benchmark("report", 1)
    record = judge_of(workspace, workspace.checkpoint(1), by="Ada", override="the set is retired")([])
    assert (record.kind, record.override, record.by) == (PROMOTED, "the set is retired", "Ada")
    assert failed(record) == ["contamination/trivia"]
    assert record.gate is not None
    assert not record.gate.accepted
    other = train_tokenizer([text.upper() for text in TEXTS], 290)
    with pytest.raises(ValueError, match="integrity/tokenizer cannot be overridden"):
        judge_of(workspace, workspace.checkpoint(2, other.save), override="trust me")([])


def test_a_champion_that_was_deleted_is_refused_by_name_until_somebody_decides(workspace: PromotionWorkspace) -> None:
    first, second = workspace.checkpoint(1), workspace.checkpoint(2)
    log = [judge_of(workspace, first)([])]
    workspace.store.delete(first.label)
    record = judge_of(workspace, second)(log)
    assert (record.kind, failed(record)) == (REJECTED, [CHAMPION])
    assert f"artifact '{first.label}': not found" in record.why
    assert "herd rollback quickstart --to" in record.why
    assert judge_of(workspace, second, override="it is lost")(log).kind == PROMOTED


def test_what_passes_waits_where_a_person_is_asked(tmp_path: Path) -> None:
    workspace = PromotionWorkspace(tmp_path, "promote.approval=manual")
    first = workspace.checkpoint(1)
    record = judge_of(workspace, first)([])
    assert (record.kind, record.asked) == (PENDING_APPROVAL, True)
    assert record.decision.refusals == ["waits for approval by a person"]
    insisted = judge_of(workspace, first, by="Ada", override="I read it")([])
    assert (insisted.kind, insisted.override, insisted.comment) == (PROMOTED, "", "I read it")
    assert insisted.decision.rows[-1].reason.startswith("approved by Ada at ")
    champion = record.decided(True, "Ada", "", "noon", 1)
    assert judge_of(workspace, first)([record, champion]).kind == PROMOTED, "it is the champion already"
