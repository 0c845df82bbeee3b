"""Products in float8: their error on the CPU, and who may not have them."""

from __future__ import annotations

import pytest
import torch

from herd.llama3.model.linear import Linear, Scaling, check_device, float8_product, use_float8
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


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"precision: fp8 needs a GPU .*, this is cpu; take bf16"):
        check_device(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"precision: fp8 needs axes of multiples of 16, 0 is 24 x 32; take bf16"):
        use_float8(torch.nn.Sequential(Linear(32, 24)))
