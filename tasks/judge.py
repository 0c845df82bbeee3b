"""Judge one candidate against whoever holds the alias: vet it, score the champion on the same text, ask the gate.

It takes minutes, and meanwhile another promoter may win: then the judgement is void and the candidate is judged again,
against the new champion. A judgement is of one candidate against one champion and stays true of them, so it is kept
by the champion's label, and only a champion that was not met yet costs another evaluation. What this gives up: nothing
is held locked, so of two promoters one may judge twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama3.evaluate.compare import compare
from llama3.evaluate.gate import Check, Decision, Evidence
from llama3.evaluate.scores import read_scores
from storage.artifact import Artifact
from tasks.evaluate import evaluate_model
from tasks.promotions import PROMOTED, REFUSED, WAITS, Kind, Log, Promotion, reigning
from tasks.runs import now
from tasks.step import Context
from tasks.vetting import vet

CHAMPION = "champion/there"
"""Row of a champion that was deleted. A person may decide against it, which nobody may against `integrity/...`."""
INTEGRITY = "integrity/"


@dataclass(frozen=True)
class Asked:
    """What a person said who had a model judged."""

    by: str = ""
    comment: str = ""
    override: str = ""
    """Why to promote it whatever the gate says; no other person is asked then."""
    again: bool = False
    """Judge it though its run has been decided on already."""


class Judge:
    """Decides on one candidate, by the log as it stands (`promotion_log.Write`)."""

    def __init__(
        self, context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact, asked: Asked
    ) -> None:
        self.context, self.checkpoint, self.evaluation, self.curated = context, checkpoint, evaluation, curated
        self.asked = asked
        self.checks = vet(context, checkpoint, curated)
        self._judged: dict[str, tuple[Evidence, Decision, int]] = {}

    def __call__(self, log: Log) -> Promotion:
        """Return the record that the log, as it is, asks for. Raises ValueError for an override of what cannot be."""
        policy, checkpoint = self.context.recipe.promote, self.checkpoint
        champion = reigning(log, policy.to)
        if champion not in self._judged:
            evidence = self._evidence(champion)
            used = sum(record.evidence is not None and evidence.asked_alike(record.evidence) for record in log)
            evidence = evidence.model_copy(update={"used": used})
            self._judged[champion] = (evidence, evidence.decide(), len(log))
        evidence, gate, against = self._judged[champion]
        said = self.asked
        override = "" if gate.accepted else _allowed(said.override, gate)
        asks = policy.approval == "person" and champion != checkpoint.label
        return Promotion(
            time=now(),
            kind=PROMOTED if said.override else _kind(gate, asks),
            run=self.context.record.name,
            family=self.context.recipe.name,
            artifact=checkpoint.label,
            digest=checkpoint.facts["model_sha256"],
            position=checkpoint.facts["end"],
            alias=policy.to,
            champion=champion,
            against=against,
            gate=gate,
            evidence=evidence,
            asked=asks,
            override=override,
            by=said.by,
            comment=said.comment or (said.override if gate.accepted else ""),
        )

    def _evidence(self, label: str) -> Evidence:
        """Return what the gate is to see of the candidate, and of the champion called `label`."""
        recipe, candidate = self.context.recipe, read_scores(self.evaluation.path)
        rules = recipe.promote.when
        if not label:
            return Evidence.of(rules, candidate, None, None, self.checks)
        try:
            champion = self.context.store.at(label)
        except ValueError as error:
            return Evidence.of(rules, candidate, None, None, [*self.checks, _gone(recipe.name, str(error))])
        scored = evaluate_model(self.context, "champion", champion, self.curated).path
        differences = compare(recipe, self.evaluation.path, scored)
        return Evidence.of(rules, candidate, read_scores(scored), differences, self.checks)


def _kind(gate: Decision, asks: bool) -> Kind:
    if not gate.accepted:
        return REFUSED
    return WAITS if asks else PROMOTED


def _allowed(override: str, gate: Decision) -> str:
    """Return why the gate is decided against, if it is. Raises ValueError where nobody may."""
    firm = [row for row in gate.rows if not row.passed and row.metric.startswith(INTEGRITY)]
    if override and firm:
        raise ValueError(
            f"override: nobody may decide against {firm[0].metric} ({firm[0].reason}); make the model anew"
        )
    return override


def _gone(family: str, why: str) -> Check:
    remedy = f"roll back to a model that is there (herd rollback {family} --to LABEL), or promote over it (--override)"
    return Check(metric=CHAMPION, rule="the champion can be scored", passed=False, reason=f"{why}; {remedy}")
