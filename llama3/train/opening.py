"""Open a stage: check that job, recipe, layout and tokens fit, make the state, and load what there is to go on from.

In this order: the newest good checkpoint of the stage; else the stage before (`parent`); else weights from elsewhere
(`start`); else the initial weights of the recipe's seed. A stage that was begun under another recipe goes on only if
the past is the same (see `recipe.past`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from llama3.model.files import open_model
from llama3.parallel.mesh import World
from llama3.recipe.checks import check_batches
from llama3.recipe.load import RecipeError, load_recipe, to_yaml
from llama3.recipe.past import check_past
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.tokens.stream import TokenStream
from llama3.train.agree import led
from llama3.train.checkpoint import Checkpoints, load_state
from llama3.train.job import TrainJob
from llama3.train.journal import abandon
from llama3.train.manifest import Manifest
from llama3.train.precision import Precision
from llama3.train.recorder import log
from llama3.train.state import TrainState
from storage.filesystem import write_atomic
from storage.lazy import brought, lazy_of


@dataclass(frozen=True)
class Opened:
    """A stage that is ready to be trained from `state.position` on."""

    span: StageSpan
    stream: TokenStream
    state: TrainState
    checkpoints: Checkpoints
    origin: str
    """Where the state came from, in words."""


def open_stage(job: TrainJob, recipe: Recipe, world: World) -> Opened:
    """Return the stage of `job`; every process calls it. Raises ValueError if the job's parts do not fit each other."""
    span = _span(recipe, job.stage)
    rows = int(json.loads(brought(job.tokens / "tokens.json").read_text())["rows"])
    check_batches(span, world.layout.dp(world.size))
    world.layout.check(recipe.model, rows, world.size)
    for segment in span.segments:
        world.layout.check_sequence(segment.seq)
    stream = TokenStream(job.tokens, recipe)
    _check_cache(job.tokens, stream)
    precision = Precision.of(recipe, world.device)
    state = TrainState(recipe, rows, precision, world, span.start, exact=job.deterministic)
    folder, keep = job.work / "checkpoints", recipe.checkpoint.keep
    checkpoints = Checkpoints(folder, keep, world, uri=job.checkpoints, work=job.work, say=log)
    found = checkpoints.resume(state, anew=job.restart_damaged)
    for reason in found.skipped if world.leads else ():
        log(f"checkpoint passed over: {reason}")
    if checkpoints.restore(found) and world.leads:
        log("the journal was brought from the object store: another machine trained up to here")
    origin = f"checkpoint {found.path.name}" if found.path else begin(state, job, recipe, span, world)
    led(world, lambda: _take_past(job, recipe, stream, span.start, state.position))
    led(world, lambda: write_atomic(job.trained_recipe, to_yaml(recipe)))
    checkpoints.prepare(state)
    return Opened(span, stream, state, checkpoints, origin)


def begin(state: TrainState, job: TrainJob, recipe: Recipe, span: StageSpan, world: World) -> str:
    """Put `state` where the stage begins; return where from, in words."""
    if job.parent is not None:
        _load_parent(state, job.parent, span, world)
        return str(job.parent)
    if span.start:
        raise ValueError(f"parent: stage {span.name} starts at {span.start}; name the stage before")
    state.reset(recipe, span.start, world)
    if job.start is None:
        return f"initial weights of seed {recipe.seed}"
    start = job.start
    led(world, lambda: _check_weights(start, recipe, state.rows))
    model = open_model(start)
    state.fill(lambda name, _: model.tensor(name), world)
    return f"weights of {start}"


def _span(recipe: Recipe, stage: str) -> StageSpan:
    schedule = Schedule(recipe)
    try:
        return schedule.span(stage)
    except KeyError:
        known = ", ".join(span.name for span in schedule.trained)
        raise ValueError(f"stage: {stage!r} is not in the recipe; its stages are {known}") from None


def _check_cache(tokens: Path, stream: TokenStream) -> None:
    lazy = lazy_of(tokens)
    if lazy is not None and lazy.limit_bytes < stream.block_bytes:
        raise ValueError(
            f"token_cache: {lazy.limit_bytes:,} bytes do not hold a block of documents of each source, and every batch "
            f"would bring whole blocks again; write at least {stream.block_bytes:,}, better four times as much"
        )


def _take_past(job: TrainJob, recipe: Recipe, stream: TokenStream, start: int, position: int) -> None:
    """Go on at `position` under a recipe that may have another future: what was trained past it is given up.

    Raises RecipeError if the past is another.
    """
    if job.trained_under(recipe) or not job.trained_recipe.exists():
        return
    trained = load_recipe(job.trained_recipe)
    check_past(trained, recipe, position)
    if TokenStream(job.tokens, trained).identity(start, position) != stream.identity(start, position):
        raise RecipeError(
            f"mix: the tokens before {position} were dealt under mixes that ended elsewhere, and the past of a run "
            "cannot change; write the old stages again, or begin a new run"
        )
    abandon(job.work / "journal.jsonl", position)


def _load_parent(state: TrainState, parent: Path, span: StageSpan, world: World) -> None:
    manifest = led(world, lambda: Manifest.read(parent))  # the files are verified while they are loaded
    if manifest.position != span.start:
        raise ValueError(
            f"parent: {parent} ends at {manifest.position}, stage {span.name} starts at {span.start}; "
            "name the state of the stage before"
        )
    load_state(parent, manifest, state, world, average=False)


def _check_weights(folder: Path, recipe: Recipe, rows: int) -> None:
    """Raise ValueError if the model in `folder` is not of the recipe's shape with `rows` embedding rows."""
    model = open_model(folder)
    labels = {"preset", "max_seq"}
    mine = (recipe.model.model_dump(mode="json", exclude=labels), rows)
    theirs = (model.spec.model_dump(mode="json", exclude=labels), model.rows)
    if mine != theirs:
        raise ValueError(
            f"start: {folder} holds a model of shape {theirs}, the recipe asks {mine}; change model: to it"
        )
