"""The weighted mean of several models ("model soup", arXiv 2203.05482), one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from herd.llama3.model.files import WeightReader, parameters, save_model

if TYPE_CHECKING:
    from torch import Tensor


LEAST, MOST = 1e-6, 1e6
"""Weights of a model: their products with weights in fp32 stay exact in fp64."""


class MergedModel:
    """Reads models of one shape as their mean: sum(w x) / sum(w) in fp64, then the dtype of the first model."""

    def __init__(self, models: Mapping[str, WeightReader], weights: Sequence[float]) -> None:
        """Open the mean of `models` by name, with one weight each (LEAST to MOST).

        Its longest sequence is the shortest of theirs: what all were trained to. Raises ValueError for fewer than two
        models, other weights, or models of different shape.
        """
        if len(models) < 2:
            raise ValueError(f"merge: takes two models or more, not {len(models)}; name another")
        if len(weights) != len(models):
            raise ValueError(f"weights: {len(weights)} for {len(models)} models; write one for each")
        if wrong := [weight for weight in weights if not LEAST <= weight <= MOST]:
            raise ValueError(f"weights: {wrong[0]} must be from {LEAST} to {MOST:g}; leave a model without weight out")
        self.models, self.weights = dict(models), list(weights)
        (name, first), *others = models.items()
        for other, model in others:
            if faults := list(_differences(first, model)):
                raise ValueError(f"merge: {other} has another shape than {name}: {'; '.join(faults)}; merge others")
        longest = min(model.config.max_seq_len for model in models.values())
        self.config = first.config.model_copy(update={"max_seq_len": longest})
        self.vocab_size = first.vocab_size

    def tensor(self, name: str) -> Tensor:
        import torch

        total, dtype = None, None
        for model, weight in zip(self.models.values(), self.weights, strict=True):
            tensor = model.tensor(name)
            dtype = dtype or tensor.dtype
            scaled = tensor.to(torch.float64) * weight
            total = scaled if total is None else total.add_(scaled)
        assert total is not None
        return total.div_(math.fsum(self.weights)).to(dtype)

    def save(self, folder: Path) -> None:
        """Write the mean into `folder` as a model, one tensor in memory at a time."""
        named = ((param.name, tensor) for param, tensor in parameters(self, None))
        save_model(folder, self.config, self.vocab_size, named)


def _differences(first: WeightReader, other: WeightReader) -> list[str]:
    """Return the fields of the shape in which two models differ, but for the longest sequence."""
    shapes = [
        {**model.config.model_dump(mode="json", exclude={"max_seq_len", "preset"}), "vocab_size": model.vocab_size}
        for model in (first, other)
    ]
    return [
        f"{name} {shapes[1][name]} instead of {value}" for name, value in shapes[0].items() if shapes[1][name] != value
    ]
