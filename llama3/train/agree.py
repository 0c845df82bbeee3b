"""What one process finds out, all must know: results and failures that end the same way on every process.

A process that raises while its peers wait for it costs them their whole time-out, and hides what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llama3.parallel.mesh import World

T = TypeVar("T")


def led(world: World, do: Callable[[], T]) -> T:
    """Return on every process what `do` returns on the leading one, which alone calls it; or raise what it raises."""
    value: T | None = None
    failure: Exception | None = None
    if world.leads:
        try:
            value = do()
        except Exception as error:
            failure = tellable(error, world.rank)
    value, failure = world.from_leader((value, failure))
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def together(world: World, do: Callable[[], None]) -> None:
    """Call `do` on every process; if it fails on some, raise the failure of the lowest rank on all."""
    failure: Exception | None = None
    try:
        do()
    except Exception as error:
        failure = tellable(error, world.rank)
    first = next((told for (told,) in world.gathered((failure,)) if told is not None), None)
    if first is not None:
        raise first


def tellable(error: Exception, rank: int) -> Exception:
    """Return an error that survives the way to another process: ours and the system's do, others become text."""
    if type(error).__module__.split(".")[0] in ("builtins", "llama3", "storage"):
        return error
    return RuntimeError(f"process {rank}: {type(error).__name__}: {error}")
