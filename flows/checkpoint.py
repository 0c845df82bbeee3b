"""Score a checkpoint, or let the gate judge it, outside the run that made it.

Both belong to that run: its recipe says on what to score, its record and its MLflow runs take the result. An event
starts `evaluate` for every checkpoint that is committed. If the run that made it is at work and scores that stage
itself, this leaves it to the run, so the event costs a flow run of a few seconds and no second scoring.
"""

from __future__ import annotations

from prefect import flow

from flows.existing import Found, existing_run, existing_run_or_beside, find_checkpoint
from flows.outcome import Outcome, told, why_not
from flows.parameters import CheckpointParameters
from storage.artifact import Artifact
from storage.holder import LeaseHeld
from tasks.evaluate import evaluate_model, evaluated_stages
from tasks.promote import promote_model
from tasks.scores import SCORE, scores_of
from tasks.step import Context

PATIENCE_S = 60.0
"""As long as the judge of a checkpoint waits for a flow that scores it, which its commit has started."""


@flow(name="evaluate", persist_result=False)
def evaluate(config: CheckpointParameters = CheckpointParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Score a checkpoint on the held-out documents of its run, and return the run's name.

    Args:
        config: Which checkpoint, and where.
    """
    return told(lambda: _evaluate(config))


@flow(name="promote", persist_result=False)
def promote(config: CheckpointParameters = CheckpointParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Let the gate judge a checkpoint, make it the champion if it passes, and return its run's name.

    Args:
        config: Which checkpoint, and where.
    """
    return told(lambda: _promote(config))


def _evaluate(config: CheckpointParameters) -> Outcome:
    found = find_checkpoint(config.root_at, config.checkpoint)
    name, label = found.record.name, found.checkpoint.label
    with existing_run_or_beside(config.root_at, name, config.cluster) as (context, ours):
        if not ours and found.stage in evaluated_stages(context.recipe):
            return Outcome(name, f"{label} is left to {name}, which is at work and scores {found.stage} itself")
        scores = _scored(context, found, _curated(context))
        return Outcome(name, f"{label}: {_scores(scores)}")


def _promote(config: CheckpointParameters) -> Outcome:
    found = find_checkpoint(config.root_at, config.checkpoint)
    name = found.record.name
    try:
        with existing_run(config.root_at, name, config.cluster, PATIENCE_S) as context:
            curated = _curated(context)
            scores = _scored(context, found, curated)
            decision = promote_model(context, found.checkpoint, scores, curated)
    except LeaseHeld as error:
        raise ValueError(f"checkpoint: {name} is at work and comes to its gate itself; wait for it ({error})") from None
    message = f"{found.checkpoint.label} {context.record.verdict}, {_scores(scores)}{why_not(decision)}"
    return Outcome(name, message)


def _scored(context: Context, found: Found, curated: Artifact) -> Artifact:
    """Return the scores, under the step by which the run itself would call them."""
    return evaluate_model(context, found.stage, found.checkpoint, curated)


def _curated(context: Context) -> Artifact:
    step = context.record.steps.get("curate")
    if step is None:
        raise ValueError(f"checkpoint: {context.record.name} has no curated documents to score on; name another run")
    return context.store.at(step.artifact)


def _scores(evaluation: Artifact) -> str:
    scores = {key.removeprefix(SCORE): value for key, value in scores_of(evaluation).items()}
    return ", ".join(f"{name} {value:.3f}" for name, value in sorted(scores.items()))
