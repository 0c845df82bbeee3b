"""Warnings about legal but unusual settings; they never reject a recipe. The published 405B schedule earns three."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from herd.llama3.recipe.lr import FEW_STEPS
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Tokens

PLACEHOLDER = re.compile(r"<[^<>|]+>")
"""Text that the user must replace: `s3://<your-bucket>/web/*.parquet`."""
MANY_EPOCHS = 5
"""Passes over conversations that earn a warning; Llama 2 made 2 (arXiv 2307.09288, section 3.1)."""
FEW_CHUNKS = 16
"""Chunks of a batch. With 8, shuffling them gained 9 % of bits per byte (docs/benchmarks/2026-11-26-quickstart.md)."""


def lint(recipe: Recipe) -> list[str]:
    """Return the warnings about `recipe`; each names its field."""
    schedule = recipe.schedule
    last = schedule.spans[-1]
    final_rate = schedule.scheduled(last.start if last.stage.lr else schedule.tokens)
    return [
        *_stage_length_warnings(schedule),
        *recipe.lr.decay.warnings(schedule.timeline, final_rate),
        *_data_warnings(recipe),
        *_batch_warnings(recipe, schedule),
        *_conversation_warnings(schedule),
    ]


def placeholders(recipe: Recipe) -> list[str]:
    """Return a line for each placeholder in `recipe`; a run rejects them, a plan does not."""
    fields: dict[str, list[str]] = {}
    for field, text in _texts(recipe.model_dump(mode="json", by_alias=True)):
        for placeholder in dict.fromkeys(PLACEHOLDER.findall(text)):
            fields.setdefault(placeholder, []).append(field)
    return [
        f"{', '.join(names)}: {placeholder} is a placeholder; write your own in its place"
        for placeholder, names in fields.items()
    ]


def _texts(value: object, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield (field, text) for every string in `value`."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{field}.{key}" if field else str(key))


def _stage_length_warnings(schedule: Schedule) -> Iterator[str]:
    """Warn about stages inside the warm-up and stages of few optimizer steps."""
    warmup = schedule.rate.warmup
    lengths = {span.name: f"{Tokens(sum(part.requested for part in span.segments))} tokens" for span in schedule.spans}
    inside = [span for span in schedule.spans[:-1] if warmup.pick(schedule.step_at(span.end), span.end) < warmup.amount]
    if inside:
        name, steps = inside[-1].name, schedule.step_at(inside[-1].end)
        yield (
            f"stages.{name}: {lengths[name]} is {steps:,} steps, inside the warm-up of {warmup}: "
            "the stage ends before the learning rate has reached its peak"
        )
    if warmup.amount >= warmup.pick(schedule.steps, schedule.tokens):
        yield f"lr.warmup: {warmup} is not over when the run ends, after {schedule.steps:,} steps"
    for span in schedule.spans:
        if span.steps >= FEW_STEPS:
            continue
        batch, average = span.segments[-1].batch, span.stage.weight_averaging
        exact = sum(segment.requested for segment in span.segments) / batch
        count = f"{span.steps} steps" if exact == span.steps else f"{exact:.1f} steps, rounded to {span.steps}"
        averaging = f" or to average {average.count} checkpoints" if average and average.count > span.steps else ""
        yield (
            f"stages.{span.name}: {lengths[span.name]} at {Tokens(batch)} is {count}: "
            f"few for a learning rate to move in{averaging}"
        )


def _data_warnings(recipe: Recipe) -> Iterator[str]:
    """Warn about sequences too long for RoPE or never trained, pretraining without replay, and cut documents."""
    model, longest = recipe.model, recipe.longest_sequence
    if recipe.init_from is None and model.preset != "custom" and longest < model.max_seq_len:
        yield (
            f"model.max_seq_len: preset {model.preset} declares {model.max_seq_len}, but the longest sequence of "
            f"a stage is {longest}, and the model will take no longer one; write max_seq_len: {longest}, or add a stage"
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.type == "llama3" and longest > scaling.factor * scaling.original:
        yield (
            f"model.rope_scaling: factor {scaling.factor:g} stretches {scaling.original} positions to "
            f"{scaling.factor * scaling.original:.0f}, less than sequence {longest}"
        )
    domains = [domain for domain, share in recipe.first_mix.items() if share]
    if recipe.init_from is not None and len(domains) == 1 and len(recipe.sources[domains[0]]) == 1:
        yield (
            f"init_from: every token comes from sources.{domains[0]}.0: without text like that of the first training "
            "the model forgets what it knew; add such a source, e.g. for half of the tokens"
        )
    unit = recipe.tokens.chunk_tokens
    for stage in recipe.stages if unit else []:
        for seq_len in stage.lengths:
            if unit and max(unit, seq_len) % min(unit, seq_len):
                yield (
                    f"tokens.chunk_tokens: {unit} and sequence {seq_len} of stage {stage.name} do not divide each "
                    "other: more documents are cut"
                )


def _batch_warnings(recipe: Recipe, schedule: Schedule) -> Iterator[str]:
    """Warn about batches of few documents, and about a batch or a sequence that is smaller than the one before."""
    pretrained = [part for span in schedule.spans if span.stage.kind == "pretrain" for part in span.segments]
    main, chunk = max(pretrained, key=lambda part: part.end - part.start, default=None), recipe.chunk_tokens
    if main and recipe.tokens.shuffle == "documents" and main.batch < FEW_CHUNKS * chunk:
        yield (
            f"tokens.shuffle: a batch of stage {main.stage} has {main.batch / chunk:g} chunks of {chunk} tokens, so "
            "the next pages of few documents; write tokens: {chunk_tokens: 256 tokens, shuffle: chunks}"
        )
    for before, after in pairwise(pretrained):
        if after.batch < before.batch * 0.9:
            yield f"stages.{after.stage}.batch: {Tokens(after.batch)} is smaller than {Tokens(before.batch)} before it"
        if after.seq_len < before.seq_len:
            yield f"stages.{after.stage}.seq_len: {after.seq_len} is shorter than {before.seq_len} before it"


def _conversation_warnings(schedule: Schedule) -> Iterator[str]:
    """Warn about fine-tuning that continues the schedule of pretraining, and about many passes."""
    for before, span in pairwise(schedule.spans):
        if (
            span.stage.kind == "sft"
            and before.stage.kind == "pretrain"
            and (not span.stage.lr or not span.stage.lr.start)
        ):
            yield (
                f"stages.{span.name}.lr: starts at {schedule.lr_at(span.start):.2g}, where pretraining ends; "
                "fine-tuning usually has a separate rate, such as linear from 1e-5 to 0"
            )
    for span in schedule.spans:
        if span.stage.epochs and span.stage.epochs > MANY_EPOCHS:
            yield (
                f"stages.{span.name}.epochs: {span.stage.epochs:g} passes over the same conversations are many; two or "
                "three are usual"
            )
