"""The launcher that a cluster file names."""

from __future__ import annotations

from tasks.cluster import Cluster
from tasks.launch.base import Launcher
from tasks.launch.local import Agents, LocalLauncher


def launcher_of(cluster: Cluster, name: str, agents: Agents) -> Launcher:
    """Return the launcher that `cluster` asks for; `name` (see `launch_key`) tells its jobs from those of others.

    On this machine it works through one of `agents`. Raises ValueError if its commands are missing here.
    """
    match cluster.launcher:
        case "local":
            return LocalLauncher(cluster, agents)
        case "slurm":
            from tasks.launch.slurm import SlurmLauncher

            return SlurmLauncher(cluster, name)
        case "kubernetes":
            from tasks.launch.kubernetes import KubernetesLauncher

            return KubernetesLauncher(cluster, name)
