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
from typing import Protocol

from llama3.recipe.base import Domain
from llama3.recipe.lr import LearningRate
from llama3.recipe.sections import Stage, Start
from llama3.recipe.units import Share, Span

SAMPLES = 64
"""Steps of a segment, besides its first and last, that stand for its learning rates where two recipes are compared."""


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
    """A stage laid out on the axis of positions, or the part of one that is trained between two gates."""

    stage: Stage
    segments: tuple[Segment, ...]
    shares: dict[Domain, Fraction]
    part: int | None = None
    """Which of the stage's parts it is; None: the whole stage."""

    @property
    def name(self) -> str:
        return self.stage.name if self.part is None else self.stage.parts[self.part]

    @property
    def lengths(self) -> list[int]:
        """Sequence lengths, in order."""
        return [segment.seq for segment in self.segments]

    @property
    def begins_stage(self) -> bool:
        return not self.part

    @property
    def ends_stage(self) -> bool:
        return self.part is None or self.part == len(self.stage.parts) - 1

    @property
    def parts(self) -> tuple[StageSpan, ...]:
        """What is trained as a step of its own: the whole stage, or each sequence length where gates lie between."""
        if self.part is not None or len(self.stage.parts) == 1:
            return (self,)
        return tuple(
            StageSpan(self.stage, (segment,), self.shares, number) for number, segment in enumerate(self.segments)
        )

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


class StagedRecipe(Protocol):
    """What a schedule reads of a recipe. A Protocol, because `Recipe` itself is checked by its schedule."""

    @property
    def lr(self) -> LearningRate: ...
    @property
    def start(self) -> Start | None: ...
    @property
    def stages(self) -> list[Stage]: ...
    @property
    def mix(self) -> dict[str, dict[Domain, Share]]: ...
    @property
    def apart(self) -> dict[str, Domain]: ...


class Schedule:
    """The stages of a recipe as spans of positions, and the learning rate at each position."""

    def __init__(self, recipe: StagedRecipe) -> None:
        self.rate = recipe.lr
        self.spans = tuple(_lay_out(recipe))
        """One per stage of the recipe."""
        following = [span for span in self.spans if span.stage.lr is None] or self.spans
        last = following[-1].segments[-1]
        self.given = _given(recipe)
        """How many stages are not trained, because the checkpoint of `start` stands for them."""
        self.fall = (last.first_step + last.steps, last.end)
        """Step and position at which a decay (wsd) ends: the end of the last stage without a rule of its own."""
        self.warm = self.reached(recipe.lr.warmup)
        """Step and position at which the warm-up ends, in its own unit exact, in the other one converted."""

    @property
    def trained(self) -> list[StageSpan]:
        """The spans that are trained as steps of their own, in order: stages, or their parts between gates."""
        return [part for span in self.spans[self.given :] for part in span.parts]

    @property
    def names(self) -> set[str]:
        """Names of the stages, and of the parts that are steps of their own."""
        return {name for span in self.spans for part in span.parts for name in (span.stage.name, part.name)}

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
        """Return the span of the stage, or of the part of a stage, called `stage`. Raises KeyError."""
        for span in [*self.trained, *self.spans]:
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

    def reached(self, span: Span) -> tuple[Fraction, Fraction]:
        """Return the step and the position at which `span`, counted from the start of the run, ends.

        One is written in the recipe; the other follows from the batches of the stages, and may lie within a step.
        Behind the run the last batch goes on.
        """
        amount = Fraction(span.amount)
        for segment in self.segments:
            ahead = amount - (segment.first_step if span.unit == "steps" else segment.start)
            steps = ahead if span.unit == "steps" else ahead / segment.batch
            if steps <= segment.steps:
                break
        return segment.first_step + steps, segment.start + steps * segment.batch

    def lr_at(self, position: int) -> float:
        """Return the learning rate of the step that starts at `position`.

        A stage's own rule runs from the rate that the schedule had where the stage begins, and reaches its end
        value at the stage's last token.
        """
        for span in self.spans:
            if position < span.end and span.stage.lr is not None:
                if position < span.start:
                    break
                begin = self.scheduled(span.start)
                end = begin if span.stage.lr.end is None else span.stage.lr.end
                return begin + (end - begin) * (position - span.start) / span.tokens
        return self.scheduled(position)

    def rates(self, start: int, stop: int) -> list[tuple[int, float]]:
        """Return positions of steps in [start, stop) and their learning rates, enough to tell two schedules apart.

        Of each segment the first step, the last and up to SAMPLES between: a rate has few parameters, so two that agree
        there agree everywhere. Equal lists are what makes two recipes train alike, however `lr` is written.
        """
        found: dict[int, float] = {}
        for segment in self.segments:
            first = max(0, -(-(start - segment.start) // segment.batch))
            steps = min(segment.steps, -(-(stop - segment.start) // segment.batch)) - first
            for number in range(SAMPLES + 1) if steps > 0 else ():
                position = segment.start + (first + number * (steps - 1) // SAMPLES) * segment.batch
                found[position] = self.lr_at(position)
        return sorted(found.items())

    def scheduled(self, position: int) -> float:
        """Return the rate that the run's schedule has at `position`, whatever the stage there says.

        The first step already has a rate above zero, as published code does: the warm-up counts the step about to be
        taken.
        """
        rate, step = self.rate, self.step_at(position)
        batch = self.segment_at(min(position, self.tokens - 1)).batch
        warm = _progress(rate.warmup, step + 1, position + batch)
        if warm < 1:
            return rate.peak * warm
        left = _left_of_decay(rate, step, position, self.fall) if rate.wsd else self._left_of_fall(step, position)
        return rate.to + (rate.peak - rate.to) * left

    def _left_of_fall(self, step: int, position: int) -> float:
        """Return how much of the way from `to` to the peak is left on the cosine or line that follows the warm-up."""
        over = self.rate.fall.over
        begin = float(self.warm[0] if over.unit == "steps" else self.warm[1]) / over.amount
        done = min(max((_progress(over, step, position) - begin) / (1 - begin), 0.0), 1.0)
        return 1 - done if self.rate.linear else 0.5 * (1 + math.cos(math.pi * done))


def _given(recipe: StagedRecipe) -> int:
    after = recipe.start.after if recipe.start else None
    return 0 if after is None else 1 + [stage.name for stage in recipe.stages].index(after)


def _progress(span: Span, step: int, position: int) -> float:
    done = step if span.unit == "steps" else position
    return done / span.amount if span.amount else 1.0


def _left_of_decay(rate: LearningRate, step: int, position: int, fall: tuple[int, int]) -> float:
    """Return how much of the way from `to` to the peak is left: all of it before the last `decay` of the run."""
    assert rate.wsd is not None
    decay = rate.wsd.decay
    to_go = fall[0] - step if decay.unit == "steps" else fall[1] - position
    done = min(max(1 - to_go / decay.amount, 0.0), 1.0)
    return 1 - (math.sqrt(done) if rate.wsd.shape == "sqrt" else done)


def _lay_out(recipe: StagedRecipe) -> Iterator[StageSpan]:
    position, step, batch = 0, 0, 0
    for stage in recipe.stages:
        batch = stage.batch or batch
        end = stage.end(position)
        segments = []
        for index, seq in enumerate(stage.lengths):
            own = stage.length[index] if isinstance(stage.length, list) else None
            asked = own if own is not None else (end - position) // (len(stage.lengths) - index)
            steps = max(1, round(Fraction(asked, batch)))
            segments.append(Segment(stage.name, position, steps, step, seq, batch, asked))
            position, step = segments[-1].end, step + steps
        yield StageSpan(stage, tuple(segments), _shares(recipe, stage))


def _shares(recipe: StagedRecipe, stage: Stage) -> dict[Domain, Fraction]:
    """Return the share of each domain in a stage, what it adds counted."""
    rest = 1 - sum(stage.add.values(), Fraction(0))
    shares = {domain: rest * Fraction(share) for domain, share in recipe.mix[stage.mix].items() if share}
    for name, share in ((name, share) for name, share in stage.add.items() if share):
        domain = recipe.apart[name]
        shares[domain] = shares.get(domain, Fraction(0)) + Fraction(share)
    return shares
