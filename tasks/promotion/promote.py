"""Promote a candidate that passes the gate, after a person's approval where the recipe asks for it; roll back.

The champion is scored again on the candidate's held-out documents, so both are measured on the same text. The record in
the promotion log comes first; run record, tags and aliases follow it. A judgement waits for an MLflow server that is
away and fails before anything is decided; one that goes away later is told when it answers.
"""

from __future__ import annotations

import getpass
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field
from rich.markup import escape
from rich.prompt import Confirm, Prompt

from llama3.evaluate.gate import Decision
from storage.artifact import Artifact
from storage.object_artifact import open_store
from tasks.console import TerminalConsole
from tasks.format import command
from tasks.promotion.gate import CandidateJudge, Override
from tasks.promotion.log import (
    APPROVAL,
    CHALLENGER,
    CHAMPION,
    PROMOTED,
    REFUSED,
    ROLLED_BACK,
    WAITS,
    Log,
    Promotion,
    PromotionLog,
    changes,
    judged,
    reigning,
    reigns,
)
from tasks.runs.records import RunRecord, Runs, mark_open, now
from tasks.stages.alerts import gate_failed
from tasks.step import Context, tracked
from tasks.tracking.events import emit, resource_id
from tasks.tracking.mlflow import Tracker
from tasks.tracking.registry import Registry
from tasks.tracking.steps import checkpoint_model

if TYPE_CHECKING:
    from prefect.input import RunInput

    from storage.root import Root
    from tasks.step import Context


# Rollback: give an alias back to a model that held it, without gate or evaluation. The artifact must exist; its bytes
# are not read again. If the champion changes meanwhile nothing is done, or two people would go back twice.


class RollbackRequest(NamedTuple):
    """What a person asks for."""

    family: str
    alias: str = CHAMPION
    to: str = ""
    """Label of a model (`checkpoint/` may be left out), or place of a record in the log; empty: the one before."""
    by: str = ""
    comment: str = ""


def roll_back(root: Root, wanted: RollbackRequest) -> tuple[Promotion, bool]:
    """Give the alias back and return the record, and whether MLflow shows it.

    Raises ValueError if no model held the alias before, the one that is named did not, or its artifact is gone.
    """
    log = PromotionLog(root, wanted.family)
    seen = reigning(log.records, wanted.alias)
    wanted = wanted._replace(by=wanted.by or getpass.getuser())

    def write(records: Log) -> Promotion:
        if (champion := reigning(records, wanted.alias)) != seen:
            raise ValueError(
                f"rollback: {wanted.family}@{wanted.alias} was {seen} and is {champion} by now; look at it "
                f"(herd promotions {wanted.family}) and decide again"
            )
        return _record(root, records, wanted, seen)

    promotion = log.append(write)
    return promotion, show(log, promotion)


def show(log: PromotionLog, promotion: Promotion) -> bool:
    """Show in MLflow who holds what now, and on both versions why; return whether it does."""
    from tasks.tracking.mlflow import Tracker
    from tasks.tracking.registry import Registry

    tracker = Tracker(log.root, log.family)
    registry = Registry(tracker)
    labels = (promotion.artifact, promotion.champion)
    return tracker.reach.attempt(lambda: registry.show(log, *labels) is not None, False)


def _record(root: Root, log: Log, wanted: RollbackRequest, champion: str) -> Promotion:
    target = _target(log, wanted)
    try:
        artifact = open_store(root).at(target.artifact)
    except ValueError as error:
        raise ValueError(f"rollback: {error}; {_others(root, log, wanted.alias, target)}") from error
    if lost := artifact.missing():
        raise ValueError(f"rollback: {target.artifact} lacks {lost[0]}; {_others(root, log, wanted.alias, target)}")
    return Promotion(
        time=now(),
        kind=ROLLED_BACK,
        run=target.run,
        family=wanted.family,
        artifact=target.artifact,
        digest=target.digest,
        position=target.position,
        alias=wanted.alias,
        champion=champion,
        against=len(log),
        by=wanted.by,
        comment=wanted.comment,
    )


def _target(log: Log, wanted: RollbackRequest) -> Promotion:
    """Return the record of the reign to go back to. Raises ValueError naming those that there were."""
    name, held = f"{wanted.family}@{wanted.alias}", changes(log, wanted.alias)
    if not held:
        raise ValueError(f"rollback: no model of {wanted.family} was promoted to {wanted.alias} yet")
    if not wanted.to:
        if len(pile := reigns(log, wanted.alias)) < 2:
            raise ValueError(f"rollback: {name} is {held[-1].artifact}, no model held it before; name one with --to")
        return pile[-2]
    found = [one for one in held if wanted.to in (one.artifact, one.artifact.rpartition("/")[2], str(one.n))]
    if not found:
        raise ValueError(
            f"rollback: {wanted.to!r} never held {name}; choose the label or the number of one that did: "
            + ", ".join(f"{record.n} {record.artifact}" for record in held)
        )
    if found[-1].artifact == held[-1].artifact:
        raise ValueError(f"rollback: {found[-1].artifact} holds {name} already")
    return found[-1]


def _others(root: Root, log: Log, alias: str, gone: Promotion) -> str:
    """Say which other models that held the alias can be gone back to."""
    store, there = open_store(root), []
    for label in dict.fromkeys(record.artifact for record in changes(log, alias)):
        if label not in (gone.artifact, reigning(log, alias)):
            with suppress(ValueError):
                there.append(store.at(label).label)
    return f"choose --to {' or '.join(there)}" if there else "no other model that held it is there"


# Run record, version tags and aliases follow the promotion log, never lead it: after a crash in between, the next call
# or `reconcile` completes them. If MLflow is away the run is marked, so that `reconcile` sends what is missing.


def settle(runs: Runs, record: RunRecord, tracker: Tracker, log: PromotionLog, artifact: str) -> bool:
    """Show what `log` says of `artifact`, the model of run `record` (whose lease is held); return whether MLflow does.

    Raises OSError if the root does not answer.
    """
    record.verdict = judged(log.records, record.name)[-1].kind
    runs.save(record)
    tracker.set_tags(record.mlflow_run, {"verdict": record.verdict})
    shown = tracker.reach.attempt(lambda: _show(Registry(tracker), log, artifact), False)
    if tracker.stale:
        record.mlflow_stale = True
        runs.save(record)
        mark_open(runs.root, record.name)
    return shown


def _show(registry: Registry, log: PromotionLog, artifact: str) -> bool:
    registry.show(log, artifact)
    return True


# Approval by a person. A flow run of a deployment is suspended: its process ends, *Resume* in Prefect shows a form, and
# the flow starts again with the answer. Prefect suspends flow runs of deployments only, so elsewhere a terminal is
# asked, or the run ends with a challenger for `herd approve` and `herd refuse`.


class Approval(NamedTuple):
    """What a person decided."""

    approved: bool
    by: str
    comment: str = ""


def ask(context: Context, promotion: Promotion) -> Approval | None:
    """Return what a person decides on the model, or None if nobody can be asked here.

    In a flow run of a deployment that nobody has answered yet this ends the process (Prefect's `Pause`).
    """
    from prefect.runtime import deployment

    payload = {"run": promotion.run, "root": context.root.uri, "artifact": promotion.artifact}
    emit("herd.approval.wanted", resource_id(promotion.artifact), promotion.artifact, payload)
    if deployment.id:
        context.console.say(f"  {'':<18}[cyan]suspended; answer with Resume on the page of this flow run[/]")
        return _from_form(promotion)
    if isinstance(context.console, TerminalConsole) and context.console.rich.is_terminal and sys.stdin.isatty():
        return _from_terminal(context.console, promotion)
    approve, refuse = (command(context.root, word, promotion.run) for word in ("approve", "refuse"))
    context.console.say(f"  {'':<18}[cyan]decide with: {escape(approve)} --comment WHY, or {escape(refuse)}[/]")
    return None


def _from_form(promotion: Promotion) -> Approval:
    from prefect.flow_runs import suspend_flow_run

    form = approval_form().with_initial_data(description=question(promotion))
    answer = suspend_flow_run(wait_for_input=form, key=f"approve-{promotion.digest[:16]}")
    decision, name, comment = (getattr(answer, field) for field in ("decision", "name", "comment"))
    return Approval(approved=decision == "approve", by=name, comment=comment)


def approval_form() -> type[RunInput]:
    """Return the form that Prefect shows at *Resume*."""
    from prefect.input import RunInput

    class Answer(RunInput):
        """The person's decision."""

        decision: Literal["approve", "refuse"] = Field(
            title="Decision",
            description="approve: the model takes over. refuse: it stays a candidate.",
            json_schema_extra={"position": 0},
        )
        name: str = Field(
            min_length=1, title="Your name", description="Kept with the decision.", json_schema_extra={"position": 1}
        )
        comment: str = Field(
            default="", title="Comment", description="Why; kept with the decision.", json_schema_extra={"position": 2}
        )

    return Answer


def question(promotion: Promotion) -> str:
    """Return what a person has to know, as markdown."""
    rules = [row for row in promotion.decision.rows if row.metric != APPROVAL]
    rows = [f"| {row.metric} | {row.rule} | {row.reason.replace('|', '/')} |" for row in rules]
    against = f"`{promotion.champion}`" if promotion.champion else "none yet"
    return "\n".join([
        f"The model of run **{promotion.run}** passed the gate. Shall it become the **{promotion.alias}** of "
        f"**{promotion.family}**?",
        "",
        f"model `{promotion.artifact}`, {promotion.alias} so far: {against}",
        "",
        "| metric | rule | result |",
        "|---|---|---|",
        *rows,
    ])  # fmt: skip


def _from_terminal(console: TerminalConsole, promotion: Promotion) -> Approval:
    target = f"{promotion.artifact} the {promotion.alias} of {promotion.family}"
    approved = Confirm.ask(f"  make {escape(target)}?", console=console.rich, default=False)
    comment = Prompt.ask("  comment", console=console.rich, default="", show_default=False)
    return Approval(approved=approved, by=getpass.getuser(), comment=comment)


def answered(log: Log, run: str, approval: Approval) -> Promotion:
    """Return the record of what a person decided on the model of a run that waits.

    Raises ValueError if it does not wait, or the champion has changed since the gate compared the model with it.
    """
    found = judged(log, run)
    if not found or found[-1].kind != WAITS:
        verdict = f"it is {found[-1].kind}" if found else "it has no decision yet"
        raise ValueError(f"approve: run {run} does not wait for approval: {verdict}")
    waiting = found[-1]
    champion = reigning(log, waiting.alias)
    if approval.approved and champion != waiting.champion:
        raise ValueError(
            f"approve: the {waiting.alias} is {champion or 'nobody'} now, and {run} was compared with "
            f"{waiting.champion or 'nobody'}; have the gate judge it again: herd promote {run}"
        )
    return waiting.decided(approval.approved, approval.by, approval.comment, now(), len(log))


def decide(root: Root, run: str, approved: bool, by: str = "", comment: str = "") -> tuple[Promotion, bool]:
    """Decide on the model of a run that waits for approval (`herd approve`, `herd refuse`).

    Returns the record and whether MLflow shows it. Raises ValueError if the run does not wait, if a process works on
    it, or if the champion has changed since the gate compared the model with it.
    """
    from storage.lease import LeaseHeld, lease
    from tasks.promotion.log import PromotionLog
    from tasks.runs.records import Runs
    from tasks.tracking.mlflow import Tracker

    runs = Runs(root)
    record = runs.find(run)
    approval = Approval(approved, by or getpass.getuser(), comment)
    log, tracker = PromotionLog(root, record.family), Tracker(root, record.family)
    try:
        with lease(root, f"runs/{run}", f"approval by {approval.by}"):
            try:
                promotion = log.append(lambda records: answered(records, run, approval))
            except ValueError:
                if found := judged(log.records, run):  # of a command that died before it showed what it decided
                    settle(runs, runs.find(run), tracker, log, found[-1].artifact)
                raise
            shown = settle(runs, runs.find(run), tracker, log, promotion.artifact)
    except LeaseHeld as error:
        raise ValueError(f"approve: run {run} is being worked on: {error}; answer there, or wait") from error
    _resume(record.prefect_run, approval)
    return promotion, shown


def _resume(flow_run: str, approval: Approval) -> None:
    """Let a suspended flow run of the same run go on, so that it ends; it finds the decision made."""
    from prefect.settings import PREFECT_API_URL

    if not flow_run or not PREFECT_API_URL.value():
        return
    from uuid import UUID

    from prefect.flow_runs import resume_flow_run

    decision = "approve" if approval.approved else "refuse"
    try:
        resume_flow_run(UUID(flow_run), run_input={"decision": decision, "name": approval.by, "comment": ""})
    except Exception:  # not suspended, or no server: the decision stands without it
        return


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
