"""What may be read, in each of its forms, against a loop over queries and keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model import attention
from herd.llama3.model.attention import SHORTEST, _starts, attention_mask, can_attend, document_lengths

batches = st.integers(1, 3).flatmap(
    lambda batch: st.lists(
        st.lists(st.integers(0, 3), min_size=12, max_size=12).map(sorted), min_size=batch, max_size=batch
    )
)


@given(numbers=batches, order=st.permutations(range(12)), held=st.integers(1, 12))
def test_a_query_reads_its_document_up_to_itself(numbers: list[list[int]], order: list[int], held: int) -> None:
    queries, keys = torch.tensor(order[:held]), torch.tensor(order)
    mask = can_attend(torch.tensor(numbers), queries, keys)
    for sequence, row in enumerate(numbers):
        for q, asking in enumerate(order[:held]):
            for t, asked in enumerate(order):
                assert mask[sequence, 0, q, t] == (asked <= asking and row[asked] == row[asking])


@given(numbers=batches)
def test_lengths_and_starts_are_runs_of_one_number_that_end_with_their_sequence(numbers: list[list[int]]) -> None:
    lengths = document_lengths(torch.tensor(numbers))
    runs = [row.count(number) for row in numbers for number in dict.fromkeys(row)]
    assert list(lengths) == runs
    starts = _starts(lengths).tolist()
    assert starts[: len(runs) + 1] == [sum(runs[:at]) for at in range(len(runs) + 1)]
    assert set(starts[len(runs) :]) == {12 * len(numbers)}
    assert (len(starts) - 1).bit_count() == 1


def test_each_batch_takes_the_cheapest_form_on_the_cpu() -> None:
    positions = torch.arange(8 * SHORTEST)
    halves = (positions >= 4 * SHORTEST).long().expand(2, -1)
    assert attention_mask(None, positions, positions) == (None, None, None, None)
    assert attention_mask(halves, positions, positions).lengths == (4 * SHORTEST,) * 4
    crumbs = attention_mask(positions.expand(2, -1), positions, positions)
    compiled = attention_mask(halves, positions, positions, compiled=True)
    elsewhere = attention_mask(halves, positions[::2], positions)
    for masked, queries in ((crumbs, positions), (compiled, positions), (elsewhere, positions[::2])):
        assert masked.lengths is None
        assert masked.mask is not None
        assert masked.mask.shape == (2, 1, len(queries), len(positions))
    assert attention_mask(None, positions[::2], positions).mask is not None, "no documents, but keys in another order"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("documents", "in_order", "dtype", "form"),
    [
        (False, True, torch.bfloat16, None),
        (True, True, torch.bfloat16, "starts"),
        (True, True, torch.float32, "blocks"),  # the packed kernel has no fp32
        (True, False, torch.bfloat16, "blocks"),  # nor keys in another order
        (False, False, torch.bfloat16, "blocks"),
    ],
)
def test_a_gpu_gets_the_form_that_its_kernels_know(
    documents: bool,
    in_order: bool,
    dtype: torch.dtype,
    form: str | None,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Positions are only passed on here, so they need no GPU."""
    numbers = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    on_gpu: Any = [SimpleNamespace(device=torch.device("cuda", 1)) for _ in range(2)]
    queries, keys = on_gpu[0], on_gpu[0 if in_order else 1]

    def starts(lengths: tuple[int, ...]) -> Any:
        assert lengths == (2, 2, 1, 3)
        return SimpleNamespace(pin_memory=lambda: SimpleNamespace(to=lambda *how, **more: (*how, more)))

    monkeypatch.setattr(attention, "_starts", starts)
    monkeypatch.setattr(attention, "_blocks", lambda *given: given)
    given_documents = numbers if documents else None
    visible = attention_mask(given_documents, queries, keys, dtype, compiled)
    made = {"starts": (queries.device, {"non_blocking": True}), "blocks": (given_documents, queries, keys), None: None}
    assert visible._asdict() == {name: made[form] if name == form else None for name in visible._fields}
