"""What an operation asks of a device, as the arithmetic of a step counts it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.roofline import FLOAT8, Counting, Work
from herd.llama3.hardware.topology import load_fabric
from herd.llama3.planner.device_curves import prior_curves


def test_products_count_by_shape_and_the_rest_by_bytes() -> None:
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    with Counting() as counting:
        (x @ weight.T).backward(torch.ones(4, 16))
    assert counting.work.products == {(4, 8, 16, False): 1, (16, 4, 8, False): 1, (4, 16, 8, False): 1}
    x.grad = None
    with Counting() as counting:
        x.detach().view(2, 16) + 1.0
    assert not counting.work.products
    assert counting.work.moved == pytest.approx(2 * 32 * 4, abs=8)


def test_a_repeated_tensor_is_read_once_and_a_view_is_free() -> None:
    row = torch.ones(1, 1000)
    with Counting() as counting:
        row.expand(50, 1000).contiguous()
    assert counting.work.moved == 4 * (1000 + 50 * 1000)


def test_work_adds_up_and_float8_is_faster_in_products_alone() -> None:
    curves = prior_curves(load_fabric("roce-24k").accelerator)
    one, two = Work(moved=3.0), Work(moved=4.0)
    one.products[8, 4096, 4096, False] = two.products[8, 4096, 4096, False] = two.products[8, 4096, 4096, True] = 2
    both = one.plus(two, 3)
    assert both.products == {(8, 4096, 4096, False): 8, (8, 4096, 4096, True): 6}
    assert both.moved == 15
    plain, fast = Work(), Work()
    plain.products[8, 4096, 4096, False] = fast.products[8, 4096, 4096, True] = 1
    assert plain.seconds(curves)["products"] / fast.seconds(curves)["products"] == pytest.approx(FLOAT8)


def test_attention_counts_half_of_its_scores() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.ones(2, 4, 32, 16, requires_grad=True)
    with Counting() as counting, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert counting.work.attention == {(False, 32): 2 * 2 * 4 * 32 * 32 * 16, (True, 32): 2 * 2 * 4 * 32 * 32 * 16}
