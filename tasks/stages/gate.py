"""Measure a candidate and the champion, and decide on the promotion.

`measure_candidate` and `measure_champion` read files and run models, which takes minutes and locks nothing. `decide` is
a pure function of what they return. A failed check is a failed row of the gate's table, not an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow.parquet as pq

from herd.llama3.data.accounting import FINDINGS
from herd.llama3.evaluate.compare import compare
from herd.llama3.evaluate.gate import Check, Evidence
from herd.llama3.evaluate.scores import GENERATIONS_FILE, Score, read_scores
from herd.llama3.recipe.sections import Promote
from herd.llama3.statistics.significance import Difference
from herd.storage.artifact import Artifact, DamagedArtifact
from herd.tasks.launch.devices import place_evaluation
from herd.tasks.promotion.log import PROMOTED, REJECTED, Kind, Log, Promotion, current_label
from herd.tasks.runs.records import PENDING_APPROVAL
from herd.tasks.stages.evaluate import evaluate_model
from herd.tasks.step import Context

FILES, SERVING, CONTAMINATION = "integrity/files", "serving", "contamination"
CHAMPION = "champion/there"
"""Row of a champion that was deleted. A person may override it, unlike a row of `integrity/...`."""
WINDOW = "champion/window"
"""Row of a champion that was trained on other sequence lengths."""
INTEGRITY = "integrity/"


@dataclass(frozen=True)
class Override:
    """A person's instructions for a judgement."""

    by: str = ""
    comment: str = ""
    override: str = ""
    """Why to promote the model if the gate rejects it; no other person is asked then."""
    rejudge: bool = False
    """Judge the model although its run already has a decision."""


@dataclass(frozen=True)
class CandidateModel:
    """A model to promote, its scores and the checks of its files."""

    run: str
    family: str
    artifact: str
    """Label of the checkpoint."""
    digest: str
    """SHA-256 of the weights."""
    position: int
    scores: dict[str, Score]
    checks: list[Check]


@dataclass(frozen=True)
class ChampionModel:
    """The holder of the alias by `log`, compared with the candidate on the same documents and questions."""

    artifact: str
    """Label of its checkpoint; empty before the first promotion."""
    log: Log
    """Records when it was compared."""
    scores: dict[str, Score] | None = None
    differences: dict[str, Difference] | None = None
    checks: Sequence[Check] = ()
    """A failed row if its artifact was deleted, a passed one if it reads other windows than the candidate."""


def decide(
    candidate: CandidateModel, champion: ChampionModel, policy: Promote, override: Override, time: str
) -> Promotion:
    """Return the record that promotes or rejects `candidate`, or has it wait for a person.

    Raises ValueError if `override` is given and an integrity check failed, and UnjudgedScore as `Evidence.from_scores`
    does.
    """
    checks = [*candidate.checks, *champion.checks]
    evidence = Evidence.from_scores(policy.when, candidate.scores, champion.scores, champion.differences, checks)
    used = sum(record.evidence is not None and evidence.same_requests(record.evidence) for record in champion.log)
    evidence = evidence.model_copy(update={"used": used})
    gate = evidence.decide()
    broken = [row for row in gate.rows if not row.passed and row.metric.startswith(INTEGRITY)]
    if override.override and broken:
        raise ValueError(
            f"override: {broken[0].metric} cannot be overridden ({broken[0].reason}); "
            "promote another checkpoint, or train this one again"
        )
    asks = policy.approval == "manual" and champion.artifact != candidate.artifact
    kind: Kind = PROMOTED
    if not override.override:
        kind = REJECTED if not gate.accepted else PENDING_APPROVAL if asks else PROMOTED
    return Promotion(
        time=time,
        kind=kind,
        run=candidate.run,
        family=candidate.family,
        artifact=candidate.artifact,
        digest=candidate.digest,
        position=candidate.position,
        alias=policy.to,
        champion=champion.artifact,
        against=len(champion.log),
        gate=gate,
        evidence=evidence,
        asked=asks,
        override="" if gate.accepted else override.override,
        by=override.by,
        comment=override.comment or (override.override if gate.accepted else ""),
    )


def measure_champion(context: Context, log: Log, evaluation: Artifact, curated: Artifact) -> ChampionModel:
    """Score the holder of the alias by `log` on `curated`, and compare it with the candidate's `evaluation`."""
    recipe, label = context.recipe, current_label(log, context.recipe.promote.to)
    if not label:
        return ChampionModel("", tuple(log))
    try:
        checkpoint = context.store.load(label)
    except ValueError as error:
        remedy = f"roll back to another model (herd rollback {recipe.name} --to LABEL), or promote over it (--override)"
        rule = "the champion can be scored"
        missing = Check(metric=CHAMPION, rule=rule, passed=False, reason=f"{error}; {remedy}")
        return ChampionModel(label, tuple(log), checks=[missing])
    scored = evaluate_model(context, "champion", checkpoint, curated, context.recorded("conversations"))
    checks, (own, window) = [], (each.metadata["window"] for each in (evaluation, scored))
    if own != window:
        reason = f"the candidate reads {own:,} positions at once, the champion {window:,}"
        checks.append(Check(metric=WINDOW, rule="each the longest that it was trained on", passed=True, reason=reason))
    differences = compare(recipe, evaluation.path, scored.path)
    return ChampionModel(label, tuple(log), read_scores(scored.path), differences, checks)


def measure_candidate(
    context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact
) -> CandidateModel:
    """Read the scores `evaluation` of `checkpoint`, taken on `curated`, and run all checks. Raises as `vet` does."""
    return CandidateModel(
        run=context.record.name,
        family=context.recipe.name,
        artifact=checkpoint.label,
        digest=checkpoint.metadata["model_sha256"],
        position=checkpoint.metadata["end"],
        scores=read_scores(evaluation.path),
        checks=vet(context, checkpoint, evaluation, curated),
    )


def vet(context: Context, checkpoint: Artifact, evaluation: Artifact, curated: Artifact) -> list[Check]:
    """Return the checks of `checkpoint`: files, model, tokenizer, serving, contamination of `curated`.

    Reads and exports every file, one tensor at a time, which takes long for a large model. One that no single device
    holds is not loaded again: the processes of its `evaluation` loaded it and generated text. Raises Unfinished if the
    machine stopped a check, and OSError without storage: nothing is decided then.
    """
    from herd.llama3.export.checks import check_model, checked  # imports torch

    def files() -> str:
        checkpoint.verify()
        return f"{len(checkpoint.manifest.files)} files match their digests"

    def serving() -> str:
        if served is None:
            texts = json.loads(evaluation.path_of(GENERATIONS_FILE).read_text())
            return f"{len(texts)} texts generated on tp {layout.tp} x pp {layout.pp}, loaded without pickle"
        if (failure := served.result()) is not None:
            raise ValueError(failure)
        return "loads in a fresh process without pickle, and generates text"

    from herd.tasks.models.export import smoke_test

    try:
        folder = checkpoint.path / "model"
    except DamagedArtifact as error:  # the other checks would read damaged files
        return [Check(metric=FILES, passed=False, reason=str(error)[:400])]
    layout, _ = place_evaluation(context.recipe, context.cluster)
    with ThreadPoolExecutor(1) as pool:  # the fresh process spends most of its time on imports
        served = pool.submit(smoke_test, folder) if layout.model_parallel == 1 else None
        files_check = checked(FILES, files)
        model = check_model(folder, context.scratch / "vetting")
        tokenizer = _tokenizer(context, checkpoint)
        serving_check = checked(SERVING, serving)
    return [files_check, *model, tokenizer, serving_check, *contamination(curated)]


def _tokenizer(context: Context, checkpoint: Artifact) -> Check:
    """Compare the model's tokenizer with that of the training tokens."""
    from herd.llama3.export.checks import TOKENIZER, check_tokenizer

    source = checkpoint
    for kind in ("tokens", "tokenizer"):
        key = source.manifest.inputs.get(kind, "")
        labels = [step.artifact for step in context.record.steps.values() if step.artifact.startswith(f"{kind}/")]
        label = next((label for label in labels if key and label.endswith(f"-{key[:8]}")), "")
        try:
            if not label:
                raise ValueError(
                    f"{context.record.name} has no record of the {kind} of {source.label}; promote another run"
                )
            source = context.store.load(label)
        except ValueError as error:
            return Check(metric=TOKENIZER, passed=False, reason=str(error))
    return check_tokenizer(checkpoint.path / "model", str(source.metadata["digest"]))


def contamination(curated: Artifact) -> list[Check]:
    """Return a check for each evaluation set that was searched for in the documents, or one that none was.

    `drop` removed all matching documents. With `report` no example may match: to its threshold in a single document,
    word by word (`herd.llama3.data.decontam.decontaminate`).
    """
    name = f"{FINDINGS}/contamination.parquet"
    if name not in curated.manifest.files:
        reason = "curate.decontaminate names no evaluation sets"
        return [Check(metric=CONTAMINATION, passed=True, checked=False, reason=reason)]
    checks = []
    for row in pq.read_table(curated.path_of(name)).to_pylist():
        matches, examples, dropped = int(row["confirmed"]), int(row["examples"]), row["action"] == "drop"
        share = f"{matches:,} of {examples:,} examples are in the documents ({matches / max(1, examples):.2%})"
        rule = (
            "all documents with them were dropped" if dropped else f"allowed none at {row['threshold']} of an example"
        )
        metric, reason = f"{CONTAMINATION}/{row['benchmark']}", f"{row['benchmark']}: {share}; {rule}"
        checks.append(Check(metric=metric, passed=dropped or not matches, reason=reason))
    return checks
