"""Ladders made up from a known law, and how often the fit finds it again: the check of the fit's intervals.

The losses are Hoffmann's form with the constants that Besiroglu et al. found in Hoffmann's data (arXiv 2404.10102:
E 1.82, A 482, B 2085, a 0.348, b 0.366), times noise as between seeds. Sizes lie around each budget's best one. What
this gives up: noise that is not normal, and grids that miss the optimum; a fixed grid costs accuracy, as
`llama3.scaling.isoflop` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llama3.scaling.isoflop import Trial, fit_ladder


@dataclass(frozen=True)
class Truth:
    """L(N, D) = E + A / N^a + B / D^b."""

    irreducible: float = 1.8172
    size_scale: float = 482.01
    data_scale: float = 2085.43
    size: float = 0.3478
    data: float = 0.3658

    @property
    def alpha(self) -> float:
        """Exponent of the best number of tokens in operations (arXiv 2203.15556, equation 4)."""
        return self.size / (self.size + self.data)

    def loss(self, parameters: float, tokens: float) -> float:
        of_size = self.size_scale / math.pow(parameters, self.size)
        return self.irreducible + of_size + self.data_scale / math.pow(tokens, self.data)

    def parameters(self, flops: float) -> float:
        """Return the best size for `flops`, at 6 operations per token and parameter."""
        ratio = self.size * self.size_scale / (self.data * self.data_scale)
        return float(ratio ** (1 / (self.size + self.data)) * (flops / 6) ** (1 - self.alpha))


BUDGETS = (2e11, 8e11, 3.2e12, 1.28e13)
"""Of a ladder on a laptop."""


def made_up(
    truth: Truth, budgets: Sequence[float], sizes: int, noise: float, seed: int, step: float = 2.0
) -> list[Trial]:
    """Return the runs of a ladder: `sizes` models a factor `step` apart, losses off by a share of `noise`."""
    dice = np.random.default_rng(seed)
    return [
        _trial(
            truth, flops, truth.parameters(flops) * step ** (index - (sizes - 1) / 2), 1 + noise * dice.normal(), index
        )
        for flops in budgets
        for index in range(sizes)
    ]


def _trial(truth: Truth, flops: float, size: float, noise: float, index: int) -> Trial:
    parameters = round(size)
    tokens = round(flops / 6 / parameters)
    return Trial(
        parameters, tokens, 6.0 * parameters * tokens, truth.loss(parameters, tokens) * noise, f"{flops:.3g}-{index}"
    )


def recovery(
    seeds: int = 100,
    budgets: Sequence[float] = BUDGETS,
    sizes: int = 5,
    noise: float = 0.002,
    truth: Truth | None = None,
) -> int:
    """Return in how many of `seeds` ladders the interval of alpha holds the true one; no fit holds none."""
    known = truth or Truth()
    return sum(_recovered(known, made_up(known, budgets, sizes, noise, seed), budgets) for seed in range(seeds))


def _recovered(truth: Truth, trials: Sequence[Trial], budgets: Sequence[float]) -> bool:
    try:
        alpha = fit_ladder(trials, budgets).law.alpha
    except ValueError:
        return False
    return alpha.low <= truth.alpha <= alpha.high
