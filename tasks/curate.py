"""Raw text to curated documents, as one tracked step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from llama3.data.curate import curate
from llama3.data.sources import fingerprint
from llama3.recipe.load import resolved
from storage.artifact import Artifact, Design
from tasks.step import Context, ensure

VERSION = 1


@task(name="curate", tags=["curate"], cache_policy=NO_CACHE, persist_result=False)
def curate_documents(context: Context) -> Artifact:
    """Return the curated documents of the recipe's sources."""
    recipe = context.recipe
    plain = resolved(recipe)
    design = Design(
        kind="curated",
        name=recipe.name,
        version=VERSION,
        parameters={"sources": plain["sources"], "curate": plain["curate"], "seed": recipe.seed},
        inputs={"sources": fingerprint(recipe)},
    )

    def build(folder: Path, _: str) -> dict[str, Any]:
        scratch = context.scratch / f"curate-{design.key[:8]}"
        try:
            return curate(recipe, folder, scratch, memory=context.cluster.memory, threads=context.cluster.threads)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    artifact = ensure(context, "curate", design, build)
    _say_what_was_kept(context, artifact)
    return artifact


def _say_what_was_kept(context: Context, artifact: Artifact) -> None:
    facts = artifact.facts
    parts = [
        f"{domain} {facts['bytes'][domain] / 1e6:.1f} MB in {facts['documents'][domain]:,} documents"
        for domain in facts["documents"]
    ]
    context.console.say(f"  {'':<18}[dim]kept {'; '.join(parts)}[/]")
