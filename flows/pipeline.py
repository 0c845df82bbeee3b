"""The whole chain, from raw text to a promoted model, as one Prefect flow.

The order is that of `tasks.pipeline_steps`; what a step does is in `tasks/stages`. Every step finds or makes an
artifact, so a retry, a rerun, a second run and a run that stops half-way all take this path.
"""

from __future__ import annotations

from prefect import flow

from flows.crash_recovery import check_attempts, progress_of_run
from flows.recipe_form import PipelineParameters, RerunParameters, StageParameters
from flows.run_lifecycle import HOOKS, FlowResult, chosen_recipe, find_run, flow_state, open_run, run_message
from llama3.evaluate.gate import Decision
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.units import Tokens
from storage.artifact import Artifact
from tasks.pipeline_steps import first_step, last_step, pipeline_steps
from tasks.promotion.promote import promote_model
from tasks.report.run import write_report
from tasks.stages.data import (
    annotate_documents,
    collect_documents,
    curate_documents,
    prepare_tokenizer,
    tokenise_documents,
)
from tasks.stages.evaluate import evaluate_model
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
    return flow_state(lambda: run_recipe(config.settled()))


def run_recipe(config: PipelineParameters) -> FlowResult:
    """Open a run, or the one that this flow run continues, and take its steps. Raises ValueError and TrainingFailed."""
    recipe = chosen_recipe(config)
    from_step, until = first_step(recipe, config.from_step), last_step(recipe, config.until)
    config = config.model_copy(update={"from_step": from_step, "until": until})
    check_attempts(lambda flow: progress_of_run(config.root_at, recipe, flow))
    with open_run(config, recipe) as context:
        decision = run_chain(context, until)
    write_report(context)
    return FlowResult(context.record.name, run_message(context, decision))


def run_chain(context: Context, until: str) -> Decision | None:
    """Take every step in order, up to `until` if that is given, and return the gate's decision if it came to one."""
    made: dict[str, Artifact] = {}  # by the step's name; of several stages, also by the step's kind: the latest
    schedule = Schedule(context.recipe)
    trained = schedule.spans[schedule.given - 1] if schedule.given else None  # the stage before the first one here
    origin: Artifact | None = None  # what the stage in progress started from
    for step in pipeline_steps(context.recipe):
        latest = made.get("pretrain") or made.get("start")
        match step.kind:
            case "collect":
                artifact = collect_documents(context)
            case "annotate":
                artifact = annotate_documents(context, made["collect"])
            case "curate":
                artifact = curate_documents(context, made["collect"], made["annotate"])
            case "tokenizer":
                artifact = prepare_tokenizer(context, made["curate"])
            case "tokenise":
                artifact = tokenise_documents(context, made["curate"], made["tokenizer"])
            case "start":
                artifact = import_start(context, made["tokenizer"])
            case "pretrain":
                assert step.span is not None
                _announce(context, trained, step.span)
                origin = latest if step.span.begins_stage else origin
                artifact = train_stage(context, step.name, made["tokenise"], made["tokenizer"], latest, made["curate"])
                trained = step.span
            case "advance":
                assert step.span is not None
                artifact = made["pretrain"]  # the gate stops the run or lets the checkpoint pass
                advance(context, step.span.name, artifact, origin, made["curate"])
            case "evaluate":
                assert step.span is not None
                artifact = evaluate_model(context, step.span.stage.name, made["pretrain"], made["curate"])
            case "promote":
                return promote_model(context, made["pretrain"], made["evaluate"], made["curate"])
        made[step.name] = made[step.kind] = artifact
        if step.name == until:
            return None
    raise AssertionError("the last step is a decision")


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


# Deployments that stop early. What another run has made is reused, so a schedule can curate every night and a person
# can train at any time.


@flow(name="curate", persist_result=False, **HOOKS)
def curate(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Read the sources of a recipe and decide which documents to train on; return the run's name.

    Args:
        config: What to run and where.
    """
    return flow_state(lambda: run_recipe(config.settled(until="curate")))


@flow(name="tokenise", persist_result=False, **HOOKS)
def tokenise(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Turn the curated documents of a recipe into token shards; return the run's name.

    Args:
        config: What to run and where.
    """
    return flow_state(lambda: run_recipe(config.settled(until="tokenise")))


@flow(name="pretrain", persist_result=False, **HOOKS)
def pretrain(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Train every stage of a recipe, without judging the model; return the run's name.

    Args:
        config: What to run and where.
    """
    return flow_state(lambda: run_recipe(config.settled(until="pretrain")))


# A rerun is a new run of the same family. What is upstream of the step or the change has the same keys and is reused.


@flow(name="rerun", persist_result=False, **HOOKS)
def rerun(config: RerunParameters = RerunParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run an earlier run's recipe again and return the new run's name.

    Args:
        config: Which run, from where, and what to change.
    """
    return flow_state(lambda: _rerun(config))


def _rerun(config: RerunParameters) -> FlowResult:
    return run_recipe(config.settled(find_run(config.root_at, config.run).name))
