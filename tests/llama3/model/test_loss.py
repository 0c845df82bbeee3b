"""The chunked loss against torch's cross entropy on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import llama3.model.loss
from llama3.model.loss import token_nats


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 10, 16, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, 50, (3, 10), generator=generator)
    targets[0, :4] = targets[2, 9] = -100
    return hidden, weight, targets, torch.rand(3, 10, generator=generator, dtype=dtype)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


@pytest.mark.parametrize("chunk", [50 * 7, 50, 2**24])
@pytest.mark.parametrize("kept", [0, 2**24])
def test_value_and_gradients_equal_plain_cross_entropy(chunk: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama3.model.loss, "CPU_CHUNK", chunk)
    monkeypatch.setattr(llama3.model.loss, "KEPT", kept)
    hidden, weight, targets, scale = problem(torch.float64)
    nats, expected = token_nats(hidden, weight, targets), plain(hidden, weight, targets)
    torch.testing.assert_close(nats, expected, rtol=1e-13, atol=1e-13)
    gradients = torch.autograd.grad((nats * scale).sum(), (hidden, weight))
    for got, wanted in zip(gradients, torch.autograd.grad((expected * scale).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def test_gradcheck() -> None:
    hidden, weight, targets, _ = problem(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: token_nats(h, w, targets), (hidden, weight))


def test_backward_twice_gives_the_same() -> None:
    hidden, weight, targets, scale = problem(torch.float32)
    loss = (token_nats(hidden, weight, targets) * scale).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_keeps_fp32_sums_and_gradients() -> None:
    hidden, weight, targets, scale = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        nats = token_nats(hidden, weight, targets)
    assert nats.dtype == torch.float32
    assert (nats - plain(hidden, weight, targets)).abs().max() < 0.2  # bf16 keeps 8 bits of logits near 20
    (nats * scale).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    expected = torch.autograd.grad((plain(hidden, weight, targets) * scale).sum(), weight)[0]
    assert (weight.grad - expected).norm() / expected.norm() < 0.02


def test_memory_of_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor as large as the logits of all tokens is saved for the backward pass."""
    monkeypatch.setattr(llama3.model.loss, "CPU_CHUNK", 50 * 7)
    monkeypatch.setattr(llama3.model.loss, "KEPT", 50 * 29)
    hidden, weight, targets, _ = problem(torch.float32)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        token_nats(hidden, weight, targets)
    assert max(saved) <= 50 * 16
