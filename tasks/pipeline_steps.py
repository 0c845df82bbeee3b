"""The steps of a run: `PIPELINE` lists them once, and everything that knows the steps of a run derives from it.

A new step is a function in tasks/stages and a line of `PIPELINE`. The run loop, `--from`, `--until`, the forms, the
next step of a run and `herd plan --steps` follow. Functions are imported when a step runs: the command line lists steps
without Prefect.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from herd.llama3.recipe.load import RecipeError, did_you_mean
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.tasks.step import PipelineStep

Task = Callable[..., Any]
Choice = Callable[[Sequence[PipelineStep], StageSpan | None], str]
"""Chooses an input among the steps before a step, also by its span; returns the input's name, or "" for None."""


@dataclass(frozen=True)
class StepKind:
    """Steps of one kind: one in a run, or one for each stage or part of a stage that `subject` names."""

    name: str
    task: Callable[[], Task]
    """Imports and returns the function that does a step; it gets the context, the subject, and the inputs by name."""
    inputs: dict[str, Choice] = field(default_factory=dict)
    """By parameter of the function."""
    only_if: Callable[[Recipe], bool] | None = None
    """Whether a recipe has the step; None: every recipe has it, and forms offer it."""
    subject: Callable[[Recipe, StageSpan], str] | None = None
    """Returns the subject of a span's step; empty: the span has no such step."""
    prefix: str = ""
    """Of the names of steps with a subject."""
    overlaps: bool = False
    """Whether the next stage may train while a step runs."""


def latest(kind: str) -> Choice:
    """Choose the latest step of `kind`, which must exist."""
    return lambda before, _: next(step.name for step in reversed(before) if step.kind == kind)


def latest_if_any(*kinds: str) -> Choice:
    """Choose the latest step of one of `kinds`, if there is one."""
    return lambda before, _: next((step.name for step in reversed(before) if step.kind in kinds), "")


def sft_conversations(before: Sequence[PipelineStep], span: StageSpan | None) -> str:
    return latest("conversations")(before, span) if span is not None and span.stage.kind == "sft" else ""


def stage_start(before: Sequence[PipelineStep], span: StageSpan | None) -> str:
    """Choose the parent of the whole stage of `span`."""
    first = next(
        step for step in before if step.span is not None and span is not None and step.span.stage == span.stage
    )
    return first.inputs["parent"]


def has_conversations(recipe: Recipe) -> bool:
    return bool(recipe.conversations)


def has_start(recipe: Recipe) -> bool:
    return recipe.init_from is not None


def has_gates(recipe: Recipe) -> bool:
    return any(stage.gates for stage in recipe.stages)


def trained_span(_: Recipe, span: StageSpan) -> str:
    return span.name


def gated_span(_: Recipe, span: StageSpan) -> str:
    return span.name if span.stage.gates else ""


def evaluated_stage(recipe: Recipe, span: StageSpan) -> str:
    return span.stage.name if span.ends_stage and span.stage.name in evaluated_stages(recipe) else ""


def evaluated_stages(recipe: Recipe) -> set[str]:
    """Return the stages after which a run evaluates; the last one always, because the gate judges it."""
    return {*recipe.evaluate.after, recipe.stages[-1].name}


def _collect() -> Task:
    from herd.tasks.stages.data import collect_documents

    return collect_documents


def _annotate() -> Task:
    from herd.tasks.stages.data import annotate_documents

    return annotate_documents


def _curate() -> Task:
    from herd.tasks.stages.data import curate_documents

    return curate_documents


def _tokenizer() -> Task:
    from herd.tasks.stages.data import prepare_tokenizer

    return prepare_tokenizer


def _tokenize() -> Task:
    from herd.tasks.stages.data import tokenize_documents

    return tokenize_documents


def _conversations() -> Task:
    from herd.tasks.stages.data import prepare_conversations

    return prepare_conversations


def _init_weights() -> Task:
    from herd.tasks.stages.train import init_weights

    return init_weights


def _pretrain() -> Task:
    from herd.tasks.stages.train import train_stage

    return train_stage


def _gate() -> Task:
    from herd.tasks.stages.evaluate import check_long_context_gates

    return check_long_context_gates


def _evaluate() -> Task:
    from herd.tasks.stages.evaluate import evaluate_model

    return evaluate_model


def _promote() -> Task:
    from herd.tasks.stages.promote import promote_model

    return promote_model


COLLECTED, ANNOTATED, CURATED = latest("collect"), latest("annotate"), latest("curate")
TOKENIZER, TOKENS, CHECKPOINT = latest("tokenizer"), latest("tokenize"), latest("pretrain")
PIPELINE: tuple[StepKind, ...] = (
    StepKind("collect", _collect),
    StepKind("annotate", _annotate, {"collected": COLLECTED}),
    StepKind("curate", _curate, {"collected": COLLECTED, "annotated": ANNOTATED}),
    StepKind("tokenizer", _tokenizer, {"curated": CURATED}),
    StepKind("tokenize", _tokenize, {"curated": CURATED, "tokenizer": TOKENIZER}),
    StepKind("conversations", _conversations, {"tokens": TOKENS, "tokenizer": TOKENIZER}, only_if=has_conversations),
    StepKind("init-weights", _init_weights, {"tokenizer": TOKENIZER}, only_if=has_start),
    StepKind(
        "pretrain",
        _pretrain,
        {
            "tokens": TOKENS,
            "tokenizer": TOKENIZER,
            "parent": latest_if_any("pretrain", "init-weights"),
            "curated": CURATED,
            "conversations": sft_conversations,
        },
        subject=trained_span,
    ),
    StepKind(
        "gate",
        _gate,
        {"checkpoint": CHECKPOINT, "began": stage_start, "curated": CURATED},
        only_if=has_gates,
        subject=gated_span,
        prefix="gate-",
        overlaps=True,
    ),
    StepKind(
        "evaluate",
        _evaluate,
        {"checkpoint": CHECKPOINT, "curated": CURATED, "conversations": latest_if_any("conversations")},
        subject=evaluated_stage,
        prefix="evaluate-",
        overlaps=True,
    ),
    StepKind("promote", _promote, {"checkpoint": CHECKPOINT, "evaluation": latest("evaluate"), "curated": CURATED}),
)
"""In order; kinds of steps of spans that follow each other take turns: `main`, `evaluate-main`, `anneal`, ... The last
one leaves a decision, all others an artifact."""


def pipeline_steps(recipe: Recipe) -> list[PipelineStep]:
    """Return all steps of a run of `recipe`, in order."""
    steps: list[PipelineStep] = []
    for of_spans, kinds in groupby(PIPELINE, lambda kind: kind.subject is not None):
        present = [kind for kind in kinds if kind.only_if is None or kind.only_if(recipe)]
        for span in recipe.schedule.trained if of_spans else [None]:
            for kind in present:
                subject = kind.subject(recipe, span) if kind.subject and span else ""
                if span is not None and not subject:
                    continue
                inputs = {parameter: choose(steps, span) for parameter, choose in kind.inputs.items()}
                name, own = (f"{kind.prefix}{subject}", (subject,)) if subject else (kind.name, ())
                steps.append(PipelineStep(name, kind.name, inputs, kind.task, span, own, kind.overlaps))
    return steps


def common_kinds() -> list[str]:
    """Return the words that name a step in every recipe; of `pretrain` and `evaluate` there may be several."""
    return [kind.name for kind in PIPELINE if kind.only_if is None]


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
        meant = did_you_mean(word, [*steps, *common_kinds()], str)
        raise RecipeError(f"{field}: {word!r} is not a step of {recipe.name}; {meant}steps: {', '.join(steps)}")


def first_step(recipe: Recipe, word: str) -> str:
    """Return the name of the first step of the kind `word`, or `word` itself if it is not a kind."""
    return next((step.name for step in pipeline_steps(recipe) if step.kind == word), word)


def last_step(recipe: Recipe, word: str) -> str:
    """Return the name of the last step of the kind `word`, or `word` itself if it is not a kind."""
    return next((step.name for step in reversed(pipeline_steps(recipe)) if step.kind == word), word)


def next_step(recipe: Recipe, done: Container[str], decided: bool) -> str:
    """Return the first step that is not in `done`; empty after the last. The last leaves a decision, not a step."""
    *steps, decision = pipeline_steps(recipe)
    return next((step.name for step in steps if step.name not in done), "" if decided else decision.name)
