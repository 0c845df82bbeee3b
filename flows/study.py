"""A study as one Prefect flow: its arms as runs of the pipeline, one after another or side by side, then the verdict.

One at a time, an arm's flow run is a child of the study's, in this process. Side by side, each is a process
(`flows.study_arm`) with its own signals and lease. A killed study goes on: finished arms are found by their recipe. A
failed arm does not stop the others. Arms of one study run on one machine; Slurm and Kubernetes spread their training.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import httpx
from prefect import flow, get_client
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field
from rich.markup import escape

from flows.crash_recovery import (
    attempt_number,
    check_attempts,
    end_flow_run,
    exit_if_alive_elsewhere,
    progress_of_study,
)
from flows.local_server import is_temporary
from flows.pipeline import pipeline
from flows.recipe_form import NAME, PlaceParameters, RecipeChange, field_at, is_made_up
from flows.run_lifecycle import HOOKS, MISTAKES, FlowResult, ending, flow_state
from flows.study_arm import Apart, ArmJob
from flows.watchdog import watched
from llama3.recipe.load import resolved, to_yaml
from llama3.studies.checks import check_study
from llama3.studies.expand import ArmRun, ExpandedStudy, load_study
from storage.artifact import flatten
from storage.filesystem import write_atomic
from storage.lease import LeaseLost
from storage.processes import processors
from storage.root import Root
from tasks.cluster import Cluster
from tasks.console import Console, FileConsole, TerminalConsole, aside, current_console
from tasks.errors import StudyIncomplete
from tasks.format import clock
from tasks.runs.preflight import check_place
from tasks.runs.records import Runs, State, StudyPart, now
from tasks.step import code_version
from tasks.study.plan import check_hours, plan_lines, plan_study, plan_table
from tasks.study.records import FOLDER, Studies, StudyRecord, runs_of
from tasks.study.report import conclude, plan_markdown
from tasks.tracking import prefect_artifacts
from tasks.tracking.mlflow import Tracker

# Parameters of the deployment `study`. The form lists arms, so that a comparison can be tried without a YAML file.


class ArmForm(BaseModel):
    """One more arm."""

    model_config = ConfigDict(extra="forbid", title="Arm")

    name: str = Field(
        default="my-arm",
        title="Name",
        pattern=NAME,
        description="Of the arm; an arm of the study that has it is replaced.",
        json_schema_extra={"position": 0},
    )
    change: RecipeChange = field_at(1, "Change the recipe", RecipeChange(), "Fields to fill in; the rest stays.")
    overrides: list[str] = field_at(2, "Other changes", [], "Any recipe field: lr.warmup=40 steps.")

    @property
    def lines(self) -> list[str]:
        return [*self.change.overrides(), *self.overrides]


class StudyParameters(PlaceParameters):
    """A study: several runs of a changed recipe that answer one question."""

    study: str = field_at(0, "Study", "recipes/experiments/ramp-cpu.yaml", "A YAML file, relative to the checkout.")
    arms: list[ArmForm] = field_at(
        1, "Further arms", [], "Of a comparison or a mix search: tried beside the study's own."
    )
    only: list[str] = field_at(2, "Only these arms", [], "Names; empty: all. The control is run in any case.")
    overrides: list[str] = field_at(3, "Changes for all arms", [], "Any recipe field: stages.main.until=3M.")
    at_once: int = Field(
        default=1,
        ge=1,
        title="At the same time",
        description="Runs side by side, each a process of its own; they share the processor's threads.",
        json_schema_extra={"position": 4},
    )

    def posed(self) -> ExpandedStudy:
        """Return the study as it is asked. Raises RecipeError."""
        return load_study(Path(self.study), self.overrides, {arm.name: arm.lines for arm in self.arms})

    def chosen(self, posed: ExpandedStudy) -> list[ArmRun]:
        """Return the runs of the arms that are asked for. Raises ValueError naming the arms that exist."""
        wanted = {name.strip() for name in self.only if name.strip()}
        known = list(dict.fromkeys(run.arm.name for run in posed.runs))
        if unknown := sorted(wanted - set(known)):
            raise ValueError(f"only: {unknown[0]!r} is no arm of {posed.study.name}; the arms are {', '.join(known)}")
        return [run for run in posed.runs if not wanted or run.arm.name in {*wanted, posed.control}]


# The life of a study, as run_lifecycle.py has that of a run. Whatever can refuse a study happens before its record is
# written. One process works on a study at a time.


@dataclass
class StudyContext:
    """What a study that is worked on needs."""

    config: StudyParameters
    posed: ExpandedStudy
    runs: list[ArmRun]
    """Those that are asked for."""
    studies: Studies
    record: StudyRecord
    tracker: Tracker
    console: Console
    began: float = field(default_factory=time.monotonic)
    lost: bool = False
    """Whether another process has taken the study over."""

    @property
    def root(self) -> Root:
        return self.studies.root

    def ends(self, state: State, error: str = "") -> None:
        """Write how the study stands now, and what it took so far."""
        record, until = self.record, time.monotonic()
        record.state, record.error, record.ended = state, error, now()
        record.seconds, self.began = record.seconds + until - self.began, until
        try:
            self.studies.save(record)
        except LeaseLost as lost:  # how the study goes on is for its new holder to say
            self.lost = True
            self.console.say(f"[yellow]{record.name} is left as it is: {escape(str(lost))}[/]")


@contextmanager
def open_study(config: StudyParameters, posed: ExpandedStudy) -> Iterator[StudyContext]:
    """Yield the context of a study, checked and recorded. Raises ValueError and LeaseHeld."""
    root, console, runs = config.root_at, current_console(), config.chosen(posed)
    check_study(posed, runs)
    for run in runs:
        check_place(run.recipe, config.cluster, root)
    plan = plan_study(root, posed, config.cluster, chosen=runs)
    check_hours(plan)
    studies, name = Studies(root), posed.study.name
    if _patience(studies.known(name), console):
        exit_if_alive_elsewhere(root, f"{FOLDER}/{name}", console.say)
    with studies.alone(name, _patience(studies.known(name), console)):
        record = _recorded(config, posed, studies)
        context = StudyContext(config, posed, runs, studies, record, Tracker(root, name), console)
        with watched(root, f"{FOLDER}/{name}", attempt_number()), _closing(context):
            console.say(f"study [bold]{record.name}[/] {record.digest[:12]} in {root.uri}")
            console.table(plan_table(plan))
            for line in plan_lines(plan):
                console.say(line)
            _track(context)
            prefect_artifacts.markdown("plan", plan_markdown(plan), f"Plan of {record.name}")
            yield context


def _patience(known: StudyRecord | None, console: Console) -> Callable[[str], None] | None:
    """Return what is told who has the study, if that is waited for: an earlier attempt of this flow run.

    Its process may live, though Prefect believes it dead; on an object store a dead one is believed alive for a while.
    """
    if known is None or not flow_run.id or known.prefect_run != str(flow_run.id):
        return None
    return lambda holder: console.say(f"waiting until the study is free: {holder} works on it")


def _recorded(config: StudyParameters, posed: ExpandedStudy, studies: Studies) -> StudyRecord:
    """Write the question and the record down; what the same question took and came to before is kept."""
    name, known = posed.study.name, studies.known(posed.study.name)
    record = StudyRecord(
        name=name,
        digest=posed.digest,
        kind=posed.study.kind,
        question=posed.study.question,
        recipe=posed.place,
        started=now(),
        code=code_version(),
        machine=machine(),
        command=command(config),
        prefect_run=str(flow_run.id or ""),
        recipes=sorted({run.digest for run in posed.runs}),
    )
    if known and known.digest == record.digest:
        record.started, record.seconds, record.arm_seconds = known.started, known.seconds, known.arm_seconds
        record.verdict = known.verdict
    studies.ask(posed)
    studies.save(record)
    if known and known.prefect_run not in ("", record.prefect_run):
        end_flow_run(known.prefect_run, f"its process is gone; study {name} goes on in another flow run")
    return record


def machine() -> str:
    """Return what this machine is, in words: `Linux x86_64, 2 cores`."""
    return f"{platform.system()} {platform.machine()}, {processors()} cores"


def command(config: StudyParameters) -> str:
    """Return the command line that asks the same."""
    sets = "".join(f" --set '{line}'" for line in config.overrides)
    only = "".join(f" --only {name}" for name in config.only)
    beside = f" --at-once {config.at_once}" if config.at_once > 1 else ""
    return f"herd study run {config.study}{sets}{only}{beside}"


def _track(context: StudyContext) -> None:
    record, tracker = context.record, context.tracker
    question = context.posed.study.model_dump(mode="json", by_alias=True, exclude_none=True)
    params = {**flatten(question, depth=2), **flatten({"recipe": resolved(context.posed.base)}, depth=2)}
    tags = {"code.commit": record.code, "prefect.flow_run_id": record.prefect_run, "study.kind": record.kind}
    record.mlflow_run = tracker.open_study(record.name, record.digest[:16], tags, params)
    record.mlflow_experiment = tracker.experiment
    context.studies.save(record)
    if link := tracker.page(record.mlflow_run):
        prefect_artifacts.link("mlflow-run", link, f"MLflow run of study {record.name}")
    if record.prefect_run and not is_temporary() and is_made_up(str(flow_run.name)):
        with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(record.prefect_run), name=record.name)


@contextmanager
def _closing(context: StudyContext) -> Iterator[None]:
    """Write how the study ended into its record and into MLflow, whatever ended it."""
    status = "FINISHED"
    try:
        yield
        context.ends("finished")
    except Exception as raised:
        status = "FAILED"
        context.ends("failed", f"{type(raised).__name__}: {raised}")
        raise
    except BaseException as raised:
        status = "KILLED"
        context.ends(ending(raised), type(raised).__name__)
        raise
    finally:
        if context.record.mlflow_run and not context.lost:
            context.tracker.close(context.record.mlflow_run, status)
        prefect_artifacts.flush()


@flow(name="study", persist_result=False, **HOOKS)
def study(config: StudyParameters = StudyParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run the arms of a study and return its name; its verdict is in its report.

    Args:
        config: Which study, which arms, and where.
    """
    return flow_state(lambda: run_study(config))


def run_study(config: StudyParameters) -> FlowResult:
    """Run what is missing of a study and conclude it.

    Raises ValueError, LeaseHeld, TooManyCrashes and StudyIncomplete.
    """
    posed = config.posed()
    check_attempts(lambda _: progress_of_study(config.root_at, posed.study.name))
    with open_study(config, posed) as context:
        _run_missing(context)
        answers = runs_of(Runs(context.root), context.posed, context.posed.runs)
        if lacking := [run.name for run in context.runs if run.name not in answers]:
            raise StudyIncomplete(
                f"study {context.record.name}: {len(lacking)} of {len(context.runs)} runs did not finish: "
                f"{', '.join(lacking)}; their logs are in {context.studies.place(context.record.name) / 'logs'}; the "
                "same command goes on with them"
            )
        context.ends("finished")  # so that the page says so
        verdict = conclude(context.studies, context.posed, context.record, context.tracker)
        for line in verdict.headline:
            context.console.say(f"  [bold]{escape(line)}[/]")
        for flag in verdict.flags:
            context.console.say(f"  [yellow]flag[/]  {escape(flag)}")
    return FlowResult(context.record.name, "; ".join(verdict.headline))


@dataclass(frozen=True)
class _Ended:
    """How one run of an arm ended."""

    run: ArmRun
    error: str
    """What went wrong, if anything did."""
    seconds: float


def _run_missing(context: StudyContext) -> None:
    """Run every arm that no finished run answers for, as many at a time as asked, and say what came of each."""
    answers = runs_of(Runs(context.root), context.posed, context.runs)
    missing = [run for run in context.runs if run.name not in answers]
    ways = _in_turn if context.config.at_once == 1 else _side_by_side
    with closing(ways(context, missing)) as ended:  # whatever goes wrong here stops the runs that are on their way
        for one in ended:
            _note(context, one)


def _in_turn(context: StudyContext, missing: Sequence[ArmRun]) -> Generator[_Ended]:
    for run in missing:
        began = time.monotonic()
        error = _here(context, run)
        yield _Ended(run, error, time.monotonic() - began)


def _side_by_side(context: StudyContext, missing: Sequence[ArmRun]) -> Generator[_Ended]:
    """Yield the runs as they end. Threads only wait for processes: Prefect's logger works in the flow's own alone."""
    apart, pool = Apart(), ThreadPoolExecutor(context.config.at_once, thread_name_prefix="arm")

    def work(run: ArmRun) -> _Ended:
        began = time.monotonic()
        error = _apart(context, run, apart)
        return _Ended(run, error, time.monotonic() - began)

    waiting: list[Future[_Ended]] = [pool.submit(work, run) for run in missing]
    try:
        for future in as_completed(waiting):
            yield future.result()
    except BaseException:  # Ctrl-C, or a full disk that the others would meet too
        apart.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _note(context: StudyContext, one: _Ended) -> None:
    """Add an ended run to the study's record, and say in a line what came of it."""
    context.record.arm_seconds += one.seconds
    context.studies.save(context.record)
    run, took = one.run, clock(one.seconds)
    place = f"[{context.runs.index(run) + 1}/{len(context.runs)}]"
    record = runs_of(Runs(context.root), context.posed, [run]).get(run.name)
    if record is None:
        first = one.error.splitlines()[0] if one.error else "it did not come to its end"
        context.console.say(f"  {escape(place)} {run.name:<22}[red]failed[/] after {took}: {escape(first)}")
    else:
        context.console.say(f"  {escape(place)} {run.name:<22}{record.name} in {took}")


def _here(context: StudyContext, run: ArmRun) -> str:
    """Run the arm below this flow run; return what went wrong, if anything did."""
    job = _job(context, run, context.config.cluster)
    logged = FileConsole(_log(context, run), run.name, context.console)
    try:
        with aside(logged) if isinstance(context.console, TerminalConsole) else nullcontext():
            pipeline(job.parameters())
    except MISTAKES as error:
        return str(error)
    return ""


def _apart(context: StudyContext, run: ArmRun, apart: Apart) -> str:
    """Run the arm in a process of its own; return what went wrong, if anything did."""
    job = _job(context, run, _share(context.config))
    file = _file(context, run, ".json")
    write_atomic(file, job.model_dump_json(indent=1))
    log = _log(context, run)
    if apart.run(file, log) == 0:
        return ""
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""


def _share(config: StudyParameters) -> Cluster:
    """Return the cluster of one of several runs at a time: on this machine they share the processor's threads."""
    cluster = config.cluster
    if cluster.launcher != "local":
        return cluster
    threads = max(1, cluster.threads // config.at_once)
    return cluster.model_copy(update={"threads": threads})


def _job(context: StudyContext, run: ArmRun, cluster: Cluster) -> ArmJob:
    recipe = _file(context, run, ".yaml")
    write_atomic(recipe, to_yaml(run.recipe))
    part = StudyPart(
        study=context.record.name, arm=run.arm.name, repeat=run.repeat, mlflow_run=context.record.mlflow_run
    )
    return ArmJob(recipe=str(recipe.absolute()), part=part, root=context.config.root, cluster=cluster)


def _file(context: StudyContext, run: ArmRun, ending: str) -> Path:
    return context.studies.place(context.record.name) / "arms" / f"{run.arm.name}-{run.repeat}{ending}"


def _log(context: StudyContext, run: ArmRun) -> Path:
    return context.studies.place(context.record.name) / "logs" / f"{run.arm.name}-{run.repeat}.log"
