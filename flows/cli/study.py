"""The commands of studies: `herd study plan | run | report | apply | list`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from herd.flows.cli.errors import RootOption, mistakes, out, problems, with_retries
from herd.storage.root import DEFAULT_ROOT, Root

if TYPE_CHECKING:
    from herd.flows.study import StudyParameters

study = typer.Typer(
    help="Experiments that compare recipes: several runs, one question, one verdict.", no_args_is_help=True
)
FileArgument = Annotated[Path, typer.Argument(metavar="STUDY", help="A YAML file, or a shipped study: ramp-cpu.")]
NameArgument = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study under the root.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a recipe field in all variants.")]
OnlyOption = Annotated[list[str] | None, typer.Option("--only", help="A variant to run; repeatable.")]
ClusterOption = Annotated[Path | None, typer.Option("--cluster", help="YAML file: where the variants run.")]
ThreadsOption = Annotated[int, typer.Option(envvar="HERD_THREADS", help="Processor threads for the study; 0: all.")]


def _parameters(
    file: Path,
    sets: list[str] | None,
    only: list[str] | None,
    root: str,
    cluster: Path | None,
    threads: int,
    at_once: int,
) -> StudyParameters:
    from herd.flows.study import StudyParameters
    from herd.tasks.cluster import Cluster, load_cluster

    changes = {"threads": threads} if threads else {}
    machines = load_cluster(cluster, **changes) if cluster else Cluster(**changes)
    return StudyParameters(
        study=str(file), overrides=sets or [], only=only or [], root=root, cluster=machines, at_once=at_once
    )


@study.command()
def plan(
    file: FileArgument,
    set_: SetOption = None,
    only: OnlyOption = None,
    root: RootOption = DEFAULT_ROOT,
    cluster: ClusterOption = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a device-hour, in any currency.")] = None,
) -> None:
    """Print the runs of a study, their cost, and the artifacts that exist already; runs nothing."""
    from herd.llama3.studies.checks import check_study
    from herd.tasks.study.plan import check_hours, plan_lines, plan_study, plan_table

    with mistakes():
        config = _parameters(file, set_, only, root, cluster, 0, 1)
        expanded = config.expanded()
        chosen = config.chosen(expanded)
        check_study(expanded, chosen)
        planned = plan_study(config.root_at, expanded, config.cluster, price, chosen)
        if expanded.study.question:
            out.print(f"[bold]{escape(expanded.study.question)}[/]")
        out.print(plan_table(planned))
        for line in plan_lines(planned):
            out.print(line)
        check_hours(planned)


@study.command()
def run(
    file: FileArgument,
    set_: SetOption = None,
    only: OnlyOption = None,
    root: RootOption = DEFAULT_ROOT,
    cluster: ClusterOption = None,
    threads: ThreadsOption = 0,
    at_once: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
) -> None:
    """Run the missing runs of a study, then its verdict. Stopped or killed, the same command continues it."""
    from herd.flows.local_server import quiet_prefect, start_temporary_server
    from herd.llama3.studies.checks import check_study
    from herd.tasks.study.plan import check_hours, plan_study

    with mistakes():
        quiet_prefect()  # before _parameters imports Prefect, which sets its log level then
        config = _parameters(file, set_, only, root, cluster, threads, at_once)
        expanded = config.expanded()
        check_study(expanded, config.chosen(expanded))
        check_hours(plan_study(config.root_at, expanded, config.cluster, None, config.chosen(expanded)))
        out.print("[dim]starting Prefect[/]")
        ready = start_temporary_server(config.root_at)
        from herd.flows.study import study as study_flow
        from herd.tasks.format import command
        from herd.tasks.study.records import PAGE, Studies
        from herd.tasks.tracking.mlflow_store import preload

        preload()  # while the server starts
        ready()
        name = with_retries(lambda: study_flow(config))
        studies = Studies(config.root_at)
        record = studies.find(name)
        out.print(f"  report    {studies.folder(name) / PAGE}")
        if record.verdict and record.verdict.change:
            out.print(f"next:\n  {escape(command(config.root_at, 'study', 'apply', name))}")


@study.command()
def report(name: NameArgument, root: RootOption = DEFAULT_ROOT) -> None:
    """Print the verdict of a study and write its page again, from its tracked values."""
    from herd.tasks.study.records import PAGE, Studies
    from herd.tasks.study.report import rewrite, verdict_table

    with mistakes():
        studies = Studies(Root.parse(root))
        verdict = rewrite(studies, name)
        for line in verdict.headline:
            out.print(f"[bold]{escape(line)}[/]")
        for flag in verdict.flags:
            out.print(f"[yellow]flag[/]  {escape(flag)}")
        if verdict.findings:
            out.print(verdict_table(verdict))
        out.print(f"{studies.folder(name) / PAGE}")


@study.command()
def apply(
    name: NameArgument,
    recipe: Annotated[Path | None, typer.Option(help="The recipe to change; default: the study's base recipe.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: print it.")] = None,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Write the recipe that a study proposes, with a comment that contains the study's name and digest."""
    from herd.tasks.study.records import Studies
    from herd.tasks.study.report import applied

    with mistakes():
        text = applied(Root.parse(root), name, recipe)
        verdict = Studies(Root.parse(root)).find(name).verdict
        for flag in verdict.flags if verdict else ():  # such as a source that helps and held an evaluation set
            problems.print(f"[yellow]flag[/]  {escape(flag)}")
        if output is None:
            print(text, end="")
        else:
            output.write_text(text, encoding="utf-8")
            out.print(f"{output}")


@study.command(name="list")
def list_(root: RootOption = DEFAULT_ROOT) -> None:
    """List the studies under a root with their verdicts."""
    from herd.tasks.study.records import Studies

    with mistakes():
        records = Studies(Root.parse(root)).standing()
        if not records:
            out.print(f"no study in {escape(Root.parse(root).uri)}; start one with: herd study run ramp-cpu")
        for record in records:
            result = "; ".join(record.verdict.headline) if record.verdict else record.error
            out.print(f"{record.name:<20}{record.digest[:12]}  {record.state:<12}{escape(result)}")
