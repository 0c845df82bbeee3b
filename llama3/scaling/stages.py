"""Which stages of a study's runs are one and the same, so that they are trained once, and what they come to.

Two runs share a stage if all that decides its result is equal: data, model, schedule and shape up to its end. That is
worked out here from recipes alone, before any token exists; when the runs are made, artifacts are found by their keys,
which know more (what is in the documents). What this gives up: it may call two stages different that come to one key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llama3.model.flops import embedding_rows, trained_flops
from llama3.recipe.load import digest, resolved
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.scaling.posed import ArmRun

DATA = ("sources", "curate", "tokens", "data_seed")
WHOLE = ("model", "optimizer", "z_loss", "compute", "seed", "start")


@dataclass(frozen=True)
class StageWork:
    """One stage of one run."""

    run: str
    stage: str
    lineage: str
    """Equal for stages that come to the same weights."""
    tokens: int
    flops: float


def stage_works(run: ArmRun) -> Iterator[StageWork]:
    """Yield the training stages of a run, in order."""
    recipe, lineage = run.recipe, data_digest(run.recipe)
    rows = embedding_rows(recipe)
    for span in Schedule(recipe).trained:
        lineage = digest([lineage, _decides(recipe, span)])
        before, after = (trained_flops(recipe, recipe.model, rows, position) for position in (span.start, span.end))
        yield StageWork(run.name, span.name, lineage, span.tokens, after - before)


def once(runs: Sequence[ArmRun]) -> dict[str, StageWork]:
    """Return the stages of all runs by their lineage, each once: the work that is to be done."""
    found: dict[str, StageWork] = {}
    for run in runs:
        for work in stage_works(run):
            found.setdefault(work.lineage, work)
    return found


def data_digest(recipe: Recipe) -> str:
    """Return a digest of all that decides the token shards."""
    plain = resolved(recipe)
    trained = recipe.tokenizer.train
    sampled = plain["mix"][(trained.mix or recipe.stages[0].mix)] if trained else None
    tokenizer = (
        {**plain["tokenizer"], "train": {**plain["tokenizer"]["train"], "mix": None}} if trained else plain["tokenizer"]
    )
    return digest(
        [{name: plain[name] for name in DATA}, tokenizer, sampled, recipe.seed if recipe.data_seed is None else 0]
    )


def _decides(recipe: Recipe, span: StageSpan) -> list[object]:
    plain, stage = resolved(recipe), span.stage
    return [
        {name: plain[name] for name in WHOLE},
        [span.start, span.end, [[part.seq, part.batch, part.steps] for part in span.segments]],
        digest(Schedule(recipe).rates(span.start, span.end)),
        {domain: str(share) for domain, share in span.shares.items()},
        {name: str(share) for name, share in stage.add.items()},
        stage.draw,
        str(stage.average),
        stage.keep,
    ]
