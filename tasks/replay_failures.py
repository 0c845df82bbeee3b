"""Replay failures on a real training run here: what the planner says of its effective time beside what came of it.

A trace drawn from the published failure counts is scaled to minutes and injected into a run of a stage (see
`failure_script`), which recovers through the same launcher, follower and count of attempts as any stage. Predicted from
a stretch without failures: the same trace played through the simulation, the closed form, and the spread over other
traces. Measured: steps that count, each once, over wall time. Both are in MLflow on the replay's own run, whose family
is that of the recipe with `-replay`. What this gives up: many machines, and any cause but a dead or stopped process.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from llama3.recipe.load import resolved
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Bytes
from llama3.train import metrics
from llama3.train.job import TrainJob
from storage.artifact import Artifact, flatten
from storage.filesystem import write_atomic
from storage.lazy import lazy_folder
from storage.remote_store import open_store
from storage.root import Root
from tasks.cluster import Cluster
from tasks.console import Console, TerminalConsole
from tasks.failure_script import STEADY_RESTARTS, Script, Steady, Struck
from tasks.follow import Follower
from tasks.launch import fitting, launch_key, launcher_of
from tasks.replay_result import ReplayResult, Settings, compare
from tasks.runs import Runs, now
from tasks.step import Context, code_version
from tasks.tracking import Point, Tracker
from tasks.train import SILENCE, Attempts

Perform = Callable[[], tuple[Steady, Struck]]
STAGE = "replay"
STEPS = 1_000_000
"""More than any replay trains; it ends by the clock."""
SHOWN_PER_S = 10
"""Steps a second that MLflow is taken to see: thinned by `STEPS`, a slow machine's replay showed no point at all."""


def replay_failures(
    root: Root, run: str, cluster: Cluster, settings: Settings, console: Console | None = None
) -> ReplayResult:
    """Train on the tokens of `run`, in the shape of its first stage, under the failures of `settings`; compare.

    Raises ValueError if the run has no tokens or the cluster is another machine, TrainingFailed if it fails to recover.
    """
    if cluster.launcher != "local" or cluster.processes < 2:
        raise ValueError(
            f"cluster: {cluster.processes} process(es) by launcher {cluster.launcher}; failures are injected on this "
            "machine, into two processes or more: write launcher: local and processes: 2"
        )
    if not settings.trace():
        raise ValueError(f"seed: {settings.seed} has no failure in {settings.seconds:g} s; take another or more time")
    tokens = _tokens(root, run)
    context = _opened(root, replayed_recipe(Runs(root).recipe(run), settings), cluster, settings, console)
    with _closing(context):
        return _replayed(context, tokens, settings)


def replayed_recipe(recipe: Recipe, settings: Settings) -> Recipe:
    """Return a recipe with one stage, in the shape of the first of `recipe`, that saves as `settings` say."""
    span = Schedule(recipe).trained[0]
    shape = span.segments[0]
    stage = {"name": STAGE, "for": f"{STEPS * shape.batch} tokens", "seq": shape.seq, "batch": f"{shape.batch} tokens"}
    plain = recipe.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"start", "promote"})
    return Recipe.model_validate(
        plain
        | {
            "name": f"{recipe.name}-{STAGE}",
            "stages": [stage | {"mix": span.stage.mix}],
            "tokens": {**plain["tokens"], "max_epochs": 1e12},
            "checkpoint": {"every": f"{settings.save_every_s} s", "keep": {"last": 2}},
            "evaluate": {"every": "never"},
        }
    )


def _tokens(root: Root, run: str) -> Artifact:
    step = Runs(root).find(run).steps.get("tokenise")
    if step is None:
        raise ValueError(f"run {run!r} has made no tokens yet; name one that got past tokenise")
    return open_store(root).at(step.artifact)


def _opened(root: Root, recipe: Recipe, cluster: Cluster, settings: Settings, console: Console | None) -> Context:
    """Begin the replay's own run, in the records and in MLflow."""
    changes = {"timeout_s": settings.timeout_s, "attempts": len(settings.trace()) + STEADY_RESTARTS, "checkpoints": ""}
    runs, tracker = Runs(root), Tracker(root, recipe.name)
    record = runs.begin(recipe, code_version())
    mine = cluster.model_copy(update=changes)
    context = Context(recipe, mine, open_store(root), runs, record, tracker, console or TerminalConsole(), [STAGE])
    params = {**flatten(resolved(recipe), depth=2), "replay": asdict(settings)}
    record.mlflow_run = tracker.open_run(record.name, context.tags(), params)
    record.mlflow_experiment = tracker.experiment
    runs.save(record)
    return context


@contextmanager
def _closing(context: Context) -> Iterator[None]:
    """Write how the replay ended, and remove what it worked in."""
    record = context.record
    try:
        with context.agents:
            yield
        record.state = "finished"
    except BaseException as error:
        record.state, record.error = "failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        record.ended = now()
        context.runs.save(record)
        context.tracker.close(record.mlflow_run, "FINISHED" if record.state == "finished" else "FAILED")
        shutil.rmtree(_work(context), ignore_errors=True)


def _work(context: Context) -> Path:
    return context.scratch / context.record.name


def _replayed(context: Context, tokens: Artifact, settings: Settings) -> ReplayResult:
    script = Script(_work(context))
    span = Schedule(context.recipe).span(STAGE)
    job = _job(context, tokens)

    def perform() -> tuple[Steady, Struck]:
        try:
            steady = script.steady()
            return steady, script.strike(settings.trace(), settings.seconds)
        finally:
            script.over.set()
            script.leave()

    steady, struck = _supervised(context, span, job, script, perform, round(settings.seconds * SHOWN_PER_S))
    attempts = len([*(context.folder / "logs" / STAGE).glob("attempt-*")])
    result = compare(context.record.name, settings, steady, struck, attempts)
    _publish(context, result, struck.position)
    return result


def _job(context: Context, tokens: Artifact) -> Path:
    cluster, work = context.cluster, _work(context)
    job = TrainJob(
        recipe=context.runs.local_recipe(context.record.name),
        stage=STAGE,
        tokens=lazy_folder(tokens, int(Bytes.parse(cluster.token_cache))),
        work=work,
        micro_batch=cluster.micro_batch,
        device=cluster.trainer_device,
        threads=cluster.process_threads,
        timeout_s=cluster.timeout_s,
        layout=cluster.layout,
    )
    work.mkdir(parents=True)
    write_atomic(work / "job.json", job.model_dump_json(indent=1))
    return work / "job.json"


def _supervised(
    context: Context, span: StageSpan, job: Path, script: Script, perform: Perform, shown: int
) -> tuple[Steady, Struck]:
    """Supervise the stage as `tasks.train` does while the script plays; return what it measured.

    `shown` is about how many steps MLflow is to see, of which it keeps 2,000. Raises TrainingFailed if
    the run does not recover.
    """
    silence_s, runs = SILENCE * context.cluster.timeout_s, [context.record.mlflow_run]
    with (
        context.console.progress(span.name, span.tokens) as line,
        ThreadPoolExecutor(1) as pool,
    ):
        launcher = launcher_of(context.cluster, launch_key(job), context.agents)
        follower = Follower(context, runs, job.parent / "journal.jsonl", shown, line, span.end)
        attempts = Attempts(context, span, launcher)
        script.processes = fitting(span, context.cluster, launcher.capacity())
        playing = pool.submit(perform)
        try:
            while not script.over.is_set():
                before = follower.position
                script.launch = attempts.start(job)
                outcome = follower.follow(script.launch, span.start, silence_s)
                if not script.over.is_set():
                    attempts.ended(outcome, progress=follower.position > before)
        finally:
            script.over.set()
        return playing.result()


def _publish(context: Context, result: ReplayResult, position: int) -> None:
    """Put both sides on the replay's MLflow run, with the trace and every figure as a file."""
    values = {
        metrics.EFFECTIVE_TIME: result.measured,
        metrics.PLANNED_EFFECTIVE_TIME: result.predicted,
        metrics.PLANNED_EFFECTIVE_TIME_CLOSED: result.closed_form,
    }
    points = [Point(key, value, time.time(), position) for key, value in values.items() if value is not None]
    context.tracker.log_points([context.record.mlflow_run], points)
    path = context.folder / "replay.json"
    write_atomic(path, json.dumps(result.as_dict(), indent=1))
    context.runs.publish(context.record.name, path.name)
    context.tracker.log_file(context.record.mlflow_run, path)
