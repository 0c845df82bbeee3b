"""Models for the tests of this package, and the comparison of two model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from herd.llama3.model.files import WeightReader, parameters, save_model
from herd.llama3.model.transformer import Transformer, build_model
from herd.llama3.recipe.sections import INIT_STD, Model
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog and the hen, 123 times", "été à la mer; 一二三 x = y + 1\n"] * 4
SHAPE: dict[str, Any] = {"layers": 2, "dim": 64, "ffn": 176, "heads": 8, "kv_heads": 2, "max_seq_len": 8192}
SCALED: dict[str, Any] = {"rope_scaling": {}, "max_seq_len": 131_072}


def shape(**more: Any) -> Model:
    return Model(**{**SHAPE, **more})


def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 290)


def model(config: Model, vocab_size: int, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return a model with a sharp attention and norms that are not 1."""
    made = build_model(config, vocab_size, 3, dtype, torch.device("cpu"))
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            parameter.mul_(0.7 / INIT_STD / config.dim**0.5 if parameter.ndim > 1 else 1 + 0.02 * index)
    return made


def herd_folder(
    folder: Path,
    config: Model,
    dtype: torch.dtype = torch.float32,
    coder: Tokenizer | None = None,
    vocab_size: int = 83,
) -> Transformer:
    """Write a model, with a tokenizer if there is one, as our folder and return it."""
    made = model(config, coder.vocab_size if coder else vocab_size, dtype)
    save_model(folder, config, made.vocab_size, made.state_dict())
    if coder is not None:
        coder.save(folder)
    return made


def state(source: WeightReader) -> dict[str, Tensor]:
    return {param.name: tensor for param, tensor in parameters(source, None)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether names, types and bits of two sets of weights are equal."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def tokens(vocab_size: int, batch: int = 2, seq_len: int = 150) -> Tensor:
    return torch.randint(0, vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(5))


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    assert other.abs().max() > 1
    return float((one - other).abs().max() / other.abs().max())
