"""Stage arithmetic: sequence length, batch, mix and learning rate at each position of a run.

A stage ends on the optimizer step nearest to the position in the recipe: 252M tokens at 4Mi are 60.08 steps, so 60.
The next stage starts there, so rounding errors do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.lr import LearningRate, Timeline
from herd.llama3.recipe.sections import InitFrom, Stage
from herd.llama3.recipe.units import Share, Span

SAMPLES = 64
"""Steps per segment whose learning rates are compared between two recipes, besides the last."""


@dataclass(frozen=True)
class Segment:
    """Steps of one shape: a stage, or one sequence length of a stage with several."""

    stage: str
    start: int
    """Position of the first token."""
    steps: int
    first_step: int
    """Optimizer steps before this segment."""
    seq_len: int
    batch: int
    """Tokens per optimizer step."""
    requested: int
    """Tokens in the recipe; `tokens` is this rounded to whole steps."""

    @property
    def tokens(self) -> int:
        return self.steps * self.batch

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class StageSpan:
    """Positions of a stage, or of the part of a stage between two gates."""

    stage: Stage
    segments: tuple[Segment, ...]
    shares: dict[Domain, Fraction]
    """Of the stage's tokens; conversations have the rest."""
    part: int | None = None
    """Index of the part; None: the whole stage."""

    @property
    def name(self) -> str:
        return self.stage.name if self.part is None else self.stage.parts[self.part]

    @property
    def lengths(self) -> list[int]:
        """Sequence lengths, in order."""
        return [segment.seq_len for segment in self.segments]

    @property
    def begins_stage(self) -> bool:
        return not self.part

    @property
    def ends_stage(self) -> bool:
        return self.part is None or self.part == len(self.stage.parts) - 1

    @property
    def parts(self) -> tuple[StageSpan, ...]:
        """The pipeline steps of the stage: the whole stage, or each sequence length if gates separate them."""
        if self.part is not None or len(self.stage.parts) == 1:
            return (self,)
        return tuple(StageSpan(self.stage, (segment,), self.shares, i) for i, segment in enumerate(self.segments))

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

    @property
    def mix_tokens(self) -> int:
        """Tokens from the documents of the mix: all, or in a stage of kind `sft` the replayed sequences."""
        if self.stage.kind == "pretrain":
            return self.tokens
        seq_len = self.segments[0].seq_len
        # whole sequences, rounded as `apportion` does
        return seq_len * math.ceil(self.tokens // seq_len * self.stage.replay - Fraction(1, 2))


class StagedRecipe(Protocol):
    """The fields of a recipe that a schedule reads; a Protocol, because `Recipe` itself builds a schedule."""

    @property
    def lr(self) -> LearningRate: ...
    @property
    def init_from(self) -> InitFrom | None: ...
    @property
    def stages(self) -> list[Stage]: ...
    @property
    def mix(self) -> dict[str, dict[Domain, Share]]: ...
    @property
    def named_sources(self) -> dict[str, Domain]: ...


class Schedule:
    """The stages of a recipe as spans of positions, and the learning rate at each position."""

    def __init__(self, recipe: StagedRecipe) -> None:
        self.rate = recipe.lr
        self.spans = tuple(_lay_out(recipe))
        """One per stage of the recipe."""
        after = recipe.init_from.after if recipe.init_from else None
        self.given = 0 if after is None else 1 + [stage.name for stage in recipe.stages].index(after)
        """Number of stages that the checkpoint of `init_from` replaces."""
        scheduled = [span for span in self.spans if span.stage.lr is None]
        last = (scheduled or self.spans)[-1].segments[-1]
        self.timeline = Timeline(
            warmup=recipe.lr.warmup,
            warmup_end=self.reached(recipe.lr.warmup),
            decay_end=(last.first_step + last.steps, last.end),
            run_end=(self.steps, self.tokens),
            last_stages=[span.name for span in self.spans if span.start >= last.end],
            only_rules=not scheduled,
        )

    @property
    def trained(self) -> list[StageSpan]:
        """The spans to train as pipeline steps, in order: stages, or their parts between gates."""
        return [part for span in self.spans[self.given :] for part in span.parts]

    @property
    def names(self) -> set[str]:
        """Names of the stages, and of their parts between gates."""
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
        """Return the span of a stage, or of a part of one, by name. Raises KeyError."""
        for span in [*self.trained, *self.spans]:
            if span.name == stage:
                return span
        raise KeyError(stage)

    def longest(self, start: int, stop: int) -> int:
        """Return the longest sequence that the run trains on in the positions [start, stop); 0 if there are none."""
        return max((part.seq_len for part in self.segments if part.start < stop and start < part.end), default=0)

    def segment_at(self, position: int) -> Segment:
        """Return the segment of the token at `position`. Raises ValueError past the end."""
        for segment in self.segments:
            if segment.start <= position < segment.end:
                return segment
        raise ValueError(f"position {position} is outside the run of {self.tokens} tokens")

    def step_at(self, position: int) -> int:
        """Return the number of complete optimizer steps at `position`."""
        if position == self.tokens:
            return self.steps
        segment = self.segment_at(position)
        return segment.first_step + (position - segment.start) // segment.batch

    def reached(self, span: Span) -> tuple[Fraction, Fraction]:
        """Return step and position at the end of `span`, counted from the start of the run.

        The one that is not in the recipe follows from the batches of the stages and may be inside a step. After the
        end of the run the last batch continues.
        """
        for segment in self.segments:
            steps = (span.amount - span.pick(segment.first_step, segment.start)) / Fraction(span.pick(1, segment.batch))
            if steps <= segment.steps:
                break
        return segment.first_step + steps, segment.start + steps * segment.batch

    def lr_at(self, position: int) -> float:
        """Return the learning rate of the step that starts at `position`.

        A stage's rule starts from the scheduled rate at the stage's first token and reaches its end value at the last.
        """
        for span in self.spans:
            if position < span.end and span.stage.lr is not None:
                if position < span.start:
                    break
                begin = self.scheduled(span.start) if span.stage.lr.start is None else span.stage.lr.start
                end = begin if span.stage.lr.end is None else span.stage.lr.end
                return begin + (end - begin) * (position - span.start) / span.tokens
        return self.scheduled(position)

    def rates(self, start: int, stop: int) -> list[tuple[int, float]]:
        """Return positions of steps in [start, stop) and their learning rates, enough to tell two schedules apart.

        These are the first step of each segment, the last and up to SAMPLES between. A schedule has few parameters, so
        two schedules that agree there agree everywhere.
        """
        rates: dict[int, float] = {}
        for segment in self.segments:
            first = max(0, -(-(start - segment.start) // segment.batch))
            steps = min(segment.steps, -(-(stop - segment.start) // segment.batch)) - first
            for step in {number * (steps - 1) // SAMPLES for number in range(SAMPLES + 1)} if steps > 0 else ():
                position = segment.start + (first + step) * segment.batch
                rates[position] = self.lr_at(position)
        return sorted(rates.items())

    def scheduled(self, position: int) -> float:
        """Return the rate of the run's schedule at `position`, without the rules of stages."""
        rate, step = self.rate, self.step_at(position)
        batch = self.segment_at(min(position, self.tokens - 1)).batch
        # The warm-up counts the step that starts here, so the first step has a rate above zero, as in published code.
        warmed = rate.warmup.pick(step + 1, position + batch)
        if warmed < rate.warmup.amount:
            return rate.peak * (warmed / rate.warmup.amount)
        decay = rate.decay
        return decay.to + (rate.peak - decay.to) * decay.remaining((step, position), self.timeline)


def _lay_out(recipe: StagedRecipe) -> Iterator[StageSpan]:
    position, step, batch = 0, 0, 0
    for stage in recipe.stages:
        batch = stage.batch or batch
        end = stage.end(position)
        segments = []
        for index, seq_len in enumerate(stage.lengths):
            if isinstance(stage.length, list):
                requested = int(stage.length[index])
            else:
                requested = (end - position) // (len(stage.lengths) - index)
            steps = max(1, round(Fraction(requested, batch)))
            segments.append(Segment(stage.name, position, steps, step, seq_len, batch, requested))
            position, step = segments[-1].end, step + steps
        rest = 1 - sum(stage.extra_sources.values(), Fraction(0)) if stage.kind == "pretrain" else stage.replay
        shares = {domain: rest * Fraction(share) for domain, share in recipe.mix[stage.mix].items() if rest * share}
        for name, share in stage.extra_sources.items():
            if share:
                domain = recipe.named_sources[name]
                shares[domain] = shares.get(domain, Fraction(0)) + Fraction(share)
        yield StageSpan(stage, tuple(segments), shares)
