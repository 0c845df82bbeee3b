"""Score a checkpoint's model as a tracked step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.evaluate.evaluate import evaluate
from llama3.recipe.load import resolved
from llama3.recipe.schema import Recipe
from storage.artifact import Artifact, Design, file_digest
from storage.filesystem import glob
from tasks.step import Context, ensure
from tasks.tracking import Point

VERSION = 1


@task(name="evaluate", task_run_name="evaluate-{name}", tags=["evaluate"], cache_policy=NO_CACHE, persist_result=False)
def evaluate_model(context: Context, name: str, checkpoint: Artifact, curated: Artifact) -> Artifact:
    """Return the scores of `checkpoint` on the held-out documents of `curated`.

    They are attached to the checkpoint's LoggedModel and, for this run's own checkpoints, to the parent run's curves.
    """
    recipe = context.recipe
    design = _design(context, checkpoint, curated)
    own = checkpoint.label in {step.artifact for step in context.record.steps.values()}

    def build(folder: Path, _: str) -> dict[str, Any]:
        model = checkpoint.path / "model"
        return evaluate(recipe, model, model, curated.path, folder, threads=context.cluster.threads)

    def show(artifact: Artifact, mlflow_run: str) -> None:
        runs = [mlflow_run, *([context.record.mlflow_run] if own else [])]
        position = checkpoint.facts["end"]
        scores = {key: value for key, value in artifact.facts.items() if key.startswith("eval/")}
        points = [Point(key, value, artifact.created, position) for key, value in scores.items()]
        digest = checkpoint.facts["model_sha256"]
        model = context.tracker.checkpoint_model(
            [mlflow_run], checkpoint.label, checkpoint.path.as_uri(), position, digest
        )
        context.tracker.log_points(runs, points, model)

    return ensure(context, f"evaluate-{name}", design, build, show)


def _design(context: Context, checkpoint: Artifact, curated: Artifact) -> Design:
    recipe = context.recipe
    tasks = {f"task.{Path(uri).stem}": file_digest(Path(path)) for uri in recipe.evaluate.tasks for path in glob(uri)}
    plain = resolved(recipe)
    return Design(
        kind="evaluation",
        name=checkpoint.manifest.name,
        version=VERSION,
        parameters={
            "documents": recipe.evaluate.documents,
            "questions": recipe.evaluate.questions,
            "weights": plain["mix"][recipe.stages[0].mix],
            "seed": recipe.seed,
        },
        inputs={"checkpoint": checkpoint.key, "curated": curated.key, **tasks},
    )


def evaluated_stages(recipe: Recipe) -> set[str]:
    """Return the stages after which a run evaluates; the last one always, because the gate judges it."""
    return {*recipe.evaluate.after, recipe.stages[-1].name}
