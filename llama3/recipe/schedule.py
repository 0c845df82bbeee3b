"""Stage arithmetic: which sequence length, batch, mix and learning rate hold at any position of a run.

A stage ends on the optimizer step nearest to where the recipe says, because a step cannot be cut: 252M tokens at
4Mi are 60.08 steps, so 60. The next stage starts where that one really ended, so errors do not add up. Everything
here is plain integer arithmetic on positions; nothing is stored and nothing depends on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from llama3.recipe.schema import LearningRate, Recipe, Stage
from llama3.recipe.section import Domain
from llama3.recipe.units import Span


@dataclass(frozen=True)
class Segment:
    """Steps of one shape: a stage, or one of its parts when the stage lists several sequence lengths."""

    stage: str
    start: int
    """Position of its first token."""
    steps: int
    first_step: int
    """Optimizer steps taken before it."""
    seq: int
    batch: int
    """Tokens per optimizer step."""
    asked: int
    """Tokens that the recipe asks for; `tokens` is this rounded to whole steps."""

    @property
    def tokens(self) -> int:
        return self.steps * self.batch

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class StageSpan:
    """A stage laid out on the axis of positions."""

    stage: Stage
    segments: tuple[Segment, ...]
    shares: dict[Domain, Fraction]

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def end(self) -> int:
        return self.segments[-1].end

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def steps(self) -> int:
        return sum(segment.steps for segment in self.segments)


class Schedule:
    """The stages of a recipe as spans of positions, and the learning rate at each position."""

    def __init__(self, recipe: Recipe) -> None:
        self.rate = recipe.lr
        self.spans = tuple(_lay_out(recipe))

    @property
    def tokens(self) -> int:
        return self.spans[-1].end

    @property
    def steps(self) -> int:
        return sum(span.steps for span in self.spans)

    @property
    def segments(self) -> list[Segment]:
        return [segment for span in self.spans for segment in span.segments]

    def span(self, stage: str) -> StageSpan:
        """Return the span of the stage called `stage`. Raises KeyError."""
        for span in self.spans:
            if span.name == stage:
                return span
        raise KeyError(stage)

    def segment_at(self, position: int) -> Segment:
        """Return the segment in which the token at `position` is trained. Raises ValueError past the end."""
        for segment in self.segments:
            if segment.start <= position < segment.end:
                return segment
        raise ValueError(f"position {position} is outside the run of {self.tokens} tokens")

    def step_at(self, position: int) -> int:
        """Return how many optimizer steps are complete when training stands at `position`."""
        if position == self.tokens:
            return self.steps
        segment = self.segment_at(position)
        return segment.first_step + (position - segment.start) // segment.batch

    def lr_at(self, position: int) -> float:
        """Return the learning rate of the step that starts at `position`.

        A stage's own rule runs from the rate that the schedule had where the stage begins, and reaches its end
        value at the stage's last token.
        """
        for span in self.spans:
            if position < span.end and span.stage.lr is not None:
                if position < span.start:
                    break
                begin = self._scheduled(span.start)
                end = begin if span.stage.lr.end is None else span.stage.lr.end
                return begin + (end - begin) * (position - span.start) / span.tokens
        return self._scheduled(position)

    def _scheduled(self, position: int) -> float:
        return scheduled_rate(self.rate, self.step_at(position), position)


def scheduled_rate(rate: LearningRate, step: int, position: int) -> float:
    """Return warm-up and cosine at `step` / `position` (each length says which of the two it counts).

    The first step already has a rate above zero (warm-up counts the step about to be taken), as published code does.
    """

    def progress(span: Span, ahead: int) -> float:
        done = step + ahead if span.unit == "steps" else position
        return done / span.amount if span.amount else 1.0

    warm = progress(rate.warmup, 1)
    if warm < 1:
        return rate.peak * warm
    warmup_share = rate.warmup.amount / rate.cosine.over.amount if rate.warmup.unit == rate.cosine.over.unit else 0.0
    done = (progress(rate.cosine.over, 0) - warmup_share) / (1 - warmup_share)
    cosine = 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
    return rate.cosine.to + (rate.peak - rate.cosine.to) * cosine


def _lay_out(recipe: Recipe) -> Iterator[StageSpan]:
    position, step, batch = 0, 0, 0
    for stage in recipe.stages:
        batch = stage.batch or batch
        end = stage.until if stage.until is not None else position + (stage.length or 0)
        segments = []
        for index, seq in enumerate(stage.lengths):
            asked = (end - position) // (len(stage.lengths) - index)
            steps = max(1, round(Fraction(asked, batch)))
            segments.append(Segment(stage.name, position, steps, step, seq, batch, asked))
            position, step = segments[-1].end, step + steps
        shares = {domain: Fraction(share) for domain, share in recipe.mix[stage.mix].items() if share}
        yield StageSpan(stage, tuple(segments), shares)
