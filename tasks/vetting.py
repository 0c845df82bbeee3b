"""What is looked at before the gate weighs scores: is the artifact whole, the model usable, the data clean?

Each check is a row of the gate's table, so a model that fails one is refused by its name, and nothing raises on the
way: a damaged file is a finding. Where there is nothing to look at (no decontamination configured) the row says that
it was not checked. What this gives up: every file is read again and exports are written to the scratch folder, so that
the checks of a large model take as long as reading it a few times.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq

from llama3.data.findings import FINDINGS
from llama3.evaluate.gate import Check
from storage.artifact import Artifact, Store
from storage.manifest import DamagedArtifact
from tasks.runs import RunRecord
from tasks.serving import smoke
from tasks.step import Context

FILES, SERVING, CONTAMINATION = "integrity/files", "serving", "contamination"


def vet(context: Context, checkpoint: Artifact, curated: Artifact) -> list[Check]:
    """Return the checks of `checkpoint`, whose scores were taken on `curated`.

    Raises Unfinished if one did not come to its end, and OSError without storage: nothing is decided then.
    """
    from llama3.export.vetting import checked, vet_model  # torch

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
    from llama3.export.vetting import TOKENIZER, vet_tokenizer

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
    its threshold in a single document, word by word (`llama3.data.contamination`).
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
