"""Which checkpoints are kept and when one is due; what an optimizer step does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.sections import Keep, Optimizer
from herd.llama3.recipe.units import Cadence, Tokens
from herd.llama3.train.state import adamw
from herd.llama3.train.train_step import scale, squared_norm
from herd.llama3.train.trainer import SaveSchedule


def keep(last: int, every: int | None = None) -> Keep:
    return Keep(last=last, every=None if every is None else Tokens(every))


def test_the_newest_and_the_milestones_are_kept() -> None:
    positions = [30, 60, 90, 120, 150, 180, 210, 240]
    assert keep(2).kept(positions) == {210, 240}
    assert keep(1, 100).kept(positions) == {120, 210, 240}
    assert keep(1).kept(positions, pinned=[30]) == {30, 240}
    assert keep(3, 100).kept([]) == set()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 4), st.integers(20, 200))
def test_milestones_survive_deletion_as_they_come(gaps: list[int], last: int, every: int) -> None:
    """Deleting after each save leaves one checkpoint for each multiple that was reached, not fewer as time goes on."""
    present: list[int] = []
    reached: list[int] = []
    for gap in gaps:
        reached.append((reached[-1] if reached else 0) + gap)
        present = sorted(keep(last, every).kept([*present, reached[-1]]))
    milestones = {position // every for position in reached} - {0}
    assert {position // every for position in present} >= milestones
    assert set(present) >= set(reached[-last:])
    assert len(present) <= len(milestones) + last


def test_due_by_tokens_counts_crossed_multiples() -> None:
    due = SaveSchedule(Cadence.parse("100 tokens"), 250)
    assert [due.passed(position) for position in (260, 299, 300, 399)] == [False, False, True, True]
    due.saved(310)
    assert [due.passed(position) for position in (390, 400)] == [False, True]
    assert not due.late()


def test_due_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    due = SaveSchedule(Cadence.parse("10 s"), 0)
    now = 59.0
    assert not due.late()
    now = 60.0
    assert due.late()
    assert not due.passed(10**12)
    due.saved(1)
    assert not due.late()


def parameters() -> dict[str, torch.nn.Parameter]:
    """A matrix, an embedding and a norm, with gradients."""
    torch.manual_seed(0)
    shapes = {"embedding.weight": (5, 3), "layers.0.ffn.up.weight": (4, 3), "norm.weight": (4,)}
    named = {name: torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    return named


def test_the_norm_is_of_all_gradients_and_scaling_scales_it() -> None:
    named = parameters()
    gradients = [parameter.grad for parameter in named.values() if parameter.grad is not None]
    norm = math.sqrt(float(squared_norm(named.values())))
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-14)
    scale(named.values(), torch.tensor(0.25, dtype=torch.float64))
    assert math.sqrt(float(squared_norm(named.values()))) == pytest.approx(norm / 4, rel=1e-12)


@pytest.mark.parametrize(("norms", "embeddings"), [(False, False), (True, False), (False, True)])
def test_step_follows_the_published_rule(norms: bool, embeddings: bool) -> None:
    """AdamW written out (arXiv 1711.05101, algorithm 2); norms and embeddings decay only if asked."""
    named = parameters()
    settings = Optimizer(weight_decay=0.3, decay_norms=norms, decay_embeddings=embeddings)
    decays = {"embedding.weight": embeddings, "layers.0.ffn.up.weight": True, "norm.weight": norms}
    optimizer = adamw(named, settings)
    expected = {name: [parameter.detach().clone(), 0.0, 0.0] for name, parameter in named.items()}
    for count in range(1, 4):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * count
        for name, parameter in named.items():
            value, first, second = expected[name]
            g = parameter.grad = torch.full_like(parameter, 0.5 * count)
            first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
            decay = 0.3 if decays[name] else 0.0
            update = (first / (1 - 0.9**count)) / ((second / (1 - 0.95**count)).sqrt() + 1e-8)
            expected[name] = [value * (1 - 0.01 * count * decay) - 0.01 * count * update, first, second]
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), expected[name][0], rtol=1e-12, atol=1e-14)
