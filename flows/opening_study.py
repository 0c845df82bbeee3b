"""Open a study and close it with the truth: checks, lease, record, MLflow parent, plan; as `opening.py` does for runs.

Everything that can refuse a study happens before its record is written. One process works on a study at a time.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from uuid import UUID

import httpx
from prefect import get_client
from prefect.runtime import flow_run
from rich.markup import escape

from flows.attempts import attempt_number, end_flow_run, leave_to_a_live_one
from flows.hooks import ending
from flows.names import is_made_up
from flows.study_parameters import StudyParameters
from flows.temporary import is_temporary
from flows.witness import witnessed
from llama3.recipe.load import resolved
from llama3.scaling.checks import check_study
from llama3.scaling.posed import ArmRun, Posed
from storage.artifact import flatten
from storage.holder import LeaseLost
from storage.processes import processors
from storage.root import Root
from tasks import pages
from tasks.console import Console, current_console
from tasks.preflight import check_place
from tasks.runs import State, now
from tasks.step import code_version
from tasks.studies import FOLDER, Studies, StudyRecord
from tasks.study_plan import check_hours, plan_lines, plan_study, plan_table
from tasks.study_report import plan_markdown
from tasks.tracking import Tracker


@dataclass
class StudyContext:
    """What a study that is worked on needs."""

    config: StudyParameters
    posed: Posed
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
def open_study(config: StudyParameters, posed: Posed) -> Iterator[StudyContext]:
    """Yield the context of a study, checked and recorded. Raises ValueError and LeaseHeld."""
    root, console, runs = config.root_at, current_console(), config.chosen(posed)
    check_study(posed, runs)
    for run in runs:
        check_place(run.recipe, config.cluster, root)
    plan = plan_study(root, posed, config.cluster, chosen=runs)
    check_hours(plan)
    studies, name = Studies(root), posed.study.name
    if _patience(studies.known(name), console):
        leave_to_a_live_one(root, f"{FOLDER}/{name}", console.say)
    with studies.alone(name, _patience(studies.known(name), console)):
        record = _recorded(config, posed, studies)
        context = StudyContext(config, posed, runs, studies, record, Tracker(root, name), console)
        with witnessed(root, f"{FOLDER}/{name}", attempt_number()), _closing(context):
            console.say(f"study [bold]{record.name}[/] {record.digest[:12]} in {root.uri}")
            console.table(plan_table(plan))
            for line in plan_lines(plan):
                console.say(line)
            _track(context)
            pages.markdown("plan", plan_markdown(plan), f"Plan of {record.name}")
            yield context


def _patience(known: StudyRecord | None, console: Console) -> Callable[[str], None] | None:
    """Return what is told who has the study, if that is waited for: an earlier attempt of this flow run.

    Its process may live, though Prefect believes it dead; on an object store a dead one is believed alive for a while.
    """
    if known is None or not flow_run.id or known.prefect_run != str(flow_run.id):
        return None
    return lambda holder: console.say(f"waiting until the study is free: {holder} works on it")


def _recorded(config: StudyParameters, posed: Posed, studies: Studies) -> StudyRecord:
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
        pages.link("mlflow-run", link, f"MLflow run of study {record.name}")
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
        pages.flush()
