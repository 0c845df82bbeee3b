"""Warnings about what is legal but odd: each says what the numbers amount to, so that the author can judge.

Nothing here refuses a recipe. The published 405B schedule itself earns three warnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Tokens, tokens

FEW_STEPS = 10
PLACEHOLDER = re.compile(r"<[^<>|]+>")
"""What a recipe leaves to its user, in any text: `s3://<your-bucket>/web/*.parquet`."""


def lint(recipe: Recipe) -> list[str]:
    """Return the warnings that `recipe` earns, each naming its field."""
    schedule = Schedule(recipe)
    return [
        *_warmup(recipe, schedule),
        *(warning for span in schedule.spans for warning in _few_steps(span)),
        *(_decay(recipe, schedule) if recipe.lr.wsd else _fall(recipe, schedule)),
        *_rope(recipe),
        *_replay(recipe),
        *_unit(recipe),
        *_order(schedule),
    ]


def placeholders(recipe: Recipe) -> list[str]:
    """Return a line for each placeholder that is left in `recipe`: a plan may have some, a run may not."""
    fields: dict[str, list[str]] = {}
    for field, text in _texts(recipe.model_dump(mode="json", by_alias=True)):
        for placeholder in dict.fromkeys(PLACEHOLDER.findall(text)):
            fields.setdefault(placeholder, []).append(field)
    return [
        f"{', '.join(names)}: {placeholder} is a placeholder; write your own in its place"
        for placeholder, names in fields.items()
    ]


def _texts(value: object, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text inside `value` with the name of its field."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{field}.{key}" if field else str(key))


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
    told = f"{span.steps} steps" if exact == span.steps else f"{exact:.1f} steps, rounded to {span.steps}"
    average = span.stage.average
    more = f" or to average {average.count} checkpoints" if average and average.count > span.steps else ""
    yield (
        f"stages.{span.name}: {_asked(span)} at {Tokens(part.batch)} is {told}: "
        f"few for a learning rate to move in{more}"
    )


def _fall(recipe: Recipe, schedule: Schedule) -> Iterator[str]:
    """Warn where a cosine or a line does not end with the stages that follow it."""
    rule, over = recipe.lr.rule, recipe.lr.fall.over
    what = "cosine" if rule == "cosine" else "line"
    end = schedule.steps if over.unit == "steps" else schedule.tokens
    unit = "step" if over.unit == "steps" else "token"
    following = [span for span in schedule.spans if span.stage.lr is None]
    if end < over.amount * 0.99:
        last = schedule.spans[-1].start if schedule.spans[-1].stage.lr else schedule.tokens
        rate = schedule.scheduled(last)
        yield (
            f"lr.{rule}.over: the {what} ends at {unit} {tokens(over.amount)}, the tokens before it, at {unit} "
            f"{tokens(end)}: the rate comes down to {rate:.2g}, not to {recipe.lr.to:g}"
        )
    elif following and over.amount < _reach(following[-1], schedule, over.unit) * 0.9:
        yield f"lr.{rule}.over: the {what} ends at {unit} {tokens(over.amount)}, long before the stages that follow it"


def _decay(recipe: Recipe, schedule: Schedule) -> Iterator[str]:
    """Warn where the decay of a WSD schedule has no room, or leaves nothing to the stage behind it."""
    assert recipe.lr.wsd is not None
    decay, warmup = recipe.lr.wsd.decay, recipe.lr.warmup
    step, position = schedule.fall
    end, unit = (step, "step") if decay.unit == "steps" else (position, "token")
    begin = end - decay.amount
    if begin < schedule.warm[0 if decay.unit == "steps" else 1]:
        yield (
            f"lr.wsd.decay: {decay} before {unit} {tokens(end)} begin inside the warm-up of {warmup}: "
            "the rate has no stable part and never reaches its peak, or jumps down from it"
        )
    elif decay.unit == "steps" and decay.amount < FEW_STEPS:
        yield f"lr.wsd.decay: {decay} are few for a learning rate to come down in"
    behind = [span.name for span in schedule.spans if span.start >= position]
    if behind and recipe.lr.to == 0:
        yield f"lr.wsd.to: the decay ends at 0 before stage {behind[0]}, which then starts from a rate of 0"


def _rope(recipe: Recipe) -> Iterator[str]:
    scaling, longest = recipe.model.rope_scaling, max(max(stage.lengths) for stage in recipe.stages)
    if scaling is not None and longest > scaling.factor * scaling.original:
        yield (
            f"model.rope_scaling: factor {scaling.factor:g} stretches {scaling.original} positions to "
            f"{scaling.factor * scaling.original:.0f}, less than sequence {longest}"
        )


def _replay(recipe: Recipe) -> Iterator[str]:
    """Warn where continued pretraining draws all tokens from one source: nothing then replays what was known."""
    shares = recipe.first_mix
    domains = [domain for domain, share in shares.items() if share]
    if recipe.start is not None and len(domains) == 1 and len(recipe.sources[domains[0]]) == 1:
        yield (
            f"start: every token comes from sources.{domains[0]}.0: without text like that of the first training "
            "the model forgets what it knew; add such a source, with half of the tokens, say"
        )


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
