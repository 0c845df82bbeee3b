"""A study as one Prefect flow: its variants as runs of the pipeline, then the verdict.

One at a time, a variant is a child flow run in this process; side by side, each is a process
(`herd.flows.study_variant`). A killed study continues: finished variants are found by their recipe. A failed variant
does not stop the others. All flows run on one machine; Slurm and Kubernetes spread their training.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import httpx
from prefect import flow, get_client, tags
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict
from rich.markup import escape

from herd.flows.crash_recovery import (
    attempt_number,
    check_attempts,
    end_flow_run,
    exit_if_alive_elsewhere,
    progress_of_study,
)
from herd.flows.pipeline import pipeline
from herd.flows.recipe_form import NAME, PlaceParameters, RecipeChange, field_at, is_made_up
from herd.flows.run_lifecycle import MISTAKES, STOPS, FlowResult, flow_state, reporting_end
from herd.flows.study_variant import Apart, VariantJob
from herd.flows.watchdog import watched
from herd.llama3.recipe.load import resolved, to_yaml
from herd.llama3.studies.checks import check_study
from herd.llama3.studies.expand import ExpandedStudy, VariantRun, load_study
from herd.llama3.studies.study import BASE, PROPOSED
from herd.storage.artifact import flatten
from herd.storage.filesystem import write_atomic
from herd.storage.lease import LeaseLost
from herd.storage.processes import processors
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import Console, FileConsole, console_as, current_console
from herd.tasks.errors import StudyIncomplete
from herd.tasks.format import format_duration
from herd.tasks.operate.owners import process_tag
from herd.tasks.operate.preflight import check_run
from herd.tasks.runs.provenance import code_version
from herd.tasks.runs.records import Runs, State, StudyPart, now
from herd.tasks.study.plan import check_hours, plan_lines, plan_study, plan_table
from herd.tasks.study.records import FOLDER, Studies, StudyRecord, runs_of
from herd.tasks.study.report import conclude, plan_markdown, with_proposed
from herd.tasks.tracking import prefect_artifacts
from herd.tasks.tracking.mlflow import MLflowTracker


class VariantForm(BaseModel):
    """One more variant, to try a comparison without a YAML file."""

    model_config = ConfigDict(extra="forbid", title="Variant")

    name: str = field_at(
        0, "Name", "my-variant", "Name of the variant; it replaces the study's variant of this name.", pattern=NAME
    )
    change: RecipeChange = field_at(1, "Change the recipe", RecipeChange(), "Fields to fill in; the rest stays.")
    overrides: list[str] = field_at(2, "Other changes", [], "Any recipe field: lr.warmup=40 steps.")


class StudyParameters(PlaceParameters):
    """A study: several runs of a changed recipe that answer one question."""

    study: str = field_at(0, "Study", "recipes/experiments/ramp-cpu.yaml", "A shipped study, or a YAML file.")
    variants: list[VariantForm] = field_at(
        1, "Further variants", [], "For a comparison or a mix search: run in addition to the study's own."
    )
    only: list[str] = field_at(2, "Only these variants", [], "Names; empty: all. The control is run in any case.")
    overrides: list[str] = field_at(3, "Changes for all variants", [], "Any recipe field: stages.main.until=3M.")
    at_once: int = field_at(
        4, "At the same time", 1, "Runs side by side, in their own processes; they share the processor's threads.", ge=1
    )

    def expanded(self) -> ExpandedStudy:
        """Return the study with its variants expanded. Raises RecipeError."""
        variants = {form.name: [*form.change.overrides(), *form.overrides] for form in self.variants}
        return load_study(Path(self.study), self.overrides, variants)

    def chosen(self, expanded: ExpandedStudy) -> list[VariantRun]:
        """Return the runs of the variants in `only`. Raises ValueError naming the variants that exist."""
        selected = {name.strip() for name in self.only if name.strip()}
        known = list(dict.fromkeys(run.variant.name for run in expanded.runs))
        if unknown := sorted(selected - set(known)):
            raise ValueError(
                f"only: {unknown[0]!r} is not a variant of {expanded.study.name}; the variants are {', '.join(known)}"
            )
        return [run for run in expanded.runs if not selected or run.variant.name in {*selected, expanded.control}]


@dataclass
class StudyContext:
    """A study in progress."""

    config: StudyParameters
    expanded: ExpandedStudy
    runs: list[VariantRun]
    """Those of the selected variants."""
    studies: Studies
    record: StudyRecord
    tracker: MLflowTracker
    console: Console
    began: float = field(default_factory=time.monotonic)

    @property
    def root(self) -> Root:
        return self.studies.root

    def ends(self, state: State, error: str = "") -> bool:
        """Write the state of the study and its seconds so far; return whether its lease is still held."""
        record, until = self.record, time.monotonic()
        record.state, record.error, record.ended = state, error, now()
        record.seconds, self.began = record.seconds + until - self.began, until
        try:
            self.studies.save(record)
        except LeaseLost as lost:  # the new holder of the lease writes the record
            self.console.log(f"[yellow]{record.name} is left as it is: {escape(str(lost))}[/]")
            return False
        return True

    def close(self, state: State, status: str, error: str) -> None:
        """Write how the study ended into its record and into MLflow."""
        if self.ends(state, error):
            if error == STOPS[TerminationSignal]:  # Prefect ends this process before the command line can print a line
                self.console.log(f"[yellow]{error}[/]; the same command continues {self.record.name}")
            if self.record.mlflow_run:
                self.tracker.close(self.record.mlflow_run, status)
        prefect_artifacts.flush()


@contextmanager
def open_study(config: StudyParameters, expanded: ExpandedStudy) -> Iterator[StudyContext]:
    """Yield the context of a study whose lease is held. Checks raise ValueError before its record is written.

    Raises LeaseHeld if another process works on the study, unless that is an earlier attempt of this flow run.
    """
    root, console, runs = config.root_at, current_console(), config.chosen(expanded)
    check_study(expanded, runs)
    for run in runs:
        check_run(run.recipe, config.cluster, root)
    plan = plan_study(root, expanded, config.cluster, chosen=runs)
    check_hours(plan)
    studies, name = Studies(root), expanded.study.name

    def wait(holder: str) -> None:
        console.log(f"waiting until the study is free: {holder} works on it")

    earlier = studies.known(name)
    retried = earlier is not None and bool(flow_run.id) and earlier.prefect_run == str(flow_run.id)
    if retried:
        exit_if_alive_elsewhere(root, f"{FOLDER}/{name}", console.log)
    # Prefect may report a living process as dead, and on an object store a dead one keeps its lease for a while.
    with studies.alone(name, wait if retried else None):
        record = _recorded(config, expanded, studies)
        tracker = MLflowTracker(root, name)
        context = StudyContext(config, expanded, runs, studies, record, tracker, console)
        with watched(root, f"{FOLDER}/{name}", attempt_number()), reporting_end(tracker, context.close):
            console.log(f"study [bold]{record.name}[/] {record.digest[:12]} in {root.uri}")
            console.table(plan_table(plan))
            for line in plan_lines(plan):
                console.log(line)
            _open_mlflow_run(context)
            prefect_artifacts.markdown("plan", plan_markdown(plan), f"Plan of {record.name}")
            yield context


def _recorded(config: StudyParameters, expanded: ExpandedStudy, studies: Studies) -> StudyRecord:
    """Write the question and the record; keep seconds and verdict of an earlier record of the same question."""
    name, known = expanded.study.name, studies.known(expanded.study.name)
    options = [f" --set '{line}'" for line in config.overrides] + [f" --only {variant}" for variant in config.only]
    options += [f" --threads {config.cluster.threads}"] if config.cluster.threads != processors() else []
    options += [f" --at-once {config.at_once}"] if config.at_once > 1 else []
    record = StudyRecord(
        name=name,
        digest=expanded.digest,
        kind=expanded.study.kind,
        question=expanded.study.question,
        recipe=expanded.path,
        started=now(),
        code=code_version(),
        machine=f"{platform.system()} {platform.machine()}, {processors()} cores",
        command=f"herd study run {config.study}{''.join(options)}",
        prefect_run=str(flow_run.id or ""),
        recipes=sorted({run.digest for run in expanded.runs}),
    )
    if known and known.digest == record.digest:
        record.started, record.seconds, record.variant_seconds = known.started, known.seconds, known.variant_seconds
        record.verdict, record.recipes = known.verdict, sorted({*record.recipes, *known.recipes})
    studies.ask(expanded)
    studies.save(record)
    if known and known.prefect_run not in ("", record.prefect_run):
        end_flow_run(known.prefect_run, f"its process is gone; study {name} continues in another flow run")
    return record


def _open_mlflow_run(context: StudyContext) -> None:
    record, tracker = context.record, context.tracker
    question = context.expanded.study.model_dump(mode="json", by_alias=True, exclude_none=True)
    params = {**flatten(question, depth=2), **flatten({"recipe": resolved(context.expanded.base)}, depth=2)}
    tags = {"code.commit": record.code, "prefect.flow_run_id": record.prefect_run, "study.kind": record.kind}
    record.mlflow_run = tracker.open_study(record.name, record.digest[:16], tags, params)
    record.mlflow_experiment = tracker.experiment
    context.studies.save(record)
    if link := tracker.page(record.mlflow_run):
        prefect_artifacts.link("mlflow-run", link, f"MLflow run of study {record.name}")
    if record.prefect_run and is_made_up(str(flow_run.name)):
        with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(record.prefect_run), name=record.name)


@flow(name="study", persist_result=False)
def study(config: StudyParameters = StudyParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run the variants of a study and return the study's name; the report contains the verdict."""
    return flow_state(lambda: run_study(config))


def run_study(config: StudyParameters) -> FlowResult:
    """Run the missing variants of a study and conclude it. Raises what MISTAKES lists."""
    expanded = config.expanded()
    check_attempts(config.root_at, lambda _: progress_of_study(config.root_at, expanded.study.name))
    with open_study(config, expanded) as context:
        _run_missing(context)
        _run_proposed(context)
        context.ends("finished")  # so that the page says so
        verdict = conclude(context.studies, context.expanded, context.record, context.tracker)
        for line in verdict.headline:
            context.console.log(f"  [bold]{escape(line)}[/]")
        for flag in verdict.flags:
            context.console.log(f"  [yellow]flag[/]  {escape(flag)}")
    return FlowResult(context.record.name, "; ".join(verdict.headline))


def _run_proposed(context: StudyContext) -> None:
    """Train the mix that a finished mix search proposes, beside the control's seeds. Raises StudyIncomplete."""
    found = with_proposed(context.root, context.expanded)
    if found is context.expanded or found.proposal is None:
        return
    runs = [run for run in found.runs if run.variant.name == PROPOSED]
    shares = "/".join(f"{float(share) * 100:g}" for share in found.proposal.values())
    context.console.log(f"  the fit proposes {shares} ({'/'.join(found.proposal)}); it is trained beside {BASE}")
    for run in runs:
        check_run(run.recipe, context.config.cluster, context.root)
    context.expanded, context.runs = found, [*context.runs, *runs]
    context.record.recipes = sorted({*context.record.recipes, *(run.digest for run in runs)})
    context.studies.save(context.record)
    _run_missing(context)


def _run_missing(context: StudyContext) -> None:
    """Run every variant that has no finished run, `at_once` at a time, and print the result of each.

    Raises StudyIncomplete if one did not finish.
    """
    answers = runs_of(Runs(context.root), context.expanded, context.runs)
    missing = [run for run in context.runs if run.name not in answers]
    execute = _in_turn if context.config.at_once == 1 else _side_by_side
    with closing(execute(context, missing)) as results:  # an error here stops the runs in progress
        for run, error, seconds in results:
            context.record.variant_seconds += seconds
            context.studies.save(context.record)
            prefix = f"  {escape(f'[{context.runs.index(run) + 1}/{len(context.runs)}]')} {run.name:<22}"
            record = runs_of(Runs(context.root), context.expanded, [run]).get(run.name)
            if record is None:
                reason = escape(error.splitlines()[0] if error else "it did not finish")
                context.console.log(f"{prefix}[red]failed[/] after {format_duration(seconds)}: {reason}")
            else:
                context.console.log(f"{prefix}{record.name} in {format_duration(seconds)}")
    answers = runs_of(Runs(context.root), context.expanded, context.runs)
    if unfinished := [run.name for run in context.runs if run.name not in answers]:
        raise StudyIncomplete(
            f"study {context.record.name}: {len(unfinished)} of {len(context.runs)} runs did not finish: "
            f"{', '.join(unfinished)}; their logs are in {context.studies.folder(context.record.name) / 'logs'}; the "
            "same command continues them"
        )


Result = tuple[VariantRun, str, float]
"""A run of a variant, its error (empty: none) and its seconds."""


def _in_turn(context: StudyContext, missing: Sequence[VariantRun]) -> Generator[Result]:
    """Run the variants one after another, as child flow runs."""
    for run in missing:
        began, error = time.monotonic(), ""
        job = _job(context, run, context.config.cluster)
        console = FileConsole(_file(context, "logs", run, "log"), run.name, context.console)
        try:
            # a worker's study: its own process works on the flow run of the variant
            with tags(process_tag()), console_as(console) if context.console.rich is not None else nullcontext():
                pipeline(job.parameters())
        except MISTAKES as raised:
            error = str(raised)
        yield run, error, time.monotonic() - began


def _side_by_side(context: StudyContext, missing: Sequence[VariantRun]) -> Generator[Result]:
    """Run the variants in their own processes; yield them as they end."""
    apart, at_once, cluster = Apart(), context.config.at_once, context.config.cluster
    if cluster.launcher == "local":  # they share the processor's threads
        cluster = cluster.model_copy(update={"threads": max(1, cluster.threads // at_once)})

    def work(run: VariantRun) -> Result:
        began = time.monotonic()
        file, log = _file(context, "variants", run, "json"), _file(context, "logs", run, "log")
        write_atomic(file, _job(context, run, cluster).model_dump_json(indent=1))
        failed = apart.run(file, log) != 0
        lines = log.read_text(errors="replace").splitlines() if failed else []
        return run, lines[-1] if lines else "", time.monotonic() - began

    # The threads only wait for processes: Prefect's logger works in the flow's own thread alone.
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="variant")
    futures = [pool.submit(work, run) for run in missing]
    try:
        for future in as_completed(futures):
            yield future.result()
    except BaseException:  # Ctrl-C, or a full disk, which fails the other runs too
        apart.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _job(context: StudyContext, run: VariantRun, cluster: Cluster) -> VariantJob:
    recipe, record = _file(context, "variants", run, "yaml"), context.record
    write_atomic(recipe, to_yaml(run.recipe))
    part = StudyPart(study=record.name, variant=run.variant.name, repeat=run.repeat, mlflow_run=record.mlflow_run)
    return VariantJob(recipe=str(recipe.absolute()), part=part, root=context.config.root, cluster=cluster)


def _file(context: StudyContext, folder: str, run: VariantRun, suffix: str) -> Path:
    return context.studies.folder(context.record.name) / folder / f"{run.variant.name}-{run.repeat}.{suffix}"
