"""What Prefect and MLflow cost: a recipe run by `herd run`, and by plain function calls, one after the other.

Both sides call the same functions of the library on the same text and start the same trainer. The plain side knows no
Prefect, no MLflow, no artifact and no record; it writes the same report, from the other side's data, because a report
is no cost of orchestration. `python -m benchmarks.overhead RECIPE FOLDER ROOT RUN` is the plain side, a process of
its own, so that imports count on both. What this gives up: two runs on a shared machine differ by a few per cent of
themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.rows import Row, measured
from herd.llama3.recipe.load import load_recipe, to_yaml
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.job import TrainJob
from herd.storage.root import Root
from herd.tasks.runs.records import Runs

WATCH_S = 0.25
EMPTY_FLOW = "from prefect import flow\n@flow\ndef nothing() -> None: ...\nnothing()\n"
EMPTY_TRACKER = (
    "import sys\nfrom herd.storage.root import Root\nfrom herd.tasks.tracking.mlflow import MLflowTracker\n"
    "assert MLflowTracker(Root.parse(sys.argv[1]), 'empty').experiment\n"
)


@dataclass(frozen=True)
class Overhead:
    """Seconds of wall time."""

    herd_s: float
    """`herd run`, from start to exit."""
    plain_s: float
    """The same work by plain calls."""
    prefect_s: tuple[float, float]
    """A flow that does nothing on a new machine, where Prefect makes its database, and the same once more."""
    mlflow_s: tuple[float, float]
    """Opening an experiment in a new root, where MLflow makes its database, and the same once more."""
    supervisor_share: float
    """Processor time of the supervising process while the trainer ran, as a share of that time."""

    @property
    def seconds(self) -> float:
        """What orchestration adds."""
        return self.herd_s - self.plain_s

    @property
    def percent(self) -> float:
        return 100 * self.seconds / self.plain_s


def measure_overhead(recipe: Path, folder: Path) -> Overhead:
    """Run `recipe` both ways below the empty `folder`. Raises RuntimeError with the last words of a side that fails."""
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect"), "PREFECT_LOGGING_LEVEL": "CRITICAL"}
    environment |= {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120", "HERD_ROOT": str(folder / "root")}
    prefect = [sys.executable, "-c", EMPTY_FLOW]
    mlflow = [sys.executable, "-c", EMPTY_TRACKER, str(folder / "root")]
    first, again = ([_timed(side, environment, folder)[0] for side in (prefect, mlflow)] for _ in range(2))
    herd, share = _timed([sys.executable, "-m", "herd.flows.cli.main", "run", str(recipe)], environment, folder)
    (run,) = Runs(Root.parse(folder / "root")).all()
    plain = [
        sys.executable,
        "-m",
        "benchmarks.overhead",
        str(recipe),
        str(folder / "plain"),
        str(folder / "root"),
        run.name,
    ]
    plain_s, _ = _timed(plain, environment, folder)
    return Overhead(herd, plain_s, (first[0], again[0]), (first[1], again[1]), share)


def overhead_rows(found: Overhead) -> list[Row]:
    """Return the rows of the benchmark."""
    sides = f"herd run {found.herd_s:.1f} s, plain calls {found.plain_s:.1f} s"
    share = "the supervising process while the trainer ran"
    return [
        measured("orchestration/seconds", found.seconds, sides),
        measured("orchestration/share", found.percent, sides),
        measured("orchestration/supervisor", 100 * found.supervisor_share, share),
        _first("prefect", found.prefect_s, "an empty flow on a new machine"),
        _first("mlflow", found.mlflow_s, "a first experiment in a new root"),
    ]


def _first(what: str, seconds: tuple[float, float], note: str) -> Row:
    """Return the row of a database that is made once; it is there before both sides are timed."""
    first, again = seconds
    return measured(f"orchestration/first-{what}", first, f"{note}; {again:.1f} s from then on")


def _timed(command: list[str], environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """Run a command; return its wall time, and its processor share while it had a trainer."""
    with (folder / "output.log").open("w+") as log:
        began = time.monotonic()
        process = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        trained = used = 0.0
        while process.poll() is None:
            before, busy, training = time.monotonic(), _cpu(process), _trains(process)
            time.sleep(WATCH_S)
            if training and process.poll() is None:
                trained += time.monotonic() - before
                used += _cpu(process) - busy
        seconds = time.monotonic() - began
        log.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command[:5])} failed: {log.read()[-600:]}")
    return seconds, used / trained if trained else 0.0


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _trains(process: psutil.Process) -> bool:
    try:
        return any(child.name().startswith("herd-rank-") for child in process.children(recursive=True))
    except psutil.Error:
        return False


def plain_chain(recipe: Recipe, folder: Path) -> None:
    """Raw text to a scored model by plain calls, in `folder`."""
    from herd.llama3.data.annotate import annotate
    from herd.llama3.data.collect import collect
    from herd.llama3.data.curate import curate
    from herd.llama3.data.readers.sources import survey
    from herd.llama3.tokens.shards import tokenize
    from herd.llama3.tokens.tokenizer import make_tokenizer
    from herd.tasks.cluster import Cluster
    from herd.tasks.executors import data_runner

    survey(recipe)
    names = ("collected", "annotated", "curated", "scratch", "tokenizer", "tokens")
    collected, annotated, curated, scratch, tokenizer, tokens = places = [folder / name for name in names]
    for place in places:
        place.mkdir(parents=True)
    with data_runner(Cluster()) as runner:
        collect(recipe, collected, runner)
        annotate(recipe, collected, annotated, runner)
        curate(recipe, collected, annotated, curated, scratch, runner)
        make_tokenizer(recipe, curated, tokenizer)
        tokenize(recipe, curated, tokenizer, tokens, runner=runner)
    _train(recipe, folder, tokens, tokenizer, curated)


def _train(recipe: Recipe, folder: Path, tokens: Path, tokenizer: Path, curated: Path) -> None:
    from herd.llama3.evaluate.evaluate import evaluate
    from herd.llama3.export.checks import check_model
    from herd.tasks.cluster import Cluster
    from herd.tasks.launch.base import wait
    from herd.tasks.launch.local import Agents, LocalLauncher
    from herd.tasks.models.export import smoke_test
    from herd.tasks.pipeline_steps import evaluated_stages
    from herd.tasks.stages.evaluate import write_validation_rows

    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    parent, cluster = None, Cluster()
    for span in Schedule(recipe).trained:
        job = TrainJob(
            recipe=folder / "recipe.yaml", stage=span.name, tokens=tokens, parent=parent, work=folder / span.name,
            micro_batch=cluster.micro_batch, threads=cluster.process_threads, layout=cluster.layout,
        )  # fmt: skip
        job.work.mkdir()
        write_validation_rows(recipe, curated, tokenizer, job.work)
        (job.work / "job.json").write_text(job.model_dump_json())
        with Agents(folder / "agent.log") as agents:
            launcher = LocalLauncher(cluster, agents)
            outcome = wait(launcher.start(job.work / "job.json", 1, job.work / "logs" / "attempt-1"))
        if outcome.status:
            raise RuntimeError(outcome.message)
        parent = job.work / "result" / "state"
        if span.ends_stage and span.stage.name in evaluated_stages(recipe):
            scores = folder / f"scores-{span.name}"
            scores.mkdir()
            evaluate(recipe, job.work / "result" / "model", tokenizer, curated, scores, threads=cluster.threads)
    served = shutil.copytree(job.work / "result" / "model", folder / "served")
    shutil.copytree(tokenizer, served, dirs_exist_ok=True)
    check_model(served, folder)
    smoke_test(served)


def main(recipe: str, folder: str, root: str, run: str) -> None:
    """The plain side."""
    from herd.tasks.report.run import make_report

    plain_chain(load_recipe(Path(recipe)), Path(folder))
    make_report(Root.parse(root), run)


if __name__ == "__main__":
    main(*sys.argv[1:])
