"""Bad steps: found on the device without waiting for it, and what follows from one.

A step is bad when its loss or gradient norm is not finite, or (where the recipe has a policy for spikes) when its loss
or the logarithm of the norm lies more than sigma times the spread above the mean over the last good steps: the rule of
OLMo-core and Levanter, 6 sigma of 128 steps, with a scale and a spread that allow for batches of rare domains. The
optimizer is given the flag as a tensor, so a bad step changes nothing and nobody waits. Bad values never enter the
window. A level that rises for good (a harder mix in the middle of a stage) is bad until `spikes.most` ends the run; the
window starts anew with each stage, so its first steps are not judged.

The decision is a function of the recipe and the journal: values have the same bits in both, so an attempt that goes on
from a checkpoint restores the window and decides as the one before would have.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from llama3.recipe.schedule import StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.sections import Spikes
from llama3.tokens.inspect import Inspection, inspect
from llama3.train import metrics
from llama3.train.data_loader import Step, steps_from
from llama3.train.incidents import Skip, SkippedRanges
from llama3.train.journal import Record
from storage.filesystem import write_atomic

SMALLEST = 1e-6
"""Least spread that counts, as a part of the mean (or of 1, if that is less): below it lies rounding."""
LEAST_NORM = 1e-30
"""Stands for a gradient norm of 0, which has no logarithm."""


TAIL = 3.0
"""Deviations at which the largest of a window may lie before it widens the spread. Of 128 normal values it lies at 2.6:
there the spread is the standard deviation. Where domains mix, a few batches of a rare one lie at 5 or 9."""


class History(NamedTuple):
    """What the journal knows of a stage up to a position."""

    losses: list[float]
    """Of the last good steps, oldest first."""
    norms: list[float]
    bad: int
    """Steps of the stage that were found bad and left behind."""


def history(records: Iterable[Record], position: int, window: int) -> History:
    """Return the history, of at most `window` good steps, of a stage that goes on from `position`."""
    before = [record.metrics for record in records if record.position <= position]
    good = [values for values in before if metrics.SKIPPED not in values][-window:]
    bad = sum(metrics.SKIPPED in values and metrics.SPIKE_SCORE in values for values in before)
    return History([values[metrics.LOSS] for values in good], [values[metrics.GRAD_NORM] for values in good], bad)


class SpikeGuard:
    """The window and the verdict on each step, all on the device; the same bits on every process.

    Shapes: 2 loss and gradient norm, W steps of the window.
    """

    def __init__(self, spikes: Spikes, device: torch.device) -> None:
        self.spikes = spikes
        self.score = torch.zeros((), dtype=torch.float64, device=device)
        """Of the last step: spreads above the mean, 0 as long as the window is not full."""
        self._window_2W = torch.zeros(2, spikes.window, dtype=torch.float64, device=device)
        """Newest last, so that its bits do not depend on how many came before."""
        self._filled = torch.zeros((), dtype=torch.int64, device=device)

    def restore(self, past: History) -> None:
        """Take up the window of an earlier attempt."""
        values_2W = torch.zeros(self._window_2W.shape, dtype=torch.float64)
        count = min(len(past.losses), self.spikes.window)
        if count:
            values_2W[:, -count:] = torch.tensor([past.losses[-count:], past.norms[-count:]], dtype=torch.float64)
        self._window_2W = values_2W.to(self._window_2W.device)
        self._filled = torch.full_like(self._filled, count)
        self.score = torch.zeros_like(self.score)

    @torch.no_grad()
    def flag(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1.0 (fp32, 0-d) if the step with this loss and gradient norm (0-d) is bad, else 0.0.

        Sets `score`. A good step enters the window.
        """
        now_2 = torch.stack([loss, grad_norm]).double()
        finite = now_2.isfinite().all()
        past_2W = _scaled(self._window_2W)
        deviation_2, mean_2 = torch.std_mean(past_2W, dim=1)
        spread_2 = torch.maximum(deviation_2, (past_2W.amax(dim=1) - mean_2) / TAIL)
        scores_2 = (_scaled(now_2) - mean_2) / torch.maximum(spread_2, SMALLEST * mean_2.abs().clamp_min(1.0))
        judged = finite & (self._filled >= self.spikes.window)
        self.score = torch.where(judged, scores_2.amax(), 0.0)
        bad = ~finite
        if self.spikes.policy != "off":
            bad = bad | (self.score > self.spikes.sigma)
        later_2W = torch.cat([self._window_2W[:, 1:], now_2.unsqueeze(1)], dim=1)
        self._window_2W = torch.where(bad, self._window_2W, later_2W)
        self._filled = self._filled + ~bad
        return bad.float()


def _scaled(values_2: Tensor) -> Tensor:
    """Return losses as they are and norms as logarithms: those of a mix of domains differ by factors."""
    return torch.stack([values_2[0], values_2[1].clamp_min(LEAST_NORM).log()])


class StepReading(Protocol):
    """What the host has read of a step."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def score(self) -> float: ...
    @property
    def skipped(self) -> bool: ...


@dataclass(frozen=True)
class StepDecision:
    """What follows from a step."""

    kind: Literal["go on", "skipped", "stop", "roll back"]
    reason: str = ""
    skip: Skip | None = None
    """`roll back` only: what to pass over from now on. Go back to the newest checkpoint at or before its start."""


GO_ON = StepDecision("go on")


class SpikeDetector:
    """Decides on every process alike what follows from each step; counts the bad ones."""

    def __init__(self, recipe: Recipe, span: StageSpan, past: History, skips: SkippedRanges) -> None:
        self.recipe, self.span = recipe, span
        self.bad = past.bad + len(skips.spans)
        """Bad steps of the stage so far, those that were rolled back included."""

    def judge(self, step: Step, found: StepReading) -> StepDecision:
        """Return what follows from `step`."""
        if not found.skipped:
            return GO_ON
        self.bad += 1
        return decide(self.recipe, self.span, step, found, self.bad)


def decide(recipe: Recipe, span: StageSpan, step: Step, found: StepReading, bad: int) -> StepDecision:
    """Return what follows from a bad step, the `bad`-th of its stage."""
    finite = math.isfinite(found.loss) and math.isfinite(found.grad_norm)
    policy = recipe.spikes.policy if finite else recipe.non_finite
    reason = f"loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}: {_why(recipe.spikes, found, finite)}"
    if policy == "stop":
        field = "spikes.policy" if finite else "non_finite"
        return StepDecision("stop", f"{reason}; {field} is stop")
    if bad >= recipe.spikes.most:
        return StepDecision("stop", f"{reason}; it is bad step {bad} of stage {span.name}, spikes.most is {bad}")
    if policy == "rollback":
        return StepDecision("roll back", reason, _around(span, step, recipe.spikes.around, reason))
    return StepDecision("skipped", reason)


def _why(spikes: Spikes, found: StepReading, finite: bool) -> str:
    if not finite:
        return "not finite"
    return (
        f"{found.score:.1f} times the spread above the mean of the {spikes.window} good steps before "
        f"(spikes.sigma is {spikes.sigma:g})"
    )


def _around(span: StageSpan, step: Step, around: int, reason: str) -> Skip:
    """Return the span of `step` and `around` steps on both sides, as far as the stage reaches."""
    steps = list(steps_from(span, span.start))
    place = steps.index(step)
    first, last = steps[max(0, place - around)], steps[min(len(steps) - 1, place + around)]
    return Skip(start=first.start, end=last.end, spike=step.start, reason=reason)


# Which documents were in the batch of a bad step: `incidents/<position>.json` in the stage's folder.
#
# A spike is understood by reading what was trained on. The file says why the step was bad and what was done, the
# tokens and documents of its batch by domain, source, language and licence, and the documents themselves in order
# of position, at most a thousand. `herd inspect` shows the same range with the texts. It is written by the leading
# process while the device works on: 0.1 to 0.7 s for a batch of 4M tokens in documents of 20, and there are at most
# `spikes.most` of them.

FOLDER = "incidents"


def write_incident(
    work: Path, tokens: Path, recipe: Recipe, step: Step, found: StepReading, verdict: StepDecision
) -> Path:
    """Write down the bad `step` of a run of `recipe` over the shards in `tokens`; return the file.

    The same step found bad again, after a restart, replaces its file.
    """
    incident = {
        "position": step.start,
        "end": step.end,
        "time": time.time(),
        "outcome": verdict.kind,
        "reason": verdict.reason,
        "loss": _number(found.loss),
        "grad_norm": _number(found.grad_norm),
        "score": found.score,
        "skip": None if verdict.skip is None else verdict.skip.model_dump(exclude={"reason"}),
        **_batch(inspect(tokens, recipe, step.start, step.end)),
    }
    path = work / FOLDER / f"{step.start:018}.json"
    write_atomic(path, json.dumps(incident, indent=1, allow_nan=False) + "\n")
    return path


def told(step: Step, verdict: StepDecision, incident: Path) -> str:
    """Return the line that logs a bad step or ends the run."""
    text = f"position {step.start}: {verdict.reason}"
    if verdict.skip is not None:
        text += f"; back to before {verdict.skip.start}, passing over the batches until {verdict.skip.end}"
    elif verdict.kind == "skipped":
        text += "; its batch changed nothing"
    else:
        text += ". Nothing of this step is kept. Look at its documents, or lower lr.peak"
    return f"{text}. Documents of the batch: {incident}"


def _batch(found: Inspection) -> dict[str, Any]:
    totals = {
        name: {value: count._asdict() for value, count in getattr(found, name).items()}
        for name in ("domains", "sources", "languages", "licences")
    }
    return {**totals, "documents": [use._asdict() for use in found.documents], "complete": found.complete}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no word for infinity
