"""Who holds which alias follows from the records alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate.gate import Check, Evidence
from herd.tasks.promotion.log import (
    ALIASES,
    APPROVAL,
    CANDIDATE,
    CHALLENGER,
    CHAMPION,
    IMPORTED,
    OVERRIDE,
    PREVIOUS,
    PROMOTED,
    REJECTED,
    ROLLED_BACK,
    Kind,
    Promotion,
    alias_history,
    current_aliases,
    current_label,
    decisive_record,
    gate_decisions,
    version_description,
    version_history,
    version_tags,
)
from herd.tasks.runs.records import PENDING_APPROVAL
from tests.tasks.promotion_samples import judged_record


def log_of(*events: tuple[int, Kind]) -> list[Promotion]:
    """Return the log of (model, what became of it)."""
    log: list[Promotion] = []
    for number, kind in events:
        log.append(judged_record(number, kind, log, n=len(log) + 1))
    return log


def held(log: list[Promotion]) -> dict[str, int]:
    """Return alias -> number of the model."""
    return {alias: int(label[-8:], 16) for alias, label in current_aliases(log).items()}


def test_the_champion_before_is_the_previous_and_the_last_judged_the_candidate() -> None:
    assert current_aliases([]) == {}
    assert held(log_of((1, PROMOTED))) == {CHAMPION: 1, CANDIDATE: 1}
    assert held(log_of((1, PROMOTED), (2, PROMOTED), (3, REJECTED))) == {CHAMPION: 2, PREVIOUS: 1, CANDIDATE: 3}


def test_a_challenger_waits_until_it_is_decided_on() -> None:
    log = log_of((1, PROMOTED), (2, PENDING_APPROVAL))
    assert held(log) == {CHAMPION: 1, CHALLENGER: 2, CANDIDATE: 2}
    for approved, after in ((True, {CHAMPION: 2, PREVIOUS: 1}), (False, {CHAMPION: 1})):
        answer = log[1].decided(approved, "Ada", "reads well", "later", len(log))
        assert held([*log, answer]) == {**after, CANDIDATE: 2}
        assert (answer.run, answer.against, answer.id != log[1].id) == ("tiny-2", 2, True)
    assert held(log_of((1, PENDING_APPROVAL), (2, PENDING_APPROVAL)))[CHALLENGER] == 2
    assert (
        held([*log_of((1, PENDING_APPROVAL), (2, PENDING_APPROVAL)), judged_record(2, REJECTED, n=3)])[CHALLENGER] == 1
    )


def test_a_rollback_takes_the_reigns_after_its_model_off_the_pile() -> None:
    log = log_of((1, PROMOTED), (2, PROMOTED), (3, PROMOTED), (2, ROLLED_BACK))
    assert held(log) == {CHAMPION: 2, PREVIOUS: 1, CANDIDATE: 3}
    assert held([*log, judged_record(1, ROLLED_BACK)]) == {CHAMPION: 1, CANDIDATE: 3}
    again = [*log, judged_record(3, ROLLED_BACK)]  # forward again
    assert held(again) == {CHAMPION: 3, PREVIOUS: 2, CANDIDATE: 3}


def test_imported_weights_are_a_champion_that_nobody_judged() -> None:
    imported = judged_record(1, IMPORTED, n=1, gate=None, evidence=None, comment="training started from public.gguf")
    assert held([imported]) == {CHAMPION: 1}
    assert gate_decisions([imported]) == []
    assert imported.decision.accepted
    assert imported.decision.rows == ()
    assert version_description([imported], imported.artifact) == "imported: training started from public.gguf"
    assert version_tags([imported], imported.artifact) == {"verdict": "imported", "tokens": "100"}
    log = [imported, judged_record(2, PROMOTED, [imported], n=2)]
    assert held(log) == {CHAMPION: 2, PREVIOUS: 1, CANDIDATE: 2}
    assert held([*log, judged_record(1, ROLLED_BACK)]) == {CHAMPION: 1, CANDIDATE: 2}
    assert held([imported, judged_record(2, REJECTED, [imported], n=2)]) == {CHAMPION: 1, CANDIDATE: 2}


def test_a_champion_that_is_promoted_again_is_no_predecessor_of_itself() -> None:
    assert held(log_of((1, PROMOTED), (2, PROMOTED), (2, PROMOTED))) == {CHAMPION: 2, PREVIOUS: 1, CANDIDATE: 2}


def test_other_aliases_are_held_besides_and_those_of_the_log_by_its_rules_alone() -> None:
    log = [judged_record(1, alias="staging"), judged_record(2), judged_record(3, alias=PREVIOUS)]
    assert held(log) == {"staging": 1, CHAMPION: 2, CANDIDATE: 3}


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([PROMOTED, REJECTED, PENDING_APPROVAL, ROLLED_BACK])), max_size=12
    )
)
def test_whatever_happened_the_last_change_names_the_champion_and_the_pile_ends_with_it(
    events: list[tuple[int, Kind]],
) -> None:
    log = log_of(*events)
    pile = [record.artifact for record in alias_history(log, CHAMPION)]
    found = current_aliases(log)
    assert pile[-1:] == ([current_label(log, CHAMPION)] if pile else [])
    assert found.get(CHAMPION, "") == current_label(log, CHAMPION)
    assert all(one != other for one, other in pairwise(pile)), "nobody follows itself"
    assert found.get(PREVIOUS, "") != found.get(CHAMPION, "") or not pile
    assert set(found) <= ALIASES
    assert found.get(CANDIDATE) == (gate_decisions(log)[-1].artifact if gate_decisions(log) else None)


def test_the_gates_decision_is_kept_beside_the_persons_and_replayed_from_its_evidence() -> None:
    waiting = judged_record(2, PENDING_APPROVAL, asked=True)
    assert waiting.decision.refusals == ["waits for approval by a person"]
    assert not waiting.decision.accepted
    for record in (waiting, waiting.decided(False, "Ada", "not yet", "noon", 1)):
        read = Promotion.model_validate_json(record.model_dump_json())
        assert read == record
        assert read.evidence is not None
        assert read.evidence.decide() == read.gate
    refused = waiting.decided(False, "Ada", "not yet", "noon", 1)
    assert refused.decision.refusals == ["rejected by Ada at noon: not yet"]
    approved = waiting.decided(True, "Ada", "", "noon", 1)
    assert approved.decision.accepted
    assert [row.reason for row in approved.decision.rows if row.metric == APPROVAL] == ["approved by Ada at noon"]
    assert not [row for row in judged_record(1).decision.rows if row.metric == APPROVAL]


def test_an_override_is_a_row_of_its_own() -> None:
    record = judged_record(2, override="the set was broken", by="Ada", time="noon")
    (row,) = [row for row in record.decision.rows if row.metric == OVERRIDE]
    assert row.reason == "overridden by Ada at noon: the set was broken"
    assert record.why == "the set was broken"


def test_a_later_judgement_leaves_the_evidence_that_promoted_a_version() -> None:
    """A rerun that reuses the champion has it judged against itself; a later champion has it refused."""
    log = [judged_record(1)]
    label = log[0].artifact
    promoted, said = version_tags(log, label), version_description(log, label)
    assert promoted == {"verdict": "promoted", "tokens": "100", "bpb": "2.5"}
    assert (said, version_history(log, label)) == ("promoted: run tiny-1, 100 tokens, eval/bpb 2.5", [])
    check = Check(metric="integrity/files", passed=True, reason="as committed, again")
    other = Evidence(rules={}, candidate={}, checks=(check,))
    again = judged_record(1, log=log, run="tiny-2", gate=other.decide(), evidence=other)
    log.append(again.model_copy(update={"n": 2}))
    assert version_history(log, label) == [
        "Judged again: promoted for tiny-2 at 2026-11-22T10:00:00+00:00, against itself; log number 2"
    ]
    assert version_tags(log, label) == promoted
    log.append(judged_record(2, log=log))
    log.append(judged_record(1, REJECTED, log, run="tiny-3"))
    assert version_history(log, label)[0].startswith("Judged again: rejected for tiny-3 ")
    assert (version_tags(log, label), version_description(log, label)) == (promoted, said)
    assert decisive_record(log, label) is log[0]
    log.append(judged_record(1, log=log, run="tiny-4", gate=other.decide(), evidence=other))
    assert version_history(log, label) == []
    assert decisive_record(log, label) is log[-1], "it won against another champion"


def test_versions_say_what_became_of_them() -> None:
    log = log_of((1, PROMOTED), (2, PROMOTED))
    back = judged_record(1, ROLLED_BACK, log, by="Ada", comment="it loops", time="noon")
    assert {version_tags([*log, back], record.artifact)["verdict"] for record in log} == {"promoted"}
    (first,), (second,) = (version_history([*log, back], record.artifact) for record in log)
    assert first == second
    assert first.startswith("Rolled back: champion from ")
    assert first.endswith("by Ada at noon: it loops")
    assert version_history(log, log[0].artifact) == []
    forward = judged_record(2, ROLLED_BACK, [*log, back], by="Bob", time="night")
    assert version_history([*log, back, forward], log[0].artifact)[0].endswith("by Bob at night")


def test_a_record_with_unknown_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="extra"):
        Promotion.model_validate({**judged_record(1).model_dump(), "version": "1"})
