"""What is made again has the same bits, is made once in a backward pass, and leaves with it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from herd.llama3.model.attention import attention_mask, rotation
from herd.llama3.model.linear import use_float8
from herd.llama3.model.recompute import gate_product, recomputed, swiglu
from herd.llama3.model.transformer import Block, build_model
from herd.llama3.recipe.sections import Model

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
CONFIG = Model(layers=1, dim=32, ffn=80, heads=4, kv_heads=2, max_seq_len=32)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Counted:
    """Doubles, and counts how often and what it gave."""

    def __init__(self) -> None:
        self.made: list[StorageWeakRef] = []

    def __call__(self, x: Tensor) -> Tensor:
        doubled = x * 2
        self.made.append(StorageWeakRef(doubled.untyped_storage()))
        return doubled


def loss(make: Counted, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Return a sum of products that all read one value."""
    value = make(x)
    with recomputed(value, make, x):
        return sum((torch.tanh(value @ weight).sum() for weight in weights), torch.zeros((), dtype=x.dtype))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only counts of references free memory."""
    gc.disable()
    yield
    gc.enable()


def test_a_value_is_made_once_for_all_its_readers_and_leaves_with_the_last(no_collector: None) -> None:
    x, weights = random(5, 4).requires_grad_(), [random(4, 3, seed=n).requires_grad_() for n in range(3)]
    make = Counted()
    total = loss(make, x, weights)
    assert [one.expired() for one in make.made] == [True]  # gone after the forward pass
    total.backward()
    assert [one.expired() for one in make.made] == [True, True]
    expected = torch.autograd.grad(sum(torch.tanh(x * 2 @ weight).sum() for weight in weights), [x, *weights])
    assert all(torch.equal(leaf.grad, wanted) for leaf, wanted in zip([x, *weights], expected, strict=True))


def test_each_backward_pass_makes_it_once(no_collector: None) -> None:
    x, weights = random(5, 4).requires_grad_(), [random(4, 3, seed=n).requires_grad_() for n in range(2)]
    make = Counted()
    total = loss(make, x, weights)
    first = torch.autograd.grad(total, [x, *weights], retain_graph=True)
    second = torch.autograd.grad(total, [x, *weights])
    assert len(make.made) == 3
    assert all(one.expired() for one in make.made)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_graph_that_no_backward_pass_visits_leaves_too(no_collector: None) -> None:
    x, weights, make = random(5, 4).requires_grad_(), [random(4, 3).requires_grad_()], Counted()
    copy = StorageWeakRef((kept := x * 1).untyped_storage())
    total = loss(make, kept, weights)
    del kept
    assert not copy.expired()
    del total
    assert copy.expired()


def test_an_operation_that_keeps_its_own_result_does_not_stay(no_collector: None) -> None:
    """A saved result that still knows its operation keeps it, and that the result, until the collector runs."""
    x = random(5, 4).requires_grad_()
    with recomputed(value := x * 2, lambda x: x * 2, x):
        result = torch.tanh(value)
    memory = StorageWeakRef(result.untyped_storage())
    del result
    assert memory.expired()


@given(st.integers(0, 3), st.integers(1, 4), st.booleans())
def test_readers_may_see_any_part_of_it(start: int, size: int, turned: bool) -> None:
    x, other = random(3, 4, 8).requires_grad_(), random(3, 4, 8, seed=1)

    def total(context: Callable[[Tensor], AbstractContextManager[None]]) -> Tensor:
        value = x * 2
        with context(value):
            part = value[:, :, start : start + size]
            theirs = other[:, :, start : start + size]
            return (part.mT.exp() * theirs.mT).sum() if turned else (part * part * theirs).sum()

    (expected,) = torch.autograd.grad(total(lambda _: nullcontext()), x)
    (found,) = torch.autograd.grad(total(lambda value: recomputed(value, lambda x: x * 2, x)), x)
    assert torch.equal(found, expected)


def test_nothing_is_made_again_without_gradients_or_a_wish(no_collector: None) -> None:
    x, weight, make = random(5, 4).requires_grad_(), random(4, 3).requires_grad_(), Counted()
    with torch.no_grad():
        loss(make, x, [weight])
    value = make(x)
    with recomputed(value, make, x, enabled=False):
        total = (value @ weight).sum()
    total.backward()
    assert len(make.made) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gated_product_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    gate, up, outer = (random(7, 33, seed=n, dtype=dtype) for n in range(3))
    gate, up = gate.requires_grad_(), up.requires_grad_()
    plain, ours = F.silu(gate) * up, swiglu(gate, up)
    assert torch.equal(ours, plain)
    assert torch.equal(gate_product(gate.detach(), up.detach()), plain)
    pairs = zip(
        torch.autograd.grad(ours, (gate, up), outer), torch.autograd.grad(plain, (gate, up), outer), strict=True
    )
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_gated_product_has_the_gradient_of_its_value() -> None:
    assert torch.autograd.gradcheck(swiglu, (random(3, 5).requires_grad_(), random(3, 5, seed=1).requires_grad_()))


def block(dtype: torch.dtype, exact: bool, float8: bool) -> Block:
    model = build_model(CONFIG, 64, 0, dtype, torch.device("cpu"))
    for module in model.modules():
        if hasattr(module, "exact"):
            module.exact = exact
    if float8:
        use_float8(model.layers)
    layer = model.layers["0"]
    assert isinstance(layer, Block)
    return layer


def run_block(layer: Block, x: Tensor, **how: Any) -> list[Tensor]:
    """Return what the layer gives, and the gradients of its input and weights."""
    positions = torch.arange(x.shape[1])
    table = rotation(positions, CONFIG.dim // CONFIG.heads, CONFIG.rope_theta, CONFIG.rope_scaling, torch.float32)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, table, attention_mask(None, positions, positions, x.dtype, False), **how)
    out.backward(random(*out.shape, seed=9, dtype=out.dtype))
    gradients = [x.grad, *(weight.grad for weight in layer.parameters())]
    return [out, *(one for one in gradients if one is not None)]


@pytest.mark.parametrize("how", [{"spare": True}, {"spare": True, "recompute_ffn": True}], ids=["spare", "feed again"])
@pytest.mark.parametrize(
    ("dtype", "exact", "float8"),
    [
        (torch.float64, False, False),
        (torch.float32, False, False),
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
        (torch.bfloat16, False, True),
    ],
    ids=["fp64", "fp32", "exact", "bf16", "fp8"],
)
def test_a_layer_that_keeps_less_gives_the_same_bits(dtype: torch.dtype, exact: bool, float8: bool, how: Any) -> None:
    layer, x = block(dtype, exact, float8), random(2, 16, CONFIG.dim, dtype=dtype)
    plain, less = run_block(layer, x), run_block(layer, x, **how)
    assert len(plain) == len(less) == 2 + 9
    assert [number for number, pair in enumerate(zip(plain, less, strict=True)) if not torch.equal(*pair)] == []
