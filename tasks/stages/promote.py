"""Promote a candidate that passes the gate, after a person's approval where the recipe asks for it.

Three steps: `decide` compares candidate and champion, `PromotionLog.append` records the decision if the log has not
moved since, and `apply` moves the MLflow aliases.
"""

from __future__ import annotations

from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE
from rich.markup import escape

from herd.llama3.evaluate.gate import Decision
from herd.storage.artifact import Artifact
from herd.tasks.promotion.approval import append_answer, ask
from herd.tasks.promotion.log import (
    APPROVAL,
    CHALLENGER,
    IMPORTED,
    PROMOTED,
    REJECTED,
    HeadMoved,
    Log,
    Promotion,
    PromotionLog,
    current_label,
    gate_decisions,
)
from herd.tasks.promotion.registry import Registry, apply
from herd.tasks.runs.records import PENDING_APPROVAL, now
from herd.tasks.stages.alerts import alert_gate_failed
from herd.tasks.stages.gate import ChampionModel, Override, decide, measure_candidate, measure_champion
from herd.tasks.step import Context, tracked_step
from herd.tasks.tracking.steps import checkpoint_model


def promote_model(
    context: Context,
    checkpoint: Artifact,
    evaluation: Artifact,
    curated: Artifact,
    override: Override = Override(),  # noqa: B008  (frozen)
) -> Decision:
    """Return the decision on `checkpoint`, recorded in the log, the run and the registry.

    Where the recipe wants a person's approval, a deployed flow run is suspended here until its form is answered, and a
    terminal is asked; otherwise the run ends with a challenger, for `herd approve` or `herd reject`.
    """
    promotion = judge_model(context, checkpoint, evaluation, curated, override)
    if promotion.kind != PENDING_APPROVAL or (approval := ask(context, promotion)) is None:
        return promotion.decision
    log = PromotionLog(context.root, promotion.family)
    last = gate_decisions(log.records, promotion.run, promotion.artifact)[-1]
    if last.kind == PENDING_APPROVAL:  # `herd approve` has not answered yet
        last = append_answer(log, promotion.run, approval)
    apply(context.runs, context.record, context.tracker, log)
    by = escape(last.by)
    result = f"[red]rejected by {by}: {last.artifact} stays a candidate[/]"
    if last.kind == PROMOTED:
        result = f"[green]approved by {by}: {last.artifact} is the {last.alias}[/]"
    context.console.log(f"  {'promote':<18}{result}")
    return last.decision


@task(name="promote", cache_policy=NO_CACHE, persist_result=False)
def judge_model(
    context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact, override: Override
) -> Promotion:
    """Return the record of the judgement on `checkpoint`: promoted if it passed and no approval is needed.

    A decision that the run got before a crash is kept. Raises ValueError if MLflow is away for longer than the policy
    allows, before anything is decided.
    """
    timeout = context.recipe.promote.mlflow_timeout
    mlflow = context.tracker
    if not mlflow.reach.wait(int(timeout), context.console.log):
        raise ValueError(
            f"promote.mlflow_timeout: MLflow at {mlflow.uri} did not answer for {timeout} ({mlflow.reach.why}); the "
            "model is trained and evaluated: start MLflow and give the same command again"
        )
    with tracked_step(context, "promotion", "promote", evaluation.key) as mlflow_run:
        log = PromotionLog(context.root, context.recipe.name)
        imported = import_champion(context, log)
        if imported is not None and current_label(log.records, context.recipe.promote.to) == imported.label:
            context.console.log(f"  {'promote':<18}compares with {imported.label}, where training started")
        promotion = None if override.rejudge else decided_before(log.records, context.record.name, checkpoint.label)
        if promotion is None:
            promotion = append_decision(context, log, checkpoint, evaluation, curated, override)
        context.record.judged_in = promotion.run if promotion.run != context.record.name else ""
        registry, version = Registry(mlflow), ""
        for model in filter(None, (imported, checkpoint)):
            model_id = checkpoint_model(context.tracker, [mlflow_run], model)
            register = partial(registry.version, model, context.record.name, mlflow_run, model_id)
            registered = mlflow.reach.attempt(register, None)
            version = "" if registered is None else str(registered.version)  # None while MLflow is away
        apply(context.runs, context.record, context.tracker, log)
        context.tracker.set_tags(mlflow_run, {"verdict": promotion.kind})
    _say(context, promotion, version)
    return promotion


def import_champion(context: Context, log: PromotionLog) -> Artifact | None:
    """Return the weights that training started from if they are the first champion of the family, and record that.

    The gate compares with them then. A checkpoint of another run (`format: checkpoint`) is no model of its own.
    """
    start, recipe = context.recorded("init-weights"), context.recipe
    if start is None or start.manifest.kind != "weights":
        return None
    while not log.records:
        imported = Promotion(
            time=now(),
            kind=IMPORTED,
            run=context.record.name,
            family=recipe.name,
            artifact=start.label,
            digest=start.metadata["model_sha256"],
            position=start.metadata["end"],
            alias=recipe.promote.to,
            comment=f"training started from {start.metadata['from']}",
        )
        try:
            log.append(imported, log.head)
        except HeadMoved:
            log.refresh()
    return start if (log.records[0].kind, log.records[0].artifact) == (IMPORTED, start.label) else None


def append_decision(
    context: Context,
    log: PromotionLog,
    checkpoint: Artifact,
    evaluation: Artifact,
    curated: Artifact,
    override: Override,
) -> Promotion:
    """Decide on `checkpoint` and append the decision to `log`; decide again while other promotions come first.

    Only a new champion is measured again. Where nothing has changed since another run's decision, returns that one,
    unless this run is a rerun from here. Raises as `decide` does.
    """
    again = override.rejudge or override.override or context.record.redo_from == "promote"
    candidate = measure_candidate(context, checkpoint, evaluation, curated)
    champions: dict[str, ChampionModel] = {}
    while True:
        log.refresh()
        head, label = log.head, current_label(log.records, context.recipe.promote.to)
        if label not in champions:
            champions[label] = measure_champion(context, log.records, evaluation, curated)
        promotion = decide(candidate, champions[label], context.recipe.promote, override, now())
        if not again and (same := decided_elsewhere(log.records, promotion)):
            return same
        try:
            return log.append(promotion, head)
        except HeadMoved:
            continue


def decided_before(log: Log, run: str, artifact: str) -> Promotion | None:
    """Return the last decision on `artifact` in `run`; None if it waits and the champion has changed since."""
    decisions = gate_decisions(log, run, artifact)
    if not decisions:
        return None
    last = decisions[-1]
    return None if last.kind == PENDING_APPROVAL and last.champion != current_label(log, last.alias) else last


def decided_elsewhere(log: Log, promotion: Promotion) -> Promotion | None:
    """Return another run's decision on the model of `promotion` that still applies: same scores, rules and champion.

    A nightly run that changes nothing is not judged every night.
    """
    decisions = gate_decisions(log, artifact=promotion.artifact)
    if not decisions or decisions[-1].run == promotion.run or decisions[-1].alias != promotion.alias:
        return None
    last = decisions[-1]
    old, new = last.evidence, promotion.evidence
    if old is None or new is None or (old.rules, old.candidate) != (new.rules, new.candidate):
        return None
    if [(check.metric, check.passed) for check in old.checks] != [(check.metric, check.passed) for check in new.checks]:
        return None
    if last.kind == PROMOTED:
        return last if promotion.champion == promotion.artifact else None
    same_champion = (last.champion, old.champion) == (promotion.champion, new.champion)
    return last if last.kind == REJECTED and same_champion else None


def _say(context: Context, promotion: Promotion, version: str) -> None:
    if promotion.run != context.record.name:
        verdict = f"{promotion.kind}, number {promotion.n} of the log"
        context.console.log(f"  {'promote':<18}unchanged since {promotion.run}: {verdict}; it is not judged again")
        return
    target = f"{promotion.family} version {version}" if version else promotion.artifact
    result = {
        PROMOTED: f"[green]{target} is the {promotion.alias}[/]",
        REJECTED: f"[red]rejected: {target} stays a candidate[/]",
        PENDING_APPROVAL: f"[cyan]{target} passed the gate and is the {CHALLENGER}: it waits for approval[/]",
    }
    context.console.log(f"  {'promote':<18}{result[promotion.kind]}")
    if not version:
        context.console.log(f"  {'':<18}[yellow]MLflow went away and does not show it yet; the decision is recorded[/]")
    for row in promotion.decision.rows:
        if row.without_champion or (row.metric == APPROVAL and promotion.kind == PENDING_APPROVAL):
            continue
        mark = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]"}.get(row.verdict, f"[yellow]{row.verdict}[/]")
        subject = "" if row.reason.startswith(row.metric) else f"{row.metric}: "
        context.console.log(f"  {'':<18}{mark} {escape(subject + row.reason)}")
    if count := sum(row.without_champion for row in promotion.decision.rows):
        scores = f"{count} score{'s' if count > 1 else ''}"
        context.console.log(f"  {'':<18}[green]pass[/] {scores}: there is no champion yet to compare with")
    if promotion.kind == REJECTED:
        reasons = "; ".join(promotion.decision.refusals)
        alert_gate_failed(context.root, context.console, promotion.run, "promote", reasons, promotion.position)
