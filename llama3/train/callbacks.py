"""The interface between the training loop and what observes it: metrics, profiler, validation, incidents.

The trainer calls the callbacks of one list in order, on every process. To add one (for W&B, a debugger), write a class
and add a line to `Trainer.callbacks`. No torch: a job file is checked before torch is imported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from herd.llama3.train.journal import SkippedRange

if TYPE_CHECKING:
    from herd.llama3.train.data_loader import Step


def log(line: str) -> None:
    """Print one line of the trainer's log, now."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


@dataclass(frozen=True)
class StepDecision:
    """What follows from a step."""

    kind: Literal["continue", "skipped", "stop", "roll back", "excluded"]
    """`skipped`: a bad step changed nothing; `excluded`: not trained on, because of an earlier rollback."""
    reason: str = ""
    skip: SkippedRange | None = None
    """`roll back` only: the batches to exclude, from the newest checkpoint at or before their start on."""


@dataclass(frozen=True)
class StepTiming:
    """Seconds of one step on this process."""

    step: float
    data_wait: float
    checkpoint: float | None = None
    """Seconds that training stopped before this step for a checkpoint; None if there was none."""


@dataclass(frozen=True)
class StepResult:
    """A finished step: its numbers, the same on every process, and what the trainer adds to them."""

    loss: float
    """Nats per target."""
    grad_norm: float
    """Of the mean loss, before clipping."""
    domain_loss: Mapping[str, float] = field(default_factory=dict)
    """Nats per target of each domain, and of conversations."""
    stop: bool = False
    """Whether any process has received a request to stop."""
    save: bool = False
    """Whether any process has requested a checkpoint."""
    skipped: bool = False
    """Whether the weights were left unchanged because the step was bad."""
    score: float = 0.0
    """z-score of the loss or the log gradient norm, if larger, against the last good steps."""
    targets: float = 0.0
    """Tokens that the loss is averaged over."""
    decision: StepDecision = StepDecision("continue")
    timing: StepTiming = StepTiming(0.0, 0.0)
    metrics: dict[str, float] = field(default_factory=dict)
    """What callbacks add to the record of the step in the journal."""

    @classmethod
    def excluded(cls) -> StepResult:
        """Return the result of a batch that is not trained on because of a rollback: it has no numbers."""
        return cls(math.nan, math.nan, skipped=True, score=math.nan, decision=StepDecision("excluded"))


class Callback:
    """Observes the training loop. Override the methods that you need; by default they do nothing."""

    def on_step_start(self, step: Step, data_wait_s: float) -> None:
        """`step` is about to be enqueued; training waited `data_wait_s` for its batch."""

    def on_step_end(self, step: Step, result: StepResult) -> None:
        """The host has read `result`, or the batch was excluded. On a GPU the next step may be running already."""

    def on_save_start(self) -> None:
        """The training state is about to be saved."""

    def on_train_end(self) -> None:
        """Training has ended or stops on request; no step is running."""
