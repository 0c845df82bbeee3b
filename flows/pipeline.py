"""The whole chain, from raw text to a promoted model, as one Prefect flow.

Every step (`herd.tasks.pipeline_steps`, `tasks/stages`) finds or makes an artifact, so a retry, a rerun, a second run
and a run that stops early all take this path.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from prefect import flow

from herd.flows.crash_recovery import check_attempts, progress_of_run
from herd.flows.recipe_form import PipelineParameters, RerunParameters, StageParameters, chosen_recipe
from herd.flows.run_lifecycle import FlowResult, find_run, flow_state, open_run, run_message
from herd.llama3.evaluate.gate import Decision
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.recipe.units import Tokens
from herd.storage.artifact import Artifact
from herd.tasks.launch.local import Agents
from herd.tasks.pipeline_steps import PipelineStep, first_step, last_step, pipeline_steps
from herd.tasks.stages.data import (
    annotate_documents,
    collect_documents,
    curate_documents,
    prepare_conversations,
    prepare_tokenizer,
    tokenize_documents,
)
from herd.tasks.stages.evaluate import check_long_context_gates, evaluate_model
from herd.tasks.stages.promote import promote_model
from herd.tasks.stages.train import init_weights, train_stage
from herd.tasks.step import Context

T = TypeVar("T")


@flow(name="pipeline", persist_result=False)
def pipeline(config: PipelineParameters = PipelineParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run a recipe from raw text to a promoted model and return the run's name."""
    return flow_state(lambda: run_recipe(config.resolved_parameters()))


def run_recipe(config: PipelineParameters) -> FlowResult:
    """Open a new run, or the one to continue, and do its steps. Raises ValueError and TrainingFailed."""
    recipe = chosen_recipe(config)
    from_step, until = first_step(recipe, config.from_step), last_step(recipe, config.until)
    config = config.model_copy(update={"from_step": from_step, "until": until})
    check_attempts(lambda flow: progress_of_run(config.root_at, recipe, flow))
    with open_run(config, recipe) as context:
        decision = run_chain(context, until)
    return FlowResult(context.record.name, run_message(context, decision))


class StageOverlap:
    """Evaluations and gates that run while the next stage trains; without `evaluate.next_stage: overlap`, before it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # an agent works on one attempt after the other, so that of the trainer cannot start these
        self.agents = Agents(context.folder / "logs" / "agent-overlap.log")
        self.pool = ThreadPoolExecutor(1)
        self.begun: list[Future[Any]] = []
        """Since the last stage began."""
        self.older: list[Future[Any]] = []

    def __enter__(self) -> StageOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.agents.stopped = True
        self.agents.close()  # what still runs ends with its processes
        self.pool.shutdown(cancel_futures=True)

    def start(self, step: PipelineStep, work: Callable[[Context], T]) -> T | None:
        """Return the result of `work`; if another stage may train meanwhile, begin it and return None."""
        recipe = self.context.recipe
        if recipe.evaluate.next_stage == "wait" or step.span is None or step.span.stage == recipe.stages[-1]:
            return work(self.context)
        self.begun.append(self.pool.submit(copy_context().run, work, replace(self.context, agents=self.agents)))
        return None

    def next_stage(self) -> None:
        """Wait for what was begun before the stage that has just ended. Raises as it does, such as GateFailed."""
        for future in self.older:
            future.result()
        self.older, self.begun = self.begun, []

    def finish(self) -> None:
        """Wait for everything."""
        self.next_stage()
        self.next_stage()


def run_chain(context: Context, until: str) -> Decision | None:
    """Do every step in order, up to `until`, and return the gate's decision if the run gets that far."""
    artifacts: dict[str, Artifact] = {}  # by the step's name, and by its kind (the latest of several stages)
    schedule = Schedule(context.recipe)
    trained = schedule.spans[schedule.given - 1] if schedule.given else None  # the stage before the first one here
    origin: Artifact | None = None  # start of the stage in progress
    with StageOverlap(context) as overlap:
        for step in pipeline_steps(context.recipe):
            latest = artifacts.get("pretrain") or artifacts.get("init-weights")
            match step.kind:
                case "collect":
                    artifact = collect_documents(context)
                case "annotate":
                    artifact = annotate_documents(context, artifacts["collect"])
                case "curate":
                    artifact = curate_documents(context, artifacts["collect"], artifacts["annotate"])
                case "tokenizer":
                    artifact = prepare_tokenizer(context, artifacts["curate"])
                case "tokenize":
                    artifact = tokenize_documents(context, artifacts["curate"], artifacts["tokenizer"])
                case "conversations":
                    artifact = prepare_conversations(context, artifacts["tokenize"], artifacts["tokenizer"])
                case "init-weights":
                    artifact = init_weights(context, artifacts["tokenizer"])
                case "pretrain":
                    assert step.span is not None
                    overlap.next_stage()
                    _announce(context, trained, step.span)
                    origin = latest if step.span.begins_stage else origin
                    artifact = train_stage(
                        context,
                        step.name,
                        artifacts["tokenize"],
                        artifacts["tokenizer"],
                        latest,
                        artifacts["curate"],
                        artifacts.get("conversations") if step.span.stage.kind == "sft" else None,
                    )
                    trained = step.span
                case "gate":
                    assert step.span is not None
                    artifact, curated = artifacts["pretrain"], artifacts["curate"]  # the run stops, or it goes on
                    name, began = step.span.name, origin
                    overlap.start(
                        step,
                        partial(check_long_context_gates, name=name, checkpoint=artifact, began=began, curated=curated),
                    )
                case "evaluate":
                    assert step.span is not None
                    model, curated, name = artifacts["pretrain"], artifacts["curate"], step.span.stage.name
                    work = partial(evaluate_model, name=name, checkpoint=model, curated=curated)
                    artifact = overlap.start(step, work) or model
                case "promote":
                    overlap.finish()
                    return promote_model(context, artifacts["pretrain"], artifacts["evaluate"], artifacts["curate"])
            artifacts[step.name] = artifacts[step.kind] = artifact
            if step.name == until:
                overlap.finish()
                return None
    raise AssertionError("the last step is a decision")


def _announce(context: Context, before: StageSpan | None, span: StageSpan) -> None:
    """Print what changes from one stage to the next."""
    if before is None:
        context.console.log(
            f"[bold]{span.name}[/]: seq_len {span.segments[0].seq_len}, batch {Tokens(span.segments[0].batch)}"
        )
        return
    old, new = before.segments[-1], span.segments[0]
    fields = {
        "seq_len": (old.seq_len, new.seq_len),
        "batch": (Tokens(old.batch), Tokens(new.batch)),
        "mix": (before.stage.mix, span.stage.mix),
        "kind": (before.stage.kind, span.stage.kind),
    }
    changes = [f"{name} {left} -> {right}" for name, (left, right) in fields.items() if left != right]
    if span.stage.lr is not None:
        changes.append(f"lr {span.stage.lr}")
    changed = ", ".join(changes) or "same shape"
    context.console.log(f"[bold]{before.name} -> {span.name}[/]: {changed}; stream continues at token {span.start:,}")


# Deployments that stop early. Artifacts of other runs are reused: a schedule may curate every night, a person train.


@flow(name="curate", persist_result=False)
def curate(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Read the sources of a recipe and decide which documents to train on; return the run's name."""
    return flow_state(lambda: run_recipe(config.resolved_parameters(until="curate")))


@flow(name="tokenize", persist_result=False)
def tokenize(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Turn the curated documents of a recipe into token shards; return the run's name."""
    return flow_state(lambda: run_recipe(config.resolved_parameters(until="tokenize")))


@flow(name="pretrain", persist_result=False)
def pretrain(config: StageParameters = StageParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Train every stage of a recipe, without judging the model; return the run's name."""
    return flow_state(lambda: run_recipe(config.resolved_parameters(until="pretrain")))


# A rerun is a new run of the same family. Artifacts upstream of the step or the change have the same keys: reused.


@flow(name="rerun", persist_result=False)
def rerun(config: RerunParameters = RerunParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run an earlier run's recipe again and return the new run's name."""
    return flow_state(lambda: run_recipe(config.resolved_parameters(find_run(config.root_at, config.run).name)))
