"""A difference of two models with its interval and p, and Holm's correction.

Reading stored decisions loads no numerical library: scipy is imported where a p is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer

LEVEL = 0.05
"""Two-sided level of significance; intervals are 95 %."""
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
