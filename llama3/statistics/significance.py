"""A difference of two models with its interval and p, Holm's correction, and the power of a margin.

Reading stored decisions loads no numerical library: scipy is imported where a p is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer

LEVEL = 0.05
"""Two-sided level of significance; intervals are 95 %."""
Z = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
Method = Literal["paired bootstrap over documents", "McNemar", "paired difference"]
DOCUMENTS: Method = "paired bootstrap over documents"
QUESTIONS: Method = "McNemar"
"""Exact p of right and wrong answers, with Agresti and Min's interval."""
PAIRED: Method = "paired difference"
"""Normal interval and p of differences per item: shares of right answers, means over groups or tasks."""


def _exact(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Number = Annotated[float, PlainSerializer(_exact, when_used="json")]
"""A float that survives JSON exactly; `nan` and infinities, which JSON lacks, as text."""


class Difference(BaseModel):
    """Candidate minus champion of one score, on the samples that both have."""

    model_config = ConfigDict(frozen=True)

    value: Number
    low: Number
    """Lower end of the paired 95 % interval; NaN or infinite with too few samples."""
    high: Number
    p: Number
    """Two-sided: how often chance alone gives a difference this large."""
    p_holm: Number | None = None
    """`p` after Holm's correction over all scores where higher is better; None for the other scores."""
    n: int
    """Documents or questions that both models answered."""
    method: Method
    better: Literal["lower", "higher"]
    clusters: int = 0
    """Of the documents or questions; 0: each is its own, 1: it is not known what errs together."""
    design: Number = 1.0
    """Design effect: the variance over that of independent documents or questions."""

    @property
    def worse(self) -> tuple[float, float, float]:
        """How much worse the candidate is (below 0: better), and the ends of its interval."""
        if self.better == "lower":
            return self.value, self.low, self.high
        return -self.value, -self.high, -self.low


def normal_p(value: float, stderr: float) -> float:
    """Return the two-sided p of `value` under a normal distribution around 0; NaN if either is not finite."""
    if not (math.isfinite(value) and math.isfinite(stderr)):
        return math.nan
    if stderr == 0:
        return 1.0 if value == 0 else 0.0
    from scipy.stats import norm

    return float(2 * norm.sf(abs(value) / stderr))


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p of `gained` questions newly right against `lost` newly wrong (binomial, 1/2).

    McNemar (1947), Psychometrika 12:153-157; questions that both models answer alike do not count.
    """
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """Return the p of each name after Holm's step-down over all of them (Holm 1979, Scand. J. Statist. 6:65-70).

    It keeps the chance of any false finding at 5 %, also for dependent p. A p that is not finite is left out.
    """
    finite = sorted((name for name in ps if math.isfinite(ps[name])), key=lambda name: ps[name])
    adjusted, largest = dict(ps), 0.0
    for rank, name in enumerate(finite):
        largest = max(largest, min(1.0, (len(finite) - rank) * ps[name]))
        adjusted[name] = largest
    return adjusted


# Power of a margin: the chance that a difference of a given size passes it, by the size of the sample.

USUAL = 0.8
"""Least chance to pass that an equal model should have."""
MARGINS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 25, 30, 40, 50)
"""Margins to propose, in percent or points."""


def questions_pass(margin: float, n: int, drop: float, discordant: float) -> float:
    """Return the chance that a model which is `drop` worse on `n` questions shows a drop of at most `margin`.

    All are shares; `discordant` is that of questions that only one of the two models answers right. Exact for
    `estimates.paired_proportions`: k answers differ, binomially, each is a loss with one probability, and for each k
    the interval allows a largest number of losses.
    """
    import numpy as np
    from scipy import special

    discordant = max(discordant, abs(drop))
    spread = 6 * math.sqrt(n * discordant * (1 - discordant)) + 6
    k = np.arange(max(0, int(n * discordant - spread)), min(n, int(n * discordant + spread)) + 1)
    size, room = n + 2, margin * (n + 2)
    # losses - gains = x passes if x + Z sqrt(k + 1 - x^2 / size) <= room: below the smaller root of a quadratic
    curve = Z**2 / size
    root = np.sqrt(np.maximum(0.0, (1 + curve) * Z**2 * (k + 1) - curve * room**2))
    losses = np.floor((k + (room - root) / (1 + curve)) / 2 + 1e-9)
    share = (1 + drop / discordant) / 2 if discordant else 0.5
    passed = np.where(losses >= k, 1.0, special.bdtr(np.maximum(losses, 0), np.maximum(k, 1), share) * (losses >= 0))
    chance = special.bdtr(k, n, discordant) - np.where(k > 0, special.bdtr(np.maximum(k - 1, 0), n, discordant), 0.0)
    return float((chance * passed).sum())


def normal_pass(margin: float, stderr: float, worse: float) -> float:
    """Return the chance that the 95 % bound of a normal difference with mean `worse` is at most `margin`."""
    return NormalDist().cdf((margin - worse) / stderr - Z)


def usual_margin(stderr: float) -> float | None:
    """Return the smallest of MARGINS, in percent, that an equal model passes `USUAL`ly; None if none is wide enough."""
    return next((margin for margin in MARGINS if normal_pass(margin / 100, stderr, 0.0) >= USUAL), None)


def items_for(margin: float, n: int, stderr: float) -> int:
    """Return of how many items instead of `n` an equal model passes `margin` `USUAL`ly."""
    return math.ceil(n * ((Z + NormalDist().inv_cdf(USUAL)) * stderr / margin) ** 2)
