"""Score a checkpoint's model as a tracked step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.evaluate.suites import suite_for, suite_inputs, under
from llama3.recipe.load import resolved
from llama3.recipe.schema import Recipe
from storage.artifact import Artifact, Design
from tasks.evaluators import score
from tasks.held_out import held_out_folder
from tasks.step import Context, ensure

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


def _design(recipe: Recipe, checkpoint: Artifact, curated: Artifact) -> Design:
    plain = resolved(recipe)
    return Design(
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


def evaluated_stages(recipe: Recipe) -> set[str]:
    """Return the stages after which a run evaluates; the last one always, because the gate judges it."""
    return {*recipe.evaluate.after, recipe.stages[-1].name}
