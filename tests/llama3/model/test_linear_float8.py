"""Products in float8: their error on the CPU, and who may not have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from herd.llama3.model import linear
from herd.llama3.model.linear import (
    Linear,
    Scaling,
    casts_kept,
    check_device,
    float8_product,
    use_float8,
    weight_casts,
)
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_error_of_a_product_and_its_gradients(scaling: Scaling) -> None:
    """e4m3 has 3 bits after the point and e5m2 two: 4 % and 7 % of a product of two rounded operands."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 32, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(48, 64, generator=generator).bfloat16().requires_grad_()
    outer = torch.randn(3, 32, 48, generator=generator).bfloat16()
    got, wanted = float8_product(x, weight, scaling), x @ weight.T
    assert got.dtype == torch.bfloat16
    assert 0.005 < relative(got, wanted) < 0.05
    gradients = torch.autograd.grad(got, (x, weight), outer)
    for one, other in zip(gradients, torch.autograd.grad(wanted, (x, weight), outer), strict=True):
        assert 0.005 < relative(one, other) < 0.09


def test_rows_keep_an_outlier_to_themselves() -> None:
    """One token of 1e6 makes all others nothing under one scale, and touches no other row under one each."""
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    x[0] *= 1e6
    x, weight = x.bfloat16(), weight.bfloat16()
    by_row, whole = (float8_product(x, weight, scaling)[1:] for scaling in ("row", "tensor"))
    wanted = (x @ weight.T)[1:]
    assert relative(by_row, wanted) < 0.05
    assert relative(whole, wanted) > 0.2


def test_zeros_stay_zeros() -> None:
    out = float8_product(torch.zeros(16, 32).bfloat16(), torch.randn(16, 32).bfloat16(), "tensor")
    assert torch.equal(out, torch.zeros_like(out))


def test_a_model_learns_in_float8() -> None:
    """Blocks multiply in float8, the output in bf16; the loss of one batch falls as in bf16."""
    config = Model(layers=2, dim=32, ffn=64, heads=2, kv_heads=1, max_seq_len=32)
    tokens = torch.randint(0, 48, (2, 17), generator=torch.Generator().manual_seed(0))
    ends = []
    for float8 in (False, True):
        model = build_model(config, 48, 0, torch.float32, torch.device("cpu"))
        model.compute = torch.bfloat16
        if float8:
            use_float8(model.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(20):
            loss = model(tokens[:, :-1], None, tokens[:, 1:].contiguous()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(float(loss))
    assert ends[1] != ends[0]
    assert abs(ends[1] - ends[0]) < 0.15
    assert ends[1] < 2.5


def product_of(left_MK: torch.Tensor, right_NK: torch.Tensor, types: tuple[Any, Any], scaling: Scaling) -> torch.Tensor:
    """Return left @ right^T in bf16, each operand searched for its largest value, divided and rounded by itself."""
    operands, scales = [], []
    for x, dtype in zip((left_MK, right_NK), types, strict=True):
        largest = x.float().abs().amax(**({"dim": 1, "keepdim": True} if scaling == "row" else {}))
        scales.append(largest / torch.finfo(dtype).max)
        operands.append((x.float() / scales[-1]).to(dtype).contiguous())
    by = [scales[0], scales[1].T] if scaling == "row" else scales
    return torch._scaled_mm(operands[0], operands[1].T, scale_a=by[0], scale_b=by[1], out_dtype=torch.bfloat16)


@pytest.mark.parametrize("kept", [False, True], ids=["cast", "kept"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_shared_scales_and_layouts_have_the_bits_of_separate_operands(scaling: Scaling, kept: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x, outer = (torch.randn(32, size, generator=generator).bfloat16() for size in (64, 48))
    weight = torch.randn(48, 64, generator=generator, requires_grad=True)
    x.requires_grad_()
    casts = weight_casts([weight.detach()], x.dtype, scaling)[0] if kept else None
    out = float8_product(x, weight, scaling, casts)
    d_x, d_weight = torch.autograd.grad(out, (x, weight), outer)
    forward, backward = linear.FORWARD, linear.BACKWARD
    narrow = weight.detach().bfloat16()
    assert torch.equal(out, product_of(x.detach(), narrow, (forward, forward), scaling))
    assert torch.equal(d_x, product_of(outer, narrow.T, (backward, forward), scaling))
    assert torch.equal(d_weight, product_of(outer.T, x.detach().T, (backward, forward), scaling).float())


def steps(kept: bool, scaling: Scaling, recompute: str) -> Iterator[tuple[list[float], list[torch.Tensor]]]:
    """Yield the losses of three micro-batches and a copy of the weights after each of three steps."""
    config = Model(layers=2, dim=32, ffn=64, heads=2, kv_heads=1, max_seq_len=32)
    model = build_model(config, 48, 0, torch.float32, torch.device("cpu"))
    model.compute, model.recompute = torch.bfloat16, recompute
    use_float8(model.layers, scaling)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        losses = []
        with casts_kept([model]) if kept else nullcontext():
            for _ in range(3):
                tokens = torch.randint(0, 48, (1, 17), generator=generator)
                loss = model(tokens[:, :-1], None, tokens[:, 1:].contiguous()).sum()
                loss.backward()
                losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # as between steps, where the held-out loss is taken
            losses.append(float(model(tokens[:, :-1], None, tokens[:, 1:].contiguous()).sum()))
        yield losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_weights_that_are_cast_once_a_step_give_the_same_bits(
    recompute: str, scaling: Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulated gradients of a step, the step after the optimizer changed the weights, and a validation between."""
    calls: list[int] = []

    def counted(weights: list[torch.Tensor], *more: Any) -> Any:
        calls.append(len(weights))
        return weight_casts(weights, *more)

    monkeypatch.setattr(linear, "weight_casts", counted)
    for (losses, weights), (others, expected) in zip(
        steps(True, scaling, recompute), steps(False, scaling, recompute), strict=True
    ):
        assert losses == others
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    assert calls == [7] * 2 * 3  # all weights of a layer, in each layer and step


def test_casts_go_with_the_step_that_fails() -> None:
    config = Model(layers=1, dim=32, ffn=64, heads=2, kv_heads=1, max_seq_len=32)
    model = build_model(config, 48, 0, torch.float32, torch.device("cpu"))
    model.compute = torch.bfloat16
    use_float8(model.layers)
    linears = [module for module in model.layers.modules() if isinstance(module, Linear)]
    with casts_kept([model]):
        model(torch.zeros(1, 16, dtype=torch.int64))
        assert all(each.casts is not None for each in linears)
    with pytest.raises(IndexError), casts_kept([model]):
        model(torch.full((1, 16), 48))
    assert all(each.casts is None and not each.keeps_casts for each in linears)


def test_a_product_keeps_its_weight_by_reference_and_its_input_as_it_is() -> None:
    """Neither a copy of the weight nor the rounded input: a recomputed input costs nothing more."""
    x, weight = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(48, 64, requires_grad=True)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        float8_product(x, weight, "tensor")
    places = {weight.data_ptr(), x.data_ptr()}
    assert sum(tensor.nbytes for tensor in saved if tensor.data_ptr() not in places) == 2 * 4  # two scales


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"precision: fp8 needs a GPU .*, this is cpu; take bf16"):
        check_device(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"precision: fp8 needs axes of multiples of 16, 0 is 24 x 32; take bf16"):
        use_float8(torch.nn.Sequential(Linear(32, 24)))
