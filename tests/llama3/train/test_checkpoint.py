"""Which checkpoints are kept and when one is due; how an optimizer step is clipped."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama3.recipe.schema import Keep, Optimizer
from llama3.recipe.units import Cadence, Tokens
from llama3.train.checkpoint import kept
from llama3.train.optimizer import adamw, clip, squared_norm
from llama3.train.trainer import Due


def keep(last: int, every: int | None = None) -> Keep:
    return Keep(last=last, every=None if every is None else Tokens(every))


def test_the_newest_and_the_milestones_are_kept() -> None:
    positions = [30, 60, 90, 120, 150, 180, 210, 240]
    assert kept(positions, keep(2)) == {210, 240}
    assert kept(positions, keep(1, 100)) == {120, 210, 240}
    assert kept([], keep(3, 100)) == set()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 4), st.integers(20, 200))
def test_milestones_survive_deletion_as_they_come(gaps: list[int], last: int, every: int) -> None:
    """Deleting after each save leaves one checkpoint for each multiple that was reached, not fewer as time goes on."""
    present: list[int] = []
    reached: list[int] = []
    for gap in gaps:
        reached.append((reached[-1] if reached else 0) + gap)
        present = sorted(kept([*present, reached[-1]], keep(last, every)))
    milestones = {position // every for position in reached} - {0}
    assert {position // every for position in present} >= milestones
    assert set(present) >= set(reached[-last:])
    assert len(present) <= len(milestones) + last


def test_due_by_tokens_counts_crossed_multiples() -> None:
    due = Due(Cadence.parse("100 tokens"), 250)
    assert [due.at(position) for position in (260, 299, 300, 399)] == [False, False, True, True]
    due.saved(310)
    assert [due.at(position) for position in (390, 400)] == [False, True]


def test_due_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    due = Due(Cadence.parse("10 s"), 0)
    now = 59.0
    assert not due.at(10**12)
    now = 60.0
    assert due.at(1)
    due.saved(1)
    assert not due.at(2)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.RMSNorm(4)).double()


def test_clip_scales_to_the_largest_norm_and_no_further() -> None:
    net = model()
    net(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    norm = math.sqrt(float(squared_norm(net)))
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-14)
    clip(net, norm, norm * 2)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True) if p.grad is not None)
    clip(net, norm, norm / 4)
    assert math.sqrt(float(squared_norm(net))) == pytest.approx(norm / 4, rel=1e-12)


def test_step_follows_the_published_rule() -> None:
    """AdamW written out (arXiv 1711.05101, algorithm 2); norms do not decay."""
    net, settings = model(), Optimizer(weight_decay=0.3)
    optimizer = adamw(net, settings)
    matrix, vector = net.parameters()
    expected = {name: [p.detach().clone(), 0.0, 0.0] for name, p in (("matrix", matrix), ("vector", vector))}
    for count in range(1, 4):
        net(torch.arange(6, dtype=torch.float64).view(2, 3)).square().sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * count
        for name, parameter in (("matrix", matrix), ("vector", vector)):
            value, first, second = expected[name]
            g = parameter.grad
            assert g is not None
            first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
            decay = 0.3 if name == "matrix" else 0.0
            update = (first / (1 - 0.9**count)) / ((second / (1 - 0.95**count)).sqrt() + 1e-8)
            expected[name] = [value * (1 - 0.01 * count * decay) - 0.01 * count * update, first, second]
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(matrix.detach(), expected["matrix"][0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(vector.detach(), expected["vector"][0], rtol=1e-12, atol=1e-14)
