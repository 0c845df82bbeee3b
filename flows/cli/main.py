"""The command line: `herd plan | run | rerun | report | eval | generate | export | inspect`, and what other files add.

Commands import what they need when they run, so that `herd plan` answers in a second. A user's mistake is one or more
plain lines and exit status 2, never a traceback; docs/reference/commands.md has every status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.errors import RootOption, exit_as_judged, mistakes, out, patiently
from flows.cli.models import add_requests, add_uses, evaluate
from flows.cli.ops import add_operations, add_promotions
from flows.cli.plan import planner
from flows.cli.study import study
from storage.processes import fix_import_path
from storage.root import DEFAULT_ROOT, Root
from storage.secrets import move_logins

if TYPE_CHECKING:
    from flows.recipe_form import PipelineParameters
    from tasks.cluster import Cluster

app = typer.Typer(
    help="Pretrain Llama 3 class models from raw text to a promoted checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"herd {version('herd')}")
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
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a recipe field: stages.main.until=3M")]
ProcessesOption = Annotated[int, typer.Option(help="Trainer processes; 0: as the cluster file says, or 1.")]
ClusterOption = Annotated[
    Path | None, typer.Option("--cluster", help="YAML file: processes, layout, launcher, and where else it runs.")
]
UntilOption = Annotated[str, typer.Option(help="Last step to do: curate, tokenise, pretrain, a stage, ...")]
RestartOption = Annotated[
    bool,
    typer.Option("--restart-damaged", help="Train a stage again from its start if all its checkpoints are damaged."),
]
ThreadsOption = Annotated[int, typer.Option(envvar="HERD_THREADS", help="Processor threads for the run; 0: all.")]


@app.command()
def run(
    recipe: Path,
    set_: SetOption = None,
    root: RootOption = DEFAULT_ROOT,
    processes: ProcessesOption = 0,
    threads: ThreadsOption = 0,
    cluster: ClusterOption = None,
    until: UntilOption = "",
    new: Annotated[bool, typer.Option("--new", help="Begin a new run even if the last one did not finish.")] = False,
    restart_damaged: RestartOption = False,
) -> None:
    """Run the whole chain here: raw text to a promoted model. An interrupted run is continued."""
    from flows.recipe_form import PipelineParameters

    with mistakes():
        where = _cluster(cluster, processes, threads)
    asked = {"new": new, "until": until, "restart_damaged": restart_damaged}
    config = PipelineParameters(recipe=str(recipe), overrides=set_ or [], root=root, cluster=where, **asked)
    _run(config, _given(cluster, processes, threads))


@app.command()
def rerun(
    run: str,
    from_: Annotated[str, typer.Option("--from", help="Step to redo from; what is upstream is reused.")] = "",
    set_: SetOption = None,
    root: RootOption = DEFAULT_ROOT,
    processes: ProcessesOption = 0,
    threads: ThreadsOption = 0,
    cluster: ClusterOption = None,
    until: UntilOption = "",
    restart_damaged: RestartOption = False,
) -> None:
    """Run an earlier run's recipe again: reuse what is upstream of a step, redo what is downstream."""
    from flows.recipe_form import PipelineParameters

    with mistakes():
        where = _cluster(cluster, processes, threads)
    asked = {"from_step": from_, "until": until, "restart_damaged": restart_damaged}
    config = PipelineParameters(rerun_of=run, overrides=set_ or [], root=root, cluster=where, **asked)
    _run(config, _given(cluster, processes, threads))


@app.command()
def report(run: str, root: RootOption = DEFAULT_ROOT) -> None:
    """Write the report of a run again from what was tracked."""
    from tasks.report.run import make_report

    with mistakes():
        out.print(f"{make_report(Root.of(root), run)}")


@app.command()
def inspect(
    run: str,
    tokens: Annotated[str, typer.Option(help="Positions from:to, such as 120M:121M.")],
    limit: Annotated[int, typer.Option(min=0, help="Most documents to list.")] = 20,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Show which documents, sources and licences the tokens of a run came from."""
    from tasks.models.provenance import inspect_run, inspection_tables

    with mistakes():
        found = inspect_run(Root.of(root), run, tokens, limit)
        for table in inspection_tables(found):
            out.print(table)
            out.print()
        if not found.complete:
            out.print(f"[dim]the first {len(found.documents)} stretches; --limit shows more[/]")


add_uses(app)
app.command("eval")(evaluate)
add_operations(app)
add_promotions(app)
add_requests(app)


@app.command()
def reference(
    study: Annotated[bool, typer.Option("--study", help="Of a study's fields instead of a recipe's.")] = False,
) -> None:
    """Print the reference of every recipe field as markdown."""
    from llama3.recipe.reference import recipe_reference
    from llama3.studies.study import study_reference

    print(study_reference() if study else recipe_reference(), end="")


def _cluster(path: Path | None, processes: int, threads: int) -> Cluster:
    """Return the cluster of a file (or this machine), with what the options change."""
    from tasks.cluster import Cluster, load_cluster

    changes = {name: value for name, value in {"processes": processes, "threads": threads}.items() if value}
    return load_cluster(path, **changes) if path else Cluster(**changes)


def _given(path: Path | None, processes: int, threads: int) -> list[str]:
    """Return the options that say where a run works, for the commands that are proposed at its end."""
    threads = 0 if os.environ.get("HERD_THREADS") else threads
    given = {"--cluster": path, "--processes": processes, "--threads": threads}
    return [word for option, value in given.items() if value for word in (option, str(value))]


def _run(config: PipelineParameters, given: Sequence[str]) -> None:
    from flows.local_server import quiet_prefect, start_temporary_server

    with mistakes():
        check_quick(config)
        out.print("[dim]starting Prefect[/]")
        quiet_prefect()
        ready = start_temporary_server(config.root_at)
        from httpx import HTTPError, HTTPStatusError, TransportError
        from prefect import get_client

        from flows.pipeline import pipeline
        from tasks.runs.records import now
        from tasks.runs.recovery import RunSettler
        from tasks.runs.summary import summary_lines
        from tasks.tracking.mlflow_store import preload

        preload()  # while the server starts
        ready()
        began = now()
        try:
            name = patiently(lambda: pipeline(config))
        except (TransportError, HTTPStatusError):  # the server went away; the run itself may be complete
            name = _finished_since(config.root_at, began)
            if not name:
                raise
            with suppress(HTTPError), get_client(sync_client=True) as client:  # which may call it Failed for that
                RunSettler(config.root_at, client).settle(name)
        for line in summary_lines(config.root_at, name, given):
            out.print(line)
        exit_as_judged(config.root_at, name)


def _finished_since(root: Root, began: str) -> str:
    """Return the run that finished after `began`, or nothing."""
    from tasks.runs.records import Runs

    ended = [record for record in Runs(root).all() if record.state == "finished" and record.ended > began]
    return ended[-1].name if ended else ""


def check_quick(config: PipelineParameters) -> None:
    """Refuse what can be refused within a second, before Prefect is started. Raises RecipeError."""
    from llama3.recipe.load import load_recipe
    from tasks.runs.preflight import check_place
    from tasks.runs.records import Runs

    recipe = Runs(config.root_at).recipe(config.rerun_of) if config.rerun_of else None
    check_place(recipe or load_recipe(Path(config.recipe), config.overrides), config.cluster, config.root_at)


def main() -> None:
    """Entry point of the `herd` command."""
    fix_import_path()
    move_logins()  # before Prefect reads its settings
    sys.exit(app())


if __name__ == "__main__":
    main()
