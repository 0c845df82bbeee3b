"""The command group `herd plan`; `herd plan RECIPE` is short for `herd plan recipe RECIPE`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from herd.flows.cli.errors import DefaultGroup, JsonOption, RootOption, mistakes, out, print_json, problems
from herd.storage.root import DEFAULT_ROOT, Root

if TYPE_CHECKING:
    from herd.tasks.plan.recipe import RunPlan
    from herd.tasks.plan.steps import PlannedStep

planner = typer.Typer(
    cls=DefaultGroup,
    help="Show what a recipe does, and on a cluster: layouts, speed, days and cost. `herd plan RECIPE`.",
    no_args_is_help=True,
)
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a recipe field: stages.main.until=3M")]
GpusOption = Annotated[
    list[str] | None, typer.Option("--gpus", help="GPUs of all stages, or of one: 8192, main=16384. Repeatable.")
]


@planner.command("recipe")
def plan_recipe(
    recipe: Annotated[Path, typer.Argument(help="YAML file of a recipe, such as recipes/quickstart.yaml.")],
    set_: SetOption = None,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            help="DGX servers such as h100x8, a preset (dgx-h100, roce-24k, this-machine), its YAML file, or that of "
            "`herd run`.",
        ),
    ] = "",
    gpus: GpusOption = None,
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to list.")] = 10,
    price: Annotated[float, typer.Option(help="Price of a GPU-hour.", min=0)] = 2.5,
    watts: Annotated[float, typer.Option(help="Power of a GPU; 0: the value of its preset.", min=0)] = 0.0,
    pue: Annotated[float, typer.Option(help="Power of the site divided by the power of its servers.", min=1)] = 1.1,
    megawatts: Annotated[
        float, typer.Option(help="Power of the site, which limits the GPUs; 0: no limit.", min=0)
    ] = 0.0,
    sparse: Annotated[bool, typer.Option("--sparse", help="Use the GPU's peak with 2:4 sparsity.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the layouts to a file for `herd run --cluster`.")] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            help="Hosts, a server a line in the order of the wiring; --write puts them in the order of ranks."
        ),
    ] = None,
    steps: Annotated[
        bool, typer.Option("--steps", help="List the steps of a run too, and what each would reuse under the root.")
    ] = False,
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Show stages, totals, FLOPs and warnings; with a cluster layouts, steps, days, money, cadence and risks too."""
    from herd.llama3.recipe.load import base_changes
    from herd.tasks.models.start import load_recipe
    from herd.tasks.plan.recipe import memory_lines, plan_document, survey_and_plan

    with mistakes():
        loaded = load_recipe(Root.parse(root), recipe, set_)
        if not json_ and (changes := base_changes(recipe)):
            out.print(f"base     {escape(changes)}")
        plan = survey_and_plan(loaded, Root.parse(root))
        fabric, here = None, None
        if cluster:
            from herd.tasks.cluster import unused_launchers
            from herd.tasks.operate.preflight import layout_faults
            from herd.tasks.plan.options import open_cluster
            from herd.tasks.plan.predict import pod_memory_faults
            from herd.tasks.plan.presets import fabric_of

            cluster = fabric_of(cluster)
            fabric, here = open_cluster(cluster, sparse)
            faults = here and (
                layout_faults(plan.recipe, here, plan.vocab_size) or pod_memory_faults(plan.recipe, here)
            )
            if faults:
                raise ValueError("\n".join(faults))
            plan = replace(plan, warnings=[*(unused_launchers(here) if here else ()), *plan.warnings])
        planned_steps: list[PlannedStep] = []
        if steps:
            from herd.tasks.cluster import Cluster
            from herd.tasks.plan.steps import plan_steps

            planned_steps = plan_steps(loaded, Root.parse(root), here or Cluster())
        pipeline = {"pipeline": [asdict(step) for step in planned_steps]} if steps else {}
        if fabric is None:
            options = {"--gpus": gpus, "--html": html, "--write": write, "--hosts": hosts, "--json": json_ and cluster}
            if given := [name for name, value in options.items() if value]:
                raise ValueError(
                    f"cluster: {', '.join(given)} need known devices and network; give a preset such as roce-24k "
                    "(herd plan presets) with --cluster, or write fabric: into the file"
                )
            if json_:
                print_json({**plan_document(plan), **pipeline})
                return
            _print_plan(plan, planned_steps)
            if here is not None:  # the devices are unknown: only the memory of the fullest process can be computed
                for line in memory_lines(plan, here.layout, here.processes, here.micro_batch):
                    out.print(line)
                out.print("[dim]cluster.fabric is not given: step times are unknown (herd plan presets: clusters)[/]")
            return
        from herd.tasks.format import command
        from herd.tasks.plan.cluster import plan_on_cluster, print_cluster_plan

        prices = {"gpu_hour": price, "pue": pue, **({"gpu_watts": watts} if watts else {})}
        planned = plan_on_cluster(plan, cluster, gpus or [], prices, sparse, Root.parse(root), megawatts, hosts)
        if json_:
            print_json({**plan_document(plan), **planned.as_json(top), **pipeline})
        else:
            _print_plan(plan, planned_steps, warnings=False)
            print_cluster_plan(planned, out, top)
            _print_warnings(planned.plan)
        console = problems if json_ else out  # with --json standard output is JSON
        if html:
            from herd.tasks.plan.page import write_page  # imports matplotlib

            write_page(planned, html)
            console.print(f"[dim]{html}[/]")
        if write:
            planned.write_cluster(write)
            sets = [word for change in set_ or [] for word in ("--set", change)]
            line = command(Root.parse(root), "run", str(recipe), *sets, "--cluster", str(write))
            console.print(f"[dim]{write}: {escape(line)}[/]")


def _print_plan(plan: RunPlan, planned_steps: list[PlannedStep], warnings: bool = True) -> None:
    from herd.tasks.plan.recipe import stage_table, summary_lines

    out.print(stage_table(plan))
    for line in summary_lines(plan):
        out.print(line)
    if planned_steps:
        from herd.tasks.plan.steps import steps_table

        out.print(steps_table(planned_steps))
    if warnings:
        _print_warnings(plan)


def _print_warnings(plan: RunPlan) -> None:
    for warning in plan.warnings:
        out.print(f"[yellow]warning[/]  {escape(warning)}")


@planner.command()
def presets(name: Annotated[str, typer.Argument(help="A preset; empty: list them.")] = "") -> None:
    """Print the YAML of a preset (GPU, server or cluster), to copy and edit."""
    from herd.llama3.hardware.specs import preset_text
    from herd.tasks.plan.tables import presets_table

    with mistakes():
        if name:
            print(preset_text(name), end="")
        else:
            out.print(presets_table())


@planner.command("compare")
def compare_clusters(
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
    from herd.tasks.models.start import load_recipe
    from herd.tasks.plan.cluster import compare_fabrics, fabrics_table

    with mistakes():
        clusters = cluster or ["roce-24k", "ib-24k"]
        results = compare_fabrics(Root.parse(root), load_recipe(Root.parse(root), recipe, set_), clusters, gpus or [])
        if json_:
            print(json.dumps([result.as_json() for result in results], indent=1))
        else:
            out.print(fabrics_table(results))


@planner.command()
def network(
    name: Annotated[str, typer.Argument(help="A cluster: preset or YAML file.")], json_: JsonOption = False
) -> None:
    """Show a cluster's network: collectives by size and ranks, routing, failed links, fragmented jobs."""
    from herd.llama3.hardware.topology import load_fabric
    from herd.tasks.plan.tables import network_facts, network_tables

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
def hall(
    name: Annotated[str, typer.Argument(help="A cluster: preset or YAML file.")],
    megawatts: Annotated[float, typer.Option(help="Power of the site.", min=0)],
    gpu_mb_s: Annotated[
        float, typer.Option(help="MB/s of data that a GPU takes from reader hosts; 0: tokens are ready.", min=0)
    ] = 0.0,
    json_: JsonOption = False,
) -> None:
    """Show how many GPUs of a cluster a site's power feeds, in racks, with their reader hosts."""
    from herd.llama3.hardware.topology import load_fabric
    from herd.tasks.plan.tables import hall_facts, hall_lines

    with mistakes():
        fabric = load_fabric(name)
        if json_:
            print(json.dumps(hall_facts(fabric, megawatts, gpu_mb_s), indent=1))
        else:
            for line in hall_lines(fabric, megawatts, gpu_mb_s):
                out.print(line)


@planner.command()
def calibrate(
    root: RootOption = DEFAULT_ROOT,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Approximate duration in seconds.")] = 60.0,
) -> None:
    """Measure matmul, attention and elementwise kernels here; later runs use it for predictions (`plan/*`)."""
    from herd.tasks.console import TerminalConsole
    from herd.tasks.plan.calibrate import calibration_lines, calibration_table, measure_and_store

    with mistakes():
        calibration, artifact = measure_and_store(Root.parse(root), TerminalConsole(), device, seconds)
        out.print(calibration_table(calibration))
        for line in calibration_lines(calibration):
            out.print(line)
        for warning in calibration.warnings():
            out.print(f"[yellow]warning[/]  {escape(warning)}")
        out.print(f"[dim]{artifact.label}[/]")
