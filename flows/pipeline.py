"""The whole chain, from raw text to a promoted model, as one Prefect flow.

The order of the steps stands here and nothing else: what a step does is in `tasks/`. Every step finds or makes an
artifact, so a retry, a rerun, a second run and a run that is to stop half-way all take this same path.
"""

from __future__ import annotations

from collections.abc import Iterator

from prefect import flow

from flows.crash_recovery import check_attempts, found_of_run
from flows.recipe_form import EVALUATE, PRETRAIN, PipelineParameters, RerunParameters, StageParameters
from flows.run_lifecycle import HOOKS, FlowResult, chosen_recipe, find_run, open_run, run_message, step_names, told
from llama3.evaluate.gate import Decision
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Tokens
from tasks.promotion.promote import promote_model
from tasks.report.run import write_report
from tasks.stages.data import (
    annotate_documents,
    collect_documents,
    curate_documents,
    prepare_tokenizer,
    tokenise_documents,
)
from tasks.stages.evaluate import evaluate_model, evaluated_stages
from tasks.stages.init_weights import import_start
from tasks.stages.long_context_gate import advance
from tasks.stages.train import train_stage
from tasks.step import Context


@flow(name="pipeline", persist_result=False, **HOOKS)
def pipeline(config: PipelineParameters = PipelineParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run a recipe from raw text to a promoted model and return the run's name.

    Args:
        config: What to run and where.
    """
    return told(lambda: run_recipe(config.settled()))


def run_recipe(config: PipelineParameters) -> FlowResult:
    """Open a run, or the one that this flow run continues, and take its steps. Raises ValueError and TrainingFailed."""
    recipe = chosen_recipe(config)
    from_step, until = first_step(recipe, config.from_step), last_step(recipe, config.until)
    config = config.model_copy(update={"from_step": from_step, "until": until})
    check_attempts(lambda flow: found_of_run(config.root_at, recipe, flow))
    with open_run(config, recipe) as context:
        decision = run_chain(context, until)
    write_report(context)
    return FlowResult(context.record.name, run_message(context, decision))


def first_step(recipe: Recipe, word: str) -> str:
    """Return the step that `word` names; `pretrain` and `evaluate` are the first of their kind."""
    return {PRETRAIN: Schedule(recipe).trained[0].name, EVALUATE: _evaluations(recipe)[0]}.get(word, word)


def last_step(recipe: Recipe, word: str) -> str:
    """Return the step that `word` names; `pretrain` and `evaluate` are the last of their kind."""
    return {PRETRAIN: Schedule(recipe).trained[-1].name, EVALUATE: _evaluations(recipe)[-1]}.get(word, word)


def _evaluations(recipe: Recipe) -> list[str]:
    names = set(step_names(recipe))
    steps = [f"evaluate-{stage.name}" for stage in recipe.stages]
    return [step for step in steps if step in names]


def run_chain(context: Context, until: str) -> Decision | None:
    """Take every step in order, up to `until` if that is given, and return the gate's decision if it came to one."""
    for step, decision in _chain(context):
        if step == until or decision is not None:
            return decision
    raise AssertionError("the chain ends with a decision")


def _chain(context: Context) -> Iterator[tuple[str, Decision | None]]:
    """Take the steps one by one; yield the name of each once it is done, and with the last one the gate's decision."""
    collected = collect_documents(context)
    yield "collect", None
    annotated = annotate_documents(context, collected)
    yield "annotate", None
    curated = curate_documents(context, collected, annotated)
    yield "curate", None
    tokenizer = prepare_tokenizer(context, curated)
    yield "tokenizer", None
    tokens = tokenise_documents(context, curated, tokenizer)
    yield "tokenise", None
    start = import_start(context, tokenizer) if context.recipe.start else None
    yield "start", None
    checkpoint = evaluation = began = None
    schedule = Schedule(context.recipe)
    before = schedule.spans[schedule.given - 1] if schedule.given else None
    for span in schedule.trained:
        _announce(context, before, span)
        began = (checkpoint or start) if span.begins_stage else began
        checkpoint = train_stage(context, span.name, tokens, tokenizer, checkpoint or start, curated)
        yield span.name, None
        if span.stage.advance:
            advance(context, span.name, checkpoint, began, curated)
            yield f"advance-{span.name}", None
        if span.ends_stage and span.stage.name in evaluated_stages(context.recipe):
            evaluation = evaluate_model(context, span.stage.name, checkpoint, curated)
            yield f"evaluate-{span.stage.name}", None
        before = span
    assert checkpoint is not None
    assert evaluation is not None
    yield "promote", promote_model(context, checkpoint, evaluation, curated)


def _announce(context: Context, before: StageSpan | None, span: StageSpan) -> None:
    """Say what changes from one stage to the next."""
    if before is None:
        context.console.say(f"[bold]{span.name}[/]: seq {span.segments[0].seq}, batch {Tokens(span.segments[0].batch)}")
        return
    old, new = before.segments[-1], span.segments[0]
    changes = []
    if old.seq != new.seq:
        changes.append(f"seq {old.seq} -> {new.seq}")
    if old.batch != new.batch:
        changes.append(f"batch {Tokens(old.batch)} -> {Tokens(new.batch)}")
    if before.stage.mix != span.stage.mix:
        changes.append(f"mix {before.stage.mix} -> {span.stage.mix}")
    if span.stage.lr is not None:
        changes.append(f"lr {span.stage.lr}")
    what = ", ".join(changes) or "same shape"
    context.console.say(f"[bold]{before.name} -> {span.name}[/]: {what}; stream continues at token {span.start:,}")


# A part of the chain as a deployment of its own: `curate`, `tokenise`, `pretrain`.
#
# Each runs the same chain and stops early: what comes before the part is found or made, what comes after is left to
# another run, which then finds it. So a schedule can curate every night and a person can train when they want to.


@flow(name="curate", persist_result=False, **HOOKS)
def curate(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Read the sources of a recipe and decide which documents to train on; return the run's name.

    Args:
        config: What to run and where.
    """
    return told(lambda: run_recipe(config.settled(until="curate")))


@flow(name="tokenise", persist_result=False, **HOOKS)
def tokenise(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Turn the curated documents of a recipe into token shards; return the run's name.

    Args:
        config: What to run and where.
    """
    return told(lambda: run_recipe(config.settled(until="tokenise")))


@flow(name="pretrain", persist_result=False, **HOOKS)
def pretrain(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Train every stage of a recipe, without judging the model; return the run's name.

    Args:
        config: What to run and where.
    """
    return told(lambda: run_recipe(config.settled(until=PRETRAIN)))


# An earlier run once more: from a step on, or with changes, or both.
#
# It is a new run of the same family. What is upstream of the step or of the change is reused, because its artifacts
# have the same keys; the log says for each step what is new about it.


@flow(name="rerun", persist_result=False, **HOOKS)
def rerun(config: RerunParameters = RerunParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run an earlier run's recipe again and return the new run's name.

    Args:
        config: Which run, from where, and what to change.
    """
    return told(lambda: _rerun(config))


def _rerun(config: RerunParameters) -> FlowResult:
    return run_recipe(config.settled(find_run(config.root_at, config.run).name))
