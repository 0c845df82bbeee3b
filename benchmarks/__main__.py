"""Measure what the parts of herd cost, beside their peers: `python -m benchmarks data|train|... --json`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from herd.flows.cli.errors import RootOption, mistakes, problems
from herd.storage.root import DEFAULT_ROOT, Root

if TYPE_CHECKING:
    from benchmarks.rows import Row
    from benchmarks.session import Session
    from benchmarks.train_session import TrainSession


# Output: a table for people, JSON for machines, and each row's name as it is measured.

out = Console(highlight=False)


def collect_rows(measured: Iterator[Row], quiet: bool) -> list[Row]:
    """Return the rows, naming each on standard error as it is measured."""
    rows = []
    for row in measured:
        rows.append(row)
        if not quiet:
            problems.print(f"[dim]{row.name}[/]")
    return rows


def print_rows(
    corpus: dict[str, Any], rows: list[Row], versions: dict[str, str], as_json: bool, path: Path | None
) -> None:
    """Print the rows, and write them to `path` if there is one."""
    from benchmarks.rows import report

    document = report(rows, corpus, versions)
    text = json.dumps(document, indent=1)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    if as_json:
        print(text)
        return
    out.print(_table(rows))
    out.print(_environment_line(document))


def _table(rows: Sequence[Row]) -> Table:
    from benchmarks.rows import number

    table = Table(box=None, pad_edge=False)
    for column in ("name", "value", "unit", "target", "ok", ""):
        table.add_column(column, justify="right" if column in ("value", "target") else "left", no_wrap=column == "name")
    verdicts = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for row in rows:
        value = "-" if row.value is None else number(row.value)
        table.add_row(row.name, value, row.unit, row.target, verdicts[row.ok], escape(row.note))
    return table


def _environment_line(document: dict[str, Any]) -> str:
    """Return machine, corpus, peers and date in one line."""
    machine, corpus = document["machine"], document["corpus"]
    peers = ", ".join(f"{name} {version}" for name, version in document["peers"].items() if name != "numpy")
    text = f"; {corpus['documents']:,} documents, {corpus['mb']} MB" if corpus else ""
    return f"{machine['cpu']}, {machine['cores']} cores{text}; peers: {peers or 'none'}; {document['date']}"


bench = typer.Typer(help="Measure parts of herd on this machine, beside their peers.", no_args_is_help=True)
SHARED = Path(__file__).parents[2] / "shared"
JsonOption = Annotated[bool, typer.Option("--json", help="Print the rows as JSON, with date, machine and versions.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.")]
WorkOption = Annotated[Path | None, typer.Option(help="Folder to work in and to leave; default: a temporary one.")]
PeersOption = Annotated[
    str,
    typer.Option(envvar="HERD_BENCH_PEERS", help="Python that has the peers; default: this one.", show_default=False),
]


@bench.command()
def data(
    json_: JsonOption = False,
    only: Annotated[
        str, typer.Option(help="Rows or groups, with commas: minhash,lines/exact; only if named: scale, an hour.")
    ] = "",
    size: Annotated[
        Literal["small", "full"], typer.Option(help="About 4 MB of text (a minute or two), or 43 MB.")
    ] = "small",
    out_: OutOption = None,
    peers: PeersOption = "",
    peer_mb: Annotated[float, typer.Option(help="Give the peers the first MB of the text only; 0: all.")] = 0,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of jsonl files; default: shared prose, or what is installed.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tiktoken tokenizer.model; default: shared, or trained here.")
    ] = None,
    work: WorkOption = None,
) -> None:
    """Data production: pipeline, near-duplicates, lines, filters, tokens, mix, stream, memory. CPU time, one core."""
    from benchmarks.measure import peer_versions
    from benchmarks.session import DataSettings, Session

    with tempfile.TemporaryDirectory(prefix="herd-bench-") as temporary:
        settings = DataSettings(
            folder=_empty(work) if work else Path(temporary),
            size=size,
            only=tuple(filter(None, only.split(","))),
            peers=peers or sys.executable,
            peer_bytes=int(peer_mb * 1e6),
            corpus=corpus or _shared("corpora/general"),
            tokenizer=tokenizer or _shared("tokenizer/tokenizer.model"),
        )
        with _mistakes():
            versions = peer_versions(settings.peers)
            session = Session(settings)
            with session.closing:
                rows = _measure(session, quiet=json_)
        print_rows(session.described, rows, versions, json_, out_)


@bench.command()
def train(
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows or groups of rows, with commas: step,loss/time")] = "",
    size: Annotated[
        Literal["tiny", "small", "full"], typer.Option(help="full: both models, about 40 minutes; tiny: to try it out.")
    ] = "small",
    out_: OutOption = None,
    peers: PeersOption = "",
    work: WorkOption = None,
) -> None:
    """Training: steps beside public models, loss, checkpoints, restart, loader, layouts, GPU. One core, CPU time."""
    from benchmarks.train_session import TrainSession, TrainSettings

    with tempfile.TemporaryDirectory(prefix="herd-bench-") as temporary:
        session = TrainSession(
            TrainSettings(
                folder=_empty(work) if work else Path(temporary),
                size=size,
                only=tuple(filter(None, only.split(","))),
                peers=peers or sys.executable,
                restart=_restart,
            )
        )
        with _mistakes():
            rows = _measure_training(session, quiet=json_)
        print_rows({}, rows, session.versions, json_, out_)


@bench.command("gpu-day")
def gpu_day(
    minutes: Annotated[float, typer.Option(help="Time for the rows; what does not fit is not measured.")] = 36,
    only: Annotated[str, typer.Option(help="Rows of gpu/, or their beginnings, with commas: values,chain,8b")] = "",
    out_: Annotated[
        Path | None, typer.Option("--out", help="The page; default: docs/benchmarks/<date>-gpu.md.")
    ] = None,
) -> None:
    """All rows of a GPU, the most valuable first, and a calibration for the planner, as a dated page."""
    from datetime import date

    from benchmarks.gpu_day import measure_day

    page = out_ or Path(f"docs/benchmarks/{date.today().isoformat()}-gpu.md")
    with _mistakes():
        measure_day(minutes, tuple(filter(None, only.split(","))), page)


@bench.command()
def storage(
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows or groups of rows, with commas: write,reuse/local")] = "",
    size: Annotated[
        Literal["tiny", "small", "full"], typer.Option(help="full: 10,000 artifacts in the object store too.")
    ] = "small",
    out_: OutOption = None,
    endpoint: Annotated[
        str, typer.Option(help="URL of an S3 server, keys in AWS_*; default: moto is started.", show_default=False)
    ] = "",
    bucket: Annotated[str, typer.Option(help="Bucket to write to; with --endpoint it must exist.")] = "herd-bench",
) -> None:
    """Object store: commits beside a bare put_file, and how long it takes to see that a stage is done."""
    from benchmarks.rows import installed
    from benchmarks.storage import StorageSession, StorageSettings, storage_rows

    names = tuple(filter(None, only.split(",")))
    with tempfile.TemporaryDirectory(prefix="herd-bench-") as temporary:
        settings = StorageSettings(Path(temporary), size, names, endpoint, bucket)
        with _mistakes(), StorageSession(settings) as session:
            rows = collect_rows(storage_rows(session), json_)
        print_rows({}, rows, installed(("s3fs", "moto")), json_, out_)


@bench.command()
def load(
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows or groups of rows, with commas: status,compare/cpu")] = "",
    artifacts: Annotated[int, typer.Option(min=400, help="In the root, of a tenth as many runs.")] = 10_000,
    points: Annotated[
        int, typer.Option(help="Of all runs in MLflow's SQLite file; 45 million take 20 GB.")
    ] = 4_500_000,
    postgres_points: Annotated[int, typer.Option(help="Of all runs in MLflow's Postgres.")] = 4_500_000,
    queued: Annotated[int, typer.Option(min=1, help="Runs queued at once.")] = 20,
    out_: OutOption = None,
    work: Annotated[Path | None, typer.Option(help="Folder to work in; an earlier call's root is used again.")] = None,
) -> None:
    """A root and databases in use for a year: status, compare, gc, verify, MLflow, and 20 runs queued at once."""
    from benchmarks.load import LoadSession, LoadSettings, load_rows
    from benchmarks.rows import installed

    names = tuple(filter(None, only.split(",")))
    with tempfile.TemporaryDirectory(prefix="herd-bench-") as temporary:
        folder = work.absolute() if work else Path(temporary)
        settings = LoadSettings(folder, names, artifacts, points, postgres_points, queued)
        with _mistakes(), LoadSession(settings) as session:
            rows = collect_rows(load_rows(session), json_)
        print_rows({}, rows, installed(("mlflow", "prefect", "duckdb")), json_, out_)


@bench.command()
def evaluate(
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows or groups of rows, with commas: lm-eval,sharing/wall")] = "",
    size: Annotated[Literal["tiny", "small"], typer.Option(help="Of the random model; tiny: to try it out.")] = "small",
    limit: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 100,
    model: Annotated[
        str, typer.Option(help="Model folder with its tokenizer, or a GGUF file; default: random weights.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Folder of benchmark files; default: eval of the shared data.")
    ] = None,
    out_: OutOption = None,
    peers: PeersOption = "",
    work: WorkOption = None,
) -> None:
    """Evaluation: the same tasks by herd and by lm-eval on the same weights, one thread. Wants a quiet machine."""
    from benchmarks.evaluate import EvaluateSession, EvaluateSettings, evaluate_rows
    from benchmarks.rows import installed

    names = tuple(filter(None, only.split(",")))
    with tempfile.TemporaryDirectory(prefix="herd-bench-") as temporary:
        folder = _empty(work) if work else Path(temporary)
        given = EvaluateSettings(folder, data or _shared("eval") or SHARED / "eval", size, limit, model, names, peers)
        with _mistakes():
            rows = collect_rows(evaluate_rows(EvaluateSession(given)), json_)
        print_rows({}, rows, installed(("lm_eval", "transformers", "datasets", "torch")), json_, out_)


@bench.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="Recipe to plan.")] = Path("recipes/llama3-405b.yaml"),
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows or groups of rows, with commas: search,recipe/cpu")] = "",
    out_: OutOption = None,
) -> None:
    """Planning: layouts searched per CPU second, CPU time of `herd plan`, and start-up of commands."""
    from benchmarks.plan import PlanSession, PlanSettings, plan_rows

    names = tuple(filter(None, only.split(",")))
    with _mistakes():
        settings = PlanSettings(names, (sys.executable, "-m", "herd.flows.cli.main"), str(recipe))
        rows = collect_rows(plan_rows(PlanSession(settings)), json_)
    print_rows({}, rows, {}, json_, out_)


@bench.command()
def study(
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows or groups of rows, with commas: alpha,same/mix")] = "",
    ladder: Annotated[Path, typer.Option(help="Study file whose grid is tried on made-up losses.")] = Path(
        "recipes/experiments/ladder-llama3.yaml"
    ),
    out_: OutOption = None,
) -> None:
    """Studies: how often intervals hold the truth, and how often a difference is found where there is none."""
    from benchmarks.study import StudySession, StudySettings, study_rows

    with _mistakes():
        rows = collect_rows(
            study_rows(StudySession(StudySettings(tuple(filter(None, only.split(","))), ladder))), json_
        )
    print_rows({}, rows, {}, json_, out_)


@bench.command()
def gate(
    tries: Annotated[int, typer.Option(min=10, help="Made-up pairs of models of each kind.")] = 200,
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows or groups of rows, with commas: quickstart,default/equal")] = "",
    out_: OutOption = None,
) -> None:
    """Promotion rules: how often an equal, a better and a worse model pass those of our recipes."""
    from benchmarks.gate import GateSession, GateSettings, gate_rows

    with _mistakes():
        rows = collect_rows(gate_rows(GateSession(GateSettings(tuple(filter(None, only.split(","))), tries))), json_)
    print_rows({}, rows, {}, json_, out_)


@bench.command()
def chaos(
    minutes: Annotated[
        float, typer.Option(min=0, help="Time in which faults happen; then all runs come to an end.")
    ] = 30,
    seed: Annotated[int, typer.Option(help="Which faults, and when.")] = 1,
    json_: JsonOption = False,
    out_: OutOption = None,
    work: WorkOption = None,
) -> None:
    """Runs in an object store under kills, pauses, full disks and lost replies: is anything lost? Needs root."""
    from benchmarks.chaos import World
    from benchmarks.chaos_checks import broken_promises, chaos_rows, undisturbed
    from benchmarks.rows import installed

    with tempfile.TemporaryDirectory(prefix="herd-bench-") as temporary:
        world = World(_empty(work) if work else Path(temporary), seed, lambda line: problems.print(escape(line)))
        with _mistakes((ValueError, RuntimeError)), world.running():
            reference = undisturbed(world)
            world.inject(minutes)
            rows = list(chaos_rows(world, reference, *broken_promises(world, reference)))
        print_rows({}, rows, installed(("prefect", "mlflow", "torch", "swift")), json_, out_)


@bench.command()
def owners(
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows, with commas: owners/blocked,owners/lies")] = "",
    kills: Annotated[int, typer.Option(min=1, help="Deaths, each kind about as often.")] = 120,
    minutes: Annotated[float, typer.Option(help="After so long no further one begins.")] = 40,
    seed: Annotated[int, typer.Option(help="Their order.")] = 1,
    out_: OutOption = None,
    work: WorkOption = None,
) -> None:
    """Kill workers, flow runs, `herd up` and `herd run` at each state: does anything wait for the dead?"""
    from benchmarks.owners import OwnersSession, OwnersSettings, owners_rows
    from benchmarks.rows import installed

    with tempfile.TemporaryDirectory(prefix="herd-bench-") as temporary:
        folder, names = _empty(work) if work else Path(temporary), tuple(filter(None, only.split(",")))
        session = OwnersSession(
            OwnersSettings(folder, kills, seed, minutes, names), lambda line: problems.print(escape(line))
        )
        with _mistakes((ValueError, RuntimeError)):
            session.kill_all()
            rows = collect_rows(owners_rows(session), json_)
        print_rows({}, rows, installed(("prefect", "mlflow")), json_, out_)


@bench.command()
def house(
    json_: JsonOption = False,
    only: Annotated[str, typer.Option(help="Rows or groups of rows, with commas: folders,tests/misnamed")] = "",
    out_: OutOption = None,
) -> None:
    """The source itself: callers in editors, imports, files up to the first step, lists, names of tests."""
    from benchmarks.house import HouseSession, HouseSettings, house_rows

    with _mistakes():
        rows = collect_rows(house_rows(HouseSession(HouseSettings(tuple(filter(None, only.split(",")))))), json_)
    print_rows({}, rows, {}, json_, out_)


@bench.command("plan-anchors")
def plan_anchors(
    number: Annotated[str, typer.Argument(help="One anchor, such as A7; empty: all.")] = "", json_: JsonOption = False
) -> None:
    """Compare the planner with published figures (A1 to A26); exit status 1 if one is outside its target."""
    from benchmarks.plan_anchors.run import anchor_table, compare_with_published, verdict_line

    with mistakes():
        anchors = compare_with_published(number)
        if json_:
            print(json.dumps([anchor.as_dict() for anchor in anchors], indent=1))
        else:
            out.print(anchor_table(anchors))
            out.print(verdict_line(anchors))
        if any(anchor.wrong for anchor in anchors):
            raise typer.Exit(1)


@bench.command("fault-test")
def fault_test(
    run: Annotated[
        str, typer.Argument(help="A run of the root: source of the tokens, and of the shape of its first stage.")
    ],
    root: RootOption = DEFAULT_ROOT,
    processes: Annotated[int, typer.Option(min=2, help="Trainer processes on this machine.")] = 2,
    seed: Annotated[int, typer.Option(help="The same seed gives the same failures.")] = 1,
    seconds: Annotated[float, typer.Option(help="Duration of the failure injection in seconds.")] = 300.0,
    mtti: Annotated[float, typer.Option(help="Mean time between two failures in seconds.")] = 100.0,
    json_: JsonOption = False,
) -> None:
    """Kill and hang ranks of a real run by a seeded trace; compare effective time with the planner's prediction."""
    from benchmarks.fault_test import FaultTestSettings, fault_test_lines, run_fault_test
    from herd.tasks.cluster import Cluster

    with mistakes():
        settings = FaultTestSettings(seed, seconds, mtti)
        result = run_fault_test(Root.parse(root), run, Cluster(processes=processes), settings)
        if json_:
            print(json.dumps(result.as_dict(), indent=1))
        else:
            for line in fault_test_lines(result):
                out.print(line)


@contextmanager
def _mistakes(kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Turn a user's mistake, or errors of other `kinds`, into a line and exit status 2."""
    try:
        yield
    except kinds as error:
        problems.print(f"[red]error[/]  {escape(str(error))}")
        raise typer.Exit(2) from None


def _restart(job: Path, ranks: int, logs: Path, torchrun: bool) -> float:
    from benchmarks.restart import measure_restart

    return measure_restart(job, ranks, logs, torchrun).total


def _measure_training(session: TrainSession, quiet: bool) -> list[Row]:
    from benchmarks.train import train_rows

    return collect_rows(train_rows(session), quiet)


def _measure(session: Session, quiet: bool) -> list[Row]:
    from benchmarks.data import data_rows

    return collect_rows(data_rows(session), quiet)


def _shared(name: str) -> Path | None:
    """Return a file or folder of the shared data, if it is there."""
    path = Path(os.environ.get("HERD_SHARED", SHARED)) / name
    return path if path.exists() else None


def _empty(folder: Path) -> Path:
    """Return `folder`, made if need be. Raises typer.BadParameter if something is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise typer.BadParameter(f"{folder} is not empty; give another", param_hint="--work")
    return folder.absolute()


if __name__ == "__main__":
    bench(prog_name="python -m benchmarks")
