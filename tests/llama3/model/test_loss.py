"""The chunked loss against torch's cross entropy on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import herd.llama3.model.loss
from herd.llama3.model.comms import NoComms
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


def both_ways(patch: pytest.MonkeyPatch, dtype: torch.dtype, size: int = 50) -> list[list[torch.Tensor]]:
    """Return nats and gradients of chunks of 7 tokens, with targets absent and z_loss: eager, then as on a GPU."""
    small_chunks(patch, 7)
    hidden, weight, targets, scale = problem(dtype)
    weight = torch.randn(size, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()  # master weights
    found = []
    for devices in ((), ("cpu",)):
        patch.setattr(herd.llama3.model.loss, "FUSED", devices)
        nll = token_nll(hidden, weight, targets, 0.01)
        sums = (nll.sum() / 3, (nll * scale).sum())
        gradients = (torch.autograd.grad(each, (hidden, weight), retain_graph=True) for each in sums)
        found.append([nll.detach(), *(one for pair in gradients for one in pair)])
    return found


def assert_near(found: list[list[torch.Tensor]], dtype: torch.dtype) -> None:
    """Nats to the last bits of their type; in bf16 a gradient may round to the neighbor."""
    nats, rest = {torch.float64: (1e-14, 1e-13), torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-6, 1e-2)}[dtype]
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        error = float((one.double() - other.double()).norm() / one.double().norm())
        assert error < (rest if number else nats), number


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_passes_of_a_gpu_give_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(herd.llama3.model.loss, "_compiled", lambda function: function)
    assert_near(both_ways(monkeypatch, dtype), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_passes_give_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the processor; what is compiled for a GPU is in `tests/cuda/test_loss_kernels.py`."""
    assert_near(both_ways(monkeypatch, dtype, 1000), dtype)


class Half(NoComms):
    """One of two processes with half of the vocabulary each: it reads what the other reduces, made beforehand."""

    def __init__(self, rank: int, logits_TV: torch.Tensor, targets_T: torch.Tensor, tokens: int) -> None:
        self.rank, self.tokens, self.calls = rank, tokens, 0
        self.largest_T1 = logits_TV.amax(-1, keepdim=True)
        e_TV = (logits_TV - self.largest_T1).exp()
        self.sums_T1 = e_TV.sum(-1, keepdim=True)
        self.local_sums_T1 = e_TV.chunk(2, 1)[rank].sum(-1, keepdim=True)
        self.target_T1 = (logits_TV - self.largest_T1).gather(1, targets_T.clamp(min=0).unsqueeze(1))
        self.present_T1 = targets_T.unsqueeze(1) >= 0

    def vocab_start(self, local_vocab_size: int) -> int:
        return local_vocab_size * self.rank

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        self.chunk = slice(self.calls * self.tokens, (self.calls + 1) * self.tokens)
        self.calls, self.reduced = self.calls + 1, 0
        assert (x <= self.largest_T1[self.chunk] + 1e-12).all()
        return self.largest_T1[self.chunk]

    def all_reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        self.reduced += 1
        if self.reduced == 1:
            return (self.target_T1 * self.present_T1)[self.chunk]
        torch.testing.assert_close(x, self.local_sums_T1[self.chunk])
        return self.sums_T1[self.chunk]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_half_of_a_vocabulary_gives_half_of_the_gradient(
    rank: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 7)
    monkeypatch.setattr(herd.llama3.model.loss, "FUSED", ("cpu",) if fused else ())
    monkeypatch.setattr(herd.llama3.model.loss, "_compiled", lambda function: function)
    hidden, weight, targets, _ = problem(torch.float64)
    half = Half(rank, (hidden @ weight.T).detach().flatten(0, 1), targets.flatten(), 7)
    shard = weight.detach().chunk(2)[rank].requires_grad_()
    nll = token_nll(hidden, shard, targets, comms=half)
    torch.testing.assert_close(nll, token_nll(hidden, weight, targets))
    whole = torch.autograd.grad(plain(hidden, weight, targets).sum(), weight)[0]
    torch.testing.assert_close(torch.autograd.grad(nll.sum(), shard)[0], whole.chunk(2)[rank])
