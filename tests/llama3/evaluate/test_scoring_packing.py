"""Plans: every token scored once, nothing seen that should not be, and no more read than without sharing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate.scoring import BatchLimits, PackedBatch, PackedRow, Scorable, plan_batches, sliding_windows
from tests.llama3.evaluate.packing_samples import questions

BUDGET = BatchLimits(512, 2048)


def seen(batch: PackedBatch, row: PackedRow, place: int) -> list[int]:
    """Return the tokens that place `place` of a row sees, itself included."""
    assert row.tokens[: len(batch.prefix)] == batch.prefix
    ends = [row.trunk]
    for branch in row.branches:
        ends.append(ends[-1] + branch)
    if place < row.trunk:
        return row.tokens[: place + 1]
    begin = max(end for end in ends if end <= place)
    return row.tokens[: row.trunk] + row.tokens[begin : place + 1]


@given(questions(), st.sampled_from([16, 64, 512]), st.booleans())
def test_every_token_is_scored_once_after_what_stands_before_it(
    asked: list[Scorable], window: int, share: bool
) -> None:
    scored: list[tuple[int, int]] = []
    for batch in plan_batches(asked, window, BUDGET, share):
        for row in batch.rows:
            assert len(row.tokens) == row.trunk + sum(row.branches)
            assert row.free >= len(batch.prefix)
            for part in row.scored:
                tokens, _ = asked[part.sequence]
                for place, target in zip(part.positions, part.targets, strict=True):
                    at, before = target // 10, seen(batch, row, place)
                    assert tokens[at] == target
                    assert before == tokens[at - len(before) : at]
                    assert len(before) == at if len(tokens) - 1 <= window else len(before) <= window
                    scored.append((part.sequence, at))
    wanted = [(index, at) for index, (tokens, start) in enumerate(asked) for at in range(start, len(tokens))]
    assert sorted(scored) == wanted


@given(questions(), st.sampled_from([16, 512]))
def test_batches_keep_their_budget_and_sharing_never_reads_more(asked: list[Scorable], window: int) -> None:
    def read(share: bool) -> int:
        batches = plan_batches(asked, window, BUDGET, share)
        for batch in batches:
            longest = max(len(row.tokens) for row in batch.rows)
            assert len(batch.rows) == 1 or len(batch.rows) * batch.longest <= BUDGET.positions
            assert len(batch.rows) == 1 or len(batch.rows) * longest <= BUDGET.held
        prefixes = {tuple(batch.prefix) for batch in batches}
        rows = sum(len(row.tokens) - len(batch.prefix) for batch in batches for row in batch.rows)
        return rows + sum(map(len, prefixes))

    assert read(True) <= read(False)


@given(questions(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order(asked: list[Scorable], dice: object) -> None:
    def shape(order: list[int]) -> list[object]:
        batches = plan_batches([asked[place] for place in order], 512, BUDGET)
        return [
            (
                batch.prefix,
                [(row.tokens, row.branches, [(p.positions, p.targets) for p in row.scored]) for row in batch.rows],
            )
            for batch in batches
        ]

    order = list(range(len(asked)))
    before = shape(order)
    dice.shuffle(order)  # type: ignore[attr-defined]
    assert shape(order) == before


@given(questions(), st.sampled_from([16, 64, 512]), st.integers(64, 512), st.integers(64, 2048))
def test_a_batch_stays_within_both_limits(asked: list[Scorable], window: int, positions: int, held: int) -> None:
    """A row alone may be over them; a second one is not added."""
    for batch in plan_batches(asked, window, BatchLimits(positions, held)):
        if len(batch.rows) > 1:
            assert len(batch.rows) * batch.longest <= positions
            assert len(batch.rows) * (batch.longest + len(batch.prefix)) <= held


def test_letters_of_a_question_take_one_row_and_examples_one_reading() -> None:
    examples = [0, *range(100, 200)]
    asked = [([*examples, question, letter], len(examples) + 1) for question in range(1, 51) for letter in (5, 6, 7, 8)]
    batches = plan_batches(asked, 512, BUDGET)
    assert {tuple(batch.prefix) for batch in batches} == {tuple(examples)}
    rows = [row for batch in batches for row in batch.rows]
    assert len(rows) == 50
    assert all(len(row.tokens) == len(examples) + 1 and len(row.scored) == 4 for row in rows)


def test_whole_documents_share_nothing() -> None:
    asked = [([0, *range(1, length)], 1) for length in (40, 60, 80)]
    (batch,) = plan_batches(asked, 512, BUDGET)
    assert [len(row.tokens) for row in batch.rows] == [79, 59, 39]
    assert not batch.prefix


def test_documents_of_a_collection_with_an_own_beginning_each_stand_in_runs_of_their_own() -> None:
    """Two sets of examples that begin alike are two runs: the shorter common beginning would save less."""
    one, two = [0, *[9] * 50, *[1] * 100], [0, *[9] * 50, *[2] * 100]
    asked = [
        ([*begin, question, question + 1, 5], len(begin) + 2) for begin in (one, two) for question in range(10, 40)
    ]
    assert {tuple(batch.prefix) for batch in plan_batches(asked, 512, BUDGET)} == {tuple(one), tuple(two)}


@given(st.integers(2, 300), st.integers(2, 40), st.data())
def test_windows_score_every_token_once_with_enough_context(length: int, window: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(1, length - 1))
    spans = list(sliding_windows(range(length), start, window))
    scored = [token for span in spans for token in range(span.scored, span.end + 1)]
    assert scored == list(range(start, length))
    for span in spans:
        assert 0 <= span.begin < span.scored <= span.end
        assert span.end - span.begin <= window
        assert span.begin == 0 or len(spans) == 1 or span.scored - span.begin >= window / 2
    assert (len(spans) == 1) == (length - start <= window)
    if len(spans) == 1:
        assert spans[0].begin == max(0, length - 1 - window)


def test_windows_refuse_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="window 1 must be at least 2"):
        list(sliding_windows([1, 2, 3], 1, 1))
    with pytest.raises(ValueError, match="start 0 at least 1"):
        list(sliding_windows([1, 2, 3], 0, 4))
    with pytest.raises(ValueError, match="start 0 at least 1"):
        plan_batches([([1, 2, 3], 0)], 4, BUDGET)
    with pytest.raises(ValueError, match="window 1 must be at least 2"):
        plan_batches([([1, 2, 3], 1)], 1, BUDGET)


def test_nothing_to_score_is_nothing_to_read() -> None:
    assert plan_batches([([1, 2, 3], 3), ([1], 1)], 8, BUDGET) == []
