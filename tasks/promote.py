"""Let the gate judge a candidate, and make it the champion if it passes, and if a person agrees where one is asked.

The champion is scored again on the candidate's own held-out documents, so both are measured on the same text. The
decision is written beside the run and as a document of its own before the alias moves: documents are the truth, the
registry shows it. A candidate becomes the champion only through the registry, so a promotion waits for an MLflow
server that is away. What this gives up: with `promote.approval: person` nothing can be promoted without somebody.
"""

from __future__ import annotations

from typing import Any

from mlflow.exceptions import MlflowException
from prefect import task
from prefect.cache_policies import NO_CACHE
from rich.markup import escape

from llama3.evaluate.gate import Decision, Row, decide
from llama3.evaluate.scores import read_scores
from storage.artifact import Artifact
from storage.root import Root
from tasks.alerts import gate_failed
from tasks.approval import ask
from tasks.evaluate import evaluate_model
from tasks.project import checkpoint_model
from tasks.promotions import APPROVAL, CHALLENGER, WAITS, Promotion, last_promotion, with_approval, write_promotion
from tasks.reach import is_refusal
from tasks.registry import Registry
from tasks.runs import RunRecord, Runs, now
from tasks.step import Context, tracked

ATTEMPTS = 5
"""Times that a judgement is begun again because MLflow went away in the middle; all it does can be done twice."""


def promote_model(context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact) -> Decision:
    """Return the gate's decision on `checkpoint`, recorded in the run, the root's documents, and the registry.

    Where the recipe asks for a person, a deployed flow run is suspended here until somebody answers its form, and a
    terminal is asked; otherwise the run ends with a challenger, and `herd approve` has the last word.
    """
    promotion = judge_model(context, checkpoint, evaluation, curated)
    if promotion.verdict != WAITS:
        return promotion.decision
    approval = ask(context, promotion)
    if approval is not None:
        promotion = promotion.decided(approval, now())
        settle(context.root, context.runs, context.record, Registry(context.tracker), promotion)
        _say_settled(context, promotion)
    return promotion.decision


@task(name="promote", cache_policy=NO_CACHE, persist_result=False)
def judge_model(context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact) -> Promotion:
    """Return the decision on `checkpoint`, promoted if it passed and no person is to be asked.

    Raises ValueError if MLflow is away for longer than the policy allows, also while this works.
    """
    for _ in range(ATTEMPTS):
        await_mlflow(context)
        try:
            return _judge(context, checkpoint, evaluation, curated)
        except MlflowException as error:
            if is_refusal(error):
                raise
    raise ValueError(f"promote: MLflow at {context.tracker.uri} went away {ATTEMPTS} times; see its log, and try again")


def _judge(context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact) -> Promotion:
    registry, policy, run = Registry(context.tracker), context.recipe.promote, context.record.name
    with tracked(context, "promotion", "promote", evaluation.key) as mlflow_run:
        model_id = checkpoint_model(context.tracker, [mlflow_run], checkpoint)
        version = registry.register(checkpoint, run, mlflow_run, model_id)
        champion = registry.holder(policy.to)
        reigning = champion.tags.get("herd.artifact", "") if champion is not None else ""
        decision = _decide(context, checkpoint, evaluation, curated, champion)
        asks = decision.accepted and policy.approval == "person" and reigning != checkpoint.label
        promotion = Promotion(
            time=now(),
            run=run,
            family=context.recipe.name,
            artifact=checkpoint.label,
            digest=checkpoint.facts["model_sha256"],
            position=checkpoint.facts["end"],
            version=str(version.version),
            alias=policy.to,
            champion=reigning,
            verdict=WAITS if asks else ("promoted" if decision.accepted else "refused"),
            decision=with_approval(decision, None) if asks else decision,
        )
        promotion = _as_decided_before(context, promotion) if asks else promotion
        settle(context.root, context.runs, context.record, registry, promotion)
        context.tracker.set_tags(mlflow_run, {"verdict": promotion.verdict})
    _say(context, promotion)
    return promotion


def _as_decided_before(context: Context, promotion: Promotion) -> Promotion:
    """Return the decision as a person made it on this very model already (`herd approve`, an earlier attempt)."""
    earlier = last_promotion(context.root, promotion.run, promotion.artifact)
    if earlier is None or earlier.approval is None:
        return promotion
    return promotion.decided(earlier.approval, promotion.time)


def await_mlflow(context: Context) -> None:
    """Return once MLflow answers. Raises ValueError if it does not within the policy's patience."""
    patience = context.recipe.promote.patience
    if not context.tracker.wait_until_available(int(patience), context.console.say):
        raise ValueError(
            f"promote.patience: MLflow at {context.tracker.uri} did not answer for {patience}; the model is trained "
            "and evaluated: start MLflow and give the same command again"
        )


def settle(root: Root, runs: Runs, record: RunRecord, registry: Registry, promotion: Promotion) -> None:
    """Carry out a decision: write it beside the run, as a document, in the record, and last in MLflow."""
    root.write(promotion.decision.model_dump_json(indent=1), "runs", promotion.run, "promotion.json")
    write_promotion(root, promotion)
    record.verdict = promotion.verdict
    runs.save(record)
    found = registry.find(promotion.artifact)
    version = str(found.version) if found is not None else promotion.version  # a rebuilt server numbers them anew
    registry.note(version, promotion.tags)
    if promotion.verdict == "promoted":
        registry.promote(version, promotion.alias)
    if promotion.verdict == WAITS:
        registry.promote(version, CHALLENGER)
    elif promotion.alias != CHALLENGER:
        _end_challenge(registry, version)
    registry.tracker.set_tags(record.mlflow_run, {"verdict": promotion.verdict})


def _end_challenge(registry: Registry, version: str) -> None:
    """Take the challenger's alias from a version that has been decided on."""
    challenger = registry.holder(CHALLENGER)
    if challenger is not None and str(challenger.version) == version:
        registry.client.delete_registered_model_alias(registry.name, CHALLENGER)


def _decide(
    context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact, champion: Any | None
) -> Decision:
    checkpoint.verify()
    reigning = None
    if champion is not None:
        try:
            artifact = context.store.at(champion.tags["herd.artifact"])
        except ValueError as error:
            return Decision(accepted=False, rows=(_champion_gone(str(error)),))
        reigning = read_scores(evaluate_model(context, "champion", artifact, curated).path)
    return decide(context.recipe.promote.when, read_scores(evaluation.path), reigning)


def _champion_gone(why: str) -> Row:
    return Row(
        metric="integrity/champion",
        rule="the champion can be scored",
        candidate=None,
        champion=None,
        threshold=None,
        passed=False,
        reason=f"{why}; restore it, or delete the alias in MLflow to start without a champion",
    )


def _say(context: Context, promotion: Promotion) -> None:
    target = f"{promotion.family} version {promotion.version}"
    told = {
        "promoted": f"[green]{target} is the {promotion.alias}[/]",
        "refused": f"[red]refused: {target} stays a candidate[/]",
        WAITS: f"[cyan]{target} passed the gate and is the {CHALLENGER}: it waits for a person's approval[/]",
    }
    context.console.say(f"  {'promote':<18}{told[promotion.verdict]}")
    for row in promotion.decision.rows:
        if row.metric == APPROVAL and promotion.verdict == WAITS:
            continue
        mark = "[green]pass[/]" if row.passed else "[red]FAIL[/]"
        context.console.say(f"  {'':<18}{mark} {escape(row.reason)}")
    if promotion.verdict == "refused":
        reasons = "; ".join(promotion.decision.refusals)
        gate_failed(context.root, context.console, promotion.run, "promote", reasons, promotion.position)


def _say_settled(context: Context, promotion: Promotion) -> None:
    assert promotion.approval is not None
    by, target = escape(promotion.approval.by), f"{promotion.family} version {promotion.version}"
    if promotion.approval.approved:
        context.console.say(f"  {'promote':<18}[green]approved by {by}: {target} is the {promotion.alias}[/]")
    else:
        context.console.say(f"  {'promote':<18}[red]refused by {by}: {target} stays a candidate[/]")
