"""The learning rate of a run: linear warm-up from zero, then exactly one of three ways down.

A cosine or a line must know the length of the run from the first step on; WSD (warm-up, stable, decay) need not: the
rate stays at its peak until the last stretch, so a run can be lengthened as long as the decay has not begun. For that
it gives up a little of the loss before the decay, which the decay then wins back (arXiv 2405.18392, figure 3).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PlainSerializer, model_validator

from llama3.recipe.base import Section
from llama3.recipe.units import Span

Rate = Annotated[float, PlainSerializer(float)]
"""A float that YAML may have read as text, such as 8e-5."""


class Cosine(Section):
    """Half a cosine from the peak to `to`."""

    to: Rate = Field(ge=0)
    """Learning rate at the end of the cosine."""
    over: Span
    """Where the cosine ends, counted from the start of the run. It begins where the warm-up ends, in any units."""


class LinearDecay(Section):
    """A straight line from the peak to `to`."""

    to: Rate = Field(ge=0)
    """Learning rate at the end of the line."""
    over: Span
    """Where the line ends, counted from the start of the run. It begins where the warm-up ends, in any units."""


class Wsd(Section):
    """The peak, held, and a decay at the end (warm-up, stable, decay: arXiv 2404.06395, 2405.18392)."""

    to: Rate = Field(ge=0)
    """Learning rate at the end of the decay."""
    decay: Span
    """Length of the decay; it ends with the last stage that has no learning-rate rule of its own."""
    shape: Literal["linear", "sqrt"] = "sqrt"
    """`linear`: 1 - x over the decay; `sqrt`: 1 - sqrt(x), which ends lower for equal length (arXiv 2405.18392)."""


class LearningRate(Section):
    """Linear warm-up from zero, then exactly one of cosine, linear and wsd."""

    peak: Rate = Field(gt=0)
    warmup: Span
    cosine: Cosine | None = None
    linear: LinearDecay | None = None
    wsd: Wsd | None = None

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        given = [name for name in ("cosine", "linear", "wsd") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"write exactly one of cosine, linear and wsd after the warm-up, not {given or 'none'}")
        span, field = (self.wsd.decay, "decay") if self.wsd else (self.fall.over, "over")
        if not span.amount:
            raise ValueError(f"{self.rule}.{field}: {span} is no length; write 1M steps or 252M")
        if field == "over" and span.unit == self.warmup.unit and span.amount <= self.warmup.amount:
            raise ValueError(f"{self.rule}.over: {span} is not longer than the warm-up of {self.warmup}; lengthen it")
        return self

    @property
    def rule(self) -> Literal["cosine", "linear", "wsd"]:
        """Return the name of the rule after the warm-up."""
        return "cosine" if self.cosine else "linear" if self.linear else "wsd"

    @property
    def fall(self) -> Cosine | LinearDecay:
        """Return the rule of a run without a stable part."""
        fall = self.cosine or self.linear
        assert fall is not None
        return fall

    @property
    def to(self) -> float:
        """Return the rate at the end."""
        return self.wsd.to if self.wsd else self.fall.to
