"""What a token costs to train on by size of model, read off runs: the other half of every allocation.

Operations per token and parameter are near 6, but not 6: an embedding lookup multiplies nothing, attention multiplies
without parameters. Between the sizes that were run the ratio is interpolated over the logarithm of the size; outside
it is that of the nearest one, an assumption. What this gives up: models of another shape or sequence length than those
that were run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """Operations per token and parameter at the sizes that were run."""

    sizes: Array
    """[n] parameters, rising."""
    ratios: Array
    """[n] operations per token and parameter."""

    def per_token(self, parameters: Array) -> Array:
        """Return training operations per token of models of `parameters`."""
        return np.asarray(parameters * np.interp(np.log(parameters), np.log(self.sizes), self.ratios))

    def parameters(self, per_token: Array) -> Array:
        """Return how many parameters a model has that costs `per_token` operations per token."""
        ratio = np.interp(np.log(per_token), np.log(self.sizes * self.ratios), self.ratios)
        return np.asarray(per_token / ratio)


def cost(parameters: Sequence[float], tokens: Sequence[float], flops: Sequence[float]) -> Cost:
    """Return the cost of a token from runs; those of one size are averaged."""
    counts = np.asarray(parameters, np.float64)
    ratios = np.asarray(flops, np.float64) / np.asarray(tokens, np.float64) / counts
    sizes = np.unique(counts)
    return Cost(sizes, np.array([ratios[counts == size].mean() for size in sizes]))
