"""Options of `herd plan`: a cluster, GPUs of stages, and the curves of a cluster's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from herd.llama3.hardware.topology import Fabric, is_fabric_name, load_fabric
from herd.llama3.planner.device_curves import Curves, derate_for_step, prior_curves
from herd.llama3.planner.projection import StagePlacement
from herd.llama3.recipe.base import read_yaml
from herd.llama3.recipe.schema import Recipe
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, load_cluster
from herd.tasks.launch.devices import run_fabric
from herd.tasks.plan.calibrate import load_calibration


def device_curves(fabric: Fabric, root: Root | None = None) -> Curves:
    """Return the curves of the cluster's GPUs: measured by `herd plan calibrate` under `root`, or else assumed."""
    device = fabric.accelerator
    measured = load_calibration(root, device.driver_name) if root is not None and device.driver_name else None
    return derate_for_step(measured) if measured else prior_curves(device)


def parse_gpus(values: Sequence[str]) -> tuple[int, dict[str, StagePlacement]]:
    """Parse `--gpus`: a default (0 if absent) and per-stage overrides. Raises ValueError for an invalid number."""
    everywhere, placements = 0, {}
    for text in values:
        name, _, number = text.rpartition("=")
        if not number.replace(",", "").isdecimal() or not int(number.replace(",", "")):
            raise ValueError(f"gpus: {text!r} is not a number of GPUs; write 8192, or main=16384 for one stage")
        if name:
            placements[name] = StagePlacement(int(number.replace(",", "")))
        else:
            everywhere = int(number.replace(",", ""))
    return everywhere, placements


def read_hosts(path: Path, fabric: Fabric) -> tuple[str, ...]:
    """Return the host of each server from a file, a line a server in the order of the wiring.

    An empty line, or one that begins with #, is a server that other jobs use. Raises ValueError.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hosts: cannot read {path}: {error}; give a text file, a host a line") from None
    hosts = tuple("" if line.startswith("#") else line for line in lines)
    names = [host for host in hosts if host]
    if twice := sorted({host for host in names if names.count(host) > 1}):
        raise ValueError(f"hosts: {path} names {twice[0]} twice; name each host once")
    if not names or len(hosts) > fabric.servers:
        raise ValueError(
            f"hosts: {path} has {len(hosts):,} lines with {len(names):,} hosts, and {fabric.name} {fabric.servers:,} "
            "servers; write a line for each server, in the order of the wiring"
        )
    return hosts


def free_gpus(hosts: Sequence[str], fabric: Fabric) -> NDArray[np.int64]:
    """Return the GPUs of the servers whose hosts are named."""
    free, size = np.flatnonzero([bool(host) for host in hosts]), fabric.server.gpus
    return (free[:, None] * size + np.arange(size)).reshape(-1)


def check_stage_names(recipe: Recipe, placements: Mapping[str, StagePlacement]) -> None:
    """Raise ValueError for a stage that the recipe does not have."""
    known = recipe.schedule.names
    for name in sorted(set(placements) - known):
        raise ValueError(f"gpus: {name} is not a stage of the recipe; write one of {', '.join(sorted(known))}")


def open_cluster(named: str, sparse: bool = False) -> tuple[Fabric | None, Cluster | None]:
    """Return the fabric that `named` describes, and the cluster of a run if it is the file of `herd run`.

    The fabric is None if such a file names none. Raises ValueError.
    """
    if is_fabric_name(named) or not Path(named).is_file():
        return load_fabric(named, sparse), None
    data = read_yaml(Path(named))
    if isinstance(data, dict) and "tiers" in data:
        return load_fabric(named, sparse), None
    cluster = load_cluster(Path(named))
    return (run_fabric(cluster, sparse) if cluster.fabric else None), cluster


def stage_placements(recipe: Recipe, cluster: Cluster) -> dict[str, StagePlacement]:
    """Return the placement of each trained part in a run's cluster file."""
    placements = {}
    for span in recipe.schedule.trained:
        own = cluster.for_stage(span.stage.name, span.name)
        placements[span.name] = StagePlacement(own.processes, own.layout, own.micro_batch)
    return placements
