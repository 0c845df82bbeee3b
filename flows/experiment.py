"""A study as one Prefect flow: its arms as runs of the pipeline, one after another or side by side, then the verdict.

One at a time, an arm's flow run is a child of the study's, in this process. Side by side, each is a process of its own
(`flows.arm`), so that a signal, a lost lease and a crash stay that run's business. Killed at any time, the same study
goes on: arms that finished are found by their recipe, the one in progress goes on from its checkpoint. One arm that
fails does not stop the others. What this gives up: arms of one study on several machines; Slurm and Kubernetes
launchers spread the training of each arm instead.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from rich.markup import escape

from flows.arm import Apart, ArmJob
from flows.attempts import check_attempts, found_of_study
from flows.hooks import HOOKS
from flows.opening_study import StudyContext, open_study
from flows.outcome import MISTAKES, Outcome, told
from flows.pipeline import pipeline
from flows.study_parameters import StudyParameters
from llama3.recipe.load import to_yaml
from llama3.scaling.posed import ArmRun
from storage.filesystem import write_atomic
from tasks.cluster import Cluster
from tasks.console import FileConsole, TerminalConsole, aside
from tasks.failures import StudyIncomplete
from tasks.runs import Runs, StudyPart
from tasks.studies import runs_of
from tasks.study_report import conclude
from tasks.words import clock


@flow(name="study", persist_result=False, **HOOKS)
def study(config: StudyParameters = StudyParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run the arms of a study and return its name; its verdict is in its report.

    Args:
        config: Which study, which arms, and where.
    """
    return told(lambda: run_study(config))


def run_study(config: StudyParameters) -> Outcome:
    """Run what is missing of a study and conclude it.

    Raises ValueError, LeaseHeld, TooManyCrashes and StudyIncomplete.
    """
    posed = config.posed()
    check_attempts(lambda _: found_of_study(config.root_at, posed.study.name))
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
    return Outcome(context.record.name, "; ".join(verdict.headline))


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
