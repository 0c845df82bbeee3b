"""Warnings about what is legal but odd: each says what the numbers amount to, so that the author can judge.

Nothing here refuses a recipe. The published 405B schedule itself earns three warnings.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Tokens, tokens

FEW_STEPS = 10


def lint(recipe: Recipe) -> list[str]:
    """Return the warnings that `recipe` earns, each naming its field."""
    schedule = Schedule(recipe)
    return [
        *_warmup(recipe, schedule),
        *(warning for span in schedule.spans for warning in _few_steps(span)),
        *_cosine(recipe, schedule),
        *_unit(recipe),
        *_order(schedule),
    ]


def _warmup(recipe: Recipe, schedule: Schedule) -> Iterator[str]:
    warmup = recipe.lr.warmup
    inside = [
        span
        for span in schedule.spans[:-1]
        if (schedule.step_at(span.end) if warmup.unit == "steps" else span.end) < warmup.amount
    ]
    if inside:
        span = inside[-1]
        yield (
            f"stages.{span.name}: {_asked(span)} is {schedule.step_at(span.end):,} steps, inside the warm-up of "
            f"{warmup}: the stage ends before the learning rate has reached its peak"
        )
    total = schedule.steps if warmup.unit == "steps" else schedule.tokens
    if warmup.amount >= total:
        yield f"lr.warmup: {warmup} is not over when the run ends, after {schedule.steps:,} steps"


def _few_steps(span: StageSpan) -> Iterator[str]:
    if span.steps >= FEW_STEPS:
        return
    part = span.segments[-1]
    exact = sum(segment.asked for segment in span.segments) / part.batch
    average = span.stage.average
    more = f" or to average {average} checkpoints" if average and average > span.steps else ""
    yield (
        f"stages.{span.name}: {_asked(span)} at {Tokens(part.batch)} is {exact:.1f} steps, rounded to {span.steps}: "
        f"few for a learning rate to move in{more}"
    )


def _cosine(recipe: Recipe, schedule: Schedule) -> Iterator[str]:
    over = recipe.lr.cosine.over
    end = schedule.steps if over.unit == "steps" else schedule.tokens
    unit = "step" if over.unit == "steps" else "token"
    scheduled = [span for span in schedule.spans if span.stage.lr is None]
    if end < over.amount * 0.99:
        last = schedule.spans[-1].start if schedule.spans[-1].stage.lr else schedule.tokens
        rate = schedule._scheduled(last)
        yield (
            f"lr.cosine.over: the cosine ends at {unit} {tokens(over.amount)}, the tokens before it, at {unit} "
            f"{tokens(end)}: the rate comes down to {rate:.2g}, not to {recipe.lr.cosine.to:g}"
        )
    elif scheduled and over.amount < _reach(scheduled[-1], schedule, over.unit) * 0.9:
        yield f"lr.cosine.over: the cosine ends at {unit} {tokens(over.amount)}, long before the stages that follow it"


def _reach(span: StageSpan, schedule: Schedule, unit: str) -> int:
    return schedule.step_at(span.end) if unit == "steps" else span.end


def _unit(recipe: Recipe) -> Iterator[str]:
    unit = recipe.tokens.unit
    for stage in recipe.stages if unit else []:
        for seq in stage.lengths:
            if unit and max(unit, seq) % min(unit, seq):
                yield (
                    f"tokens.unit: {unit} and sequence {seq} of stage {stage.name} do not divide each other: "
                    "more documents are cut"
                )


def _order(schedule: Schedule) -> Iterator[str]:
    for before, after in pairwise(schedule.segments):
        if after.batch < before.batch * 0.9:
            yield f"stages.{after.stage}.batch: {Tokens(after.batch)} is smaller than {Tokens(before.batch)} before it"
        if after.seq < before.seq:
            yield f"stages.{after.stage}.seq: {after.seq} is shorter than {before.seq} before it"


def _asked(span: StageSpan) -> str:
    return f"{Tokens(sum(segment.asked for segment in span.segments))} tokens"
