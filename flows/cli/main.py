"""The command line: `herd run | rerun | fetch | rehearse | report | inspect | schema`, and the other files' commands.

Commands import what they need when they run, so that `herd plan` answers in a second. Wrong input ends with plain lines
and exit status 2, never with a traceback; docs/reference/commands.md lists every status.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup, TyperOption

from herd import __version__
from herd.flows.cli import models, ops
from herd.flows.cli.errors import (
    FAILED,
    DefaultGroup,
    JsonOption,
    RootOption,
    at_work,
    exit_as_judged,
    mistakes,
    option,
    out,
    print_json,
    problems,
    with_retries,
)
from herd.flows.cli.plan import planner
from herd.flows.cli.study import study
from herd.storage.filesystem import use_writable_cache
from herd.storage.processes import COMMAND, fix_import_path
from herd.storage.root import DEFAULT_ROOT, Root
from herd.storage.secrets import move_logins

PANELS = {
    "Start here": ("run", "plan", "status", "rerun", "up"),
    "Runs and studies": ("watch", "logs", "stop", "report", "compare", "inspect", "study", "rehearse"),
    "Recipes and data": ("fetch", "data", "schema"),
    "Models": (
        *("generate", "serve", "eval", "export", "merge"),
        *("promote", "approve", "reject", "rollback", "promotion-log"),
    ),
    "Operation": ("doctor", "hosts", "setup", "verify", "gc", "mlflow"),
}
"""Title -> commands, in the order of `herd --help`."""


class Panels(TyperGroup):
    """The commands in PANELS; one that is in none comes last."""

    def list_commands(self, ctx: Any) -> list[str]:
        titles = {name: title for title, names in PANELS.items() for name in names}
        for name, command in self.commands.items():
            command.rich_help_panel = titles.get(name, "Other")  # type: ignore[attr-defined]
        return [*(name for name in titles if name in self.commands), *(set(self.commands) - set(titles))]


option_class: Any = TyperOption  # a flag takes no value: not `--json <bool>`
shown_type = getattr(option_class, "display_type_rich", lambda option, ctx: None)
option_class.display_type_rich = lambda option, ctx: None if option.is_flag else shown_type(option, ctx)
app = typer.Typer(
    cls=Panels,
    help="Pretrain Llama 3 class models from raw text to a promoted checkpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"herd {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.add_typer(planner, name="plan")
app.add_typer(study, name="study")
RecipeArgument = Annotated[Path, typer.Argument(help="YAML file of a recipe, such as recipes/quickstart.yaml.")]
RunArgument = Annotated[str, typer.Argument(help="A run, such as quickstart-7.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a recipe field: stages.main.until=3M")]
ProcessesOption = Annotated[
    int, typer.Option(min=0, help="Trainer processes; 0: the number in the cluster file, or 1.")
]
ClusterOption = Annotated[
    Path | None, typer.Option("--cluster", help="YAML file, or a preset: dgx-h100, this-machine.")
]
UntilOption = Annotated[str, typer.Option(help="Last step to do: curate, tokenize, pretrain, a stage, ...")]
RestartOption = Annotated[
    bool,
    typer.Option("--restart-damaged", help="Train a stage again from its start if all its checkpoints are damaged."),
]
ThreadsOption = Annotated[
    int, typer.Option(min=0, envvar="HERD_THREADS", help="Processor threads for the run; 0: all.")
]


@app.command()
def run(
    recipe: RecipeArgument,
    set_: SetOption = None,
    root: RootOption = DEFAULT_ROOT,
    processes: ProcessesOption = 0,
    threads: ThreadsOption = 0,
    cluster: ClusterOption = None,
    until: UntilOption = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run even if the last one did not finish.")
    ] = False,
    restart_damaged: RestartOption = False,
    json_: JsonOption = False,
) -> None:
    """Run the whole chain on this machine: raw text to a promoted model. An interrupted run is continued."""
    fields = {"recipe": str(recipe), "fresh": fresh, "until": until, "restart_damaged": restart_damaged}
    _run(cluster, processes, threads, json_, root=root, overrides=set_ or [], **fields)


@app.command()
def rerun(
    run: RunArgument,
    from_: Annotated[
        str, typer.Option("--from", help="First step to redo; artifacts of earlier steps are reused.")
    ] = "",
    set_: SetOption = None,
    root: RootOption = DEFAULT_ROOT,
    processes: ProcessesOption = 0,
    threads: ThreadsOption = 0,
    cluster: ClusterOption = None,
    until: UntilOption = "",
    restart_damaged: RestartOption = False,
    json_: JsonOption = False,
) -> None:
    """Run the recipe of an earlier run again: reuse the artifacts before a step, redo the steps from it on."""
    fields = {"rerun_of": run, "from_step": from_, "until": until, "restart_damaged": restart_damaged}
    _run(cluster, processes, threads, json_, root=root, overrides=set_ or [], **fields)


@app.command()
def fetch(
    recipe: RecipeArgument,
    set_: SetOption = None,
    root: RootOption = DEFAULT_ROOT,
    jobs: Annotated[int, typer.Option(min=1, help="Files to download at the same time.")] = 8,
    update: Annotated[bool, typer.Option("--update", help="Take the newest revision of what is here already.")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only show files, bytes, tokens, hours, disk.")] = False,
    rate: Annotated[str, typer.Option(help="Bytes per second that --estimate assumes.")] = "100MB",
) -> None:
    """Download the data, tokenizer and weights that a recipe names elsewhere; `herd run` then reads the copies.

    A killed download continues with the same command.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from herd.llama3.recipe.units import Bytes
    from herd.storage.fetch import check_space, free_bytes, missing_bytes
    from herd.tasks.format import command, format_bytes, format_duration
    from herd.tasks.models.start import load_recipe
    from herd.tasks.plan.recipe import epoch_lines, fetch_files, fetch_lines, prepare_fetch, targets_of

    with mistakes():
        with option("--rate"):
            speed = Bytes.parse(rate)
        loaded = load_recipe(Root.parse(root), recipe, set_)
        with at_work("listing"):
            folder, addresses = prepare_fetch(loaded, Root.parse(root), update)
        if not addresses:
            out.print("everything that the recipe names is on this machine")
            return
        for line in [*fetch_lines(folder, addresses, sampled=estimate), *epoch_lines(loaded, addresses)]:
            out.print(line)
        missing = missing_bytes(folder, targets_of(addresses))
        needs = f"{format_bytes(missing)} to download, {format_bytes(free_bytes(folder))} free in {folder}"
        if estimate:
            out.print(f"{needs}; {format_duration(missing / speed)} at {format_bytes(speed)}/s")
            check_space(folder, targets_of(addresses))
            return
        out.print(needs if missing else f"[dim]nothing to download; the copies are in {folder}[/]")
        began = time.monotonic()
        columns = (TextColumn("fetch"), BarColumn(30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=out, disable=not (out.is_terminal and missing)) as bar:
            bar.add_task("fetch", total=0)
            (task,) = bar.tasks

            def progress(received: int, more: int) -> None:
                bar.update(task.id, advance=received, total=(task.total or 0) + more)

            try:
                fetch_files(loaded, folder, addresses, jobs, progress)
            except Exception:
                problems.print(f"{format_bytes(task.completed)} downloaded; run the same command to resume")
                raise
        files = sum(len(target.selected) for target in targets_of(addresses))
        took = format_duration(time.monotonic() - began)
        out.print(
            f"{files:,} files are here"
            + (f"; {format_bytes(task.completed)} downloaded in {took}" if task.completed else "")
        )
        out.print(f"next: {escape(command(Root.parse(root), 'run', str(recipe)))}")


@app.command()
def rehearse(
    recipe: RecipeArgument,
    set_: SetOption = None,
    root: RootOption = DEFAULT_ROOT,
    cluster: ClusterOption = None,
    processes: Annotated[int, typer.Option(min=1, help="Maximum trainer processes of this machine.")] = 8,
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Run the whole chain in small here, with a kill and a resume, and show what would go wrong at full size."""
    from herd.flows.local_server import quiet_prefect, start_temporary_server
    from herd.tasks.cluster import Cluster, load_cluster
    from herd.tasks.console import TerminalConsole, console_as
    from herd.tasks.models.start import load_recipe

    with mistakes():
        base = Root.parse(root)
        loaded, chosen_cluster = load_recipe(base, recipe, set_), load_cluster(cluster) if cluster else Cluster()
        problems.print("[dim]starting Prefect[/]")
        quiet_prefect()
        ready = start_temporary_server(base)
        from herd.flows.rehearsal import rehearse as run_rehearsal
        from herd.tasks.operate.rehearsal import print_rehearsal

        ready()
        with console_as(TerminalConsole(problems if json_ else out)):  # with --json standard output is JSON
            rehearsal, page = with_retries(lambda: run_rehearsal(loaded, chosen_cluster, base, processes))
        if json_:
            print(json.dumps(rehearsal.as_dict(), indent=1))
        else:
            print_rehearsal(rehearsal, out)
        problems.print(f"[dim]{page}[/]")
        if rehearsal.faults:
            raise typer.Exit(FAILED)


@app.command()
def report(run: RunArgument, root: RootOption = DEFAULT_ROOT) -> None:
    """Write the report of a run again from its tracked values."""
    with mistakes():
        with at_work("report"):
            from herd.tasks.report.run import make_report  # imports matplotlib and MLflow

            page = make_report(Root.parse(root), run)
        out.print(f"{page}")


@app.command()
def inspect(
    run: RunArgument,
    tokens: Annotated[str, typer.Option(help="Positions from:to, such as 120M:121M.")],
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of documents to list.")] = 20,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Show the documents, sources and licenses of a run's tokens."""
    from herd.tasks.models.lookup import inspect_run, inspection_tables, parse_span

    with mistakes():
        with option("--tokens"):
            parse_span(tokens)
        inspection = inspect_run(Root.parse(root), run, tokens, limit)
        if json_:
            print_json({"run": run, **inspection.as_dict()})
            return
        for table in inspection_tables(inspection):
            out.print(table)
            out.print()
        if not inspection.complete:
            out.print(f"[dim]the first {len(inspection.documents)} stretches; --limit shows more[/]")


data = typer.Typer(cls=DefaultGroup, help="The data alone, without training: `herd data RECIPE`.", no_args_is_help=True)


@data.command("make")
def make_data(
    recipe: RecipeArgument,
    set_: SetOption = None,
    root: RootOption = DEFAULT_ROOT,
    threads: ThreadsOption = 0,
    cluster: ClusterOption = None,
    count: Annotated[bool, typer.Option("--count", help="Only count tasks, files and requests of a store.")] = False,
    size: Annotated[str, typer.Option(help="Size of the corpus to count for, 60TB; else that of the sources.")] = "",
) -> None:
    """Collect, curate and tokenize; the report has the data page. A later `herd run` reuses all of it."""
    if size and not count:
        with mistakes():
            raise ValueError(f"--size {size}: says for which size --count counts; give both")
    if count:
        _count_data(recipe, set_ or [], root, threads, cluster, size)
        return
    fields = {"recipe": str(recipe), "fresh": False, "until": "tokenize"}
    _run(cluster, 0, threads, False, root=root, overrides=set_ or [], **fields)


def _count_data(recipe: Path, changes: list[str], root: str, threads: int, cluster: Path | None, size: str) -> None:
    from herd.llama3.data.count import count_requests
    from herd.llama3.evaluate.suite import with_evaluation_sets
    from herd.llama3.recipe.units import Bytes
    from herd.storage.fetch import use_fetched
    from herd.tasks.cluster import Cluster, load_cluster
    from herd.tasks.executors import workers_of
    from herd.tasks.models.start import load_recipe
    from herd.tasks.report.data import print_count

    with mistakes(), tempfile.TemporaryDirectory(prefix="herd-count-") as folder:
        use_fetched(Root.parse(root))
        machines = load_cluster(cluster) if cluster else Cluster(**({"threads": threads} if threads else {}))
        given = Bytes.parse(size) if size else None
        loaded = with_evaluation_sets(load_recipe(Root.parse(root), recipe, changes))
        with at_work("sample"):
            count = count_requests(loaded, Path(folder), size=given, workers=workers_of(machines))
        print_count(count, out)


@data.command("try")
def try_data(
    recipe: RecipeArgument,
    set_: SetOption = None,
    sample: Annotated[int, typer.Option(min=1, help="Documents of each source.")] = 1000,
    examples: Annotated[int, typer.Option(min=0, help="Documents to show of each outcome, at most 8.")] = 1,
    rule: Annotated[str, typer.Option(help="Show only what this rule drops, in longer excerpts.")] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Show the documents that each rule of curation would drop from a sample."""
    from herd.llama3.data.accounting import EXPLAINED, KEPT
    from herd.llama3.data.curate import CURATION, curate_sample
    from herd.llama3.evaluate.suite import with_evaluation_sets
    from herd.llama3.recipe.load import did_you_mean
    from herd.storage.fetch import use_fetched
    from herd.tasks.models.start import load_recipe
    from herd.tasks.report.data import print_sample

    with mistakes(), tempfile.TemporaryDirectory(prefix="herd-sample-") as folder:
        rules = [name for stage in CURATION for name in stage.reasons] + [
            name for name in EXPLAINED if name not in KEPT
        ]
        if rule and rule not in rules and not rule.startswith("score_"):
            meant = "" if rule in KEPT else did_you_mean(rule, rules, str)
            raise ValueError(f"--rule: {rule!r} is not a rule; {meant}rules: {', '.join(rules)}")
        use_fetched(Root.parse(root))
        loaded = with_evaluation_sets(load_recipe(Root.parse(root), recipe, set_))
        emptied = ""
        problems.print(f"[dim]reading up to {sample:,} documents of each source[/]")
        try:
            with at_work("sample"):
                curate_sample(loaded, sample, Path(folder), lambda line: problems.print(f"[yellow]{escape(line)}[/]"))
        except ValueError as error:  # a domain that keeps nothing: the tables say why
            emptied = str(error)
            if not (Path(folder) / "curated" / "ledger.parquet").exists():
                raise
        print_sample(Path(folder), loaded, out, examples, rule)
        if emptied:
            problems.print(f"[red]error[/]  {escape(emptied)}")
            raise typer.Exit(FAILED)


@data.command()
def why(
    document: Annotated[str, typer.Argument(help="Its id or the first 8 digits of it, its URL, path or text.")],
    run: Annotated[str, typer.Option(help="Run whose curated data is looked at.")] = "latest",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Say why a document is not, or not whole, in the training data of a run."""
    from herd.flows.run_lifecycle import find_run
    from herd.llama3.data.accounting import find_documents, text_as_read
    from herd.storage.object_artifact import open_store
    from herd.tasks.report.data import why_lines

    with mistakes():
        at = Root.parse(root)
        record = find_run(at, run)
        if "curate" not in record.steps:
            raise ValueError(f"run: {record.name} has no curated data; name another run with --run")
        curated = open_store(at).load(record.steps["curate"].artifact)
        asked = os.path.abspath(document) if os.path.lexists(document) else document
        found = list(find_documents(str(curated.path), asked))
        if not found:
            raise ValueError(
                f"document: {document[:80]!r} is not in the curated data of {record.name}, kept or dropped; a text "
                "must be whole and as it was read, and what could not be read has no id (see the report)"
            )
        for row in found:
            text = ""
            if row["spans"]:
                with suppress(ValueError):  # `herd gc` has deleted what was collected
                    collected = open_store(at).load(record.steps["collect"].artifact)
                    text = text_as_read(collected.uri, row["id"], row["domain"])
            for line in why_lines(row, text):
                out.print(line, soft_wrap=True, highlight=False)


for command in (
    *(models.generate, models.serve, models.export, models.merge),
    *(ops.up, ops.setup, ops.status, ops.logs, ops.stop, ops.compare),
    *(ops.watch, ops.doctor, ops.hosts, ops.gc, ops.verify),
    *(ops.promote, ops.approve, ops.reject, ops.rollback, ops.promotion_log),
):
    app.command()(command)
app.add_typer(data, name="data")
app.add_typer(models.evaluation, name="eval")
app.add_typer(ops.mlflow, name="mlflow")


@app.command()
def schema(
    study: Annotated[bool, typer.Option("--study", help="The fields of a study instead of a recipe.")] = False,
    cluster: Annotated[bool, typer.Option("--cluster", help="The fields of a cluster file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON Schema, for editors.")] = False,
) -> None:
    """Print the reference of all fields of a recipe, a study or a cluster file as markdown."""
    from herd.llama3.recipe.reference import json_schema, recipe_reference
    from herd.llama3.recipe.schema import Recipe
    from herd.llama3.studies.study import Study, study_reference
    from herd.tasks.cluster import Cluster, cluster_reference

    with mistakes():
        if study and cluster:
            raise ValueError("--study and --cluster are two files; give one of them")
        if as_json:
            print(json.dumps(json_schema(Study if study else Cluster if cluster else Recipe), indent=1))
        else:
            print(study_reference() if study else cluster_reference() if cluster else recipe_reference(), end="")


def _run(cluster_file: Path | None, processes: int, threads: int, json_: bool, **fields: Any) -> None:
    """Run the pipeline with the parameters `fields` on the cluster of a file, or on this machine.

    With `json_` standard output is the document of `herd status RUN --json`; all other lines go to standard error.
    """
    from herd.flows.local_server import quiet_prefect, start_temporary_server
    from herd.flows.recipe_form import PipelineParameters, chosen_recipe
    from herd.tasks.cluster import load_cluster, make_cluster
    from herd.tasks.console import TerminalConsole, console_as, working
    from herd.tasks.operate.preflight import check_run
    from herd.tasks.pipeline_steps import check_step
    from herd.tasks.runs.records import Runs, now

    with mistakes("the same command without --fresh" if fields.get("fresh") else "the same command"):
        changes = {name: value for name, value in {"processes": processes, "threads": threads}.items() if value}
        config = PipelineParameters(**fields)
        root, runs = config.root_at, Runs(config.root_at)
        # find wrong input within a second, before Prefect starts
        recipe = chosen_recipe(config)
        check_step(recipe, "--from", config.from_step)
        check_step(recipe, "--until", config.until)
        preset = None
        if cluster_file and not cluster_file.is_file():
            from herd.tasks.plan.presets import cluster_of

            preset = cluster_of(str(cluster_file), recipe, root)
        if preset is not None or not cluster_file:
            cluster = make_cluster({**(preset.model_dump() if preset else {}), **changes})
        else:
            cluster = load_cluster(cluster_file, **changes)
        config = config.model_copy(update={"cluster": cluster})
        check_run(recipe, cluster, root, until=config.until)
        console = TerminalConsole(shown := problems if json_ else out)
        shown.print("[dim]starting Prefect[/]")
        quiet_prefect()
        with working(console, "Prefect"):
            ready = start_temporary_server(root)
            from httpx import HTTPError, HTTPStatusError, TransportError
            from prefect import get_client

            from herd.flows.pipeline import pipeline
            from herd.tasks.operate.recovery import reconcile_record
            from herd.tasks.operate.status import run_document, summary_lines
            from herd.tasks.tracking.mlflow_store import preload

            preload()  # while the server starts
            ready()
        began = now()
        try:
            with console_as(console):
                name = with_retries(lambda: pipeline(config))
        except (TransportError, HTTPStatusError):  # the server went away; the run itself may be complete
            finished = [record.name for record in runs.all() if record.state == "finished" and record.ended > began]
            if not finished:
                raise
            name = finished[-1]
            with suppress(HTTPError), get_client(sync_client=True) as client:  # Prefect may show it as Failed
                reconcile_record(root, client, f"runs/{name}")
        threads = 0 if os.environ.get("HERD_THREADS") else threads
        options = {"--cluster": cluster_file, "--processes": processes, "--threads": threads}
        arguments = [word for option, value in options.items() if value for word in (option, str(value))]
        for line in summary_lines(root, name, arguments):  # the summary proposes commands with the same options
            shown.print(line)
        if json_:
            print_json(run_document(root, name))
        exit_as_judged(root, name)


def main() -> None:
    """Entry point of the `herd` command."""
    COMMAND.set()
    fix_import_path()
    use_writable_cache()
    move_logins()  # before Prefect reads its settings
    sys.exit(app())


if __name__ == "__main__":
    main()
