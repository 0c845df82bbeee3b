"""Initial weights that depend on the seed and on each parameter's name, and on nothing else.

Every parameter has its own random stream, so any process can draw its parameters alone, in any order, and a model split
over any number of devices starts as the same model. Values come from numpy's Philox in float64: torch's normal
distribution differs between processors in its last bits. Matrices are normal with standard deviation 0.02, those that
write to the residual stream divided by sqrt(2 L) as in GPT-2, norms are 1. Llama 3's own scheme is not published.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from llama3.model.transformer import Transformer
from llama3.recipe.sections import Model

STD = 0.02


def initial_value(spec: Model, seed: int, name: str, shape: torch.Size) -> Tensor:
    """Return the initial value of parameter `name`, fp64 on the CPU; a function of the arguments alone."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float64)
    residual = name.endswith(("attention.o.weight", "ffn.down.weight"))
    std = STD / math.sqrt(2 * spec.layers) if residual else STD
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return torch.from_numpy(generator.standard_normal(tuple(shape)) * std)


def initialise(model: Transformer, seed: int) -> None:
    """Set every parameter of a whole (not sharded) model to its initial value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(model.spec, seed, name, parameter.shape))


def build(spec: Model, rows: int, seed: int, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Return a whole model with its initial weights on `device`."""
    model = empty(spec, rows).to(dtype).to_empty(device=device)
    initialise(model, seed)
    return model


def empty(spec: Model, rows: int) -> Transformer:
    """Return a model whose parameters have shapes but no memory (405B is laid out in a second)."""
    with torch.device("meta"):
        return Transformer(spec, rows)
