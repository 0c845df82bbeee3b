"""The chunked loss against torch's cross entropy on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import herd.llama3.model.loss
from herd.llama3.model.loss import token_nll


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 10, 16, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, 50, (3, 10), generator=generator)
    targets[0, :4] = targets[2, 9] = -100
    return hidden, weight, targets, torch.rand(3, 10, generator=generator, dtype=dtype)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def small_chunks(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(herd.llama3.model.loss, "CPU_CHUNK", 1)
    monkeypatch.setattr(herd.llama3.model.loss, "CPU_TOKENS", tokens)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_equal_plain_cross_entropy(
    chunk: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weighted tokens take the way that computes again; a sum, and any multiple of it, the one that does not."""
    small_chunks(monkeypatch, chunk)
    hidden, weight, targets, scale = problem(torch.float64)
    nll, expected = token_nll(hidden, weight, targets), plain(hidden, weight, targets)
    torch.testing.assert_close(nll, expected, rtol=1e-13, atol=1e-13)
    losses = ((x * scale).sum() if weighted else x.sum() / 3 for x in (nll, expected))
    got, wanted = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_gradcheck() -> None:
    hidden, weight, targets, _ = problem(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: token_nll(h, w, targets), (hidden, weight))


@pytest.mark.parametrize("weighted", [False, True])
def test_backward_twice_gives_the_same(weighted: bool) -> None:
    hidden, weight, targets, scale = problem(torch.float64)
    nll = token_nll(hidden, weight, targets)
    loss = (nll * scale).sum() if weighted else nll.sum() / 3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for again in (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2)):
        for one, other in zip(first, again, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_z_loss_changes_gradients_and_not_the_value() -> None:
    hidden, weight, targets, _ = problem(torch.float64)
    nll = token_nll(hidden, weight, targets, 0.1)
    assert torch.equal(nll, token_nll(hidden, weight, targets))
    z = (hidden @ weight.T).logsumexp(-1)
    expected = plain(hidden, weight, targets).sum() + 0.1 * (z**2)[targets != -100].sum()
    got = torch.autograd.grad(nll.sum(), (hidden, weight))
    for one, other in zip(got, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_error_of_a_bf16_gradient_does_not_grow_with_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2048, 16, generator=generator)
    weight = torch.randn(64, 16, generator=generator).requires_grad_()
    targets = torch.randint(64, (1, 2048), generator=generator)
    exact = torch.autograd.grad(plain(hidden.double(), weight.double(), targets).sum(), weight)[0]
    errors = []
    for tokens in (2048, 256, 16):
        monkeypatch.setattr(herd.llama3.model.loss, "CPU_TOKENS", tokens)
        monkeypatch.setattr(herd.llama3.model.loss, "CPU_CHUNK", 64 * tokens)
        nll = token_nll(hidden.bfloat16(), weight, targets)
        gradient = torch.autograd.grad(nll.sum(), weight)[0]
        errors.append(float((gradient - exact).norm() / exact.norm()))
    assert max(errors) < 1.1 * errors[0]


def test_no_gradients_are_made_where_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    sweep = herd.llama3.model.loss._sweep
    monkeypatch.setattr(herd.llama3.model.loss, "_sweep", lambda p, s, g: made.append(g) or sweep(p, s, g))
    hidden, weight, targets, _ = problem(torch.float32)
    token_nll(hidden.detach(), weight.detach(), targets)
    with torch.no_grad():
        token_nll(hidden, weight, targets)
    token_nll(hidden, weight, targets).sum().backward()
    assert made == [False, False, True]


def test_memory_of_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor as large as the logits of all tokens is made, forward or backward."""
    small_chunks(monkeypatch, 7)
    hidden, weight, targets, _ = problem(torch.float32)

    with Largest() as seen:
        token_nll(hidden, weight, targets).sum().backward()
    assert weight.numel() <= seen.elements < 30 * 50


class Largest(TorchDispatchMode):
    """Sees the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        out = function(*arguments, **(keywords or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out
