"""The error of bf16 against fp64 is that of rounding once, for any length, width, vocabulary and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from herd.llama3.model.attention import AttentionMask, attend, can_attend
from herd.llama3.model.comms import NoComms
from herd.llama3.model.linear import RMSNorm
from herd.llama3.model.loss import token_nll
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from tests.llama3.model.test_attention import GROUPS, HEADS, SIZE, written_out


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return bf16 values whose products with one another have a mean, so that a sum grows with its length."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).bfloat16()


def largest_error(computed: Tensor, exact: Tensor, inputs: Sequence[Tensor], wide: Sequence[Tensor]) -> float:
    """Return the error of the values or of a gradient of their sum, relative to its norm."""
    grads = torch.autograd.grad(computed.sum(), inputs), torch.autograd.grad(exact.sum(), wide)
    pairs = [(computed, exact), *zip(*grads, strict=True)]
    return max(float(((got - due).norm() / due.norm()).detach()) for got, due in pairs)


def norm(tokens: int, width: int) -> float:
    layer, x, outer = RMSNorm(width, 1e-5, NoComms()), drawn(tokens, width), drawn(tokens, width, seed=1)
    wide, weight = x.double().requires_grad_(), torch.ones(width, dtype=torch.float64, requires_grad=True)
    torch.nn.init.ones_(layer.weight)
    exact = F.rms_norm(wide, (width,), weight, 1e-5) * outer
    return largest_error(layer(x.requires_grad_()) * outer, exact, (x, layer.weight), (wide, weight))


def attention(length: int, visible: AttentionMask | None = None) -> float:
    qkv = [
        drawn(1, length, heads, SIZE, seed=heads + n).requires_grad_()
        for n, heads in enumerate((HEADS, GROUPS, GROUPS))
    ]
    wide = [x.detach().double().requires_grad_() for x in qkv]
    positions = torch.arange(length)
    exact = written_out(wide[0], wide[1], wide[2], can_attend(None, positions, positions))
    return largest_error(attend(qkv[0], qkv[1], qkv[2], visible or AttentionMask()), exact, qkv, wide)


def masked_attention(length: int) -> float:
    positions = torch.arange(length)
    return attention(length, AttentionMask(mask=can_attend(None, positions, positions)))


def loss(vocabulary: int) -> float:
    hidden, weight = drawn(1, 16, 8).requires_grad_(), drawn(vocabulary, 8, seed=1).float().requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    targets = torch.arange(16).view(1, 16)
    exact = F.cross_entropy((wide[0] @ wide[1].T)[0], targets[0], reduction="none")
    nll = token_nll(hidden, weight, targets)
    assert nll.dtype == torch.float32
    return largest_error(nll[0], exact, (hidden, weight), wide)


def position(first: int) -> float:
    """Scores depend on distances only, so the exact logits are those of the first positions."""
    config = Model(layers=1, dim=32, ffn=32, heads=2, kv_heads=1, max_seq_len=16)
    narrow, exact = (build_model(config, 32, 0, torch.float64, torch.device("cpu")) for _ in range(2))
    with torch.no_grad():
        for model in (narrow, exact):
            for weight in model.parameters():
                weight.mul_(20.0 if weight.ndim > 1 else 1.0)
    narrow.compute = torch.bfloat16

    class Later(NoComms):
        def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
            return (positions := torch.arange(first, first + seq_len)), positions

    narrow.comms = Later()
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        got, due = narrow(tokens), exact(tokens)
    return float((got - due).norm() / due.norm())


@pytest.mark.parametrize(
    ("error", "small", "large"),
    [
        pytest.param(lambda width: norm(4, width), 16, 2**14, id="norm over width"),
        pytest.param(lambda tokens: norm(tokens, 16), 4, 2**14, id="norm over tokens"),
        pytest.param(attention, 16, 1024, id="attention"),
        pytest.param(masked_attention, 16, 1024, id="masked attention"),
        pytest.param(loss, 16, 2**14, id="loss over the vocabulary"),
        pytest.param(position, 0, 2**17, id="positions"),
    ],
)
def test_the_error_of_bf16_does_not_grow(error: Callable[[int], float], small: int, large: int) -> None:
    assert error(large) < 1.5 * error(small) < 0.05
