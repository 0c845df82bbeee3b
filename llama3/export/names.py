"""One parameter, three names: ours, Hugging Face's and Meta's; and what a model in any of the three formats offers.

Meta's files may be cut for model parallelism; the table also says along which axis (llama-models,
models/checkpoint.py). Names are all that differs, but for the rows of q and k in Meta's files (see `meta`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llama3.recipe.sections import Model


@dataclass(frozen=True)
class Name:
    ours: str
    hugging_face: str
    meta: str
    cut: int | None
    """Axis along which Meta cuts it over model-parallel files; None: each file holds all of it."""

    def at(self, layer: int) -> Name:
        """Return the name of this parameter of layer `layer`."""
        return Name(self.ours.format(layer), self.hugging_face.format(layer), self.meta.format(layer), self.cut)


FIRST = Name("embedding.weight", "model.embed_tokens.weight", "tok_embeddings.weight", 0)
LAYER = [
    Name(f"layers.{{}}.{ours}.weight", f"model.layers.{{}}.{hugging_face}.weight", f"layers.{{}}.{meta}.weight", cut)
    for ours, hugging_face, meta, cut in (
        ("attention_norm", "input_layernorm", "attention_norm", None),
        ("attention.q", "self_attn.q_proj", "attention.wq", 0),
        ("attention.k", "self_attn.k_proj", "attention.wk", 0),
        ("attention.v", "self_attn.v_proj", "attention.wv", 0),
        ("attention.o", "self_attn.o_proj", "attention.wo", 1),
        ("ffn_norm", "post_attention_layernorm", "ffn_norm", None),
        ("ffn.gate", "mlp.gate_proj", "feed_forward.w1", 0),
        ("ffn.up", "mlp.up_proj", "feed_forward.w3", 0),
        ("ffn.down", "mlp.down_proj", "feed_forward.w2", 1),
    )
]
NORM = Name("norm.weight", "model.norm.weight", "norm.weight", None)
OUTPUT = Name("output.weight", "lm_head.weight", "output.weight", 0)


def names(spec: Model) -> list[Name]:
    """Return the names of every parameter of a model, from the first layer to the last."""
    layers = [name.at(layer) for layer in range(spec.layers) for name in LAYER]
    return [FIRST, *layers, NORM, *([] if spec.tied_embeddings else [OUTPUT])]


class WeightReader(Protocol):
    """A model in some format, read by our names; `files.StoredModel` is one."""

    spec: Model
    rows: int

    def tensor(self, name: str) -> Tensor:
        """Return the parameter that we call `name`, in our layout."""


def parameters(source: WeightReader, dtype: torch.dtype | None) -> Iterator[tuple[Name, Tensor]]:
    """Yield every parameter of `source` in the model's order, as `dtype` (default: as stored).

    Raises ValueError if a number is too large for `dtype`.
    """
    for name in names(source.spec):
        yield name, _as(name.ours, source.tensor(name.ours), dtype)


def _as(name: str, stored: Tensor, dtype: torch.dtype | None) -> Tensor:
    made = stored.to(dtype or stored.dtype)
    if dtype == torch.float16 and made.isinf().any() and not stored.isinf().any():
        raise ValueError(f"{name}: holds {stored.abs().max():.4g}, too large for fp16 (65,504 at most); choose bf16")
    return made
