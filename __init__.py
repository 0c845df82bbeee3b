"""Pretrain Llama 3 class models from raw text to a promoted checkpoint; for programs and notebooks.

    import herd

    run = herd.run("quickstart")
    print(herd.generate(run.name, "The"))

A name is imported when it is used: `import herd` loads no library.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'herd' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("herd.api"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
