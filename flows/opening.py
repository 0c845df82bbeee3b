"""Open a run and close it with the truth: recipe, preflight, lease, record, MLflow and Prefect links.

Everything that can refuse a run happens before its record is written. However the body ends, the record and MLflow
say how.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import get_client
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.runtime import flow_run

from flows.parameters import PipelineParameters
from llama3.recipe.load import RecipeError, load_recipe, parse_recipe, resolved
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from storage.artifact import Store, flatten
from storage.lease import LeaseHeld, lease
from tasks.console import Console, current_console
from tasks.evaluate import evaluated_stages
from tasks.memory import peak_memory
from tasks.plan import Plan, make_plan, plan_markdown, stage_table, summary_lines
from tasks.preflight import preflight
from tasks.runs import RunRecord, Runs, now
from tasks.step import Context, code_version
from tasks.tracking import Tracker


def chosen_recipe(config: PipelineParameters) -> Recipe:
    """Return the recipe that the parameters name: a file's, or an earlier run's. Raises RecipeError."""
    if not config.rerun_of:
        return load_recipe(Path(config.recipe), config.overrides)
    recipe = Runs(config.root_path).recipe(config.rerun_of)
    return parse_recipe(resolved(recipe), config.rerun_of, config.overrides)


def step_names(recipe: Recipe) -> list[str]:
    """Return the names of a run's steps in order: what a rerun can start from."""
    evaluated = evaluated_stages(recipe)
    stages = []
    for span in Schedule(recipe).trained:
        stages += [span.name, *([f"advance-{span.name}"] if span.stage.advance else [])]
        if span.ends_stage and span.stage.name in evaluated:
            stages.append(f"evaluate-{span.stage.name}")
    start = ["start"] if recipe.start else []
    return ["collect", "annotate", "curate", "tokenizer", "tokenise", *start, *stages, "promote"]


@contextmanager
def open_run(config: PipelineParameters, recipe: Recipe) -> Iterator[Context]:
    """Yield the context of a new run, or of the interrupted one that this continues. Raises RecipeError."""
    steps = step_names(recipe)
    if config.from_step and config.from_step not in steps:
        raise RecipeError(f"from_step: {config.from_step!r} is not a step of {recipe.name}; steps: {', '.join(steps)}")
    console = current_console()
    found = preflight(recipe, config.cluster, config.root_path)
    with _hold(config.root_path, recipe.name):
        store, runs = Store(config.root_path), Runs(config.root_path)
        store.clear_staging()
        record = _record(config, recipe, runs, console)
        tracker = Tracker(config.root_path, recipe.name)
        context = Context(recipe, config.cluster, store, runs, record, tracker, console, steps)
        _introduce(context, make_plan(recipe, found))
        with _closing(context):
            yield context


@contextmanager
def _hold(root: Path, family: str) -> Iterator[None]:
    try:
        with lease(root, f"a run of {family}"):
            yield
    except LeaseHeld as error:
        raise RecipeError(f"root: {error}; wait for it to end, or choose another root") from error


def _record(config: PipelineParameters, recipe: Recipe, runs: Runs, console: Console) -> RunRecord:
    """Return the record to work on: of the unfinished run of this very recipe, else of a new one."""
    earlier = None if config.new or config.from_step else runs.unfinished(recipe)
    if earlier is None:
        record = runs.begin(recipe, code_version(), config.rerun_of, config.from_step)
    else:
        record = earlier
        record.attempts += 1
        record.state, record.error, record.code = "running", "", code_version()
        console.say(f"continuing [bold]{record.name}[/], which did not finish (attempt {record.attempts})")
    record.prefect_run = str(flow_run.id or "")
    runs.save(record)
    return record


def _introduce(context: Context, plan: Plan) -> None:
    """Show the plan on the console and in Prefect, open the MLflow run, and link the two."""
    record, console, tracker = context.record, context.console, context.tracker
    console.say(f"run [bold]{record.name}[/] in {context.store.root}")
    console.table(stage_table(plan))
    for line in summary_lines(plan):
        console.say(line)
    for warning in plan.warnings:
        console.say(f"[yellow]warning[/]  {warning}")
    params = flatten(resolved(context.recipe), depth=2)
    record.mlflow_run = tracker.open_run(record.name, context.tags(), params)
    record.mlflow_experiment = tracker.experiment
    context.runs.save(record)
    tracker.log_file(record.mlflow_run, context.folder / "recipe.yaml")
    _link(context, plan_markdown(plan))


def _link(context: Context, plan: str) -> None:
    record, url = context.record, flow_run.ui_url
    context.tracker.set_tags(record.mlflow_run, {"prefect.url": url or "", "mlflow.note.content": _note(record, url)})
    create_markdown_artifact(plan, key="plan", description=f"Plan of {record.name}")
    link = context.tracker.page(record.mlflow_run)
    if link:
        create_link_artifact(link, link_text=f"MLflow run {record.name}", key="mlflow-run")
    if record.prefect_run:
        with get_client(sync_client=True) as client:
            client.update_flow_run(record.prefect_run, name=record.name)  # type: ignore[arg-type]


def _note(record: RunRecord, url: str | None) -> str:
    prefect = f"[Prefect run]({url})" if url else "Prefect run (temporary server)"
    return f"{prefect} · recipe `{record.recipe_digest[:12]}` · code `{record.code}`"


@contextmanager
def _closing(context: Context) -> Iterator[None]:
    """Write how the run ended into its record and into MLflow, whatever ended it."""
    try:
        with peak_memory() as peak:
            yield
    except Exception as error:
        _close(context, "failed", "FAILED", f"{type(error).__name__}: {error}")
        raise
    except BaseException as error:
        _close(context, "interrupted", "KILLED", type(error).__name__)
        raise
    context.record.peak_memory_gib = round(peak.gib, 2)
    _close(context, "finished", "FINISHED", "")


def _close(context: Context, state: str, status: str, error: str) -> None:
    record = context.record
    record.state, record.error, record.ended = state, error, now()  # type: ignore[assignment]
    context.runs.save(record)
    context.tracker.close(record.mlflow_run, status)
