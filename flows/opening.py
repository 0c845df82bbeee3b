"""Open a run and close it with the truth: recipe, preflight, lease, record, MLflow and Prefect links.

Everything that can refuse a run happens before its record is written. However the body ends, the record and MLflow
say how.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import httpx
from prefect import get_client
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from rich.markup import escape

from flows.claim import claimed
from flows.hooks import ending
from flows.names import is_made_up
from flows.parameters import PipelineParameters
from flows.temporary import is_temporary
from llama3.recipe.load import RecipeError, load_recipe, parse_recipe, resolved
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from storage.artifact import flatten
from storage.holder import LeaseLost
from storage.remote_store import open_store
from storage.secrets import split_login
from tasks import pages
from tasks.catch_up import catch_up, watch
from tasks.console import current_console
from tasks.evaluate import evaluated_stages
from tasks.events import run_ended
from tasks.memory import peak_memory
from tasks.plan import Plan, make_plan, plan_markdown, stage_table, summary_lines
from tasks.preflight import preflight
from tasks.promotions import WAITS
from tasks.result_pages import run_done
from tasks.runs import RunRecord, Runs, State, now
from tasks.step import Context
from tasks.tracking import Tracker

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


def _introduce(context: Context, plan: Plan) -> None:
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
    pages.markdown("plan", plan, f"Plan of {record.name}")
    if link := context.tracker.page(record.mlflow_run):
        pages.link("mlflow-run", link, f"MLflow run {record.name}")
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
    run_ended(context)
