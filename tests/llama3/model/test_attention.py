"""Every way of computing attention that runs on the CPU against the masked one, forward and backward."""

from __future__ import annotations

import sys
import warnings
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from herd.llama3.model.attention import (
    FLASH_3,
    AttentionMask,
    _blocks,
    _flex,
    _starts,
    attend,
    can_attend,
    document_lengths,
    flash_version,
    use_flash,
)
from herd.llama3.model.comms import NoComms
from herd.llama3.model.linear import RMSNorm

HEADS, GROUPS, SIZE = 4, 2, 8
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(batch: int, seq_len: int, seed: int = 0) -> Qkv:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq_len, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    return q, k, v


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(E)) v with every score."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("bshe,bthe->bhst", q, k) / SIZE**0.5
    return torch.einsum("bhst,bthe->bshe", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def equal(one: torch.Tensor, other: torch.Tensor, wrt: Qkv) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    outer = torch.randn_like(other)
    for a, b in zip(
        torch.autograd.grad(one, wrt, outer), torch.autograd.grad(other, wrt, outer, retain_graph=True), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3), seed=st.integers(0, 9)
)
def test_documents_one_by_one_equal_the_mask(rows: list[list[int]], seed: int) -> None:
    seq_len = max(map(sum, rows))
    numbers = [[n for n, length in enumerate([*row, seq_len - sum(row)]) for _ in range(length)] for row in rows]
    documents, positions = torch.tensor(numbers), torch.arange(seq_len)
    mask = can_attend(documents, positions, positions)
    qkv = inputs(len(rows), seq_len, seed)
    reference = written_out(*qkv, mask)
    equal(attend(*qkv, AttentionMask(mask=mask)), reference, qkv)
    equal(attend(*qkv, AttentionMask(lengths=document_lengths(documents))), reference, qkv)


def documented_varlen_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as the documentation of torch's CUDA function defines each argument."""
    assert enable_gqa
    assert scale is None
    assert starts_q.dtype == starts_k.dtype == torch.int32
    outputs = []
    bounds_q, bounds_k = ([*pairwise(starts)] for starts in (starts_q, starts_k))
    for (start, end), (first, last) in zip(bounds_q, bounds_k, strict=True):
        assert end - start <= longest_q
        assert last - first <= longest_k
        distance = torch.arange(int(last - first)) - torch.arange(int(end - start)).unsqueeze(1)
        left, right = window_size
        mask = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
        outputs.append(written_out(q[None, start:end], k[None, first:last], v[None, first:last], mask)[0])
    return torch.cat(outputs)


@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3), seed=st.integers(0, 9)
)
def test_what_the_packed_kernel_is_asked_for_equals_the_mask(rows: list[list[int]], seed: int) -> None:
    """The form that CUDA takes for documents; only its kernel is replaced."""
    seq_len = max(map(sum, rows))
    numbers = [[n for n, length in enumerate([*row, seq_len - sum(row)]) for _ in range(length)] for row in rows]
    documents, positions = torch.tensor(numbers), torch.arange(seq_len)
    qkv = inputs(len(rows), seq_len, seed)
    starts = _starts(document_lengths(documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", documented_varlen_attn)
        packed = attend(*qkv, AttentionMask(starts=starts))
    equal(packed, written_out(*qkv, can_attend(documents, positions, positions)), qkv)


def test_no_form_is_plain_causal() -> None:
    qkv, positions = inputs(2, 33), torch.arange(33)
    equal(attend(*qkv, AttentionMask()), written_out(*qkv, can_attend(None, positions, positions)), qkv)


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda: Any = property(lambda self: True)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("tensor", [torch.Tensor, OnCuda])
def test_whole_sequences_and_padded_ones_are_masked_alike_on_every_device(tensor: Any, queries: int) -> None:
    """As in generation: the last queries read the keys so far, but no padding before them."""
    keys = torch.arange(17)
    q, k, v = inputs(3, 17)
    q = q[:, -queries:]
    causal = can_attend(None, keys[-queries:], keys)
    padded = causal & (keys >= torch.tensor([[0], [4], [7]]))[:, None, None]
    for mask in (causal, padded):
        got = attend(q.as_subclass(tensor), k.as_subclass(tensor), v.as_subclass(tensor), AttentionMask(mask=mask))
        equal(got.as_subclass(torch.Tensor), written_out(q, k, v, mask), (q, k, v))
    if queries == 1:
        got = attend(q.as_subclass(tensor), k.as_subclass(tensor), v.as_subclass(tensor), AttentionMask())
        equal(got.as_subclass(torch.Tensor), written_out(q, k, v, causal), (q, k, v))


def test_a_block_mask_holds_for_keys_in_another_order() -> None:
    """The mask that CUDA takes under context parallelism; its kernel is torch's own slow one here, forward only."""
    seq_len = 256
    positions, order = torch.arange(seq_len), torch.arange(seq_len).view(4, -1)[[0, 3, 1, 2]].flatten()
    q, k, v = (x.detach() for x in inputs(2, seq_len))
    here = order[:128]
    for documents in (None, torch.stack([positions // 100, positions // 37])):
        got = _flex(q[:, here], k[:, order], v[:, order], _blocks(documents, here, order))
        expected = written_out(q, k, v, can_attend(documents, positions, positions))[:, here]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_norms_own_backward_pass_is_that_of_the_formula() -> None:
    norm = RMSNorm(24, 1e-3, NoComms()).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    outer = torch.randn_like(x)
    plain = F.rms_norm(x, (24,), norm.weight, 1e-3)
    torch.testing.assert_close(norm(x), plain, rtol=1e-14, atol=1e-14)
    wrt = (x, norm.weight)
    for a, b in zip(torch.autograd.grad(norm(x), wrt, outer), torch.autograd.grad(plain, wrt, outer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that says that it is an H100; no FlashAttention 3 is installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setitem(sys.modules, FLASH_3, None)  # type: ignore[arg-type]
    return torch.device("cuda")


def test_hopper_takes_flash_attention_3_where_it_is_installed(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention._registry._FLASH_ATTENTION_IMPLS", {"FA3": Installed})
    for asked, taken in (("auto", 3), (3, 3), (2, 2)):
        assert use_flash(asked, hopper) == taken  # type: ignore[arg-type]
        assert flash_version() == taken
    torch.use_deterministic_algorithms(True)
    try:
        assert use_flash("auto", hopper) == 2
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert use_flash("auto", hopper) == flash_version() == 2
    with pytest.raises(ValueError, match=r"flash: 3 needs an H100 .*, NVIDIA A100 has 8\.0; write auto"):
        use_flash(3, hopper)


class Installed:
    """Stands for the handle of FlashAttention 3."""

    def remove(self) -> None:
        pass


def test_without_the_package_hopper_takes_flash_attention_2(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.delitem(sys.modules, FLASH_3)
        assert use_flash("auto", hopper) == 2
    with pytest.raises(ValueError, match=r"flash: 3 needs the package flash-attn-3 \(No module .*\); install it or"):
        use_flash(3, hopper)
    monkeypatch.setitem(sys.modules, FLASH_3, ModuleType(FLASH_3))  # another build, without its kernels
    with pytest.warns(UserWarning, match="does not expose FA3 .*kernels; documents take FlashAttention 2"):
        assert use_flash("auto", hopper) == 2
    assert use_flash("auto", torch.device("cpu")) == 2
    with pytest.raises(ValueError, match="flash: 3 needs GPUs; leave it out on processors"):
        use_flash(3, torch.device("cpu"))
