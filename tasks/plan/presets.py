"""Clusters by name for `--cluster`: a server of a known kind, with the planner's layouts, and this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from herd.llama3.data.readers.sources import survey
from herd.llama3.hardware.topology import fabric_names, load_fabric
from herd.llama3.recipe.schema import Recipe
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, load_cluster
from herd.tasks.launch.local import gpu_name, visible_gpus
from herd.tasks.plan.cluster import plan_on_cluster
from herd.tasks.plan.recipe import make_plan

THIS = "this-machine"
ALIASES = {"dgx-h100": "h100-8"}


def fabric_of(named: str) -> str:
    """Return the planner's name of the cluster `named`, which stays as it is unless it is an alias or this machine.

    Raises ValueError if the planner does not know this machine's GPU.
    """
    if named != THIS:
        return ALIASES.get(named, named)
    name, count = gpu_name(), visible_gpus()
    servers = {each: fabric for each in fabric_names() if (fabric := load_fabric(each)).servers == 1}
    for each, fabric in servers.items():
        if name and fabric.accelerator.driver_name == name and fabric.gpus == count:
            return each
    known = sorted({f"{fabric.gpus} x {fabric.accelerator.driver_name}" for fabric in servers.values()})
    raise ValueError(
        f"cluster: {THIS} has {f'{count} x {name}' if name else 'no GPU'}, and the planner has the figures of "
        f"{', '.join(known)}; copy a preset (herd plan presets one-4090 > FILE.yaml), put your figures in, and give "
        "the file; herd run needs none"
    )


def cluster_of(named: str, recipe: Recipe, root: Root) -> Cluster | None:
    """Return the cluster of a run on a preset, with the planner's layout of each stage; None if `named` is none.

    Raises ValueError for one that this machine is not.
    """
    fabric_name, count = ALIASES.get(named, named), visible_gpus()
    if named == THIS:
        try:
            fabric_name = fabric_of(named)
        except ValueError:  # the devices are unknown: one process for each
            return Cluster(processes=max(1, count))
    if fabric_name not in fabric_names():
        return None
    fabric = load_fabric(fabric_name)
    if fabric.servers > 1 or fabric.gpus != count or gpu_name() != fabric.accelerator.driver_name:
        here = f"{count} x {gpu_name()}" if count else "no GPU"
        raise ValueError(
            f"cluster: {named} is {fabric.gpus:,} x {fabric.accelerator.driver_name} and this machine has {here}; run "
            f"it there, or write its layouts into a file (herd plan RECIPE --cluster {named} --write FILE.yaml) and "
            "add launcher: slurm or kubernetes"
        )
    with tempfile.TemporaryDirectory(prefix="herd-cluster-") as folder:
        path = Path(folder, "cluster.yaml")
        plan_on_cluster(make_plan(recipe, survey(recipe)), fabric_name, root=root).write_cluster(path)
        return load_cluster(path, device="cuda")
