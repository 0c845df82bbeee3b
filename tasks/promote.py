"""Let the gate judge a candidate, and make it the champion if it passes.

The champion is scored again on the candidate's own held-out documents, so both are measured on the same text. The
decision is written beside the run and appended to the root's log before the alias moves: the log is the truth, the
registry shows it.
"""

from __future__ import annotations

import os
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from rich.markup import escape

from llama3.evaluate.gate import Decision, Row, decide
from llama3.evaluate.scores import read_scores
from storage.artifact import Artifact
from storage.filesystem import write_atomic
from tasks.evaluate import evaluate_model
from tasks.registry import Registry
from tasks.runs import now
from tasks.step import Context, tracked


@task(name="promote", tags=["promote"], cache_policy=NO_CACHE, persist_result=False)
def promote_model(context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact) -> Decision:
    """Return the gate's decision on `checkpoint`, recorded in the run, the root's log, and the registry."""
    registry = Registry(context.tracker)
    policy = context.recipe.promote
    with tracked(context, "promotion", "promote", evaluation.key) as mlflow_run:
        digest = checkpoint.facts["model_sha256"]
        model_id = context.tracker.checkpoint_model(
            [mlflow_run], checkpoint.label, checkpoint.path.as_uri(), checkpoint.facts["end"], digest
        )
        version = registry.register(checkpoint, context.record.name, mlflow_run, model_id)
        decision = _decide(context, checkpoint, evaluation, curated, registry.holder(policy.to))
        _write(context, checkpoint, decision, str(version.version))
        registry.record(str(version.version), decision)
        if decision.accepted:
            registry.promote(str(version.version), policy.to)
        context.record.verdict = "promoted" if decision.accepted else "refused"
        context.runs.save(context.record)
        context.tracker.set_tags(mlflow_run, {"verdict": context.record.verdict})
        context.tracker.set_tags(context.record.mlflow_run, {"verdict": context.record.verdict})
    _say(context, decision, str(version.version))
    return decision


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


def _write(context: Context, checkpoint: Artifact, decision: Decision, version: str) -> None:
    """Write the decision beside the run and append it to the root's log, synced to disk."""
    write_atomic(context.folder / "promotion.json", decision.model_dump_json(indent=1))
    line = (
        f'{{"time":"{now()}","run":"{context.record.name}","artifact":"{checkpoint.label}","version":"{version}",'
        f'"alias":"{context.recipe.promote.to}","decision":{decision.model_dump_json()}}}\n'
    )
    with (context.store.root / "promotions.jsonl").open("a") as log:
        log.write(line)
        log.flush()
        os.fsync(log.fileno())


def _say(context: Context, decision: Decision, version: str) -> None:
    target = f"{context.recipe.name} version {version}"
    if decision.accepted:
        context.console.say(f"  {'promote':<18}[green]{target} is the {context.recipe.promote.to}[/]")
    else:
        context.console.say(f"  {'promote':<18}[red]refused: {target} stays a candidate[/]")
    for row in decision.rows:
        mark = "[green]pass[/]" if row.passed else "[red]FAIL[/]"
        context.console.say(f"  {'':<18}{mark} {escape(row.reason)}")
