"""`python -m benchmarks fault-test RUN`: the planner's effective time beside that of a real run under failures.

A trace drawn from the published failure counts is scaled to minutes and injected into a stage (`FaultInjector`), which
recovers through the launcher, follower and count of attempts of any stage. The prediction uses what an undisturbed
stretch measured: the simulation of the same trace, the closed form, and the spread over other traces. Measured: steps
of the last checkpoint, each once, over wall time. MLflow has both on a run of the family `<recipe>-fault-test`. Not
covered: several machines, and any cause but a dead or stopped process.
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
from herd.llama3.recipe.schedule import StageSpan
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
from herd.tasks.runs.provenance import code_version
from herd.tasks.runs.records import Runs, now
from herd.tasks.runs.work_dirs import newest
from herd.tasks.stages.follow import JournalTailer
from herd.tasks.stages.train import SILENCE, StageAttempts
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MetricPoint, MLflowTracker

# The injector runs in a thread beside the supervisor, which does not know it. First the run trains undisturbed, and the
# injector measures what the planner needs: steps, saves, and restarts by request (every rank saves and exits). From the
# first step after those, it kills ranks (SIGKILL) and hangs them (SIGSTOP) at the times of a trace. At the end the run
# saves and exits, so that its last step is in a checkpoint. A failure that finds no rank waits for one.

WARM_UP = 3
"""Steps at the start of an attempt that are not measured: they import and allocate."""
STEADY_STEPS, STEADY_SAVES, STEADY_RESTARTS = 20, 2, 3
"""Measured without failures: at least these steps and saves, exactly these restarts."""
LONGEST_S = 300.0
"""Limit of each wait."""
POLL_S = 0.02


@dataclass(frozen=True)
class SteadyState:
    """What was measured without failures, in seconds."""

    step_s: float
    block_s: float
    save_s: float
    restart_s: float
    """Mean from the end of an attempt that saved and exited to the first step of the next, loading included."""

    @property
    def costs(self) -> CheckpointCosts:
        """Costs of checkpoints for the planner; the restart includes loading."""
        return CheckpointCosts(self.block_s, max(self.save_s, self.block_s), 0.0, "measured in this run")

    def recovery(self, timeout_s: float) -> Recovery:
        """Return the cost of a failure: the supervisor sees a killed rank at its next poll.

        The peers of a rank that hangs wait `timeout_s`, and then the launcher waits for that rank.
        """
        return Recovery(WATCH_S, timeout_s + SETTLE_S + WATCH_S, self.restart_s)


@dataclass(frozen=True)
class FaultRunResult:
    """What the run kept under failures."""

    useful_s: float
    """Time of the steps that the last checkpoint holds, each once, in seconds."""
    position: int
    """Of that checkpoint, in tokens."""


class FaultInjector:
    """One fault-test run, in its own thread; the supervisor sets `launch` at each attempt."""

    def __init__(self, work: Path) -> None:
        """Follow the journal in `work`."""
        self.work, self.processes = work, 1
        self.tail, self.records = Tail(work / "journal.jsonl"), list[Record]()
        self.launch: Launch | None = None
        self.ended = threading.Event()
        """Set when the injector has ended or must end."""
        self.began, self.start = 0.0, 0
        """Time (seconds since 1970) and position at which the first step after the last restart began."""

    def steady(self) -> SteadyState:
        """Measure steps, saves, then restarts. Raises TrainingFailed if they do not come."""
        self._until(self._enough)
        records = self.records[WARM_UP:]
        step_s = mean(record.metrics[metrics.STEP_S] for record in records)
        block_s, save_s = (self._mean(key) for key in (metrics.CHECKPOINT_S, metrics.CHECKPOINT_WRITE_S))
        restarts = [self._restart(step_s) for _ in range(STEADY_RESTARTS)]
        return SteadyState(step_s, block_s, save_s, mean(restarts))

    def inject(self, trace: Trace, seconds: float) -> FaultRunResult:
        """Inject `trace` for `seconds` from the last restart on, then stop the run."""
        for failure in trace:
            self._wait_until(self.began + failure.time_s)
            self._hit(failure)
        end = self.began + seconds
        self._wait_until(end)
        self.ended.set()
        self.stop()
        self.read_journal()
        saved = newest([str(self.work / "checkpoints")])
        kept = saved.position if saved else self.start
        steps = [record for record in self.records if self.start < record.position <= kept and record.time <= end]
        return FaultRunResult(sum(record.metrics[metrics.STEP_S] for record in steps), kept)

    def stop(self) -> float:
        """Make the running attempt save and exit; return the time of its end, in seconds since 1970."""
        launch = self.launch
        while launch is not None and launch.poll() is None:
            with suppress(LookupError, psutil.Error):
                rank_process(0).terminate()
            time.sleep(POLL_S)
        return time.time()

    def read_journal(self) -> int:
        """Read the new records; return the last position, -1 without a record."""
        self.records += [entry for entry in self.tail.new() if isinstance(entry, Record)]
        return self.records[-1].position if self.records else -1

    def _restart(self, step_s: float) -> float:
        """Restart the run; return the seconds between its end and its next step, without that step."""
        launch, ended = self.launch, self.stop()
        before = self.read_journal()
        self._until(lambda: self.read_journal() > before and self.launch is not launch)
        first = next(record for record in self.records if record.position > before)
        self.began, self.start = first.time - step_s, before
        return max(0.0, self.began - ended)

    def _enough(self) -> bool:
        self.read_journal()
        saves = sum(metrics.CHECKPOINT_WRITE_S in record.metrics for record in self.records)
        return len(self.records) >= WARM_UP + STEADY_STEPS and saves >= STEADY_SAVES

    def _mean(self, key: str) -> float:
        return mean(record.metrics[key] for record in self.records if key in record.metrics)

    def _hit(self, failure: Failure) -> None:
        """Kill or hang the rank that plays the host, as soon as it runs."""
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
            if self.ended.wait(POLL_S) or time.monotonic() > deadline:
                raise TrainingFailed(f"the run ended, or made no progress for {LONGEST_S:.0f} s; its logs say why")

    def _wait_until(self, moment: float) -> None:
        if self.ended.wait(max(0.0, moment - time.time())):
            raise TrainingFailed("the run ended before the last failure; its logs say why")


# Settings and result: a scaled trace, and prediction beside measurement.
#
# The prediction uses only what was measured without failures. It assumes that a save is due at the step after its time
# (one and a half steps late on average). A failure falls anywhere in an interval, so each may cost a part of an
# interval more or less than predicted.

FLEET = Fleet(16_384)
"""The fleet whose failures are scaled."""


@dataclass(frozen=True)
class FaultTestSettings:
    """Duration, frequency and seed of the failures."""

    seed: int = 1
    seconds: float = 300.0
    """Wall time with failures."""
    mtti_s: float = 100.0
    """Mean time between two failures."""
    save_every_s: int = 10
    timeout_s: int = 10
    """Ranks give up a peer that hangs after this time."""

    def __post_init__(self) -> None:
        for name in ("seconds", "mtti_s", "save_every_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name):g} s; write a time above 0")

    def trace(self, seed: int | None = None) -> Trace:
        """Return the failures of this seed, or of `seed`, at scaled times."""
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
    """Starts of the trainer: the first, three by request, and one after each failure of a running trainer."""
    steady: SteadyState
    predicted: float
    """By the simulation, of this trace."""
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
    run: str, settings: FaultTestSettings, steady: SteadyState, kept: FaultRunResult, attempts: int
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
        measured=kept.useful_s / settings.seconds,
    )


def fault_test_lines(result: FaultTestResult) -> list[str]:
    """Return prediction and measurement as lines for a console."""
    hangs = sum(failure.hangs for failure in result.failures)
    formula = f"{result.closed_form:.1%}" if result.closed_form is not None else "unknown: too many failures for it"
    spread = f"{result.spread.low:.1%} to {result.spread.high:.1%}"
    return [
        f"injected   {len(result.failures)} failures, {hangs} of them hangs; {result.attempts} attempts ({result.run})",
        f"predicted  {result.predicted:.1%} effective time (other traces: {spread}); closed form {formula}",
        f"measured   {result.measured:.1%}: the prediction is off by {100 * result.error:+.1f} points",
    ]


Inject = Callable[[], tuple[SteadyState, FaultRunResult]]
STAGE = "fault-test"
STEPS = 1_000_000
"""More than any fault test trains; it ends by the clock."""
SHOWN_PER_S = 10
"""Steps a second for which MLflow's points are thinned: thinned for `STEPS`, a slow machine showed no point."""


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
        raise ValueError(
            f"seed: {settings.seed} has no failure in {settings.seconds:g} s; write another seed or more seconds"
        )
    tokens = _tokens(root, run)
    context = _opened(root, fault_test_recipe(Runs(root).recipe(run), settings), cluster, settings, console)
    with _closing(context):
        return _inject_and_compare(context, tokens, settings)


def fault_test_recipe(recipe: Recipe, settings: FaultTestSettings) -> Recipe:
    """Return a recipe with one stage, in the shape of the first of `recipe`, that saves as `settings` say."""
    span = recipe.schedule.trained[0]
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
        raise ValueError(f"run: {run!r} has no tokens yet; write a run that has finished tokenize")
    return open_store(root).load(step.artifact)


def _opened(
    root: Root, recipe: Recipe, cluster: Cluster, settings: FaultTestSettings, console: Console | None
) -> Context:
    """Begin the run of the test, in the records and in MLflow."""
    changes = {"timeout_s": settings.timeout_s, "attempts": len(settings.trace()) + STEADY_RESTARTS, "checkpoints": ""}
    runs, tracker = Runs(root), MLflowTracker(root, recipe.name)
    record = runs.begin(recipe, code_version())
    cluster = cluster.model_copy(update=changes)
    context = Context(recipe, cluster, open_store(root), runs, record, tracker, console or TerminalConsole(), [])
    params = {**flatten(resolved(recipe), depth=2), "fault_test": asdict(settings)}
    record.mlflow_run = tracker.open_run(record.name, context.tags(), params)
    record.mlflow_experiment = tracker.experiment
    runs.save(record)
    return context


@contextmanager
def _closing(context: Context) -> Iterator[None]:
    """Record the end of the test and remove its work folder."""
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


def _inject_and_compare(context: Context, tokens: Artifact, settings: FaultTestSettings) -> FaultTestResult:
    injector = FaultInjector(_work(context))
    span = context.recipe.schedule.span(STAGE)
    job = _job(context, tokens)

    def inject() -> tuple[SteadyState, FaultRunResult]:
        try:
            steady = injector.steady()
            return steady, injector.inject(settings.trace(), settings.seconds)
        finally:
            injector.ended.set()
            injector.stop()

    steady, kept = _supervise(context, span, job, injector, inject, round(settings.seconds * SHOWN_PER_S))
    attempts = len([*(context.folder / "logs" / STAGE).glob("attempt-*")])
    result = compare_with_prediction(context.record.name, settings, steady, kept, attempts)
    _publish(context, result, kept.position)
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


def _supervise(
    context: Context, span: StageSpan, job: Path, injector: FaultInjector, inject: Inject, shown: int
) -> tuple[SteadyState, FaultRunResult]:
    """Supervise the stage as `herd.tasks.stages.train` does while `inject` runs; return the result of `inject`.

    `shown`: about how many steps MLflow gets, of which it keeps 2,000. Raises TrainingFailed if the run does not
    recover.
    """
    step_timeout_s, runs = SILENCE * context.cluster.timeout_s, [context.record.mlflow_run]
    with (
        context.console.progress(span.name, span.tokens) as line,
        ThreadPoolExecutor(1) as pool,
    ):
        launcher = launcher_of(context.cluster, launch_key(job), context.agents)
        follower = JournalTailer(context, runs, job.parent / "journal.jsonl", shown, line, span.end)
        attempts = StageAttempts(context, span, launcher)
        injector.processes = fitting(span, context.cluster, launcher.capacity())
        injected = pool.submit(inject)
        try:
            while not injector.ended.is_set():
                before = follower.position
                injector.launch = attempts.start(job)
                outcome = follower.follow(injector.launch, span.start, step_timeout_s)
                if not injector.ended.is_set():
                    attempts.ended(outcome, progress=follower.position > before)
        finally:
            injector.ended.set()
        return injected.result()


def _publish(context: Context, result: FaultTestResult, position: int) -> None:
    """Put prediction and measurement on the MLflow run of the test, and all figures with the trace in a file."""
    values = {
        metrics.EFFECTIVE_TIME: result.measured,
        metrics.PLANNED_EFFECTIVE_TIME: result.predicted,
        metrics.PLANNED_EFFECTIVE_TIME_CLOSED: result.closed_form,
    }
    points = [MetricPoint(key, value, time.time(), position) for key, value in values.items() if value is not None]
    context.tracker.log_points([context.record.mlflow_run], points)
    path = context.folder / "fault-test.json"
    write_atomic(path, json.dumps(result.as_dict(), indent=1))
    context.runs.publish(context.record.name, path.name)
    context.tracker.log_file(context.record.mlflow_run, path)
