"""A person's decision on a model that passed the gate: ask for it, and append it to the promotion log.

Prefect suspends flow runs of deployments only: the process ends, *Resume* shows a form, and the flow starts again with
the answer. Elsewhere a terminal is asked, or the run ends with a challenger for `herd approve` and `herd reject`.
"""

from __future__ import annotations

import getpass
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import UUID

from pydantic import Field
from rich.markup import escape
from rich.prompt import Confirm, Prompt

from herd.storage.root import Root
from herd.tasks.format import command
from herd.tasks.promotion.log import (
    APPROVAL,
    HeadMoved,
    Log,
    Promotion,
    PromotionLog,
    current_label,
    gate_decisions,
)
from herd.tasks.promotion.registry import apply, gate_table
from herd.tasks.runs.records import PENDING_APPROVAL, Runs, now
from herd.tasks.tracking.events import emit, resource_id
from herd.tasks.tracking.mlflow import MLflowTracker

if TYPE_CHECKING:
    from prefect.input import RunInput

    from herd.tasks.step import Context


class Approval(NamedTuple):
    """A person's decision."""

    approved: bool
    by: str
    comment: str = ""


def ask(context: Context, promotion: Promotion) -> Approval | None:
    """Return a person's decision on the model, or None if there is neither a deployment nor a terminal to ask.

    In a flow run of a deployment that has no answer yet this ends the process (Prefect's `Pause`).
    """
    from prefect.runtime import deployment

    payload = {"run": promotion.run, "root": context.root.uri, "artifact": promotion.artifact}
    emit("herd.approval.wanted", resource_id(promotion.artifact), promotion.artifact, payload)
    if deployment.id:
        from prefect.flow_runs import suspend_flow_run

        context.console.log(f"  {'':<18}[cyan]suspended; answer with Resume on the page of this flow run[/]")
        form = approval_form().with_initial_data(description=question(promotion))
        answer = suspend_flow_run(wait_for_input=form, key=f"approve-{promotion.digest[:16]}")
        decision, name, comment = (getattr(answer, field) for field in ("decision", "name", "comment"))
        return Approval(approved=decision == "approve", by=name, comment=comment)
    console = context.console.rich
    if console is not None and console.is_terminal and sys.stdin.isatty():
        target = f"{promotion.artifact} the {promotion.alias} of {promotion.family}"
        approved = Confirm.ask(f"  make {escape(target)}?", console=console, default=False)
        comment = Prompt.ask("  comment", console=console, default="", show_default=False)
        return Approval(approved=approved, by=getpass.getuser(), comment=comment)
    approve, reject = (command(context.root, word, promotion.run) for word in ("approve", "reject"))
    context.console.log(f"  {'':<18}[cyan]decide with: {escape(approve)} --comment WHY, or {escape(reject)}[/]")
    return None


def approval_form() -> type[RunInput]:
    """Return the form that Prefect shows at *Resume*."""
    from prefect.input import RunInput

    def field(position: int, title: str, description: str, **more: Any) -> Any:
        return Field(title=title, description=description, json_schema_extra={"position": position}, **more)

    class Answer(RunInput):
        """The person's decision."""

        decision: Literal["approve", "reject"] = field(
            0, "Decision", "approve: the model takes over. reject: it stays a candidate."
        )
        name: str = field(1, "Your name", "Kept with the decision.", min_length=1)
        comment: str = field(2, "Comment", "Why; kept with the decision.", default="")

    return Answer


def question(promotion: Promotion) -> str:
    """Return the information for the approving person, as markdown."""
    rules = [row for row in promotion.decision.rows if row.metric != APPROVAL]
    champion = f"`{promotion.champion}`" if promotion.champion else "none yet"
    return "\n".join([
        f"The model of run **{promotion.run}** passed the gate. Make it the **{promotion.alias}** of "
        f"**{promotion.family}**?",
        "",
        f"model `{promotion.artifact}`, {promotion.alias} so far: {champion}",
        "",
        gate_table(rules),
    ])  # fmt: skip


def answered(log: Log, run: str, approval: Approval, time: str) -> Promotion:
    """Return the record of a person's decision on the model of a run that waits.

    Raises ValueError if it does not wait, or the champion has changed since the gate compared the model with it.
    """
    decisions = gate_decisions(log, run)
    if not decisions or decisions[-1].kind != PENDING_APPROVAL:
        verdict = f"it is {decisions[-1].kind}" if decisions else "it has no decision yet"
        raise ValueError(f"approve: run {run} does not wait for approval: {verdict}")
    waiting = decisions[-1]
    champion = current_label(log, waiting.alias)
    if approval.approved and champion != waiting.champion:
        raise ValueError(
            f"approve: the {waiting.alias} is {champion or 'none'} now, and {run} was compared with "
            f"{waiting.champion or 'none'}; judge it again: herd promote {run}"
        )
    return waiting.decided(approval.approved, approval.by, approval.comment, time, len(log))


def append_answer(log: PromotionLog, run: str, approval: Approval) -> Promotion:
    """Append a person's decision on `run` to `log`, by the log as it is then. Raises as `answered` does."""
    while True:
        log.refresh()
        try:
            return log.append(answered(log.records, run, approval, now()), log.head)
        except HeadMoved:
            continue


def decide(root: Root, run: str, approved: bool, by: str = "", comment: str = "") -> tuple[Promotion, bool]:
    """Decide on the model of a run that waits for approval (`herd approve`, `herd reject`).

    Returns the record and whether MLflow shows it. Raises ValueError if the run does not wait, if a process works on
    it, or if the champion has changed since the gate compared the model with it.
    """
    from herd.storage.lease import LeaseHeld

    runs = Runs(root)
    record = runs.find(run)
    approval = Approval(approved, by or getpass.getuser(), comment)
    log, tracker = PromotionLog(root, record.family), MLflowTracker(root, record.family)
    try:
        with runs.alone(run, f"approval by {approval.by}"):
            try:
                promotion = append_answer(log, run, approval)
            except ValueError:
                if gate_decisions(log.records, run):  # a command was killed between append and apply
                    apply(runs, runs.find(run), tracker, log)
                raise
            shown = apply(runs, runs.find(run), tracker, log)
    except LeaseHeld as error:
        raise ValueError(f"approve: run {run} is being worked on: {error}; answer there, or wait") from error
    _resume(record.prefect_run, approval)
    return promotion, shown


def _resume(flow_run: str, approval: Approval) -> None:
    """Resume a suspended flow run of the same run, so that it ends; it finds the decision in the log."""
    from prefect.settings import PREFECT_API_URL

    if not flow_run or not PREFECT_API_URL.value():
        return
    from prefect.flow_runs import resume_flow_run

    decision = "approve" if approval.approved else "reject"
    with suppress(Exception):  # not suspended, or no server: the decision in the log is valid without it
        resume_flow_run(UUID(flow_run), run_input={"decision": decision, "name": approval.by, "comment": ""})
