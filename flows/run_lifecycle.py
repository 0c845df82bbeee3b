"""The life of a run in a flow: find its record or begin one, hold its lease, open MLflow, write how it ended.

Everything that can refuse a run happens before its record is written. However the flow ends, record and MLflow say how.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from uuid import UUID

import httpx
from prefect import Flow, get_client, get_run_logger
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.objects import State as PrefectState
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed
from rich.markup import escape

from flows.crash_recovery import TooManyCrashes, attempt_number, end_flow_run, exit_if_alive_elsewhere
from flows.local_server import is_temporary
from flows.recipe_form import LATEST, PipelineParameters, RootParameters, is_made_up
from flows.watchdog import watched
from llama3.evaluate.gate import Decision, Unfinished
from llama3.recipe.load import RecipeError, load_recipe, parse_recipe, resolved
from llama3.recipe.schema import Recipe
from storage.artifact import Artifact, flatten
from storage.lease import Lease, LeaseHeld, LeaseLost, lease
from storage.object_artifact import open_store
from storage.root import Root
from storage.secrets import split_login
from tasks.cluster import Cluster
from tasks.console import Console, current_console
from tasks.errors import EvaluationFailed, StudyIncomplete, TrainingFailed
from tasks.models.lookup import label_of_alias
from tasks.pipeline_steps import step_names
from tasks.plan.recipe import RunPlan, make_plan, plan_markdown, stage_table, summary_lines
from tasks.promotion.log import WAITS
from tasks.runs.peak_memory import peak_memory
from tasks.runs.preflight import preflight
from tasks.runs.records import RunRecord, Runs, State, mark_open, now, trained_stages
from tasks.runs.recovery import RunSettler, StudySettler
from tasks.step import Context, code_version
from tasks.tracking import prefect_artifacts
from tasks.tracking.backfill import catch_up, watch
from tasks.tracking.events import run_ended
from tasks.tracking.mlflow import Tracker
from tasks.tracking.prefect_artifacts import run_done

PATIENCE_S = 60.0
"""Seconds that a finished run waits for an MLflow that is away; afterwards the flow `reconcile` sends the rest."""
MISTAKES = (ValueError, TrainingFailed, EvaluationFailed, StudyIncomplete, Unfinished, LeaseHeld, TooManyCrashes)
"""Errors whose message is enough for the user; anything else is a bug of ours and keeps its traceback."""
BEGUN = threading.Event()
"""Set once a flow of this process has begun its work: what fails before that may be tried again."""
log = logging.getLogger("herd.hooks")


def chosen_recipe(config: PipelineParameters) -> Recipe:
    """Return the recipe that the parameters name: a file's, or an earlier run's. Raises RecipeError."""
    if not config.rerun_of:
        return load_recipe(Path(config.recipe), config.overrides)
    recipe = Runs(config.root_at).recipe(config.rerun_of)
    return parse_recipe(resolved(recipe), config.rerun_of, config.overrides)


@contextmanager
def open_run(config: PipelineParameters, recipe: Recipe) -> Iterator[Context]:
    """Yield the context of a new run, or of the interrupted one that this continues. Raises RecipeError."""
    steps = step_names(recipe)
    for field, step in (("from_step", config.from_step), ("until", config.until)):
        if step and step not in steps:
            raise RecipeError(f"{field}: {step!r} is not a step of {recipe.name}; steps: {', '.join(steps)}")
    console, root = current_console(), config.root_at
    checked = preflight(recipe, config.cluster, root)
    store, runs = open_store(root), Runs(root)
    store.clear_staging()
    with acquire_run(config, recipe, runs, console) as (record, fence):
        tracker = Tracker(root, recipe.name)
        tracker.lost = lambda: runs.lost(record.name)
        context = Context(recipe, config.cluster, store, runs, record, tracker, console, steps, fence=fence)
        context.restart_damaged = config.restart_damaged
        with _closing(context):
            watch(context)
            _introduce(context, make_plan(recipe, *checked))
            yield context


@contextmanager
def acquire_run(
    config: PipelineParameters, recipe: Recipe, runs: Runs, console: Console
) -> Iterator[tuple[RunRecord, int]]:
    """Yield the record to work on and the fence of its lease, which is held until the end.

    It is the run that this flow run began, an unfinished run of the same recipe, or a new one. A recipe that another
    process works on gets a new run, which waits for each step that the other one makes and reuses it.
    """

    def hold(stack: ExitStack, record: RunRecord, wait: Callable[[str], None] | None = None) -> Lease:
        # A lost lease ends this process like any stop: the trainer saves and ends.
        lost = partial(os.kill, os.getpid(), signal.SIGTERM)
        return stack.enter_context(lease(runs.root, f"runs/{record.name}", record.name, wait, lost=lost))

    with ExitStack() as stack:
        record = None
        earlier = runs.of_flow_run(recipe, str(flow_run.id or ""))
        if earlier is not None:  # Prefect may believe a living process dead, so its lease is waited for
            exit_if_alive_elsewhere(runs.root, f"runs/{earlier.name}", console.say)
            message = f"waiting until {earlier.name} is free: {{}} works on it"
            mine, record = hold(stack, earlier, lambda holder: console.say(message.format(holder))), earlier
        elif not config.new and not config.from_step:
            earlier = runs.unfinished(recipe, config.until)
            if earlier is not None and earlier.verdict != WAITS:
                with suppress(LeaseHeld):
                    mine, record = hold(stack, earlier), earlier
        if record is not None:
            record = runs.find(record.name)  # as it is now that the lease is held
            record.attempts += 1
            console.say(f"continuing [bold]{record.name}[/], which did not finish (attempt {record.attempts})")
        else:
            record = runs.begin(recipe, code_version(), config.rerun_of, config.from_step, config.until)
            mine = hold(stack, record)
        before = record.prefect_run
        record.state, record.error, record.ended, record.code = "running", "", "", code_version()
        record.until, record.prefect_run = config.until, str(flow_run.id or "")
        record.study = config.study or record.study
        runs.hold(record.name, mine)
        mark_open(runs.root, record.name)
        runs.save(record)
        if before and before != record.prefect_run:
            end_flow_run(before, f"its process is gone; {record.name} goes on in another flow run")
        stack.enter_context(watched(runs.root, f"runs/{record.name}", attempt_number()))
        yield record, mine.fence


def _introduce(context: Context, plan: RunPlan) -> None:
    """Show the plan on the console and in Prefect, open the MLflow run, and link the two."""
    record, console, tracker = context.record, context.console, context.tracker
    console.say(f"run [bold]{record.name}[/] in {context.root.uri}")
    console.table(stage_table(plan))
    for line in summary_lines(plan):
        console.say(line)
    for warning in plan.warnings:
        console.say(f"[yellow]warning[/]  {warning}")
    params = flatten(resolved(context.recipe), depth=2)
    record.mlflow_run = tracker.open_run(
        record.name, context.tags(), params, parent=record.study.mlflow_run if record.study else ""
    )
    record.mlflow_experiment = tracker.experiment
    context.runs.save(record)
    tracker.log_file(record.mlflow_run, context.runs.local_recipe(record.name))
    url = "" if is_temporary() else split_login(flow_run.ui_url or "")[0]
    prefect = f"[Prefect run]({url})" if url else "Prefect run (temporary server)"
    note = f"{prefect} · recipe `{record.recipe_digest[:12]}` · code `{record.code}`"
    tracker.set_tags(record.mlflow_run, {"prefect.url": url, "mlflow.note.content": note})
    prefect_artifacts.markdown("plan", plan_markdown(plan), f"Plan of {record.name}")
    if link := tracker.page(record.mlflow_run):
        prefect_artifacts.link("mlflow-run", link, f"MLflow run {record.name}")
    if record.prefect_run and is_made_up(str(flow_run.name)):
        with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(record.prefect_run), name=record.name)


@contextmanager
def _closing(context: Context) -> Iterator[None]:
    """Write how the run ended into its record and into MLflow, whatever ended it."""
    try:
        with peak_memory() as peak, context.agents:
            yield
    except Exception as error:
        _close(context, "failed", "FAILED", f"{type(error).__name__}: {error}")
        raise
    except Pause:  # a person is asked; the flow run is started again with the answer
        _close(context, "interrupted", "FINISHED", WAITS)
        raise
    except BaseException as error:
        _close(context, ending(error), "KILLED", type(error).__name__)
        raise
    context.record.peak_memory_gib = round(peak.gib, 2)
    _close(context, "finished", "FINISHED", "")


def _close(context: Context, state: State, status: str, error: str) -> None:
    record = context.record
    record.state, record.error, record.ended = state, error, now()
    try:
        context.runs.save(record)
    except LeaseLost as lost:  # how the run goes on is for its new holder to say
        context.console.say(f"[yellow]{record.name} is left as it is: {escape(str(lost))}[/]")
        return
    if record.mlflow_run:
        context.tracker.close(record.mlflow_run, status)
    if context.tracker.stale and status == "FINISHED":  # one that was killed has no time left
        context.tracker.wait_until_available(PATIENCE_S, context.console.say)
    catch_up(context)
    run_done(context)
    run_ended(context.record, context.root.uri)


class FlowResult(NamedTuple):
    """What a flow returns."""

    name: str
    """The run's name; callers of the flow get it."""
    message: str
    """One line for the Prefect UI."""


def flow_state(work: Callable[[], FlowResult]) -> str:
    """Do `work` and return the Prefect state that ends the flow, with one line of what happened.

    Mistakes of the user, a training that got no further and a full disk end as Failed with their own message. Prefect
    gives callers of the flow what the state holds, hence the type: the result's name, or the exception raised.
    """
    BEGUN.set()
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_without_traceback)
    try:
        result = work()
    except (*MISTAKES, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, MISTAKES) and error.errno != errno.ENOSPC:
            raise
        get_run_logger().debug("it was raised here", exc_info=error)  # a bug of ours may raise ValueError too
        return cast(str, Failed(message=str(error), data=error))
    return cast(str, Completed(message=result.message, data=result.name))


def _without_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback of a mistake out of Prefect's log, and the line that repeats it when the process ends."""
    if not record.exc_info or not isinstance(record.exc_info[1], MISTAKES) or record.levelno <= logging.DEBUG:
        return True
    record.exc_info = record.exc_text = None
    return "unexpected exception" not in record.getMessage()


def run_message(context: Context, decision: Decision | None) -> str:
    """Return what came of a run: `quickstart-7 promoted, bpb 2.715; 11 steps made, 0 reused`."""
    record = context.record
    reused = sum(step.outcome == "reused" for step in record.steps.values())
    steps = f"{len(record.steps) - reused} steps made, {reused} reused"
    if decision is None:
        return f"{record.name} stopped after {record.until}, as asked; {steps}"
    score = context.made[f"evaluate-{context.recipe.stages[-1].name}"].facts.get("eval/bpb")
    bpb = "" if score is None else f", bpb {score:.3f}"
    return f"{record.name} {record.verdict}{bpb}{why_not(decision)}; {steps}"


def why_not(decision: Decision) -> str:
    """Return the reasons of the gate's rows that did not pass, after a colon; nothing if all did."""
    return f": {'; '.join(decision.refusals)}" if decision.refusals else ""


# Hooks carry the end of a flow run to the record and to MLflow. Prefect calls them in the flow's own process, or in
# the worker's if that process was killed, with keywords: their parameters must have these names. They only reconcile
# (`tasks.runs.recovery`), so calling them twice or late changes nothing, and they never raise. A flow run that the
# server alone ends has no hook; its watchdog and the flow `reconcile` handle it.


def on_cancellation(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """A person cancelled it."""
    _settle(flow_run, "cancelled")


def on_crashed(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """Its process was ended from outside."""
    _settle(flow_run, "interrupted")


def on_failure(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """It raised, maybe only because Prefect was slow when all was done: Prefect's state is corrected too then."""
    _settle(flow_run, "failed", get_client if PREFECT_API_URL.value() and not is_temporary() else None)


HOOKS: dict[str, Any] = {"on_cancellation": [on_cancellation], "on_crashed": [on_crashed], "on_failure": [on_failure]}
"""For the decorator: `@flow(name="pipeline", **HOOKS)`."""


def _settle(flow_run: FlowRun, state: State, opened: Any = None) -> None:
    try:
        config = (flow_run.parameters or {}).get("config") or {}
        named = config.get("root", "") if isinstance(config, dict) else config.root
        root = RootParameters(root=named).root_at
        with opened(sync_client=True) if opened else nullcontext() as client:
            for settler in (RunSettler(root, client), StudySettler(root, client)):
                if name := settler.of_flow_run(flow_run):
                    settler.settle(name, state)
                    return
    except Exception:
        log.warning("the end of flow run %s could not be recorded; `reconcile` will", flow_run.name, exc_info=True)


def ending(error: BaseException) -> State:
    """Return the state of a run that `error`, which is no Exception, ended: cancelled in Prefect, or interrupted."""
    try:
        from prefect._internal.control_listener import get_intent
    except ImportError:  # a private module of Prefect; the hook tells a second later
        return "interrupted"
    return "cancelled" if get_intent() == "cancel" else "interrupted"


# Work on an existing run: scoring a checkpoint, judging it or writing a report again belongs to the run that made it
# and takes its recipe, record and MLflow runs. Only the holder of a run's lease writes its record.


class CheckpointOfRun(NamedTuple):
    """A checkpoint and where it stands in the run that it belongs to."""

    checkpoint: Artifact
    record: RunRecord
    stage: str
    """Name of the stage of the recipe that ends with it, or of the part of one."""


class ReadOnlyRuns(Runs):
    """The runs as read without their leases."""

    def save(self, record: RunRecord) -> None:
        """Do nothing: the holder of the run's lease writes its record."""


def find_run(root: Root, name: str) -> RunRecord:
    """Return the run called `name`, or the newest one for `latest`. Raises ValueError naming the runs that exist.

    A Retry takes what its first attempt took: by then `latest` is the run that this attempt began.
    """
    runs = Runs(root)
    if name.strip() != LATEST:
        return runs.find(name.strip())
    records = runs.all()
    if not records:
        raise ValueError(f"run: there is none under {root.uri} yet; start the deployment pipeline first")
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
        return CheckpointOfRun(store.at(record.steps[last].artifact), record, last)
    checkpoint = store.at(label)
    if checkpoint.manifest.kind != "checkpoint":
        raise ValueError(f"checkpoint: {label} is none; name one such as checkpoint/quickstart-main-1a2b3c4d")
    record = Runs(root).find(checkpoint.manifest.made_by)
    return CheckpointOfRun(checkpoint, record, checkpoint.manifest.name.removeprefix(f"{record.family}-"))


@contextmanager
def existing_run(root: Root, name: str, cluster: Cluster, patience_s: float = 0) -> Iterator[Context]:
    """Yield the context of the run `name` with its record held. Raises LeaseHeld if the run is at work.

    A flow that scores one of its checkpoints holds it for some seconds: that is waited for, at most `patience_s`.
    """
    with ExitStack() as held:
        until, runs = time.monotonic() + patience_s, Runs(root)
        while True:
            try:
                holder = f"{flow_run.name or 'a command'} on {name}"
                runs.hold(name, held.enter_context(lease(root, f"runs/{name}", holder)))
                break
            except LeaseHeld:
                if time.monotonic() > until:
                    raise
                time.sleep(1)
        context = _context(root, runs, name, cluster)
        context.tracker.lost = lambda: runs.lost(name)
        with context.agents:
            yield context


@contextmanager
def existing_run_or_beside(root: Root, name: str, cluster: Cluster) -> Iterator[tuple[Context, bool]]:
    """Yield the context of the run `name`, and whether its record is ours to write or the run itself is at work."""
    with ExitStack() as held:
        try:
            context, ours = held.enter_context(existing_run(root, name, cluster)), True
        except LeaseHeld:
            context, ours = _context(root, ReadOnlyRuns(root), name, cluster), False
            held.enter_context(context.agents)
        yield context, ours


def _context(root: Root, runs: Runs, name: str, cluster: Cluster) -> Context:
    recipe, record = runs.recipe(name), runs.find(name)
    tracker, console = Tracker(root, recipe.name), current_console()
    return Context(recipe, cluster, open_store(root), runs, record, tracker, console, step_names(recipe))
