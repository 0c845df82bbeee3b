"""The scaling-law ladder of Llama 3 (arXiv 2407.21783, section 3.2.1) as data, and the effect of its rounding.

Published: the ends of the ranges of budgets, sizes, peak rates and batches, and the law's two constants, in Figure 3
and, rounded, in the text. Not published, so assumed: the eight budgets between the ends (1, 3 and 6 of each decade),
and power laws between the ends of peak rate and batch, with the lower peak for the larger model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21, 1e22)
"""Operations; the ends are published, the rest is assumed."""
SIZES = (40e6, 16e9)
"""Parameters of the smallest and the largest model."""
PEAK_LR = (4e-4, 2e-4)
"""Peak rates of the smallest and the largest model."""
BATCH_TOKENS = (250e3, 4e6)
"""Tokens per step at the smallest and the largest budget."""
FLAGSHIP_FLOPS = 3.8e25
FLAGSHIP_TOKENS = 16.55e12
"""The answer of the law at `FLAGSHIP_FLOPS` according to the text."""


@dataclass(frozen=True)
class PowerLaw:
    """N*(C) = A C^alpha, in tokens."""

    alpha: float
    coefficient: float

    def tokens(self, flops: float) -> float:
        """Return the best number of tokens for `flops`."""
        return self.coefficient * math.pow(flops, self.alpha)


FIGURE = PowerLaw(0.537, 0.299)
"""Figure 3: 16.3T tokens at 3.8e25."""
TEXT = PowerLaw(0.53, 0.29)
"""The same constants, rounded, in the text: 10.5T tokens at 3.8e25."""


@dataclass(frozen=True)
class Rounding:
    """The factors by which rounding each constant multiplies the tokens at a budget."""

    flops: float
    alpha: float
    coefficient: float
    exact: float
    """Tokens before rounding."""
    rounded: float
    """Tokens after rounding."""

    def __str__(self) -> str:
        return (
            f"at {self.flops:.3g} FLOPs {self.exact:.3g} tokens become {self.rounded:.3g}: rounding alpha multiplies "
            f"by {self.alpha:.3f}, since it counts for each of {math.log10(self.flops):.1f} decades, and rounding A by "
            f"{self.coefficient:.3f}"
        )


def rounding(flops: float = FLAGSHIP_FLOPS, exact: PowerLaw = FIGURE, rounded: PowerLaw = TEXT) -> Rounding:
    """Return the effect of rounding a law's constants on its answer at `flops` operations.

    A change of alpha by d multiplies by C^d: at 3.8e25 the third digit of alpha, 0.007, is worth a third of the tokens.
    """
    alpha, coefficient = flops ** (rounded.alpha - exact.alpha), rounded.coefficient / exact.coefficient
    return Rounding(flops, alpha, coefficient, exact.tokens(flops), rounded.tokens(flops))


def peak_lr(parameters: float, sizes: tuple[float, float] = SIZES, peaks: tuple[float, float] = PEAK_LR) -> float:
    """Return the peak rate of a model of `parameters`: a power law between the ends, constant outside."""
    return _power_law_between(parameters, sizes, peaks)


def batch_tokens(
    flops: float,
    budgets: tuple[float, float] = (BUDGETS[0], BUDGETS[-1]),
    batches: tuple[float, float] = BATCH_TOKENS,
) -> float:
    """Return the tokens per step for a budget: a power law between the ends, constant outside."""
    return _power_law_between(flops, budgets, batches)


def _power_law_between(x: float, ends: tuple[float, float], values: tuple[float, float]) -> float:
    if not 0 < ends[0] <= ends[1] or not x > 0 or not min(values) > 0:
        raise ValueError(f"{x:g} between {ends} with values {values}: give numbers above 0, the lower end first")
    if ends[0] == ends[1]:
        return values[0]
    share = min(1.0, max(0.0, math.log(x / ends[0]) / math.log(ends[1] / ends[0])))
    return math.pow(values[0], 1 - share) * math.pow(values[1], share)
