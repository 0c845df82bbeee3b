"""The learning rate of a run: linear warm-up from zero, then exactly one decay.

To add a decay, write one subclass of `Decay` here and its field in `LearningRate`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, PlainSerializer, model_validator

from herd.llama3.recipe.base import Section, decides, models_in
from herd.llama3.recipe.units import Span, Tokens, tokens

FEW_STEPS = 10
"""A stage or decay of fewer optimizer steps earns a warning."""
Rate = Annotated[float, PlainSerializer(float)]
"""A float that YAML may have read as text, such as 8e-5."""
Point = tuple[int, int]
"""Optimizer step, and position in tokens."""


class Timeline(NamedTuple):
    """What a decay needs to know about the stages of a run."""

    warmup: Span
    warmup_end: tuple[Fraction, Fraction]
    decay_end: Point
    """End of the last stage without a learning-rate rule."""
    run_end: Point
    last_stages: list[str]
    """Stages after `decay_end`."""
    only_rules: bool
    """Whether all stages have a learning-rate rule."""


def _not_empty(span: Span) -> Span:
    if not span.amount:
        raise ValueError(f"invalid length {span}; use e.g. 1000 steps or 252M")
    return span


Length = Annotated[Span, AfterValidator(_not_empty)]


class Decay(Section):
    """The learning rate after the warm-up."""

    key: ClassVar[str]
    """Name of the field in `LearningRate`."""
    to: Annotated[Rate, decides("checkpoint", since="use")] = Field(ge=0)
    """Learning rate at the end of the decay."""

    @abstractmethod
    def remaining(self, now: Point, run: Timeline) -> float:
        """Return the share of the way from `to` to the peak that remains `now`, after the warm-up; 1 is the peak."""

    @abstractmethod
    def faults(self, run: Timeline) -> Iterator[str]:
        """Yield a line for each contradiction with the warm-up and the stages."""

    @abstractmethod
    def warnings(self, run: Timeline, final_rate: float) -> Iterator[str]:
        """Yield a line for each legal but unusual setting; `final_rate` is the scheduled rate at the last stage."""

    @abstractmethod
    def scaled(
        self, run: Timeline, size: Callable[[Span], Fraction], position: Callable[[float], int], step: int
    ) -> Self:
        """Return this decay for a run in small with `step` tokens in a step.

        `size` returns the tokens of a length of this run, `position` the position in small of one of this run.
        """

    def overrides_for(self, end: Tokens) -> list[str]:
        """Return the overrides for a run that ends at position `end`."""
        return []


class _OverDecay(Decay):
    """A decay from the end of the warm-up to a fixed point; it must know the length of the run from the first step."""

    shape: ClassVar[str]
    over: Annotated[Length, decides("checkpoint", since="use")]
    """End of the decay, counted from the start of the run; the decay starts at the end of the warm-up."""

    def remaining(self, now: Point, run: Timeline) -> float:
        begin = float(self.over.pick(*run.warmup_end)) / self.over.amount
        return self.curve(min(max((self.over.pick(*now) / self.over.amount - begin) / (1 - begin), 0.0), 1.0))

    @abstractmethod
    def curve(self, done: float) -> float:
        """Return the remaining share when the share `done` of the decay is over."""

    def faults(self, run: Timeline) -> Iterator[str]:
        warmup_end = self.over.pick(*run.warmup_end)
        if self.over.amount <= warmup_end:
            yield (
                f"lr.{self.key}.over: {self.over} is not longer than the warm-up of {run.warmup}, which ends at "
                f"{self.over.unit[:-1]} {math.ceil(warmup_end):,} of these stages; lengthen it"
            )

    def warnings(self, run: Timeline, final_rate: float) -> Iterator[str]:
        over, unit, run_end = self.over, self.over.unit[:-1], self.over.pick(*run.run_end)
        if run_end < over.amount * 0.99:
            yield (
                f"lr.{self.key}.over: the {self.shape} ends at {unit} {tokens(over.amount)}, the tokens before it, at "
                f"{unit} {tokens(run_end)}: the rate comes down to {final_rate:.2g}, not to {self.to:g}"
            )
        elif not run.only_rules and over.amount < over.pick(*run.decay_end) * 0.9:
            yield (
                f"lr.{self.key}.over: the {self.shape} ends at {unit} {tokens(over.amount)}, long before the stages "
                "that follow it"
            )

    def scaled(
        self, run: Timeline, size: Callable[[Span], Fraction], position: Callable[[float], int], step: int
    ) -> Self:
        least = max(step, position(float(run.warmup_end[1]))) + step
        return self.model_copy(update={"over": Span(max(least, position(float(size(self.over)))), "tokens")})

    def overrides_for(self, end: Tokens) -> list[str]:
        return [f"lr.{self.key}.over={end}"]


class Cosine(_OverDecay):
    """Half a cosine from the peak to `to`."""

    key, shape = "cosine", "cosine"

    def curve(self, done: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * done))


class LinearDecay(_OverDecay):
    """A straight line from the peak to `to`."""

    key, shape = "linear", "line"

    def curve(self, done: float) -> float:
        return 1 - done


class Wsd(Decay):
    """Warm-up, stable, decay: the peak until the decay at the end (arXiv 2404.06395, 2405.18392).

    A run can be made longer until its decay starts. The loss is a little higher than under a cosine before the decay,
    and the decay makes up for it (arXiv 2405.18392, figure 3).
    """

    key = "wsd"
    decay: Annotated[Length, decides("checkpoint", since="use")]
    """Length of the decay; it ends with the last stage without a learning-rate rule."""
    shape: Annotated[Literal["linear", "sqrt"], decides("checkpoint", since="use")] = "sqrt"
    """`linear`: 1 - x over the decay; `sqrt`: 1 - sqrt(x), which ends lower for equal length (arXiv 2405.18392)."""

    def remaining(self, now: Point, run: Timeline) -> float:
        to_go = self.decay.pick(*run.decay_end) - self.decay.pick(*now)
        done = min(max(1 - to_go / self.decay.amount, 0.0), 1.0)
        return 1 - (math.sqrt(done) if self.shape == "sqrt" else done)

    def faults(self, run: Timeline) -> Iterator[str]:
        yield from ()

    def scaled(
        self, run: Timeline, size: Callable[[Span], Fraction], position: Callable[[float], int], step: int
    ) -> Self:
        end = run.decay_end[1]
        length = position(end) - position(max(0.0, end - float(size(self.decay))))
        return self.model_copy(update={"decay": Span(max(step, length), "tokens")})

    def warnings(self, run: Timeline, final_rate: float) -> Iterator[str]:
        decay, end = self.decay, self.decay.pick(*run.decay_end)
        if end - decay.amount < decay.pick(*run.warmup_end):
            yield (
                f"lr.wsd.decay: {decay} before {decay.unit[:-1]} {tokens(end)} begin inside the warm-up of "
                f"{run.warmup}: the rate has no stable part and never reaches its peak, or jumps down from it"
            )
        elif decay.unit == "steps" and decay.amount < FEW_STEPS:
            yield f"lr.wsd.decay: {decay} are few for a learning rate to come down in"
        if run.last_stages and self.to == 0:
            yield f"lr.wsd.to: the decay ends at 0, so stage {run.last_stages[0]} starts from a rate of 0"


class LearningRate(Section):
    """Linear warm-up from zero, then exactly one of cosine, linear and wsd."""

    peak: Annotated[Rate, decides("checkpoint", since="use")] = Field(gt=0)
    """Learning rate at the end of the warm-up."""
    warmup: Annotated[Span, decides("checkpoint", since="use")]
    """Length of the warm-up; the rate of the first step is already above zero."""
    cosine: Cosine | None = None
    linear: LinearDecay | None = None
    wsd: Wsd | None = None

    @model_validator(mode="after")
    def _one_decay(self) -> Self:
        fields = type(self).model_fields.items()
        names = [name for name, field in fields if any(issubclass(m, Decay) for m in models_in(field.annotation))]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"write exactly one of {', '.join(names)} after the warm-up, not {given or 'none'}")
        return self

    @property
    def decay(self) -> Decay:
        """The decay after the warm-up."""
        return next(value for _, value in self if isinstance(value, Decay))
