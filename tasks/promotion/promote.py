"""Promote a candidate that passes the gate, after a person's approval where the recipe asks for it.

The champion is scored again on the candidate's held-out documents, so both are measured on the same text. The record in
the promotion log comes first; run record, tags and aliases follow it. A judgement waits for an MLflow server that is
away and fails before anything is decided; one that goes away later is told when it answers.
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from rich.markup import escape

from llama3.evaluate.gate import Decision
from storage.artifact import Artifact
from tasks.promotion.approval import Approval, answered, ask, settle
from tasks.promotion.gate import CandidateJudge, Override
from tasks.promotion.log import (
    APPROVAL,
    CHALLENGER,
    PROMOTED,
    REFUSED,
    WAITS,
    Log,
    Promotion,
    PromotionLog,
    judged,
    reigning,
)
from tasks.stages.alerts import gate_failed
from tasks.step import Context, tracked
from tasks.tracking.registry import Registry
from tasks.tracking.steps import checkpoint_model


def promote_model(
    context: Context,
    checkpoint: Artifact,
    evaluation: Artifact,
    curated: Artifact,
    asked: Override = Override(),  # noqa: B008  (frozen)
) -> Decision:
    """Return the decision on `checkpoint`, recorded in the log, the run and the registry.

    Where the recipe asks for a person, a deployed flow run is suspended here until somebody answers its form, and a
    terminal is asked; otherwise the run ends with a challenger, and `herd approve` has the last word.
    """
    promotion = judge_model(context, checkpoint, evaluation, curated, asked)
    if promotion.kind != WAITS:
        return promotion.decision
    approval = ask(context, promotion)
    if approval is None:
        return promotion.decision
    return _answered(context, promotion, approval).decision


@task(name="promote", cache_policy=NO_CACHE, persist_result=False)
def judge_model(
    context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact, asked: Override
) -> Promotion:
    """Return the record of the judgement on `checkpoint`: promoted if it passed and no person is to be asked.

    One that the run was given before it died is taken as it stands. Raises ValueError if MLflow is away for longer
    than the policy allows, before anything is decided.
    """
    await_mlflow(context)
    with tracked(context, "promotion", "promote", evaluation.key) as mlflow_run:
        log = PromotionLog(context.root, context.recipe.name)
        promotion = None if asked.again else decided_before(log.records, context.record.name, checkpoint.label)
        if promotion is None:
            promotion = log.append(CandidateJudge(context, checkpoint, evaluation, curated, asked))
        model_id = checkpoint_model(context.tracker, [mlflow_run], checkpoint)
        version = _register(context, checkpoint, mlflow_run, model_id)
        settle(context.runs, context.record, context.tracker, log, checkpoint.label)
        context.tracker.set_tags(mlflow_run, {"verdict": promotion.kind})
    _say(context, promotion, version)
    return promotion


def decided_before(log: Log, run: str, artifact: str) -> Promotion | None:
    """Return the record by which `run` was decided on, unless it waits and the champion is another by now."""
    found = judged(log, run, artifact)
    if not found or (found[-1].kind == WAITS and found[-1].champion != reigning(log, found[-1].alias)):
        return None
    return found[-1]


def await_mlflow(context: Context) -> None:
    """Return once MLflow answers. Raises ValueError if it does not within the policy's patience."""
    patience = context.recipe.promote.patience
    if not context.tracker.wait_until_available(int(patience), context.console.say):
        raise ValueError(
            f"promote.patience: MLflow at {context.tracker.uri} did not answer for {patience}; the model is trained "
            "and evaluated: start MLflow and give the same command again"
        )


def _register(context: Context, checkpoint: Artifact, mlflow_run: str, model_id: str) -> str:
    """Return the number of the model's version, made if there is none; empty while MLflow is away."""
    registry = Registry(context.tracker)
    return context.tracker.reach.attempt(
        lambda: str(registry.version(checkpoint, context.record.name, mlflow_run, model_id).version), ""
    )


def _answered(context: Context, promotion: Promotion, approval: Approval) -> Promotion:
    """Record what a person answered, unless `herd approve` was faster. Raises ValueError if the champion changed."""
    log = PromotionLog(context.root, promotion.family)
    last = judged(log.records, promotion.run, promotion.artifact)[-1]
    if last.kind == WAITS:
        last = log.append(lambda records: answered(records, promotion.run, approval))
    settle(context.runs, context.record, context.tracker, log, promotion.artifact)
    _say_settled(context, last)
    return last


def _say(context: Context, promotion: Promotion, version: str) -> None:
    target = f"{promotion.family} version {version}" if version else promotion.artifact
    told = {
        PROMOTED: f"[green]{target} is the {promotion.alias}[/]",
        REFUSED: f"[red]refused: {target} stays a candidate[/]",
        WAITS: f"[cyan]{target} passed the gate and is the {CHALLENGER}: it waits for a person's approval[/]",
    }
    context.console.say(f"  {'promote':<18}{told[promotion.kind]}")
    if not version:
        context.console.say(f"  {'':<18}[yellow]MLflow went away and does not show it yet; the decision stands[/]")
    for row in promotion.decision.rows:
        if row.uncompared or (row.metric == APPROVAL and promotion.kind == WAITS):
            continue
        mark = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]"}.get(row.verdict, f"[yellow]{row.verdict}[/]")
        subject = "" if row.reason.startswith(row.metric) else f"{row.metric}: "
        context.console.say(f"  {'':<18}{mark} {escape(subject + row.reason)}")
    if alone := [row for row in promotion.decision.rows if row.uncompared]:
        scores = f"{len(alone)} score{'s' if len(alone) > 1 else ''}"
        context.console.say(f"  {'':<18}[green]pass[/] {scores}: there is no champion yet to compare with")
    if promotion.kind == REFUSED:
        reasons = "; ".join(promotion.decision.refusals)
        gate_failed(context.root, context.console, promotion.run, "promote", reasons, promotion.position)


def _say_settled(context: Context, promotion: Promotion) -> None:
    by, target = escape(promotion.by), promotion.artifact
    if promotion.kind == PROMOTED:
        context.console.say(f"  {'promote':<18}[green]approved by {by}: {target} is the {promotion.alias}[/]")
    else:
        context.console.say(f"  {'promote':<18}[red]refused by {by}: {target} stays a candidate[/]")
