"""FlashAttention 3 behind torch's packed attention: what its kernels are asked for, forward and backward."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.cuda import null_device

null_device.require(null=True)

from herd.llama3.model.attention import FLASH_3, attend, attention_mask, flash_version, use_flash  # noqa: E402


def test_documents_go_through_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        asked.append(("forward", q.shape, k.shape, *rest))
        empty = q.new_empty(0)
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), empty, empty

    def backward(gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
        asked.append(("backward", q.shape, k.shape, *rest))

    kernels = ModuleType("flash_attn_3")
    kernels.fwd, kernels.bwd = forward, backward  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.ops, "flash_attn_3", kernels, raising=False)
    monkeypatch.setitem(sys.modules, FLASH_3, ModuleType(FLASH_3))
    device = torch.device("cuda")
    documents_BS, positions_S = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]), torch.arange(4, device=device)
    visible = attention_mask(documents_BS, positions_S, positions_S, torch.bfloat16)
    shapes = [(2, 4, heads, 64) for heads in (4, 2, 2)]
    q, k, v = (torch.zeros(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    try:
        assert use_flash("auto", device) == flash_version() == 3
        attend(q, k, v, visible).sum().backward()
    finally:
        use_flash(2, device)
    assert [name for name, *_ in asked] == ["forward", "backward"]
    forward_asked, backward_asked = asked
    assert forward_asked[1:3] == backward_asked[1:3] == ((8, 4, 64), (8, 2, 64))
    for starts in (*forward_asked[7:9], *backward_asked[9:11]):
        assert starts is visible.starts
    assert forward_asked[24] is True  # causal
    asked.clear()
    attend(q, k, v, visible).sum().backward()
    assert not asked
