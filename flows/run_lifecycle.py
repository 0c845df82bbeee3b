"""Open a run and close it with the truth: recipe, preflight, lease, record, MLflow and Prefect links.

Everything that can refuse a run happens before its record is written. However the body ends, the record and MLflow
say how.
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

from flows.crash_recovery import TooManyCrashes, attempt_number, end_flow_run, leave_to_a_live_one
from flows.local_server import is_temporary
from flows.recipe_form import LATEST, PipelineParameters, RootParameters, is_made_up
from flows.watchdog import witnessed
from llama3.evaluate.gate import Decision, Unfinished
from llama3.recipe.load import RecipeError, load_recipe, parse_recipe, resolved
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from storage.artifact import Artifact, Store, flatten
from storage.lease import Lease, LeaseHeld, LeaseLost, lease
from storage.object_artifact import open_store
from storage.root import Root
from storage.secrets import split_login
from tasks.cluster import Cluster
from tasks.console import Console, current_console
from tasks.errors import EvaluationFailed, StudyIncomplete, TrainingFailed
from tasks.models.lookup import label_of_alias
from tasks.plan.recipe import RunPlan, make_plan, plan_markdown, stage_table, summary_lines
from tasks.promotion.log import WAITS
from tasks.runs.peak_memory import peak_memory
from tasks.runs.preflight import preflight
from tasks.runs.records import RunRecord, Runs, State, mark_open, now, trained_stages
from tasks.runs.recovery import RunSettler, StudySettler
from tasks.stages.evaluate import evaluated_stages
from tasks.step import Context, code_version
from tasks.tracking import prefect_artifacts
from tasks.tracking.backfill import catch_up, watch
from tasks.tracking.events import run_ended
from tasks.tracking.mlflow import Tracker
from tasks.tracking.prefect_artifacts import run_done

# Which run a flow works on: the one that its flow run began, an unfinished one of the same recipe, or a new one.
#
# Whichever it is, its lease is held as long as it is worked on, its mark says that it is open, and a witness waits
# for the end of this process. Who asks for a recipe on which another process works gets a run of its own, which
# waits for each step that the other makes and reuses it.


@contextmanager
def claimed(
    config: PipelineParameters, recipe: Recipe, runs: Runs, console: Console
) -> Iterator[tuple[RunRecord, int]]:
    """Yield the record to work on, held for this process, and the fence of its lease."""
    with ExitStack() as held:
        record, mine = _found(held, config, recipe, runs, console) or _begun(held, config, recipe, runs)
        before = record.prefect_run
        record.state, record.error, record.ended, record.code = "running", "", "", code_version()
        record.until, record.prefect_run = config.until, str(flow_run.id or "")
        record.study = config.study or record.study
        runs.hold(record.name, mine)
        mark_open(runs.root, record.name)
        runs.save(record)
        if before and before != record.prefect_run:
            end_flow_run(before, f"its process is gone; {record.name} goes on in another flow run")
        held.enter_context(witnessed(runs.root, f"runs/{record.name}", attempt_number()))
        yield record, mine.fence


def _found(
    held: ExitStack, config: PipelineParameters, recipe: Recipe, runs: Runs, console: Console
) -> tuple[RunRecord, Lease] | None:
    """Return the run to continue and its lease, or None if there is none or another process works on it."""
    begun = runs.of_flow_run(recipe, str(flow_run.id or ""))
    if begun is not None:  # its earlier process may live, though Prefect believes it dead: it is waited for
        leave_to_a_live_one(runs.root, f"runs/{begun.name}", console.say)
        mine = _hold(
            held, runs, begun, lambda holder: console.say(f"waiting until {begun.name} is free: {holder} works on it")
        )
        return _continued(runs, begun, console), mine
    earlier = None if config.new or config.from_step else runs.unfinished(recipe, config.until)
    if earlier is None or earlier.verdict == WAITS:
        return None
    try:
        mine = _hold(held, runs, earlier)
    except LeaseHeld:
        return None
    return _continued(runs, earlier, console), mine


def _continued(runs: Runs, record: RunRecord, console: Console) -> RunRecord:
    """Return the record as it is now that it is ours, one attempt on."""
    now = runs.find(record.name)
    now.attempts += 1
    console.say(f"continuing [bold]{now.name}[/], which did not finish (attempt {now.attempts})")
    return now


def _begun(held: ExitStack, config: PipelineParameters, recipe: Recipe, runs: Runs) -> tuple[RunRecord, Lease]:
    record = runs.begin(recipe, code_version(), config.rerun_of, config.from_step, config.until)
    return record, _hold(held, runs, record)


def _hold(held: ExitStack, runs: Runs, record: RunRecord, wait: Callable[[str], None] | None = None) -> Lease:
    """Take the run's lease for as long as `held` is open. Without `wait`, raises LeaseHeld if another has it."""
    return held.enter_context(lease(runs.root, f"runs/{record.name}", record.name, wait, lost=_leave))


def _leave() -> None:
    """End this process as any stop does, because another has taken the run over: the trainer saves and ends."""
    os.kill(os.getpid(), signal.SIGTERM)


# How a flow ends: one line that says what happened, as the message of its Prefect state.
#
# A user's mistake, a training that got no further and a full disk end as Failed with their own text; Prefect would
# else log a traceback of ours above it, once for the task and twice for the flow. Anything else is a bug and keeps
# its traceback. What this gives up: a ValueError out of a bug looks like a mistake; its traceback is logged at
# level DEBUG.


class FlowResult(NamedTuple):
    """What a flow hands back."""

    name: str
    """What callers of the flow get: the run's name."""
    message: str
    """One line for the Prefect UI."""


MISTAKES = (ValueError, TrainingFailed, EvaluationFailed, StudyIncomplete, Unfinished, LeaseHeld, TooManyCrashes)
"""What is told in words."""


BEGUN = threading.Event()
"""Set once a flow of this process has begun its work: what fails before that may be tried again."""


def told(work: Callable[[], FlowResult]) -> str:
    """Do `work` and return what the flow is to return: a Prefect state that says how it went.

    Prefect gives callers of the flow what the state holds, hence the type: the outcome's name, or the exception raised.
    """
    BEGUN.set()
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_in_words)
    try:
        outcome = work()
    except MISTAKES as error:
        return _failed(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _failed(error)
    return cast(str, Completed(message=outcome.message, data=outcome.name))


def _failed(error: Exception) -> str:
    get_run_logger().debug("it was raised here", exc_info=error)
    return cast(str, Failed(message=str(error), data=error))


def _in_words(record: logging.LogRecord) -> bool:
    """Take the traceback of a mistake out of Prefect's log, and the line that repeats it when the process ends."""
    if not record.exc_info or not isinstance(record.exc_info[1], MISTAKES) or record.levelno <= logging.DEBUG:
        return True
    record.exc_info = record.exc_text = None
    return "unexpected exception" not in record.getMessage()


def run_message(context: Context, decision: Decision | None) -> str:
    """Return what came of a run: `quickstart-7 promoted, bpb 2.715; 11 steps made, 0 reused`."""
    record = context.record
    return f"{record.name} {_verdict(context, decision)}; {_steps(record)}"


def _verdict(context: Context, decision: Decision | None) -> str:
    if decision is None:
        return f"stopped after {context.record.until}, as asked"
    score = context.made[f"evaluate-{context.recipe.stages[-1].name}"].facts.get("eval/bpb")
    bpb = "" if score is None else f", bpb {score:.3f}"
    return f"{context.record.verdict}{bpb}{why_not(decision)}"


def why_not(decision: Decision) -> str:
    """Return the reasons of the gate's rows that did not pass, after a colon; nothing if all did."""
    return f": {'; '.join(decision.refusals)}" if decision.refusals else ""


def _steps(record: RunRecord) -> str:
    reused = sum(step.outcome == "reused" for step in record.steps.values())
    return f"{len(record.steps) - reused} steps made, {reused} reused"


# Hooks for every flow that works on a run or a study: they carry the end of a flow run to the record and to MLflow.
#
# Prefect calls them in the flow's own process, or in the worker's when that process was killed; it calls them with
# keywords, so their parameters must have these names. They only make what is shown true (`tasks.runs.recovery`):
# called twice, late, or after the run was taken up again they change nothing, and they never raise. What this gives
# up: a flow run that the server alone ends (an automation) has no hook; its witness and the flow `reconcile` see to
# it.

log = logging.getLogger("herd.hooks")


def on_cancellation(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """A person cancelled it."""
    _settle(flow_run, "cancelled")


def on_crashed(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """Its process was ended from outside."""
    _settle(flow_run, "interrupted")


def on_failure(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """It raised, maybe only because Prefect was slow when all was done: then that is mended there too."""
    _settle(flow_run, "failed", get_client if PREFECT_API_URL.value() and not is_temporary() else None)


HOOKS: dict[str, Any] = {"on_cancellation": [on_cancellation], "on_crashed": [on_crashed], "on_failure": [on_failure]}
"""For the decorator: `@flow(name="pipeline", **HOOKS)`."""


def ending(error: BaseException) -> State:
    """Return what a run is that `error`, no Exception, has ended: cancelled by a person in Prefect, or interrupted."""
    try:
        from prefect._internal.control_listener import get_intent
    except ImportError:  # Prefect's own business: the hook says it a second later
        return "interrupted"
    return "cancelled" if get_intent() == "cancel" else "interrupted"


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


PATIENCE_S = 60.0
"""As long as a run that is done waits for an MLflow that went away, to show it whole; `reconcile` looks by the hour."""


def chosen_recipe(config: PipelineParameters) -> Recipe:
    """Return the recipe that the parameters name: a file's, or an earlier run's. Raises RecipeError."""
    if not config.rerun_of:
        return load_recipe(Path(config.recipe), config.overrides)
    recipe = Runs(config.root_at).recipe(config.rerun_of)
    return parse_recipe(resolved(recipe), config.rerun_of, config.overrides)


def step_names(recipe: Recipe) -> list[str]:
    """Return the names of a run's steps in order: what a rerun can start from."""
    evaluated = evaluated_stages(recipe)
    stages = []
    for span in Schedule(recipe).trained:
        stages += [span.name, *([f"advance-{span.name}"] if span.stage.advance else [])]
        if span.ends_stage and span.stage.name in evaluated:
            stages.append(f"evaluate-{span.stage.name}")
    start = ["start"] if recipe.start and not recipe.start.is_checkpoint else []  # a checkpoint is not made again
    return ["collect", "annotate", "curate", "tokenizer", "tokenise", *start, *stages, "promote"]


@contextmanager
def open_run(config: PipelineParameters, recipe: Recipe) -> Iterator[Context]:
    """Yield the context of a new run, or of the interrupted one that this continues. Raises RecipeError."""
    steps = step_names(recipe)
    if config.from_step and config.from_step not in steps:
        raise RecipeError(f"from_step: {config.from_step!r} is not a step of {recipe.name}; steps: {', '.join(steps)}")
    if config.until and config.until not in steps:
        raise RecipeError(f"until: {config.until!r} is not a step of {recipe.name}; steps: {', '.join(steps)}")
    console, root = current_console(), config.root_at
    found = preflight(recipe, config.cluster, root)
    store, runs = open_store(root), Runs(root)
    store.clear_staging()
    with claimed(config, recipe, runs, console) as (record, fence):
        tracker = Tracker(root, recipe.name)
        tracker.lost = lambda: runs.lost(record.name)
        context = Context(recipe, config.cluster, store, runs, record, tracker, console, steps, fence=fence)
        context.restart_damaged = config.restart_damaged
        with _closing(context):
            watch(context)
            _introduce(context, make_plan(recipe, *found))
            yield context


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
    _link(context, plan_markdown(plan))


def _link(context: Context, plan: str) -> None:
    record, url = context.record, "" if is_temporary() else split_login(flow_run.ui_url or "")[0]
    context.tracker.set_tags(record.mlflow_run, {"prefect.url": url, "mlflow.note.content": _note(record, url)})
    prefect_artifacts.markdown("plan", plan, f"Plan of {record.name}")
    if link := context.tracker.page(record.mlflow_run):
        prefect_artifacts.link("mlflow-run", link, f"MLflow run {record.name}")
    if record.prefect_run and is_made_up(str(flow_run.name)):
        with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(record.prefect_run), name=record.name)


def _note(record: RunRecord, url: str) -> str:
    prefect = f"[Prefect run]({url})" if url else "Prefect run (temporary server)"
    return f"{prefect} · recipe `{record.recipe_digest[:12]}` · code `{record.code}`"


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


# Find what exists by the names people use, and go on with the record of a run that made it.
#
# Scoring a checkpoint, judging it or writing a report again is no new run: it belongs to the run that made it, so
# it takes that run's recipe, its record and its MLflow runs. Only the holder of a run's lease writes its record;
# beside one that is at work the record is read and left alone.


class CheckpointOfRun(NamedTuple):
    """A checkpoint and where it stands in the run that it belongs to."""

    checkpoint: Artifact
    record: RunRecord
    stage: str
    """Name of the stage of the recipe that ends with it, or of the part of one."""


class ReadOnlyRuns(Runs):
    """The runs as somebody sees them who does not hold their leases."""

    def save(self, record: RunRecord) -> None:
        """Leave the record to the run's holder; the artifact and MLflow have what was done."""


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
    name, store = text.strip(), open_store(root)
    if name == LATEST:
        return _of_label(root, store, _newest(root, store))
    if "@" in name:
        return _of_label(root, store, _registered(root, name))
    if "/" in name:
        return _of_label(root, store, name)
    record = find_run(root, name)
    trained = trained_stages(Runs(root).recipe(name), record)
    if not trained:
        raise ValueError(f"checkpoint: run {name} has not finished a training stage; wait for it or choose another")
    last = trained[-1].name
    return CheckpointOfRun(store.at(record.steps[last].artifact), record, last)


def _newest(root: Root, store: Store) -> str:
    found = store.all("checkpoint")
    if not found:
        raise ValueError(f"checkpoint: there is none under {root.uri} yet; start the deployment pretrain first")
    return found[-1].label


def _registered(root: Root, name: str) -> str:
    family, _, alias = name.partition("@")
    label = label_of_alias(root, family, alias)
    if label is None:
        raise ValueError(f"checkpoint: no version of {family} holds the alias {alias!r}; promote one, or name a run")
    return label


def _of_label(root: Root, store: Store, label: str) -> CheckpointOfRun:
    """Return the checkpoint `label` with the run that made it."""
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
