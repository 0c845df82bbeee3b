"""Profiling on request: a trace of chosen steps, device memory, the flight recorder, stacks of a process that hangs.

Traces (torch.profiler, Chrome format) open in ui.perfetto.dev, memory history in pytorch.org/memory_viz. Stacks of all
threads go to the process's log on SIGUSR1, and shortly before a step times out.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from herd.llama3.train.callbacks import Callback, log
from herd.storage.filesystem import write_atomic

if TYPE_CHECKING:  # a job file is checked before torch is imported
    import torch

    from herd.llama3.train.data_loader import Step

FOLDER = "profile"
MEMORY_EVENTS = 200_000
"""Allocations and frees that are kept, with a stack each."""
PATIENCE = 0.9
"""Fraction of the time-out after which a step that does not end prints its stacks: before its peers end it."""
STDERR = 2


class Profile(BaseModel):
    """What to profile; the files go to `profile` in the stage's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    steps: tuple[int, int] | None = None
    """Steps to trace: [first, count]; the attempt's first step is 0. Leave out the first few: they compile and
    allocate. Traced steps are slower."""
    ranks: list[int] = [0]
    """The processes that write traces and memory history."""
    memory: bool = False
    """Record allocations over the same steps (CUDA only)."""
    stacks: bool = False
    """Record the Python line of every operator in the trace (slow)."""
    flight: int = Field(default=0, ge=0)
    """Collectives that torch's flight recorder keeps on every process; 0: off, 2,000 is usual. Written when a process
    fails, or by NCCL when it times out."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.steps is not None and (self.steps[0] < 0 or self.steps[1] < 1):
            raise ValueError(f"steps {list(self.steps)}: write [first, count], first from 0 on and at least one step")
        if self.steps is None and (self.memory or self.stacks):
            raise ValueError("memory and stacks need traced steps; write steps: [first, count] too")
        return self


def flight_environment(profile: Profile | None, work: Path) -> dict[str, str]:
    """Return environment variables to set before the process group is made."""
    if profile is None or not profile.flight:
        return {}
    prefix = work / FOLDER / "flight-rank-"  # torch appends the rank
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(profile.flight),
        "TORCH_FR_BUFFER_SIZE": str(profile.flight),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(prefix),
        "TORCH_FR_DUMP_TEMP_FILE": str(prefix),
    }


def prepare(profile: Profile | None, work: Path) -> None:
    """Call once per process before the process group is made: flight recorder, and stacks on SIGUSR1."""
    if settings := flight_environment(profile, work):
        (work / FOLDER).mkdir(parents=True, exist_ok=True)
        os.environ.update(settings)
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)


def dump_flight(profile: Profile | None, work: Path, rank: int) -> Path | None:
    """Write the last collectives of this process, which is about to fail; return the file if there is one."""
    if profile is None or not profile.flight:
        return None
    from torch._C import _distributed_c10d as native

    dump: Callable[[], bytes] = getattr(native, "_dump_fr_trace_json")  # noqa: B009 (no stub has it)
    path = work / FOLDER / f"flight-rank-{rank:05}.json"
    write_atomic(path, dump())
    return path


class HangStacks(Callback):
    """Prints the stacks of all threads shortly before a step has taken as long as the timeout."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def on_step_start(self, step: Step, data_wait_s: float) -> None:
        faulthandler.dump_traceback_later(PATIENCE * self.timeout_s, file=STDERR)

    def on_train_end(self) -> None:
        faulthandler.cancel_dump_traceback_later()


class Profiler(Callback):
    """Traces the steps of a profile; does nothing without one, or on ranks that it does not list."""

    def __init__(self, profile: Profile | None, work: Path, rank: int, device: torch.device) -> None:
        """Raises ValueError for memory history on a device that has none."""
        if profile is not None and profile.memory and device.type != "cuda":
            raise ValueError(f"profile.memory: needs a CUDA device, this one is {device.type}; leave it out")
        self.profile = profile if profile is not None and profile.steps and rank in profile.ranks else None
        self.folder, self.rank, self.device = work / FOLDER, rank, device
        self.steps = 0
        """Steps begun so far."""
        self._trace: Any = None
        self._span: Any = None

    def on_step_start(self, step: Step, data_wait_s: float) -> None:
        number, self.steps = self.steps, self.steps + 1
        if self.profile is None or self.profile.steps is None:
            return
        first, count = self.profile.steps
        if number == first + count:
            self.on_train_end()
        if number == first:
            self._begin(self.profile)
        if self._trace is not None:
            self._end_span()
            self._span = record_function(f"step {number}")
            self._span.__enter__()

    def on_train_end(self) -> None:
        """End and write the trace in progress, if any."""
        if self._trace is None or self.profile is None or self.profile.steps is None:
            return
        import torch

        self._end_span()
        self._trace.stop()
        name = f"rank-{self.rank:05}-step-{self.profile.steps[0]:06}"
        self._trace.export_chrome_trace(str(self.folder / f"{name}.json.gz"))
        self._trace = None
        if self.profile.memory:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory"))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        log(f"profile: {self.folder / name}.json.gz (ui.perfetto.dev)")

    def _begin(self, profile: Profile) -> None:
        import torch

        self.folder.mkdir(parents=True, exist_ok=True)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # otherwise the device's part would begin with earlier steps
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        if profile.memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._trace = torch.profiler.profile(activities=kinds, record_shapes=True, with_stack=profile.stacks)
        self._trace.start()

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = None


def record_function(name: str) -> torch.profiler.record_function:
    """Return a context manager that names a part of the step in a trace; 7 microseconds when nothing is traced."""
    import torch

    return torch.profiler.record_function(f"herd: {name}")
