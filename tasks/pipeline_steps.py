"""The steps of a run, in order. The run loop, `--from`, `--until`, forms and the next step are all read from here."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from herd.llama3.recipe.load import RecipeError, did_you_mean
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.recipe.schema import Recipe

Kind = Literal[
    "collect",
    "annotate",
    "curate",
    "tokenizer",
    "tokenize",
    "conversations",
    "init-weights",
    "pretrain",
    "gate",
    "evaluate",
    "promote",
]
KINDS: tuple[Kind, ...] = ("collect", "annotate", "curate", "tokenizer", "tokenize", "pretrain", "evaluate", "promote")
"""Words that name a step in every recipe; of `pretrain` (any training stage) and `evaluate` there may be several."""


@dataclass(frozen=True)
class PipelineStep:
    """One step of a run; its name is unique in the run."""

    name: str
    kind: Kind
    span: StageSpan | None = None
    """The stage, or the part between two gates, that the step trains, gates or evaluates."""


def pipeline_steps(recipe: Recipe) -> list[PipelineStep]:
    """Return all steps of a run of `recipe`, in order."""
    steps = [PipelineStep(kind, kind) for kind in KINDS[: KINDS.index("pretrain")]]
    if recipe.conversations:
        steps.append(PipelineStep("conversations", "conversations"))
    if recipe.init_from:
        steps.append(PipelineStep("init-weights", "init-weights"))
    evaluated = evaluated_stages(recipe)
    for span in Schedule(recipe).trained:
        steps.append(PipelineStep(span.name, "pretrain", span))
        if span.stage.gates:
            steps.append(PipelineStep(f"gate-{span.name}", "gate", span))
        if span.ends_stage and span.stage.name in evaluated:
            steps.append(PipelineStep(f"evaluate-{span.stage.name}", "evaluate", span))
    return [*steps, PipelineStep("promote", "promote")]


def evaluated_stages(recipe: Recipe) -> set[str]:
    """Return the stages after which a run evaluates; the last one always, because the gate judges it."""
    return {*recipe.evaluate.after, recipe.stages[-1].name}


def step_names(recipe: Recipe) -> list[str]:
    """Return the names of the steps that a rerun can start from, in order."""
    imported = (
        recipe.init_from is not None and recipe.init_from.is_checkpoint
    )  # it exists already and is not made again
    return [step.name for step in pipeline_steps(recipe) if not (imported and step.kind == "init-weights")]


def check_step(recipe: Recipe, field: str, word: str) -> None:
    """Raise RecipeError if `word`, the value of `field`, is not a step of the recipe; it may be empty."""
    steps = step_names(recipe)
    if word and first_step(recipe, word) not in steps:
        meant = did_you_mean(word, [*steps, *KINDS], str)
        raise RecipeError(f"{field}: {word!r} is not a step of {recipe.name}; {meant}steps: {', '.join(steps)}")


def first_step(recipe: Recipe, word: str) -> str:
    """Return the name of the first step of the kind `word`, or `word` itself if it is not a kind."""
    return next((step.name for step in pipeline_steps(recipe) if step.kind == word), word)


def last_step(recipe: Recipe, word: str) -> str:
    """Return the name of the last step of the kind `word`, or `word` itself if it is not a kind."""
    return next((step.name for step in reversed(pipeline_steps(recipe)) if step.kind == word), word)


def reaches(recipe: Recipe, until: str, *kinds: Kind) -> bool:
    """Return whether a run that stops after the step `until` (empty: it does not) has a step of one of `kinds`."""
    steps, last = pipeline_steps(recipe), last_step(recipe, until)
    end = next((at for at, step in enumerate(steps) if step.name == last), len(steps))
    return any(step.kind in kinds for step in steps[: end + 1])


def next_step(recipe: Recipe, done: Container[str], decided: bool) -> str:
    """Return the first step that is not in `done`; empty after the last. Promotion leaves a decision, not a step."""
    left = (step.name for step in pipeline_steps(recipe)[:-1] if step.name not in done)
    return next(left, "" if decided else "promote")
