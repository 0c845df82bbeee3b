"""The command group `herd plan`: a recipe's plan, on a cluster if one is named, and the models behind it.

`herd plan RECIPE` is the command `recipe` of this group, so that the commonest words stay the shortest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from flows.cli.errors import RootOption, mistakes, out, problems
from storage.root import DEFAULT_ROOT, Root

if TYPE_CHECKING:
    from tasks.cluster import Cluster
    from tasks.plan.recipe import RunPlan

DEFAULT = "recipe"


class PlanGroup(TyperGroup):
    """A group whose first word is a command, or else what the command `recipe` is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the word `recipe` in front of anything that is no command."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


planner = typer.Typer(
    cls=PlanGroup,
    help="Show what a recipe will do, and on a cluster: what fits, how fast, how long, how much. `herd plan RECIPE`.",
    no_args_is_help=True,
)
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a recipe field: stages.main.until=3M")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
GpusOption = Annotated[
    list[str] | None, typer.Option("--gpus", help="GPUs of all stages, or of one: 8192, main=16384. Repeatable.")
]


@planner.command(DEFAULT)
def plan_recipe(
    recipe: Path,
    set_: SetOption = None,
    cluster: Annotated[
        str,
        typer.Option("--cluster", help="Preset such as roce-24k, its YAML file, or the file that `herd run` takes."),
    ] = "",
    gpus: GpusOption = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to list.")] = 10,
    price: Annotated[float, typer.Option(help="Money per GPU-hour.", min=0)] = 2.5,
    watts: Annotated[float, typer.Option(help="Power of a GPU; 0: as its description says.", min=0)] = 0.0,
    pue: Annotated[float, typer.Option(help="Power of the site over that of its servers.", min=1)] = 1.1,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Let a cluster's peak be the one with 2:4 sparsity.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write one page with pictures to this file.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the layouts as a file for `herd run --cluster`.")] = None,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Show stages, totals, FLOPs and warnings; with a cluster layouts, steps, days, money, cadence and risks too."""
    from llama3.data.readers.sources import survey
    from llama3.recipe.load import load_recipe
    from tasks.plan.recipe import make_plan, survey_evaluation

    with mistakes():
        wanted = load_recipe(recipe, set_)
        made = make_plan(wanted, survey(wanted), survey_evaluation(wanted))
        fabric, place = None, None
        if cluster:
            from tasks.plan.options import open_cluster

            fabric, place = open_cluster(cluster, sparse)
        if fabric is None:
            _refuse_unknown({"--gpus": gpus, "--html": html, "--write": write, "--json": json_})
            _print_plan(made)
            if place is not None:
                _print_memory(made, place)
            return
        from tasks.format import command
        from tasks.plan.cluster import plan_on, show

        prices = {"gpu_hour": price, "pue": pue, **({"gpu_watts": watts} if watts else {})}
        planned = plan_on(made, cluster, gpus or [], prices, sparse, Root.of(root))
        if json_:
            print(json.dumps(planned.as_json(top), indent=1))
        else:
            _print_plan(made, warnings=False)
            show(planned, out, top)
            _print_warnings(made)
        say = problems if json_ else out  # what is printed with --json is JSON
        if html:
            from tasks.plan.page import write_page  # imports matplotlib

            write_page(planned, html)
            say.print(f"[dim]{html}[/]")
        if write:
            planned.write_cluster(write)
            sets = [word for change in set_ or [] for word in ("--set", change)]
            line = command(Root.of(root), "run", str(recipe), *sets, "--cluster", str(write))
            say.print(f"[dim]{write}: {escape(line)}[/]")


def _refuse_unknown(options: dict[str, Any]) -> None:
    """Raise ValueError if options are given whose answer hangs on devices and network."""
    if given := [name for name, value in options.items() if value]:
        raise ValueError(
            f"cluster: {', '.join(given)} need one whose devices and network are known; give a preset with --cluster, "
            "such as roce-24k (herd plan show), or write fabric: into the file"
        )


def _print_plan(made: RunPlan, warnings: bool = True) -> None:
    from tasks.plan.recipe import stage_table, summary_lines

    out.print(stage_table(made))
    for line in summary_lines(made):
        out.print(line)
    if warnings:
        _print_warnings(made)


def _print_memory(made: RunPlan, place: Cluster) -> None:
    """Print what the fullest process needs, which is all that is known where nothing says what the devices are."""
    from tasks.plan.recipe import memory_lines

    place.layout.check(made.recipe.model, made.rows, place.processes)
    for line in memory_lines(made, place.layout, place.processes, place.micro_batch):
        out.print(line)
    out.print("[dim]cluster.fabric is not given: what a step takes is unknown (herd plan show lists clusters)[/]")


def _print_warnings(made: RunPlan) -> None:
    for warning in made.warnings:
        out.print(f"[yellow]warning[/]  {escape(warning)}")


@planner.command()
def verify(
    only: Annotated[str, typer.Argument(help="One anchor, such as A7; empty: all.")] = "", json_: JsonOption = False
) -> None:
    """Hold the models against published figures (A1 to A23); exit status 1 if one falls outside its target."""
    from llama3.planner.validation.verify import verify as verified
    from tasks.plan.tables import verdict_line, verify_table

    with mistakes():
        rows = verified(only)
        if json_:
            print(json.dumps([row.as_dict() for row in rows], indent=1))
        else:
            out.print(verify_table(rows))
            out.print(verdict_line(rows))
        if any(row.wrong for row in rows):
            raise typer.Exit(1)


@planner.command()
def show(name: Annotated[str, typer.Argument(help="A preset; empty lists them.")] = "") -> None:
    """Print a preset's YAML, to be copied and edited: a GPU, a server or a whole cluster."""
    from llama3.planner.hardware import preset_text
    from tasks.plan.tables import presets_table

    with mistakes():
        if name:
            print(preset_text(name), end="")
        else:
            out.print(presets_table())


@planner.command()
def fabrics(
    recipe: Path,
    set_: SetOption = None,
    cluster: Annotated[
        list[str] | None, typer.Option("--cluster", help="A cluster; repeatable. Default: roce-24k and ib-24k.")
    ] = None,
    gpus: GpusOption = None,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Compare clusters for a recipe; each becomes an MLflow run with the metrics of a training run."""
    from llama3.recipe.load import load_recipe
    from tasks.plan.compare_clusters import compare_fabrics, fabrics_table

    with mistakes():
        found = compare_fabrics(Root.of(root), load_recipe(recipe, set_), cluster or ["roce-24k", "ib-24k"], gpus or [])
        if json_:
            print(json.dumps([one.as_json() for one in found], indent=1))
        else:
            out.print(fabrics_table(found))


@planner.command()
def network(
    name: Annotated[str, typer.Argument(help="A cluster: preset or YAML file.")], json_: JsonOption = False
) -> None:
    """Show what a cluster's network gives: collectives by size and ranks, routing, failed links, fragmented jobs."""
    from llama3.planner.topology import load_fabric
    from tasks.plan.tables import network_facts, network_tables

    with mistakes():
        fabric = load_fabric(name)
        if json_:
            print(json.dumps(network_facts(fabric), indent=1))
        else:
            for title, table in network_tables(fabric):
                out.print(f"[bold]{title}[/]")
                out.print(table)
                out.print()


@planner.command()
def calibrate(
    root: RootOption = DEFAULT_ROOT,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 60.0,
) -> None:
    """Measure products, attention and elementwise work here; later runs are predicted with it (`plan/*`)."""
    from tasks.console import TerminalConsole
    from tasks.plan.calibrate import calibration_lines, calibration_table, measure_and_store

    with mistakes():
        found, artifact = measure_and_store(Root.of(root), TerminalConsole(), device, seconds)
        out.print(calibration_table(found))
        for line in calibration_lines(found):
            out.print(line)
        for warning in found.warnings():
            out.print(f"[yellow]warning[/]  {escape(warning)}")
        out.print(f"[dim]{artifact.label}[/]")


@planner.command()
def replay(
    run: Annotated[
        str, typer.Argument(help="A run of this root; its tokens are trained on, in its first stage's shape.")
    ],
    root: RootOption = DEFAULT_ROOT,
    processes: Annotated[int, typer.Option(min=2, help="Trainer processes on this machine.")] = 2,
    seed: Annotated[int, typer.Option(help="The same seed draws the same failures.")] = 1,
    seconds: Annotated[float, typer.Option(help="How long failures are injected.")] = 300.0,
    mtti: Annotated[float, typer.Option(help="Mean seconds between two of them.")] = 100.0,
    json_: JsonOption = False,
) -> None:
    """Kill and hang ranks of a real run by a seeded trace; compare effective time with what the planner says."""
    from tasks.cluster import Cluster
    from tasks.plan.fault_test import FaultTestSettings, replay_failures, replay_lines

    with mistakes():
        result = replay_failures(
            Root.of(root), run, Cluster(processes=processes), FaultTestSettings(seed, seconds, mtti)
        )
        if json_:
            print(json.dumps(result.as_dict(), indent=1))
        else:
            for line in replay_lines(result):
                out.print(line)
