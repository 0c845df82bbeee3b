"""A person's decision on a model that passed the gate: ask for it, record it, and show what the log says.

A flow run of a deployment is suspended: its process ends, *Resume* in Prefect shows a form, and the flow starts again
with the answer. Prefect suspends flow runs of deployments only, so elsewhere a terminal is asked, or the run ends with
a challenger for `herd approve` and `herd refuse`.
"""

from __future__ import annotations

import getpass
import sys
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field
from rich.markup import escape
from rich.prompt import Confirm, Prompt

from storage.root import Root
from tasks.console import TerminalConsole
from tasks.format import command
from tasks.promotion.log import APPROVAL, WAITS, Log, Promotion, PromotionLog, judged, reigning
from tasks.runs.records import RunRecord, Runs, mark_open, now
from tasks.tracking.events import emit, resource_id
from tasks.tracking.mlflow import Tracker
from tasks.tracking.registry import Registry

if TYPE_CHECKING:
    from prefect.input import RunInput

    from tasks.step import Context


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
