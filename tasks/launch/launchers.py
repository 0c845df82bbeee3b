"""The registry of launchers. A new one is a module with `launcher(cluster, name, agents)`, a line here, and its name
and settings in `Cluster`."""

from __future__ import annotations

from importlib import import_module

from tasks.cluster import Cluster
from tasks.launch.base import Launcher
from tasks.launch.local import Agents

LAUNCHERS = {"local": "tasks.launch.local", "slurm": "tasks.launch.slurm", "kubernetes": "tasks.launch.kubernetes"}


def launcher_of(cluster: Cluster, name: str, agents: Agents) -> Launcher:
    """Return the launcher that `cluster` names; `name` (see `launch_key`) identifies its jobs.

    The local one uses `agents`. Raises ValueError if its commands are missing on this machine.
    """
    launcher: Launcher = import_module(LAUNCHERS[cluster.launcher]).launcher(cluster, name, agents)
    return launcher
