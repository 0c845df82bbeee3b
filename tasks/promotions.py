"""The decisions on models, one small document each: `promotions/<time>-<run>.json` under the root.

They are the truth about who is the champion and why; the registry of MLflow shows it. Where the recipe asks for a
person, that is one more row of the gate's table: not passed while the model waits, then passed or not as the person
decides, in a second document. So whoever reads `decision.accepted` reads the truth. Documents are never changed, and
two machines can write them side by side.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict

from llama3.evaluate.gate import Decision, Row
from storage.root import Root
from storage.threads import READERS, each

FOLDER = "promotions"
CHALLENGER = "challenger"
"""Alias of a model that passed the gate and waits for a person."""
WAITS: Literal["waits for approval"] = "waits for approval"
APPROVAL = "approval/person"
"""Row of the gate's table for the person's decision."""
Verdict = Literal["promoted", "refused", "waits for approval"]


class Approval(BaseModel):
    """What a person decided."""

    model_config = ConfigDict(frozen=True)

    approved: bool
    by: str
    comment: str = ""
    time: str


class Promotion(BaseModel):
    """One decision on one model."""

    model_config = ConfigDict(frozen=True)

    time: str
    """ISO 8601, UTC."""
    run: str
    family: str
    artifact: str
    """Label of the checkpoint."""
    digest: str
    """SHA-256 of the model's weights."""
    position: int
    version: str
    """Of the registered model, when it was decided."""
    alias: str
    """What the model is, or would have been, promoted to."""
    champion: str = ""
    """Label of the checkpoint that held the alias and that it was compared with; empty: none did."""
    verdict: Verdict
    decision: Decision
    """The gate's table, the person's row included."""
    approval: Approval | None = None

    @property
    def tags(self) -> dict[str, str]:
        """What the registered version says of the decision."""
        rows = {f"gate.{row.metric}".replace("/", "."): row.reason for row in self.decision.rows}
        return {"verdict": self.verdict, **rows}

    def decided(self, approval: Approval, time: str) -> Promotion:
        """Return the decision once a person has made theirs."""
        update = {"time": time, "approval": approval, "decision": with_approval(self.decision, approval)}
        return self.model_copy(update={**update, "verdict": "promoted" if approval.approved else "refused"})


def with_approval(decision: Decision, approval: Approval | None) -> Decision:
    """Return the gate's decision with the row of the person, who has not decided yet if there is no `approval`."""
    if approval is None:
        reason = "waits for approval by a person"
    else:
        comment = f": {approval.comment}" if approval.comment else ""
        reason = f"{'approved' if approval.approved else 'refused'} by {approval.by} at {approval.time}{comment}"
    row = Row(
        metric=APPROVAL,
        rule="a person approves",
        candidate=None,
        champion=None,
        threshold=None,
        passed=approval is not None and approval.approved,
        reason=reason,
    )
    rows = (*(known for known in decision.rows if known.metric != APPROVAL), row)
    return Decision(accepted=all(known.passed for known in rows), rows=rows)


def write_promotion(root: Root, promotion: Promotion) -> None:
    """Write one decision. Raises OSError."""
    stamp = re.sub(r"[^0-9TZ]", "", promotion.time.replace("+00:00", "Z"))
    text = promotion.model_dump_json(indent=1)
    root.write(text, FOLDER, f"{stamp}-{promotion.run}.json")


def promotions(root: Root, run: str = "") -> list[Promotion]:
    """Return every decision, or those on the models of `run`, oldest first."""
    names = [name for name in root.names(FOLDER) if name.endswith(f"-{run}.json" if run else ".json")]
    texts = each(lambda name: root.read(FOLDER, name), names, READERS)
    found = [Promotion.model_validate_json(text) for text in texts if text]
    return sorted((one for one in found if run in ("", one.run)), key=lambda one: one.time)


def last_promotion(root: Root, run: str, artifact: str = "") -> Promotion | None:
    """Return the last decision on the model of `run`, if any (on `artifact`, if it is given)."""
    mine = [promotion for promotion in promotions(root, run) if artifact in ("", promotion.artifact)]
    return mine[-1] if mine else None


def holders(decisions: list[Promotion]) -> dict[tuple[str, str], Promotion]:
    """Return the last promotion to each (family, alias), and to (family, challenger) of a model that still waits.

    `decisions` are oldest first.
    """
    last = {decision.run: decision for decision in decisions}
    held = {(decision.family, decision.alias): decision for decision in decisions if decision.verdict == "promoted"}
    waiting = {(one.family, CHALLENGER): one for one in last.values() if one.verdict == WAITS}
    return {**held, **waiting}


def holders_of_aliases(root: Root) -> dict[tuple[str, str], Promotion]:
    """Return who holds each (family, alias) by the decisions of the root."""
    return holders(promotions(root))
