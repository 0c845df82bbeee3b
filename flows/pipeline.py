"""The whole chain, from raw text to a promoted model, as one Prefect flow.

The order of the steps stands here and nothing else: what a step does is in `tasks/`. Every step finds or makes an
artifact, so a retry, a rerun, and a second run all take this same path.
"""

from __future__ import annotations

from prefect import flow

from flows.opening import chosen_recipe, open_run
from flows.parameters import PipelineParameters
from llama3.evaluate.gate import Decision
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.units import Tokens
from tasks.advance import advance
from tasks.curate import annotate_documents, collect_documents, curate_documents
from tasks.evaluate import evaluate_model, evaluated_stages
from tasks.promote import promote_model
from tasks.report import write_report
from tasks.start import import_start
from tasks.step import Context
from tasks.tokenise import prepare_tokenizer, tokenise_documents
from tasks.train import train_stage


@flow(name="pipeline", persist_result=False)
def pipeline(config: PipelineParameters = PipelineParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run a recipe from raw text to a promoted model and return the run's name.

    Args:
        config: What to run and where.
    """
    recipe = chosen_recipe(config)
    with open_run(config, recipe) as context:
        run_chain(context)
    write_report(context)
    return context.record.name


def run_chain(context: Context) -> Decision:
    """Take every step in order and return the gate's decision."""
    collected = collect_documents(context)
    curated = curate_documents(context, collected, annotate_documents(context, collected))
    tokenizer = prepare_tokenizer(context, curated)
    tokens = tokenise_documents(context, curated, tokenizer)
    start = import_start(context, tokenizer) if context.recipe.start else None
    checkpoint = evaluation = before = began = None
    for span in Schedule(context.recipe).trained:
        _announce(context, before, span)
        began = checkpoint if span.begins_stage else began
        checkpoint = train_stage(context, span.name, tokens, tokenizer, checkpoint or start)
        if span.stage.advance:
            advance(context, span.name, checkpoint, began, curated)
        if span.ends_stage and span.stage.name in evaluated_stages(context.recipe):
            evaluation = evaluate_model(context, span.stage.name, checkpoint, curated)
        before = span
    assert checkpoint is not None
    assert evaluation is not None
    return promote_model(context, checkpoint, evaluation, curated)


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
