"""Judge a candidate against the holder of the alias: check it, score the champion on the same text, ask the gate.

Judging takes minutes and locks nothing. If another promotion wins meanwhile, the candidate is judged again, against the
new champion. Judgements are kept by champion, so only a new champion costs another evaluation.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow.parquet as pq

from llama3.data.accounting import FINDINGS
from llama3.evaluate.compare import compare
from llama3.evaluate.gate import Check, Decision, Evidence
from llama3.evaluate.scores import read_scores
from storage.artifact import Artifact, DamagedArtifact, Store
from tasks.models.serving import smoke
from tasks.promotion.log import PROMOTED, REFUSED, WAITS, Kind, Log, Promotion, reigning
from tasks.runs.records import RunRecord, now
from tasks.stages.evaluate import evaluate_model
from tasks.step import Context

# Model checks: is the artifact whole, the model usable, the data clean? Each check is a row of the gate's table, and a
# damaged file is a failed row, not an error. Every file is read and exported, which takes long for a large model.

FILES, SERVING, CONTAMINATION = "integrity/files", "serving", "contamination"


def vet(context: Context, checkpoint: Artifact, curated: Artifact) -> list[Check]:
    """Return the checks of `checkpoint`, whose scores were taken on `curated`.

    Raises Unfinished if one did not come to its end, and OSError without storage: nothing is decided then.
    """
    from llama3.export.checks import checked, vet_model  # torch

    try:
        folder = checkpoint.path / "model"
    except DamagedArtifact as error:  # nothing else of it is worth a look
        return [Check(metric=FILES, passed=False, reason=str(error)[:400])]
    with ThreadPoolExecutor(1) as pool:  # the fresh process takes most of the time to begin
        served = pool.submit(smoke, folder)
        files = checked(FILES, lambda: _files(checkpoint))
        model = vet_model(folder, context.scratch / "vetting")
        tokenizer = _tokenizer(context, checkpoint)
        serving = checked(SERVING, lambda: _serving(served.result()))
    return [files, *model, tokenizer, serving, *contamination(curated)]


def _files(checkpoint: Artifact) -> str:
    checkpoint.verify()
    return f"{len(checkpoint.manifest.files)} files are as when they were committed"


def _serving(failed: str | None) -> str:
    if failed is not None:
        raise ValueError(failed)
    return "loads in a process of its own without pickle, and answers"


def _tokenizer(context: Context, checkpoint: Artifact) -> Check:
    """Compare the tokenizer beside the model with the one that its tokens were made with."""
    from llama3.export.checks import TOKENIZER, vet_tokenizer

    try:
        tokens = _made_of(context.store, context.record, checkpoint, "tokens")
        tokenizer = _made_of(context.store, context.record, tokens, "tokenizer")
    except ValueError as error:
        return Check(metric=TOKENIZER, passed=False, reason=str(error))
    return vet_tokenizer(checkpoint.path / "model", str(tokenizer.facts["digest"]))


def _made_of(store: Store, record: RunRecord, artifact: Artifact, kind: str) -> Artifact:
    """Return the artifact of `kind` that `artifact` was made from. Raises ValueError if it is gone."""
    key = artifact.manifest.inputs.get(kind, "")
    labels = [step.artifact for step in record.steps.values() if step.artifact.startswith(f"{kind}/")]
    for label in labels:
        if key and label.endswith(f"-{key[:8]}"):
            return store.at(label)
    raise ValueError(f"{record.name} does not know the {kind} that {artifact.label} was made from; promote another run")


def contamination(curated: Artifact) -> list[Check]:
    """Return a check for each evaluation set that was looked for in the documents, or one that says none was.

    Of a set whose documents were dropped nothing is left. Of one that was only reported, no example may be there: to
    its threshold in a single document, word by word (`llama3.data.decontam.decontaminate`).
    """
    name = f"{FINDINGS}/contamination.parquet"
    if name not in curated.manifest.files:
        why = "curate.decontaminate names no evaluation sets"
        return [Check(metric=CONTAMINATION, passed=True, checked=False, reason=why)]
    return [_contaminated(row) for row in pq.read_table(curated.part(name)).to_pylist()]


def _contaminated(row: dict[str, object]) -> Check:
    name, found, of = row["benchmark"], int(str(row["confirmed"])), int(str(row["examples"]))
    dropped = row["action"] == "drop"
    left = "all documents with them were dropped" if dropped else f"allowed none at {row['threshold']} of an example"
    reason = f"{name}: {found:,} of {of:,} examples are in the documents ({found / max(1, of):.2%}); {left}"
    return Check(metric=f"{CONTAMINATION}/{name}", passed=dropped or not found, reason=reason)


CHAMPION = "champion/there"
"""Row of a champion that was deleted. A person may decide against it, which nobody may against `integrity/...`."""
INTEGRITY = "integrity/"


@dataclass(frozen=True)
class Override:
    """What a person said who had a model judged."""

    by: str = ""
    comment: str = ""
    override: str = ""
    """Why to promote it whatever the gate says; no other person is asked then."""
    again: bool = False
    """Judge it though its run has been decided on already."""


class CandidateJudge:
    """Decides on one candidate, by the log as it stands (`promotion_log.Write`)."""

    def __init__(
        self, context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact, asked: Override
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
