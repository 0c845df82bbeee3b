"""Pretrain Llama 3 class models from raw text to a promoted checkpoint; for programs and notebooks.

    import herd

    run = herd.run("quickstart")
    print(herd.generate(run.name, "The"))

A name is imported when it is used: `import herd` loads no library.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from herd.api import (
        LoadedModel,
        Recipe,
        Run,
        evaluate,
        generate,
        load_model,
        load_recipe,
        open_run,
        plan,
        plan_on_cluster,
        run,
    )

__version__ = "0.1.0"
__all__ = [
    "LoadedModel",
    "Recipe",
    "Run",
    "evaluate",
    "generate",
    "load_model",
    "load_recipe",
    "open_run",
    "plan",
    "plan_on_cluster",
    "run",
]
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bypass_proxy(*hosts: str, variables: MutableMapping[str, str] = os.environ) -> None:
    """Name `hosts` in no_proxy and NO_PROXY if a proxy is set: HTTP libraries read them, child processes inherit them.

    Without it they send requests to servers of this machine to the proxy, which cannot reach them.
    """
    if not any(value for name, value in variables.items() if name.lower() in PROXIES):
        return
    lists = {name: variables.get(name, "") for name in ("no_proxy", "NO_PROXY")}
    for name, own in lists.items():  # libraries read one of the two, some the first and some the second
        known = [host.strip() for host in (own or max(lists.values())).split(",") if host.strip()]
        variables[name] = ",".join([*known, *(host for host in hosts if not {host, "*"} & set(known))])


# Every process of herd imports this file: commands, workers' flow runs, agents, ranks, notebooks.
bypass_proxy(*LOOPBACK)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'herd' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("herd.api"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
