"""Rows of `python -m benchmarks load`: what herd's commands take on a root that a team has used for a year.

The root has 1,000 runs and 10,000 artifacts with files; MLflow's database has every run with 45,000 points, inserted by
SQL, because its API takes a day for them. CPU time of a command is that of its process, start-up included; `linear` is
the exponent between a quarter of the artifacts and all, without start-up.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import psutil

from benchmarks.measure import NotMeasured
from benchmarks.process_tree import tree_cost
from benchmarks.rows import LOAD_TARGETS, Row, measured, rows_of
from herd.llama3.recipe.load import digest, load_recipe, resolved, to_yaml
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train import metrics
from herd.storage.artifact import MANIFEST, ArtifactSpec
from herd.storage.digests import digest_file
from herd.storage.processes import free_ports
from herd.storage.root import Root
from herd.tasks.pipeline_steps import pipeline_steps
from herd.tasks.runs.records import RunRecord, Runs, StepRecord
from herd.tasks.tracking.mlflow_store import prepare_database

DOMAINS = ("general", "math", "code", "multilingual")
SERIES = (
    metrics.LOSS, metrics.GRAD_NORM, metrics.LEARNING_RATE, metrics.BATCH_TOKENS, metrics.SEQ_LEN, metrics.STEP,
    metrics.TOKENS_PER_S, metrics.TFLOPS_PER_DEVICE, metrics.MFU, metrics.STEP_S, metrics.DATA_WAIT_S, metrics.GOODPUT,
    metrics.REMAINING_S, metrics.HOST_GIB, metrics.DEVICE_PEAK_GIB, metrics.GPU_HOURS,
    *(metrics.domain_loss(domain) for domain in DOMAINS), *(metrics.fraction(domain) for domain in DOMAINS),
)  # fmt: skip
KINDS = {"collect": "collected", "annotate": "annotated", "curate": "curated", "tokenize": "tokens"}
KINDS["tokenizer"] = "tokenizer"
RECIPE = Path("recipes/quickstart.yaml")
RUNS_A_FAMILY, ARTIFACTS_A_RUN, STEPS_LOGGED, PARAMS = 50, 10, 20_000, 60
EMPTY_BYTES = 4_000_000
"""MLflow's empty database is smaller."""
QUARTER, COMPARED, EXPERIMENT, PAGE = 4, 3, "1", 100
SECRET, REPEATS = "a password of a benchmark", 3
START_S, QUEUED_S = 900.0, 600.0
"""Seconds that `herd up` may take, and those for each queued run."""
EVALUATES = "herd: evaluate new checkpoints"
"""Automation that would evaluate the first run's checkpoints once more."""
HISTORIES = (metrics.LOSS, metrics.GRAD_NORM, metrics.LEARNING_RATE, metrics.TOKENS_PER_S)
INDEXES = {"index_metrics_run_uuid": "run_uuid", "index_metrics_run_uuid_key_step": 'run_uuid, "key", step'}


@dataclass(frozen=True)
class LoadSettings:
    """What the user of `python -m benchmarks load` chooses."""

    folder: Path
    """Root and databases; a root of an earlier call is used again."""
    only: tuple[str, ...] = ()
    artifacts: int = 10_000
    points: int = 45_000_000
    postgres_points: int = 4_500_000
    queued: int = 20
    recipe: Path = Path("tests/e2e/tiny.yaml")
    herd: Sequence[str] = (sys.executable, "-m", "herd.flows.cli.main")


@dataclass
class LoadSession:
    """Measures for the rows of one run; use it in a `with`, which stops the servers."""

    settings: LoadSettings
    _stack: ExitStack = field(default_factory=ExitStack)
    cpu: dict[tuple[str, str], float] = field(default_factory=dict)
    """(command, size of the root) -> CPU seconds."""
    compared: tuple[float, ...] = ()
    """CPU seconds of `herd compare` and of MLflow's server."""

    def __enter__(self) -> LoadSession:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @property
    def runs(self) -> int:
        return self.settings.artifacts // ARTIFACTS_A_RUN

    @cached_property
    def root(self) -> Root:
        """The full root, without MLflow's database."""
        return full_root(self.settings.folder / "root", self.settings.artifacts)

    @cached_property
    def quarter(self) -> Root:
        return full_root(self.settings.folder / "quarter", self.settings.artifacts // QUARTER)

    @cached_property
    def empty(self) -> Root:
        return full_root(self.settings.folder / "empty", 0)

    @cached_property
    def database(self) -> str:
        """URI of MLflow's full SQLite database, which is that of the root."""
        path = self.root.local / "mlflow.db"
        if path.stat().st_size < EMPTY_BYTES:
            fill_sqlite(path, Runs(self.root).all(), self.settings.points)
        return f"sqlite:///{path}"

    @cached_property
    def server(self) -> tuple[str, psutil.Process]:
        """Address and process of an MLflow server over the full database, started as `herd up` does."""
        from herd.flows.local_server import await_answer, child
        from herd.flows.serve import mlflow_command

        (port,) = free_ports(1)
        assert self.database
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = mlflow_command(self.root, port)
        process = self._stack.enter_context(child("mlflow", command, self.settings.folder, environment))
        await_answer(f"http://127.0.0.1:{port}/health", process)
        return f"http://127.0.0.1:{port}", psutil.Process(process.pid)

    @cached_property
    def postgres(self) -> str:
        """URI of MLflow's database on a Postgres of this session. Raises NotMeasured where there is none."""
        return self._stack.enter_context(full_postgres(Runs(self.root).all(), self.settings.postgres_points))

    def command(self, root: Root, *words: str, **more: str) -> float:
        """Return the CPU seconds of `herd words...` on `root`, children and start-up included. Raises RuntimeError.

        The least of REPEATS of a short command: on a busy core the same instructions take longer.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HERD_ROOT": root.uri, "COLUMNS": "160", **more}
        environment |= {"PREFECT_HOME": str(self.settings.folder / "prefect")}
        command, log = [*self.settings.herd, *words], self.settings.folder / f"{words[0]}.log"
        repeats = REPEATS if words[0] in ("status", "compare") else 1
        return min(tree_cost(command, log, environment).cpu_s for _ in range(repeats))


def full_root(folder: Path, artifacts: int) -> Root:
    """Return a root with so many artifacts of a tenth as many finished runs, written without the pains of a commit.

    Runs of a family share its tokenizer; the first three of all have their metrics in full.
    """
    root, mark = Root.parse(folder), folder / ".filled"
    if mark.exists():
        return root
    base, began = load_recipe(RECIPE), datetime.now(UTC) - timedelta(days=300)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(artifacts // ARTIFACTS_A_RUN):
        family, place = f"load-{number // RUNS_A_FAMILY}", number % RUNS_A_FAMILY + 1
        if place == 1:
            recipe = base.model_copy(update={"name": family})
            text, key = to_yaml(recipe), digest(resolved(recipe))
        started = began + timedelta(hours=6 * number)
        record = RunRecord(
            name=f"{family}-{place}", family=family, recipe_digest=key, state="finished", code="c0de",
            started=started.isoformat(), ended=(started + timedelta(hours=5)).isoformat(), verdict="rejected",
            mlflow_run=f"{number:032x}", mlflow_experiment=EXPERIMENT,
        )  # fmt: skip
        write_run(root, record, recipe, STEPS_LOGGED if number < COMPARED else 1)
        root.file("runs", record.name, "recipe.yaml").write_text(text)
    prepare_database(root)
    mark.touch()
    return root


def write_run(root: Root, record: RunRecord, recipe: Recipe, points: int) -> None:
    """Write a run's record and artifacts; its stages have `points` points of each series."""
    spans = {span.name: span for span in recipe.schedule.trained}
    before: dict[str, str] = {}
    for step in [step.name for step in pipeline_steps(recipe)[:-1]]:
        span, kind = spans.get(step), "checkpoint" if step in spans else KINDS.get(step, "evaluation")
        name = record.family if step in KINDS else f"{record.family}-{step}"
        owner = record.family if step == "tokenizer" else record.name
        spec = ArtifactSpec(kind, name, 1, {"owner": owner}, before if owner == record.name else {})
        place = root.file(*spec.label.split("/"))
        if not place.exists():
            place.mkdir(parents=True)
            (place / "data.bin").write_bytes(f"{owner} {step}\n".encode() * 20)
            facts: dict[str, Any] = {}
            if span:
                facts = {"start": span.start, "end": span.end, "steps": span.steps, "first_loss": 4.0, "last_loss": 3.0}
                shutil.copyfile(metrics_table(root, span, points), place / "metrics.parquet")
            files = {path.name: digest_file(path) for path in place.iterdir()}
            manifest = spec.manifest(files, facts, record.name, record.code, 60.0)
            (place / MANIFEST).write_text(manifest.model_copy(update={"created": record.ended}).text())
        record.steps[step] = StepRecord(artifact=spec.label, outcome="created", seconds=60.0)
        before = {"before": spec.key}
    Runs(root).save(record)


def metrics_table(root: Root, span: StageSpan, points: int) -> Path:
    """Return a stage's table of metrics, such as `to_parquet` writes, with `points` points of each series."""
    path = root.file(f".{span.name}-{points}.parquet")
    if not path.exists():
        query = """
            SELECT 1.7e9 + number AS time, ? + ? * (number + 1) // ? AS position, key, 2.0 + 1.0 / (1 + number) AS value
            FROM range(?) numbers(number), (SELECT unnest(?) AS key) ORDER BY number
        """
        values = [span.start, span.end - span.start, points, points, list(SERIES)]
        with duckdb.connect() as connection:
            connection.sql(query, params=values).write_parquet(str(path))
    return path


def fill_sqlite(path: Path, runs: Sequence[RunRecord], points: int) -> None:
    """Insert `runs` with `points` points in all into MLflow's empty database `path`."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA journal_mode = off; PRAGMA synchronous = off; PRAGMA cache_size = -200000")
        for index in INDEXES:
            connection.execute(f"DROP INDEX {index}")
        for statement, rows in fill_statements(runs, points, "0"):
            connection.executemany(statement, rows) if rows else connection.execute(statement)
        for index, columns in INDEXES.items():
            connection.execute(f"CREATE INDEX {index} ON metrics ({columns})")
        connection.commit()
        connection.execute("PRAGMA journal_mode = delete")


def fill_statements(runs: Sequence[RunRecord], points: int, no: str) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Yield SQL statements, each with its rows, that insert `runs` with `points` points; `no` is the word for false."""
    each = points // len(runs) // len(SERIES)
    yield "CREATE TEMPORARY TABLE load_keys (key varchar(250))", []
    yield "CREATE TEMPORARY TABLE load_numbers (number bigint)", []
    yield "INSERT INTO load_keys VALUES (?)", [(key,) for key in sorted(SERIES)]
    yield "INSERT INTO load_numbers VALUES (?)", [(number,) for number in range(each)]
    columns = "experiment_id, name, artifact_location, lifecycle_stage, creation_time, last_update_time, workspace"
    experiment = (int(EXPERIMENT), "load-0", "", "active", 0, 0, "default")
    yield f"INSERT INTO experiments ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", [experiment]
    columns = "run_uuid, name, user_id, source_type, status, start_time, end_time, lifecycle_stage, "
    columns += "experiment_id, artifact_uri"
    rows = []
    for run in runs:
        start, end = (round(datetime.fromisoformat(text).timestamp() * 1000) for text in (run.started, run.ended))
        rows.append((run.mlflow_run, run.name, "load", "LOCAL", "FINISHED", start, end, "active", int(EXPERIMENT), ""))
    yield f"INSERT INTO runs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
    tags = [(key, value, run.mlflow_run) for run in runs for key, value in (("herd.run", run.name), ("kind", "run"))]
    yield "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", tags
    params = [(f"recipe.{number}", "value", run.mlflow_run) for run in runs for number in range(PARAMS)]
    yield "INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)", params
    names = "key, value, timestamp, step, is_nan, run_uuid"
    # in the order of the primary key, which then grows at its end
    yield (
        f"INSERT INTO metrics ({names}) SELECT key, 2.0 + 1.0 / (1 + number), 1767225600000 + number * 60000, "
        f"number * 4194304, {no}, run_uuid FROM load_keys CROSS JOIN load_numbers CROSS JOIN runs",
        [],
    )
    yield (
        f"INSERT INTO latest_metrics ({names}) SELECT key, 2.0, {1767225600000 + each * 60000}, {each * 4194304}, "
        f"{no}, run_uuid FROM load_keys CROSS JOIN runs",
        [],
    )


def fill_postgres(uri: str, address: str, runs: Sequence[RunRecord], points: int) -> None:
    """Create MLflow's tables in an empty database, and insert `runs` with `points` points in all."""
    import psycopg2  # type: ignore[import-untyped]
    from mlflow.store.db import utils
    from psycopg2.extras import execute_values  # type: ignore[import-untyped]
    from sqlalchemy import create_engine

    engine = create_engine(uri)
    utils._initialize_tables(engine)
    engine.dispose()
    with closing(psycopg2.connect(address)) as connection, connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")  # no foreign key is looked up for each row
        for index in INDEXES:
            cursor.execute(f"DROP INDEX {index}")
        for statement, rows in fill_statements(runs, points, "false"):
            if rows:
                execute_values(cursor, re.sub(r"VALUES \(.*\)", "VALUES %s", statement), rows)
            else:
                cursor.execute(statement)
        for index, columns in INDEXES.items():
            cursor.execute(f"CREATE INDEX {index} ON metrics ({columns})")
        connection.commit()
        connection.autocommit = True
        cursor.execute("ANALYZE")


@contextmanager
def full_postgres(runs: Sequence[RunRecord], points: int) -> Iterator[str]:
    """Yield the URI of MLflow's database with `points` points on a Postgres that runs as deploy/ runs it.

    Raises NotMeasured if there is no Postgres here.
    """
    from herd.deploy import team
    from herd.deploy.services import Team

    folder = Path(tempfile.mkdtemp(prefix="herd-load-"))
    folder.chmod(0o755)  # Postgres runs as a user of its own
    names = ("HERD_POSTGRES_PORT", "HERD_PREFECT_PORT", "HERD_MLFLOW_PORT")
    ports = dict(zip(names, map(str, free_ports(3)), strict=True))
    given = {"HERD_TEAM": str(folder), "HERD_ROOT": str(folder / "root"), "HERD_DB_PASSWORD": SECRET, **ports}
    ours = Team({**given, "HERD_AUTH": f"herd:{SECRET}"})
    try:
        team.prepare(ours)
    except ValueError as error:  # no Postgres here, or no user for it
        shutil.rmtree(folder)
        raise NotMeasured(str(error)) from None
    service = ours.service("postgres")
    team.start(ours, service)
    try:
        team.await_answer(ours, service)
        asyncio.run(team.make_databases(ours))
        uri = ours.database("mlflow", "+psycopg2")
        fill_postgres(uri, ours.database("mlflow", ""), runs, points)
        yield uri
    finally:
        if (process := team.running(ours, service)) is not None:
            process.send_signal(service.stop)
            process.wait(60)
        shutil.rmtree(folder)


def status(run: LoadSession, name: str) -> Row:
    """CPU of `herd status`."""
    note = f"{run.runs:,} runs, {run.settings.artifacts:,} artifacts"
    return measured(name, run.command(run.root, "status"), note)


def compare(run: LoadSession, name: str) -> Row:
    """CPU of `herd compare` of three runs while an MLflow server answers, or of that server."""
    address, server = run.server
    if not run.compared:
        names = [record.name for record in Runs(run.root).family("load-0")[:COMPARED]]
        before = tree_seconds(server)
        cpu = run.command(run.root, "compare", *names, "--no-browser", MLFLOW_TRACKING_URI=address)
        run.compared = (cpu, tree_seconds(server) - before)
    if name == "compare/server":
        return measured(name, run.compared[1] / REPEATS, "of MLflow's server, for the same")
    points = f"{run.settings.points:,} points in MLflow, {STEPS_LOGGED * len(SERIES):,} in the files of each stage"
    return measured(name, run.compared[0], points)


def tree_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and those below it."""
    return float(sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True))))


def command(run: LoadSession, name: str) -> Row:
    """CPU of `herd gc` or `herd verify`, or by which power it grows with the artifacts."""
    word, _, what = name.partition("/")
    roots = {"empty": run.empty, "quarter": run.quarter, "all": run.root}
    for size, root in roots.items():
        if (word, size) not in run.cpu:
            more = {"MLFLOW_TRACKING_URI": ""} if word == "gc" else {}
            run.cpu[word, size] = run.command(root, word, *(["--databases", ""] if word == "gc" else []), **more)
    empty, quarter, full = (run.cpu[word, size] for size in roots)
    note = f"{empty:.1f} CPU s with none, {quarter:.1f} with a quarter, {full:.1f} with {run.settings.artifacts:,}"
    if what == "cpu":
        return measured(name, full, f"{run.settings.artifacts:,} artifacts")
    return measured(name, math.log((full - empty) / (quarter - empty), QUARTER), note)


def mlflow(run: LoadSession, name: str) -> Row:
    """Seconds of MLflow's store for the first page of its list of runs, or for four curves of each of three runs."""
    from mlflow import MlflowClient

    place, _, what = name.partition("/")
    client = MlflowClient(run.database if place == "mlflow" else run.postgres)
    points = run.settings.points if place == "mlflow" else run.settings.postgres_points
    runs = [record.mlflow_run for record in Runs(run.root).family("load-0")[:COMPARED]]
    client.get_run(runs[0])  # connects
    began, cpu = time.monotonic(), time.process_time()
    if what == "list":
        shown = len(client.search_runs([EXPERIMENT], "tags.kind = 'run'", max_results=PAGE))
        note = f"{shown} of {run.runs:,} runs"
    else:
        shown = sum(len(client.get_metric_history(run_id, key)) for run_id in runs for key in HISTORIES)
        note = f"{shown:,} of {points:,} points"
    seconds = time.monotonic() - began
    if not shown:
        raise RuntimeError(f"{name}: MLflow returned nothing")
    return measured(name, time.process_time() - cpu, f"{note}; {seconds:.1f} s of wall time")


def queued(run: LoadSession, name: str) -> Row:
    """Queue runs of one recipe at once on one root, by `herd up` and its deployment, and wait until all have ended."""
    (finished, wall), count = queue_runs(run.settings), run.settings.queued
    return measured(name, 100 * finished / count, f"{finished} of {count} in {wall:.0f} s, by record and by Prefect")


def queue_runs(given: LoadSettings) -> tuple[int, float]:
    """Return how many of the queued runs finished by record and by Prefect, and the seconds until all had ended."""
    from prefect import get_client
    from prefect.client.schemas.objects import TERMINAL_STATES, StateType
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from herd.flows.local_server import PASSWORD, child
    from herd.tasks.tracking.moved_root import ACCESS

    root, (prefect, mlflow_port) = Root.parse(given.folder / "queued"), free_ports(2)
    environment = {**os.environ, "PREFECT_HOME": str(given.folder / "prefect-up"), "HERD_THREADS": "1"}
    ports = ["--prefect-port", str(prefect), "--mlflow-port", str(mlflow_port)]
    began = time.monotonic()
    with child("up", [*given.herd, "up", "--root", root.uri, *ports], given.folder, environment) as up:
        access = root.local / ACCESS
        while not access.exists():
            if up.poll() is not None or time.monotonic() - began > START_S:
                raise NotMeasured(f"herd up did not start: {(given.folder / 'logs' / 'up.log').read_text()[-300:]}")
            time.sleep(0.5)
        password = next(word for word in shlex.split(access.read_text()) if word.startswith(f"{PASSWORD}="))
        api = {PREFECT_API_URL: f"http://127.0.0.1:{prefect}/api", PREFECT_API_AUTH_STRING: password.partition("=")[2]}
        with temporary_settings(api), get_client(sync_client=True) as client:
            for automation in client.read_automations_by_name(EVALUATES):
                client.pause_automation(automation.id)
            deployment = client.read_deployment_by_name("pipeline/pipeline")
            config = {"recipe": str(given.recipe.absolute()), "root": root.uri}
            runs = [
                client.create_flow_run_from_deployment(deployment.id, parameters={"config": config})
                for _ in range(given.queued)
            ]
            states = {str(each.id): StateType.SCHEDULED for each in runs}
            while not all(state in TERMINAL_STATES for state in states.values()):
                if up.poll() is not None or time.monotonic() - began > QUEUED_S * given.queued:
                    break
                time.sleep(5)
                found = [client.read_flow_run(each.id) for each in runs]
                states = {str(each.id): each.state_type or StateType.SCHEDULED for each in found}
        records = {record.prefect_run: record.state for record in Runs(root).all()}
        ended = [name for name, state in states.items() if state == StateType.COMPLETED]
        finished = sum(records.get(name) == "finished" for name in ended)
        wall = time.monotonic() - began
    return finished, wall


MEASURES: dict[str, Callable[[LoadSession, str], Row]] = {
    "status/cpu": status,
    "compare/cpu": compare,
    "compare/server": compare,
    "gc/cpu": command,
    "gc/linear": command,
    "verify/cpu": command,
    "verify/linear": command,
    "mlflow/list": mlflow,
    "mlflow/curves": mlflow,
    "postgres/list": mlflow,
    "postgres/curves": mlflow,
    "queued/ended": queued,
}


def load_rows(run: LoadSession) -> Iterator[Row]:
    """Yield the wanted rows as they are measured. Raises ValueError if the user asked for a row that there is not."""
    return rows_of(run, LOAD_TARGETS, MEASURES)
