"""The step of herd's own model, as the trainer takes it: see `train_side`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.train_side import Loss
from herd.llama3.model.transformer import Transformer
from herd.llama3.recipe.sections import Model


def build(shape: dict[str, Any], weights: dict[str, Tensor], bf16: bool) -> tuple[nn.Module, Loss]:
    """Return the model with these weights and its mean loss."""
    vocab_size = shape["vocab_size"]
    model = Transformer(
        Model(**{name: value for name, value in shape.items() if name not in ("vocab_size", "seq_len")}), vocab_size
    )
    model.load_state_dict(weights)
    model.compute = torch.bfloat16 if bf16 else None

    def loss_of(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        nll_BS: Tensor = model(tokens_BS, None, targets_BS)
        return nll_BS.sum() / targets_BS.numel()

    return model, loss_of
