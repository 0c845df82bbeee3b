"""Replay failures on a real training run here: what the planner says of its effective time beside what came of it.

A trace drawn from the published failure counts is scaled to minutes and injected into a run of a stage (see
`FaultInjector`), which recovers through the same launcher, follower and count of attempts as any stage. Predicted from
a stretch without failures: the same trace played through the simulation, the closed form, and the spread over other
traces. Measured: steps that count, each once, over wall time. Both are in MLflow on the replay's own run, whose family
is that of the recipe with `-replay`. What this gives up: many machines, and any cause but a dead or stopped process.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from herd.llama3.planner.goodput import CheckpointCosts, Recovery, effective_time
from herd.llama3.planner.reliability import Failure, Fleet, Trace, llama3_failures, make_trace, scale_trace
from herd.llama3.planner.uptime import SEEDS, MeanAndSpread, simulate
from herd.llama3.recipe.load import resolved
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Bytes
from herd.llama3.train import metrics
from herd.llama3.train.job import SETTLE_S, TrainJob
from herd.llama3.train.journal import Record, Tail
from herd.storage.artifact import Artifact, flatten
from herd.storage.filesystem import write_atomic
from herd.storage.object_artifact import open_store
from herd.storage.page_cache import lazy_folder
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import Console, TerminalConsole
from herd.tasks.errors import TrainingFailed
from herd.tasks.launch.base import WATCH_S, Launch, fitting, launch_key, launcher_of
from herd.tasks.launch.local import rank_process
from herd.tasks.runs.progress import newest
from herd.tasks.runs.provenance import code_version
from herd.tasks.runs.records import Runs, now
from herd.tasks.stages.follow import JournalTailer
from herd.tasks.stages.train import SILENCE, StageAttempts
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import mlflow_of, open_tracker
from herd.tasks.tracking.tracker import MetricPoint

# A script of failures for a training run on this machine: which rank is killed or stopped, and when.
#
# It runs in a thread beside the supervisor, which knows nothing of it. First it lets the run train undisturbed and
# measures what the planner needs: steps, saves, and restarts by request (every rank saves and leaves). From the
# first step after those, it kills ranks (SIGKILL) and hangs them (SIGSTOP) at the times of a trace. At the end it
# has the run save and leave, so that what was kept is a checkpoint. What this gives up: a strike that finds no rank
# waits for one.

WARM_UP = 3
"""First steps of an attempt, which import and allocate."""
STEADY_STEPS, STEADY_SAVES, STEADY_RESTARTS = 20, 2, 3
"""At least so many are measured; restarts, exactly."""
LONGEST_S = 300.0
"""As long as the script waits for what must come."""
LOOK_S = 0.02


@dataclass(frozen=True)
class SteadyState:
    """What a stretch without failures measured, in seconds."""

    step_s: float
    block_s: float
    save_s: float
    restart_s: float
    """From the end of an attempt that saved and left to the first step of the next, loading included; a mean."""

    @property
    def costs(self) -> CheckpointCosts:
        """Checkpoints as the planner takes them; loading is a part of the restart."""
        return CheckpointCosts(self.block_s, max(self.save_s, self.block_s), 0.0, "measured in this run")

    def recovery(self, timeout_s: float) -> Recovery:
        """Return what a failure costs: a killed rank's connections close at once, and the supervisor looks.

        Peers of one that hangs wait for `timeout_s`, and the launcher then for it.
        """
        return Recovery(WATCH_S, timeout_s + SETTLE_S + WATCH_S, self.restart_s)


@dataclass(frozen=True)
class FaultRunResult:
    """What came of the script."""

    useful_s: float
    """Steps of the span that the last checkpoint holds, each once."""
    position: int
    """Of that checkpoint, in tokens."""


class FaultInjector:
    """One performance, in a thread of its own; the supervisor sets `launch` at each attempt."""

    def __init__(self, work: Path) -> None:
        """Follow the journal in `work`."""
        self.work, self.processes = work, 1
        """The second: ranks that strikes are dealt over."""
        self.tail, self.records = Tail(work / "journal.jsonl"), list[Record]()
        self.launch: Launch | None = None
        self.over = threading.Event()
        """Set when the script has ended, or shall."""
        self.began, self.start = 0.0, 0
        """When the first step after the last restart began (seconds since 1970), and at which position."""

    def steady(self) -> SteadyState:
        """Measure until enough steps and saves were seen, then restarts. Raises RuntimeError if they do not come."""
        self._until(self._enough)
        records = self.records[WARM_UP:]
        step_s = mean(record.metrics[metrics.STEP_S] for record in records)
        block_s, save_s = (self._mean(key) for key in (metrics.CHECKPOINT_S, metrics.CHECKPOINT_WRITE_S))
        restarts = [self._restart(step_s) for _ in range(STEADY_RESTARTS)]
        return SteadyState(step_s, block_s, save_s, mean(restarts))

    def strike(self, trace: Trace, seconds: float) -> FaultRunResult:
        """Play `trace` on the ranks for `seconds` from the last restart on, then have the run leave."""
        for failure in trace:
            self._wait_until(self.began + failure.time_s)
            self._hit(failure)
        end = self.began + seconds
        self._wait_until(end)
        self.over.set()
        self.leave()
        self.look()
        saved = newest([str(self.work / "checkpoints")])
        kept = saved.position if saved else self.start
        mine = [r for r in self.records if self.start < r.position <= kept and r.time <= end]
        return FaultRunResult(sum(record.metrics[metrics.STEP_S] for record in mine), kept)

    def leave(self) -> float:
        """Have the running attempt save and leave; return when it was over, in seconds since 1970."""
        launch = self.launch
        while launch is not None and launch.poll() is None:
            with suppress(LookupError, psutil.Error):
                rank_process(0).terminate()
            time.sleep(LOOK_S)
        return time.time()

    def look(self) -> int:
        """Read what is new in the journal; return the last position."""
        self.records += [entry for entry in self.tail.new() if isinstance(entry, Record)]
        return self.records[-1].position if self.records else -1

    def _restart(self, step_s: float) -> float:
        """Have the run leave and wait for its first step after that; return the seconds between, without that step."""
        launch, ended = self.launch, self.leave()
        before = self.look()
        self._until(lambda: self.look() > before and self.launch is not launch)
        first = next(record for record in self.records if record.position > before)
        self.began, self.start = first.time - step_s, before
        return max(0.0, self.began - ended)

    def _enough(self) -> bool:
        self.look()
        saves = sum(metrics.CHECKPOINT_WRITE_S in record.metrics for record in self.records)
        return len(self.records) >= WARM_UP + STEADY_STEPS and saves >= STEADY_SAVES

    def _mean(self, key: str) -> float:
        return mean(record.metrics[key] for record in self.records if key in record.metrics)

    def _hit(self, failure: Failure) -> None:
        """Kill or stop the rank that stands for the host; if it is just being started, once it is there."""
        rank = failure.host % self.processes

        def hit() -> bool:
            with suppress(LookupError, psutil.Error):
                process = rank_process(rank)
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.suspend() if failure.hangs else process.kill()
                    return True
            return False

        self._until(hit)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not condition():
            if self.over.wait(LOOK_S) or time.monotonic() > deadline:
                raise TrainingFailed(f"the run ended, or did not go on for {LONGEST_S:.0f} s; its logs say why")

    def _wait_until(self, moment: float) -> None:
        if self.over.wait(max(0.0, moment - time.time())):
            raise TrainingFailed("the run ended before its failures did; its logs say why")


# What a replay of failures is asked and what it answers: a scaled trace, and prediction beside measurement.
#
# The prediction knows only what a stretch without failures measured. What it takes for granted: a save is due at
# the step after its time (one and a half steps late on average). Where in an interval a failure falls is chance on
# a real machine, so each failure may cost a part of an interval more or less.

FLEET = Fleet(16_384)
"""Whose failures are scaled."""


@dataclass(frozen=True)
class FaultTestSettings:
    """How long, how often, and which trace."""

    seed: int = 1
    seconds: float = 300.0
    """Wall time that failures are injected for."""
    mtti_s: float = 100.0
    """Mean time between two."""
    save_every_s: int = 10
    timeout_s: int = 10
    """After which ranks give up a peer that hangs."""

    def __post_init__(self) -> None:
        for name in ("seconds", "mtti_s", "save_every_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name):g} s; write a time above 0")

    def trace(self, seed: int | None = None) -> Trace:
        """Return the failures of this seed, or of another one, at scaled times."""
        model = llama3_failures()
        factor = self.mtti_s / model.mtti_s(FLEET)
        days = self.seconds / factor / 86_400
        return scale_trace(make_trace(model, FLEET, days, self.seed if seed is None else seed), factor)


@dataclass(frozen=True)
class FaultTestResult:
    """Predicted and measured effective time, as shares of wall time."""

    run: str
    failures: Trace
    """Injected, times in seconds from the first step after the steady stretch."""
    attempts: int
    """Starts of the trainer: the first, three on request, and one after each failure that met a running one."""
    steady: SteadyState
    predicted: float
    """By the simulation, of this very trace."""
    closed_form: float | None
    """None outside the formula's range."""
    spread: MeanAndSpread
    """By the simulation, over other traces with the same mean time."""
    measured: float

    @property
    def error(self) -> float:
        """Predicted less measured."""
        return self.predicted - self.measured

    def as_dict(self) -> dict[str, Any]:
        """Return every figure."""
        return {**asdict(self), "error": self.error}


def compare_with_prediction(
    run: str, settings: FaultTestSettings, steady: SteadyState, struck: FaultRunResult, attempts: int
) -> FaultTestResult:
    """Return prediction and measurement of the run called `run`."""
    interval_s = settings.save_every_s + 1.5 * steady.step_s
    costs, recovery, trace = steady.costs, steady.recovery(settings.timeout_s), settings.trace()

    def share(each: Trace) -> float:
        return simulate(each, settings.seconds, interval_s, costs, recovery).share

    restart_s = recovery.restart_s(llama3_failures().hang_share(FLEET), costs)
    return FaultTestResult(
        run=run,
        failures=trace,
        attempts=attempts,
        steady=steady,
        predicted=share(trace),
        closed_form=effective_time(settings.mtti_s, restart_s, interval_s, costs),
        spread=MeanAndSpread.from_shares([share(settings.trace(seed)) for seed in SEEDS]),
        measured=struck.useful_s / settings.seconds,
    )


def fault_test_lines(result: FaultTestResult) -> list[str]:
    """Return what was predicted and what came of it, for a console."""
    hangs = sum(failure.hangs for failure in result.failures)
    formula = f"{result.closed_form:.1%}" if result.closed_form is not None else "unknown: too many failures for it"
    spread = f"{result.spread.low:.1%} to {result.spread.high:.1%}"
    return [
        f"injected   {len(result.failures)} failures, {hangs} of them hangs; {result.attempts} attempts ({result.run})",
        f"predicted  {result.predicted:.1%} effective time (other traces: {spread}); closed form {formula}",
        f"measured   {result.measured:.1%}: the prediction is off by {100 * result.error:+.1f} points",
    ]


Perform = Callable[[], tuple[SteadyState, FaultRunResult]]
STAGE = "replay"
STEPS = 1_000_000
"""More than any replay trains; it ends by the clock."""
SHOWN_PER_S = 10
"""Steps a second that MLflow is taken to see: thinned by `STEPS`, a slow machine's replay showed no point at all."""


def run_fault_test(
    root: Root, run: str, cluster: Cluster, settings: FaultTestSettings, console: Console | None = None
) -> FaultTestResult:
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
    context = _opened(root, fault_test_recipe(Runs(root).recipe(run), settings), cluster, settings, console)
    with _closing(context):
        return _replayed(context, tokens, settings)


def fault_test_recipe(recipe: Recipe, settings: FaultTestSettings) -> Recipe:
    """Return a recipe with one stage, in the shape of the first of `recipe`, that saves as `settings` say."""
    span = Schedule(recipe).trained[0]
    shape = span.segments[0]
    stage = {
        "name": STAGE,
        "for": f"{STEPS * shape.batch} tokens",
        "seq_len": shape.seq_len,
        "batch": f"{shape.batch} tokens",
    }
    plain = recipe.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"init_from", "promote", "conversations"}
    )
    return Recipe.model_validate(
        plain
        | {
            "name": f"{recipe.name}-{STAGE}",
            "stages": [stage | {"mix": span.stage.mix}],
            "tokens": {**plain["tokens"], "max_epochs": 1e12},
            "checkpoint": {"every": f"{settings.save_every_s} s", "keep": {"last": 2}},
            "evaluate": {"val_interval": "never"},
        }
    )


def _tokens(root: Root, run: str) -> Artifact:
    step = Runs(root).find(run).steps.get("tokenize")
    if step is None:
        raise ValueError(f"run {run!r} has made no tokens yet; name one that got past tokenize")
    return open_store(root).load(step.artifact)


def _opened(
    root: Root, recipe: Recipe, cluster: Cluster, settings: FaultTestSettings, console: Console | None
) -> Context:
    """Begin the replay's own run, in the records and in MLflow."""
    changes = {"timeout_s": settings.timeout_s, "attempts": len(settings.trace()) + STEADY_RESTARTS, "checkpoints": ""}
    runs, tracker = Runs(root), open_tracker(root, recipe.name, recipe.tracking)
    record = runs.begin(recipe, code_version())
    mine = cluster.model_copy(update=changes)
    context = Context(recipe, mine, open_store(root), runs, record, tracker, console or TerminalConsole(), [STAGE])
    params = {**flatten(resolved(recipe), depth=2), "replay": asdict(settings)}
    record.mlflow_run = tracker.open_run(record.name, context.tags(), params)
    record.mlflow_experiment = mlflow_of(tracker).experiment
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


def _replayed(context: Context, tokens: Artifact, settings: FaultTestSettings) -> FaultTestResult:
    script = FaultInjector(_work(context))
    span = Schedule(context.recipe).span(STAGE)
    job = _job(context, tokens)

    def perform() -> tuple[SteadyState, FaultRunResult]:
        try:
            steady = script.steady()
            return steady, script.strike(settings.trace(), settings.seconds)
        finally:
            script.over.set()
            script.leave()

    steady, struck = _supervised(context, span, job, script, perform, round(settings.seconds * SHOWN_PER_S))
    attempts = len([*(context.folder / "logs" / STAGE).glob("attempt-*")])
    result = compare_with_prediction(context.record.name, settings, steady, struck, attempts)
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
        backend=cluster.backend,
        threads=cluster.process_threads,
        timeout_s=cluster.timeout_s,
        layout=cluster.layout,
    )
    work.mkdir(parents=True)
    write_atomic(work / "job.json", job.model_dump_json(indent=1))
    return work / "job.json"


def _supervised(
    context: Context, span: StageSpan, job: Path, script: FaultInjector, perform: Perform, shown: int
) -> tuple[SteadyState, FaultRunResult]:
    """Supervise the stage as `herd.tasks.stages.train` does while the script plays; return what it measured.

    `shown` is about how many steps MLflow is to see, of which it keeps 2,000. Raises TrainingFailed if
    the run does not recover.
    """
    step_timeout_s, runs = SILENCE * context.cluster.timeout_s, [context.record.mlflow_run]
    with (
        context.console.progress(span.name, span.tokens) as line,
        ThreadPoolExecutor(1) as pool,
    ):
        launcher = launcher_of(context.cluster, launch_key(job), context.agents)
        follower = JournalTailer(context, runs, job.parent / "journal.jsonl", shown, line, span.end)
        attempts = StageAttempts(context, span, launcher)
        script.processes = fitting(span, context.cluster, launcher.capacity())
        playing = pool.submit(perform)
        try:
            while not script.over.is_set():
                before = follower.position
                script.launch = attempts.start(job)
                outcome = follower.follow(script.launch, span.start, step_timeout_s)
                if not script.over.is_set():
                    attempts.ended(outcome, progress=follower.position > before)
        finally:
            script.over.set()
        return playing.result()


def _publish(context: Context, result: FaultTestResult, position: int) -> None:
    """Put both sides on the replay's MLflow run, with the trace and every figure as a file."""
    values = {
        metrics.EFFECTIVE_TIME: result.measured,
        metrics.PLANNED_EFFECTIVE_TIME: result.predicted,
        metrics.PLANNED_EFFECTIVE_TIME_CLOSED: result.closed_form,
    }
    points = [MetricPoint(key, value, time.time(), position) for key, value in values.items() if value is not None]
    context.tracker.log_points([context.record.mlflow_run], points)
    path = context.folder / "replay.json"
    write_atomic(path, json.dumps(result.as_dict(), indent=1))
    context.runs.publish(context.record.name, path.name)
    context.tracker.log_file(context.record.mlflow_run, path)
