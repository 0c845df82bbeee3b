"""Score a checkpoint's model as a tracked step."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.evaluate.held_out import ValidationDocument, held_out, looked_at
from llama3.evaluate.main import MISTAKE, REFUSED, EvaluateJob
from llama3.evaluate.suite import suite_for, suite_inputs, under
from llama3.recipe.base import DOMAINS
from llama3.recipe.load import resolved, to_yaml
from llama3.recipe.schema import Recipe
from llama3.train.job import Attempt
from storage.artifact import Artifact, ArtifactSpec
from tasks.cluster import Cluster
from tasks.errors import EvaluationFailed
from tasks.launch.local import Agents
from tasks.step import Context, ensure

# Evaluators are forked from the agent that forks the trainer's ranks. Scores have the same bytes on any number of
# processes. They run on this machine, and the model must fit one device.


def score(
    recipe: Recipe, model: Path, documents: Path, folder: Path, cluster: Cluster, agents: Agents
) -> dict[str, Any]:
    """Score the model in folder `model`, which holds its tokenizer, into `folder`; return the facts of `evaluate`.

    Raises ValueError as `evaluate` does, OSError for a full disk, and EvaluationFailed if a process died.
    """
    with TemporaryDirectory(prefix="evaluate-") as temporary:
        place = Path(temporary)
        (place / "recipe.yaml").write_text(to_yaml(recipe))
        threads = max(1, cluster.threads // cluster.evaluators)
        job = EvaluateJob(
            recipe=place / "recipe.yaml",
            model=model,
            tokenizer=model,
            documents=documents,
            folder=folder,
            facts=place / "facts.json",
            threads=threads,
            device=cluster.device,
        )
        (place / "job.json").write_text(job.model_dump_json())
        attempt = Attempt(program="evaluate", job=place / "job.json", logs=place / "logs", processes=cluster.evaluators)
        outcome = agents.start(attempt, cluster.process_threads).wait()
        if outcome.status == 0:
            facts: dict[str, Any] = json.loads(job.facts.read_text())
            return facts
    mistakes = [line for line in outcome.words.splitlines() if line.startswith(MISTAKE)]
    if outcome.status == REFUSED and mistakes:
        raise ValueError(mistakes[-1].removeprefix(MISTAKE))
    if os.strerror(errno.ENOSPC) in outcome.words:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    raise EvaluationFailed(f"an evaluator ended with status {outcome.status}:\n{outcome.words}")


# Scoring reads the first documents by id, which are in the first files of each domain: only these are fetched.

BYTES_PER_TOKEN = 8
"""More than any text has; a document is cut to a row of tokens later."""


def held_out_folder(curated: Artifact, count: int) -> Path:
    """Return the folder of `curated`; it has the files in which the first `count` documents of each domain stand."""
    for domain in DOMAINS:
        wanted, found = looked_at(domain, count), 0
        for name in sorted(name for name in curated.manifest.files if name.startswith(f"documents/{domain}-")):
            if found >= wanted:
                break
            splits = pq.read_table(curated.part(name), columns=["split"])["split"].to_pylist()
            found += splits.count("held_out")
    return curated.folder


def write_held_out(recipe: Recipe, curated: Path, tokenizer: Path, work: Path) -> bool:
    """Write what the trainer scores between steps into its folder; return False if there is nothing to score.

    `curated` is the folder with the documents (see `held_out_folder`).
    """
    from llama3.tokens.tokenizer import Tokenizer
    from llama3.train.validation_rows import pack

    count, seq = recipe.evaluate.every_documents, min(min(stage.lengths) for stage in recipe.stages)
    try:
        documents: list[ValidationDocument] = held_out(curated, count, BYTES_PER_TOKEN * seq)
    except ValueError:  # curate.held_out: 0; the evaluation says so
        return False
    work.mkdir(parents=True, exist_ok=True)
    pack(documents, Tokenizer.load(tokenizer), seq).write(work)
    return True


VERSION = 3


@task(name="evaluate", task_run_name="evaluate-{name}", cache_policy=NO_CACHE, persist_result=False)
def evaluate_model(context: Context, name: str, checkpoint: Artifact, curated: Artifact, suite: str = "") -> Artifact:
    """Return the scores of `checkpoint` on the held-out documents of `curated`, by the recipe's suite or by `suite`.

    `name` is the stage that ends with it, or `champion`. The scores are attached to the checkpoint's LoggedModel and,
    for this run's own checkpoints, to the parent run's curves.
    """
    usual = suite_for(context.recipe, name)
    recipe = under(context.recipe, suite or usual)
    design = _design(recipe, checkpoint, curated)
    step = f"evaluate-{name}" if suite in ("", usual) else f"evaluate-{name}-{Path(suite).stem}"

    def build(folder: Path, _: str) -> dict[str, Any]:
        documents = held_out_folder(curated, recipe.evaluate.documents)
        return score(recipe, checkpoint.part("model"), documents, folder, context.cluster, context.agents)

    return ensure(context, step, design, build)


def _design(recipe: Recipe, checkpoint: Artifact, curated: Artifact) -> ArtifactSpec:
    plain = resolved(recipe)
    return ArtifactSpec(
        kind="evaluation",
        name=checkpoint.manifest.name,
        version=VERSION,
        parameters={
            "suite": recipe.evaluate.suite,
            "documents": recipe.evaluate.documents,
            "questions": recipe.evaluate.questions,
            "weights": plain["mix"][recipe.stages[0].mix],
            "seed": recipe.seed,
        },
        inputs={"checkpoint": checkpoint.key, "curated": curated.key, **suite_inputs(recipe)},
    )
