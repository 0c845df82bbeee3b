"""Evaluate a checkpoint or decide on it outside the run that made it: promote, reject, roll back.

Recipe, record and MLflow runs are those of the run that made the checkpoint.
"""

from __future__ import annotations

from prefect import flow

from herd.flows.recipe_form import EvaluationParameters, PromotionParameters, StageInProgressParameters
from herd.flows.run_lifecycle import (
    FlowResult,
    ReadOnlyRuns,
    existing_run,
    find_checkpoint,
    find_run,
    flow_state,
    why_not,
)
from herd.llama3.evaluate.suite import stage_suite_name
from herd.storage.artifact import Artifact
from herd.storage.lease import LeaseHeld
from herd.tasks.pipeline_steps import evaluated_stages
from herd.tasks.promotion.approval import decide
from herd.tasks.promotion.log import CHAMPION, decided, read_log
from herd.tasks.promotion.rollback import RollbackRequest, roll_back
from herd.tasks.report.progress import run_progress, run_work_dir_name
from herd.tasks.runs.work_dirs import kept_checkpoints
from herd.tasks.stages.evaluate import evaluate_model, evaluate_waiting
from herd.tasks.stages.gate import Override
from herd.tasks.stages.promote import promote_model
from herd.tasks.step import Context
from herd.tasks.tracking.steps import SCORE, scores_of

PATIENCE_S = 60.0
"""Wait of `promote` for the flow that evaluates the checkpoint, which the checkpoint's commit has started."""


@flow(name="evaluate", persist_result=False)
def evaluate(config: EvaluationParameters = EvaluationParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Evaluate a checkpoint by its run's recipe, or by another suite, and return the run's name."""

    def work() -> FlowResult:
        target = find_checkpoint(config.root_at, config.checkpoint)
        name, label = target.record.name, target.checkpoint.label
        with existing_run(config.root_at, name, config.cluster, read_only=True) as context:
            suite = config.suite.strip() or context.recipe.evaluate.deferred_suite or ""
            usual = suite in ("", stage_suite_name(context.recipe, target.stage))
            # An event starts this flow for every committed checkpoint, also while its run still works.
            if isinstance(context.runs, ReadOnlyRuns) and usual and target.stage in evaluated_stages(context.recipe):
                return FlowResult(name, f"{label} is left to {name}, which evaluates {target.stage} itself")
            curated, conversations = _curated(context), context.recorded("conversations")
            scores = evaluate_model(context, target.stage, target.checkpoint, curated, conversations, suite)
            return FlowResult(name, f"{label}: {_scores(scores)}")

    return flow_state(work)


@flow(name="evaluate-checkpoint", persist_result=False)
def evaluate_checkpoint(config: StageInProgressParameters = StageInProgressParameters()) -> str:  # noqa: B008
    """Score the checkpoints of a stage in progress that wait, newest first, and return the run's name."""
    return flow_state(lambda: score_waiting(config))


def score_waiting(config: StageInProgressParameters) -> FlowResult:
    """Evaluate as `evaluate_checkpoint` does. Raises ValueError if the run or its stage is unknown."""
    root = config.root_at
    (progress,) = run_progress(root, [find_run(root, config.run)])
    name, stage = progress.record.name, config.stage.strip() or progress.step
    with existing_run(root, name, config.cluster, read_only=True) as context:
        steps = {step.name: step for step in context.steps if step.kind == "pretrain"}
        if stage not in steps or not {"curate", "tokenizer"} <= progress.record.steps.keys():
            return FlowResult(name, f"{name} trains no stage; its checkpoints are scored by the run itself")
        work = run_work_dir_name(context.store, context.recipe, progress.record, steps[stage])
        kept = kept_checkpoints(root, config.cluster.checkpoints, work)
        tokenizer = context.store.load(progress.record.steps["tokenizer"].artifact)
        folder = config.folder.strip() or kept or str(context.scratch / work / "checkpoints")
        lines = evaluate_waiting(context, stage, folder, _curated(context), tokenizer)
    for line in lines:
        context.console.log(f"  {line}")
    scored = sum(": eval/" in line for line in lines)
    left = f", {len(lines) - scored} not" if scored < len(lines) else ""
    return FlowResult(
        name, f"{scored} checkpoints of {stage} scored{left}" if lines else f"no checkpoint of {stage} waits"
    )


@flow(name="promote", persist_result=False)
def promote(config: PromotionParameters = PromotionParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Let the gate judge a checkpoint, reject a challenger, or roll back; return the name of the checkpoint's run."""
    act = {"promote": _promote, "reject": _reject, "roll back": _roll_back}[config.action]
    return flow_state(lambda: act(config))


def _promote(config: PromotionParameters) -> FlowResult:
    target = find_checkpoint(config.root_at, config.checkpoint)
    name, override = target.record.name, Override(config.by, config.comment, config.override.strip(), rejudge=True)
    try:
        with existing_run(config.root_at, name, config.cluster, PATIENCE_S) as context:
            curated, conversations = _curated(context), context.recorded("conversations")
            # the step of the run itself
            scores = evaluate_model(context, target.stage, target.checkpoint, curated, conversations)
            decision = promote_model(context, target.checkpoint, scores, curated, override)
    except LeaseHeld as error:
        raise ValueError(f"checkpoint: {name} is running and has its own gate; wait for it ({error})") from None
    message = f"{target.checkpoint.label} {context.record.verdict}, {_scores(scores)}{why_not(decision)}"
    return FlowResult(name, message)


def _reject(config: PromotionParameters) -> FlowResult:
    name = find_checkpoint(config.root_at, config.checkpoint).record.name
    promotion, shown = decide(config.root_at, name, False, config.by, config.comment)
    return FlowResult(name, decided(promotion, shown))


def _roll_back(config: PromotionParameters) -> FlowResult:
    family, _, alias = config.checkpoint.strip().partition("@")
    if not alias:
        alias = CHAMPION
        if not read_log(config.root_at, family):  # a run or a checkpoint of the family
            family = find_checkpoint(config.root_at, config.checkpoint).record.family
    promotion, shown = roll_back(
        config.root_at, RollbackRequest(family, alias, config.to.strip(), config.by, config.comment)
    )
    return FlowResult(promotion.run, decided(promotion, shown))


def _curated(context: Context) -> Artifact:
    curated = context.recorded("curate")
    if curated is None:
        raise ValueError(f"checkpoint: {context.record.name} has no curated documents to evaluate on; name another run")
    return curated


def _scores(evaluation: Artifact) -> str:
    scores = {key.removeprefix(SCORE): value for key, value in scores_of(evaluation).items()}
    whole = sorted((name, value) for name, value in scores.items() if "/" not in name)  # not by domain or language
    return ", ".join(f"{name} {value:.3f}" for name, value in whole)
