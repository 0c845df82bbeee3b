"""The life of a run in a flow: find its record or begin one, hold its lease, open MLflow, write how it ended.

Everything that can refuse a run happens before its record is written.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger
from prefect.context import TagsContext
from prefect.exceptions import Pause, TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, Failed
from rich.markup import escape

from herd.flows.crash_recovery import TooManyCrashes, attempt_number, end_flow_run, exit_if_alive_elsewhere
from herd.flows.local_server import is_temporary
from herd.flows.recipe_form import LATEST, PipelineParameters, is_made_up
from herd.flows.watchdog import watched
from herd.llama3.evaluate.gate import CheckUnfinished, Decision
from herd.llama3.recipe.schema import Recipe
from herd.storage.artifact import Artifact
from herd.storage.lease import Lease, LeaseHeld, LeaseLost, lease, lease_holder
from herd.storage.object_artifact import open_store
from herd.storage.processes import exit_within, peak_memory
from herd.storage.root import Root
from herd.storage.secrets import split_login
from herd.tasks.cluster import Cluster
from herd.tasks.console import Console, Wait, current_console, print_error, working
from herd.tasks.errors import EvaluationFailed, SchedulerRefused, StudyIncomplete, TrainingFailed
from herd.tasks.launch.local import slow_precision
from herd.tasks.models.lookup import label_of_alias
from herd.tasks.operate.owners import PROCESS, process_tag
from herd.tasks.operate.preflight import preflight
from herd.tasks.pipeline_steps import check_step, pipeline_steps
from herd.tasks.plan.predict import predict_step_times
from herd.tasks.plan.recipe import RunPlan, make_plan, plan_markdown, stage_table, summary_lines
from herd.tasks.report.run import write_report
from herd.tasks.runs.provenance import CLUSTER, code_version, record_provenance
from herd.tasks.runs.records import (
    PENDING_APPROVAL,
    RunRecord,
    Runs,
    State,
    mark_open,
    now,
    rerun_command,
    trained_stages,
)
from herd.tasks.stages.backfill import catch_up, watch_outages
from herd.tasks.step import Context
from herd.tasks.tracking import prefect_artifacts
from herd.tasks.tracking.events import flow_failed, run_ended
from herd.tasks.tracking.mlflow import MLFLOW_STOPPED_S, STOPPED_S, MLflowTracker
from herd.tasks.tracking.mlflow_store import report_page
from herd.tasks.tracking.prefect_artifacts import run_done
from herd.tasks.tracking.prometheus import remove_gauges
from herd.tasks.tracking.steps import recipe_params, recipe_points

LOOK_S = 0.5
PATIENCE_S = 60.0
"""Seconds that a finished run waits for an MLflow that is away; afterwards the reconciler sends the rest."""
MISTAKES = (
    *(ValueError, TrainingFailed, EvaluationFailed, StudyIncomplete, CheckUnfinished, LeaseHeld, TooManyCrashes),
    SchedulerRefused,
)
"""Errors whose message is enough for the user; any other error is a bug in herd and keeps its traceback."""
STOPS: dict[type[BaseException], str] = {
    KeyboardInterrupt: "stopped by Ctrl-C",
    TerminationSignal: "stopped by herd stop or SIGTERM",
}
"""What ends a run from outside -> the error of its record."""
UNREPORTED = (
    f"Prefect or MLflow did not take the end of this run within {STOPPED_S:.0f} s; herd up, or the next run, reports it"
)
BEGUN = threading.Event()
"""Set once a flow of this process has begun its work: an earlier failure may be retried."""
RECORDED = threading.Event()
"""Set once a run or study of this process has a record, whose end is announced."""


@contextmanager
def open_run(config: PipelineParameters, recipe: Recipe) -> Iterator[Context]:
    """Yield the context of a new run, or of the interrupted run that it continues. Raises RecipeError."""
    check_step(recipe, "from_step", config.from_step)
    check_step(recipe, "until", config.until)
    console, root = current_console(), config.root_at
    with working(console, "sources"):
        checked = preflight(recipe, config.cluster, root, config.until)
    store, runs, steps = open_store(root), Runs(root), pipeline_steps(recipe)
    store.clear_staging()
    with acquire_run(config, recipe, runs, console) as (record, fence):
        tracker = MLflowTracker(root, recipe.name)
        tracker.lost = lambda: runs.lease_lost(record.name)
        predict = partial(predict_step_times, root, recipe)
        context = Context(
            recipe, config.cluster, store, runs, record, tracker, console, steps, fence=fence, predict=predict
        )
        context.restart_damaged = config.restart_damaged
        with _closing(context):
            watch_outages(context)
            _introduce(context, make_plan(recipe, *checked))
            yield context


@contextmanager
def acquire_run(
    config: PipelineParameters, recipe: Recipe, runs: Runs, console: Console
) -> Iterator[tuple[RunRecord, int]]:
    """Yield the record to work on and the fence of its lease, which is held until the end.

    The record is that of the run that this flow run began, of an unfinished run of the same recipe, or a new one. With
    `from_step` the unfinished run must be a rerun of the same run from the same step. If another process runs it, the
    new run waits for each of its steps and reuses them; who only looks after it (reconcile) is waited for.
    """

    def hold(stack: ExitStack, record: RunRecord, wait: Callable[[str], None] | None = None) -> Lease:
        # A lost lease ends this process like any stop: the trainer saves a checkpoint and ends.
        lost = partial(os.kill, os.getpid(), signal.SIGTERM)
        return stack.enter_context(lease(runs.root, f"runs/{record.name}", record.name, wait, lost=lost))

    with ExitStack() as stack:
        record = None
        earlier = runs.of_flow_run(recipe, str(flow_run.id or ""))
        if earlier is not None:  # Prefect may report a living process as dead: wait for its lease
            exit_if_alive_elsewhere(runs.root, f"runs/{earlier.name}", console.log)
            message = f"waiting until {earlier.name} is free: {{}} works on it"
            run_lease, record = hold(stack, earlier, lambda holder: console.log(message.format(holder))), earlier
        elif not config.fresh:
            waiting = Wait("an unfinished run of this recipe", console.log)
            while record is None:
                earlier = runs.unfinished(recipe, config.until, config.rerun_of, config.from_step)
                if earlier is None or earlier.verdict == PENDING_APPROVAL:
                    break
                try:
                    run_lease, record = hold(stack, earlier), earlier
                except LeaseHeld as held:
                    holder = lease_holder(runs.root, f"runs/{earlier.name}")
                    if holder is not None and holder.holder == earlier.name:  # a run; others hold it for seconds
                        break
                    waiting.note(escape(str(held)))
                    time.sleep(LOOK_S)
        if record is not None:
            record = runs.find(record.name)  # again, now that the lease is held
            record.attempts += 1
            console.log(f"continuing [bold]{record.name}[/], which did not finish (attempt {record.attempts})")
        else:
            record = runs.begin(recipe, code_version(), config.rerun_of, config.from_step, config.until)
            run_lease = hold(stack, record)
        before = record.prefect_run
        record.state, record.error, record.ended, record.code = "running", "", "", code_version()
        record.until, record.prefect_run, record.attempt_started = config.until, str(flow_run.id or ""), now()
        record.study = config.study or record.study
        runs.hold(record.name, run_lease)
        given = f"deployment {by}" if (by := deployment.name) else shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        record.provenance = record_provenance(runs.root, record.name, config.cluster, given, "JOB" if by else "LOCAL")
        mark_open(runs.root, record.name)
        runs.save(record)
        if before and before != record.prefect_run:
            end_flow_run(before, f"its process is gone; {record.name} continues in another flow run")
        stack.enter_context(watched(runs.root, f"runs/{record.name}", attempt_number()))
        yield record, run_lease.fence


def _introduce(context: Context, plan: RunPlan) -> None:
    """Show the plan on the console and in Prefect, open the MLflow run, and link the two pages."""
    record, console, tracker = context.record, context.console, context.tracker
    console.log(f"run [bold]{record.name}[/] in {context.root.uri}")
    console.table(stage_table(plan))
    for line in summary_lines(plan):
        console.log(line)
    for warning in [*plan.warnings, *slow_precision(context.recipe, context.cluster)]:
        console.log(f"[yellow]warning[/]  {warning}")
    parent = record.study.mlflow_run if record.study else ""
    record.mlflow_run = tracker.open_run(record.name, context.tags(), recipe_params(context.recipe), parent=parent)
    tracker.log_points([record.mlflow_run], recipe_points(context.recipe, record.started))
    record.mlflow_experiment = tracker.experiment
    context.runs.save(record)
    tracker.log_file(record.mlflow_run, context.runs.local_recipe(record.name))
    for name in filter(None, (CLUSTER, record.provenance.diff_file if record.provenance else "")):
        tracker.log_file(record.mlflow_run, context.folder / name)
    url = "" if is_temporary() else split_login(flow_run.ui_url or "")[0]
    prefect = f"[Prefect run]({url})" if url else "Prefect run (temporary server)"
    own = report_page("", record.mlflow_experiment, tracker.run_id(record.mlflow_run))
    report = f" · [report]({own}), at its end" if record.mlflow_experiment else ""
    note = f"{prefect} · recipe `{record.recipe_digest[:12]}` · code `{record.code}`{report}"
    tracker.set_tags(record.mlflow_run, {"prefect.url": url, "mlflow.note.content": note})
    prefect_artifacts.markdown("plan", plan_markdown(plan), f"Plan of {record.name}")
    if link := tracker.page(record.mlflow_run):
        prefect_artifacts.link("mlflow-run", link, f"MLflow run {record.name}")
    if record.prefect_run and is_made_up(str(flow_run.name)):
        with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(record.prefect_run), name=record.name)


@contextmanager
def reporting_end(tracker: MLflowTracker, close: Callable[[State, str, str], None]) -> Iterator[None]:
    """Call `close` with state, MLflow status and error of the block, whatever ends it.

    After a stop the process has STOPPED_S for all reports, those of Prefect after the block too.
    """
    RECORDED.set()
    try:
        yield
    except Exception as error:
        close("failed", "FAILED", f"{type(error).__name__}: {error}")
        raise
    except Pause:  # it waits for a person; the flow run is started again with the answer
        close("interrupted", "FINISHED", PENDING_APPROVAL)
        raise
    except BaseException as error:
        left_s = max(tracker.reach.hurry(), STOPPED_S - MLFLOW_STOPPED_S)  # the record is written in any case
        exit_within(left_s, lambda: print_error(UNREPORTED))
        intent = ""
        with suppress(ImportError):  # a private module of Prefect; without it the watchdog corrects the state
            from prefect._internal.control_listener import get_intent

            intent = get_intent() or ""
        cancelled = intent == "cancel"
        message = "cancelled in Prefect" if cancelled else STOPS.get(type(error), type(error).__name__)
        close("cancelled" if cancelled else "interrupted", "KILLED", message)
        raise
    close("finished", "FINISHED", "")


@contextmanager
def _closing(context: Context) -> Iterator[None]:
    """Write how the run ended into its record and into MLflow."""
    with reporting_end(context.tracker, partial(_close, context)):
        with peak_memory() as peak, context.agents:
            yield
        context.record.peak_memory_gib = round(peak.gib, 2)


def _close(context: Context, state: State, status: str, error: str) -> None:
    record = context.record
    record.state, record.error, record.ended = state, error, now()
    try:
        context.runs.save(record)
    except LeaseLost as lost:  # the new holder of the lease writes the record
        context.console.log(f"[yellow]{record.name} is left as it is: {escape(str(lost))}[/]")
        return
    if error == STOPS[TerminationSignal]:  # Prefect ends this process before the command line can print a line
        context.console.log(f"[yellow]{error}[/]; {escape(rerun_command(context.root, record))} continues it")
    if record.mlflow_run:
        context.tracker.close(record.mlflow_run, status)
    if context.tracker.stale and status == "FINISHED":  # a killed run has no time to wait
        context.tracker.reach.wait(PATIENCE_S, context.console.log)
    try:
        catch_up(context)
        run_done(context.record, context.recipe, context.artifacts)
        if state == "finished":
            write_report(context)
    except (OSError, ValueError) as error:  # a full disk: the run has ended, and the reconciler sends the rest
        context.console.log(f"[yellow]{record.name} has ended, and not all of it is shown: {escape(str(error))}[/]")
        context.console.log(f"its report: herd report {record.name}")
    remove_gauges(context.root, record.name)
    run_ended(context.record, context.root.uri)


class FlowResult(NamedTuple):
    """The run's name, which callers of a flow get, and one line for the Prefect UI."""

    name: str
    message: str


def flow_state(work: Callable[[], FlowResult]) -> str:
    """Do `work` and return the Prefect state that ends the flow, with a message of one line.

    MISTAKES and a full disk end as Failed with their own message. The return type is str because Prefect gives callers
    of the flow the data of the state: the result's name, or the exception raised.
    """
    BEGUN.set()
    if not deployment.name and not any(tag.startswith(PROCESS) for tag in flow_run.tags or []):  # called from Python
        with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(str(flow_run.id)), tags=[*(flow_run.tags or []), process_tag()])
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_without_traceback)
    tags = {tag for tag in TagsContext.get().current_tags if not tag.startswith(PROCESS)}
    try:
        # Prefect asks its server for a slot of each tag of a task, and a run goes on without a server.
        with TagsContext(current_tags=tags):
            result = work()
    except (*MISTAKES, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, MISTAKES) and error.errno != errno.ENOSPC:
            raise
        get_run_logger().debug("it was raised here", exc_info=error)  # a bug may raise ValueError too
        if deployment.name and not RECORDED.is_set():  # scheduled, such as a nightly run whose recipe was moved
            flow_failed(str(flow_run.name), str(error))
        return cast(str, Failed(message=str(error), data=error))
    return cast(str, Completed(message=result.message, data=result.name))


def _without_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback of a mistake from Prefect's log, and the line that repeats it when the process ends."""
    if not record.exc_info or not isinstance(record.exc_info[1], MISTAKES) or record.levelno <= logging.DEBUG:
        return True
    record.exc_info = record.exc_text = None
    return "unexpected exception" not in record.getMessage()


def run_message(context: Context, decision: Decision | None) -> str:
    """Return the outcome of a run: `quickstart-7 promoted, bpb 2.715; 11 steps made, 0 reused`."""
    record = context.record
    reused = sum(step.outcome == "reused" for step in record.steps.values())
    steps = f"{len(record.steps) - reused} steps made, {reused} reused"
    if decision is None:
        return f"{record.name} stopped after {record.until}, as asked; {steps}"
    score = context.artifacts[context.steps[-1].inputs["evaluation"]].metadata.get("eval/bpb")
    bpb = "" if score is None else f", bpb {score:.3f}"
    return f"{record.name} {record.verdict}{bpb}{why_not(decision)}; {steps}"


def why_not(decision: Decision) -> str:
    """Return the reasons of the gate's rows that failed, after a colon; empty if all passed."""
    return f": {'; '.join(decision.refusals)}" if decision.refusals else ""


# Work on an existing run. Evaluation, gate and report use recipe, record and MLflow runs of the run that made the
# checkpoint. Only the holder of a run's lease writes its record.


class CheckpointOfRun(NamedTuple):
    """A checkpoint, the run that made it, and the stage (or part of a stage) that ends with it."""

    checkpoint: Artifact
    record: RunRecord
    stage: str


class ReadOnlyRuns(Runs):
    """Runs without leases: `save` does nothing."""

    def save(self, record: RunRecord) -> None: ...


def find_run(root: Root, name: str) -> RunRecord:
    """Return the run called `name`, or the newest for `latest`. Raises ValueError naming the runs that exist."""
    runs = Runs(root)
    if name.strip() != LATEST:
        return runs.find(name.strip())
    records = runs.all()
    if not records:
        raise ValueError(f"run: there is none under {root.uri} yet; start the deployment pipeline first")
    # A Retry takes the run of its first attempt: the newest is then the run that this attempt began.
    begun = [record for record in records if flow_run.id and record.prefect_run == str(flow_run.id)]
    return runs.find(begun[-1].rerun_of) if begun and begun[-1].rerun_of else records[-1]


def find_checkpoint(root: Root, text: str) -> CheckpointOfRun:
    """Return the checkpoint that `text` names: a label, a run, FAMILY@ALIAS, or `latest`. Raises ValueError."""
    name, store, label = text.strip(), open_store(root), ""
    if name == LATEST:
        checkpoints = store.all("checkpoint")
        if not checkpoints:
            raise ValueError(f"checkpoint: there is none under {root.uri} yet; start the deployment pretrain first")
        label = checkpoints[-1].label
    elif "@" in name:
        family, _, alias = name.partition("@")
        label = label_of_alias(root, family, alias) or ""
        if not label:
            raise ValueError(f"checkpoint: no version of {family} has the alias {alias!r}; promote one, or name a run")
    elif "/" in name:
        label = name
    if not label:
        record = find_run(root, name)
        trained = trained_stages(Runs(root).recipe(name), record)
        if not trained:
            raise ValueError(f"checkpoint: run {name} has not finished a training stage; wait for it or choose another")
        last = trained[-1].name
        return CheckpointOfRun(store.load(record.steps[last].artifact), record, last)
    checkpoint = store.load(label)
    if checkpoint.manifest.kind != "checkpoint":
        raise ValueError(f"checkpoint: {label} is not a checkpoint; use e.g. checkpoint/quickstart-main-1a2b3c4d")
    record = Runs(root).find(checkpoint.manifest.created_by)
    return CheckpointOfRun(checkpoint, record, checkpoint.manifest.name.removeprefix(f"{record.family}-"))


@contextmanager
def existing_run(
    root: Root, name: str, cluster: Cluster, patience_s: float = 0.0, read_only: bool = False
) -> Iterator[Context]:
    """Yield the context of the run `name` with its lease held.

    If another process holds the lease for longer than `patience_s` (a flow that evaluates a checkpoint does for
    seconds), raises LeaseHeld, or with `read_only` yields a context with ReadOnlyRuns.
    """
    runs, until = Runs(root), time.monotonic() + patience_s
    wait = Wait(f"the lease of {name}", current_console().log)
    with ExitStack() as stack:
        while True:
            try:
                holder = f"{flow_run.name or 'a command'} on {name}"
                runs.hold(name, stack.enter_context(lease(root, f"runs/{name}", holder)))
                break
            except LeaseHeld as held:
                if time.monotonic() <= until:
                    wait.note(escape(str(held)))
                    time.sleep(1)
                elif read_only:
                    runs = ReadOnlyRuns(root)
                    break
                else:
                    raise
        recipe, record = runs.recipe(name), runs.find(name)
        tracker, console = MLflowTracker(root, recipe.name), current_console()
        tracker.lost = lambda: runs.lease_lost(name)
        context = Context(recipe, cluster, open_store(root), runs, record, tracker, console, pipeline_steps(recipe))
        watch_outages(context)
        try:
            with context.agents:
                yield context
        finally:
            if not catch_up(context):
                mark_open(root, name)  # the reconciler sends the rest
