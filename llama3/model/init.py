"""Initial weights that depend only on the seed and the parameter's name.

Each parameter has its own random stream, so any process can draw its parameters alone, and a model sharded over any
number of devices starts with the same weights. Matrices are normal with standard deviation 0.02, those that write to
the residual stream divided by sqrt(2 L) as in GPT-2; norms are 1. Llama 3's own scheme is not published.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from herd.llama3.model.param_table import param_row
from herd.llama3.model.transformer import Transformer
from herd.llama3.recipe.sections import Model

STD = 0.02


def initial_value(config: Model, seed: int, name: str, shape: torch.Size) -> Tensor:
    """Return the initial value of parameter `name`, fp64 on the CPU; it depends on the arguments only."""
    row = param_row(name)
    if row.kind == "norm":
        return torch.ones(shape, dtype=torch.float64)
    std = STD / math.sqrt(2 * config.layers) if row.residual else STD
    # numpy and not torch, whose normal distribution differs between processors in its last bits
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return torch.from_numpy(generator.standard_normal(tuple(shape)) * std)


def build_model(config: Model, rows: int, seed: int, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Return a whole (not sharded) model with its initial weights on `device`."""
    model = empty_model(config, rows).to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(model.config, seed, name, parameter.shape))
    return model


def empty_model(config: Model, rows: int) -> Transformer:
    """Return a model on the meta device: shapes without memory (405B takes a second)."""
    with torch.device("meta"):
        return Transformer(config, rows)
