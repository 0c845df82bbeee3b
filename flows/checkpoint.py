"""Score a checkpoint or decide on it outside the run that made it: judge, reject, roll back.

Recipe, record and MLflow runs are those of the run that made it. An event starts `evaluate` for every committed
checkpoint; if that run is at work and scores the stage itself, this flow leaves it to the run.
"""

from __future__ import annotations

from prefect import flow

from flows.recipe_form import EvaluationParameters, PromotionParameters
from flows.run_lifecycle import FlowResult, existing_run, existing_run_or_beside, find_checkpoint, flow_state, why_not
from llama3.evaluate.suite import suite_for
from storage.artifact import Artifact
from storage.lease import LeaseHeld
from tasks.pipeline_steps import evaluated_stages
from tasks.promotion.approval import decide
from tasks.promotion.gate import Override
from tasks.promotion.log import CHAMPION, decided
from tasks.promotion.promote import promote_model
from tasks.promotion.rollback import RollbackRequest, roll_back
from tasks.stages.evaluate import evaluate_model
from tasks.step import Context
from tasks.tracking.steps import SCORE, scores_of

PATIENCE_S = 60.0
"""As long as the judge of a checkpoint waits for a flow that scores it, which its commit has started."""


@flow(name="evaluate", persist_result=False)
def evaluate(config: EvaluationParameters = EvaluationParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Score a checkpoint by its run's recipe, or by another suite, and return the run's name.

    Args:
        config: Which checkpoint, by what, and where.
    """
    return flow_state(lambda: _evaluate(config))


@flow(name="promote", persist_result=False)
def promote(config: PromotionParameters = PromotionParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Let the gate judge a checkpoint, refuse a challenger, or roll back; return the name of the model's run.

    Args:
        config: What to do, with which checkpoint, and where.
    """
    act = {"promote": _promote, "refuse": _refuse, "roll back": _roll_back}[config.action]
    return flow_state(lambda: act(config))


def _evaluate(config: EvaluationParameters) -> FlowResult:
    found = find_checkpoint(config.root_at, config.checkpoint)
    name, label = found.record.name, found.checkpoint.label
    with existing_run_or_beside(config.root_at, name, config.cluster) as (context, ours):
        suite = config.suite.strip() or context.recipe.evaluate.later or ""
        usual = suite in ("", suite_for(context.recipe, found.stage))
        if not ours and usual and found.stage in evaluated_stages(context.recipe):
            return FlowResult(name, f"{label} is left to {name}, which is at work and scores {found.stage} itself")
        scores = evaluate_model(context, found.stage, found.checkpoint, _curated(context), suite)
        return FlowResult(name, f"{label}: {_scores(scores)}")


def _promote(config: PromotionParameters) -> FlowResult:
    found = find_checkpoint(config.root_at, config.checkpoint)
    name, asked = found.record.name, Override(config.by, config.comment, config.override.strip(), again=True)
    try:
        with existing_run(config.root_at, name, config.cluster, PATIENCE_S) as context:
            curated = _curated(context)
            scores = evaluate_model(context, found.stage, found.checkpoint, curated)  # the step of the run itself
            decision = promote_model(context, found.checkpoint, scores, curated, asked)
    except LeaseHeld as error:
        raise ValueError(f"checkpoint: {name} is at work and comes to its gate itself; wait for it ({error})") from None
    message = f"{found.checkpoint.label} {context.record.verdict}, {_scores(scores)}{why_not(decision)}"
    return FlowResult(name, message)


def _refuse(config: PromotionParameters) -> FlowResult:
    name = find_checkpoint(config.root_at, config.checkpoint).record.name
    promotion, shown = decide(config.root_at, name, False, config.by, config.comment)
    return FlowResult(name, decided(promotion, shown))


def _roll_back(config: PromotionParameters) -> FlowResult:
    family, _, alias = config.checkpoint.strip().partition("@")
    if not alias:
        family, alias = find_checkpoint(config.root_at, config.checkpoint).record.family, CHAMPION
    promotion, shown = roll_back(
        config.root_at, RollbackRequest(family, alias, config.to.strip(), config.by, config.comment)
    )
    return FlowResult(promotion.run, decided(promotion, shown))


def _curated(context: Context) -> Artifact:
    step = context.record.steps.get("curate")
    if step is None:
        raise ValueError(f"checkpoint: {context.record.name} has no curated documents to score on; name another run")
    return context.store.at(step.artifact)


def _scores(evaluation: Artifact) -> str:
    scores = {key.removeprefix(SCORE): value for key, value in scores_of(evaluation).items()}
    return ", ".join(f"{name} {value:.3f}" for name, value in sorted(scores.items()))
