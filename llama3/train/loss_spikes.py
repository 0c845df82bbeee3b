"""Bad steps (loss spikes, values that are not finite): detection on the device, and the decision that follows.

A step is bad when its loss or gradient norm is not finite, or (if the recipe has a spike policy) when its loss or the
logarithm of the norm is more than sigma spreads above the mean of the last good steps: the rule of OLMo-core and
Levanter (6 sigma, 128 steps). The decision is a function of recipe and journal, so a restarted attempt decides alike.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Spikes
from herd.llama3.tokens.inspect import inspect, stream_position
from herd.llama3.train import metrics
from herd.llama3.train.callbacks import Callback, StepDecision, StepResult, log
from herd.llama3.train.data_loader import Step, steps_from
from herd.llama3.train.job import TrainJob
from herd.llama3.train.journal import Record, SkippedRange, SkippedRanges
from herd.storage.filesystem import write_atomic

SMALLEST = 1e-6
"""Smallest spread, as a fraction of the mean (or of 1, if that is larger): smaller differences are rounding."""
LEAST_NORM = 1e-30
"""Replaces a gradient norm of 0, which has no logarithm."""
TAIL = 3.0
"""Deviations above the mean that the largest value of a window may have before it widens the spread. The largest of
128 normal values has 2.6: there the spread is the standard deviation. With mixed domains, batches of a rare one have 5
or 9."""
FOLDER = "incidents"


class History(NamedTuple):
    """The steps of a stage up to a position, from the journal."""

    losses: list[float]
    """Of the last good steps, oldest first; likewise `norms`."""
    norms: list[float]
    bad: int
    """Steps of the stage that were bad and skipped."""


def history(records: Iterable[Record], position: int, window: int) -> History:
    """Return the history, of at most `window` good steps, of a stage that continues at `position`."""
    good, bad = deque[Mapping[str, float]](maxlen=window), 0
    for values in (record.metrics for record in records if record.position <= position):
        if metrics.SKIPPED not in values:
            good.append(values)
        elif metrics.SPIKE_SCORE in values:
            bad += 1
    return History([values[metrics.LOSS] for values in good], [values[metrics.GRAD_NORM] for values in good], bad)


class SpikeGuard:
    """The window of good steps and the test of each step, on the device; the same bits on every process.

    Bad values never enter the window: a lasting rise (a harder mix within a stage) is bad until `spikes.max_bad_steps`
    ends the run. The first steps of a stage, until the window is full, are not tested.
    Shapes: 2 loss and gradient norm, W steps of the window.
    """

    def __init__(self, spikes: Spikes, device: torch.device) -> None:
        self.spikes = spikes
        self.score = torch.zeros((), dtype=torch.float64, device=device)
        """z-score of the last step, 0 until the window is full."""
        self._window_2W = torch.zeros(2, spikes.window, dtype=torch.float64, device=device)
        """Newest last, so that its bits do not depend on the number of earlier steps."""
        self._filled = torch.zeros((), dtype=torch.int64, device=device)

    def restore(self, past: History) -> None:
        """Set the window to that of an earlier attempt."""
        values_2W = torch.zeros(self._window_2W.shape, dtype=torch.float64)
        count = min(len(past.losses), self.spikes.window)
        if count:
            values_2W[:, -count:] = torch.tensor([past.losses[-count:], past.norms[-count:]], dtype=torch.float64)
        self._window_2W = values_2W.to(self._window_2W.device)
        self._filled = torch.full_like(self._filled, count)
        self.score = torch.zeros_like(self.score)

    @torch.no_grad()
    def flag(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1.0 (fp32, 0-d) if the step is bad, else 0.0, and set `score`. A good step enters the window."""
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
    """Return losses unchanged and norms as logarithms: norms of a mix of domains differ by factors."""
    return torch.stack([values_2[0], values_2[1].clamp_min(LEAST_NORM).log()])


class SpikeDetector:
    """Decides on every process alike what follows from each step; counts the bad ones."""

    def __init__(self, recipe: Recipe, span: StageSpan, past: History, skips: SkippedRanges) -> None:
        self.recipe, self.span = recipe, span
        self.bad = past.bad + len(skips.ranges)
        """Bad steps of the stage so far, those that were rolled back included."""

    def judge(self, step: Step, result: StepResult) -> StepDecision:
        if not result.skipped:
            return StepDecision("continue")
        self.bad += 1
        spikes, span = self.recipe.spikes, self.span
        reason = f"loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}: "
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            field, policy = "spikes.policy", spikes.policy
            reason += (
                f"{result.score:.1f} times the spread above the mean of the {spikes.window} good steps before "
                f"(spikes.sigma is {spikes.sigma:g})"
            )
        else:
            field, policy = "non_finite", self.recipe.non_finite
            reason += "not finite"
        if policy == "stop":
            return StepDecision("stop", f"{reason}; {field} is stop")
        if self.bad >= spikes.max_bad_steps:
            return StepDecision(
                "stop", f"{reason}; it is bad step {self.bad} of stage {span.name}, spikes.max_bad_steps is {self.bad}"
            )
        if policy != "rollback":
            return StepDecision("skipped", reason)
        # Skip the step and `skip_window_steps` on both sides, as far as the stage reaches.
        steps = list(steps_from(span, span.start))
        index = steps.index(step)
        first = steps[max(0, index - spikes.skip_window_steps)]
        last = steps[min(len(steps) - 1, index + spikes.skip_window_steps)]
        return StepDecision(
            "roll back", reason, SkippedRange(start=first.start, end=last.end, spike=step.start, reason=reason)
        )


class TrainingStopped(FloatingPointError):
    """The recipe ends the run at a bad step; the text names position, reason and the file with its documents."""


class SpikeRollback(Exception):
    """Training goes back to before a spike; `decision` names the batches to skip after that."""

    def __init__(self, decision: StepDecision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


class Incidents(Callback):
    """Writes an incident file for each bad step; raises TrainingStopped or SpikeRollback if that was decided.

    A bad step has changed nothing, so continuing, going back and stopping are all still possible.
    """

    def __init__(self, job: TrainJob, recipe: Recipe, world: ParallelContext) -> None:
        self.job, self.recipe, self.world = job, recipe, world

    def on_step_end(self, step: Step, result: StepResult) -> None:
        decision = result.decision
        if decision.kind in ("continue", "excluded"):
            return
        line = ""
        if self.world.is_rank0:
            incident = write_incident(self.job.work, self.job.tokens, self.recipe, step, result, decision)
            line = incident_line(step, decision, incident)
            log(line)
        if decision.kind == "stop":
            raise TrainingStopped(self.world.broadcast_object(line))
        if decision.kind == "roll back":
            raise SpikeRollback(decision)


def write_incident(
    work: Path, tokens: Path, recipe: Recipe, step: Step, result: StepResult, decision: StepDecision
) -> Path:
    """Write `incidents/<position>.json` about the bad `step` of a run over the shards in `tokens`; return the file.

    It has the decision, counts by domain, source, language and license, and at most a thousand documents of the batch.
    Takes 0.1 to 0.7 s for a batch of 4M tokens in documents of 20.
    """
    batch = inspect(tokens, recipe, *(stream_position(recipe, position) for position in (step.start, step.end)))
    totals = {
        name: {value: count._asdict() for value, count in getattr(batch, name).items()}
        for name in ("domains", "sources", "languages", "licenses")
    }
    incident = {
        "position": step.start,
        "end": step.end,
        "time": time.time(),
        "outcome": decision.kind,
        "reason": decision.reason,
        "loss": result.loss if math.isfinite(result.loss) else str(result.loss),  # JSON has no infinity
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else str(result.grad_norm),
        "score": result.score,
        "skip": None if decision.skip is None else decision.skip.model_dump(exclude={"reason"}),
        **totals,
        "documents": [use._asdict() for use in batch.documents],
        "complete": batch.complete,
    }
    path = work / FOLDER / f"{step.start:018}.json"
    write_atomic(path, json.dumps(incident, indent=1, allow_nan=False) + "\n")
    return path


def incident_line(step: Step, decision: StepDecision, incident: Path) -> str:
    """Return the line that logs a bad step or ends the run."""
    text = f"position {step.start}: {decision.reason}"
    if decision.skip is not None:
        text += f"; back to before {decision.skip.start}, without the batches up to {decision.skip.end}"
    elif decision.kind == "skipped":
        text += "; its batch changed nothing"
    else:
        text += ". Nothing of this step is kept. Look at its documents, or lower lr.peak"
    return f"{text}. Documents of the batch: {incident}"
