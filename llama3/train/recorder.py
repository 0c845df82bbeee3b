"""What the leading process writes down after each step: a journal line, and now and then a line of log.

Steps that the journal has already are compared and not written again (see `replay`). Speed is measured here, from whole
steps on the wall clock; a device whose peak is not in the table gets no utilisation rather than a guessed one.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from llama3.model.flops import flops_per_token
from llama3.model.transformer import Transformer
from llama3.parallel.mesh import World
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.section import DOMAINS
from llama3.recipe.units import tokens as readable
from llama3.tokens.stream import TokenStream
from llama3.train import metrics
from llama3.train.journal import Journal, Record, read_journal
from llama3.train.reader import Step
from llama3.train.replay import Attempts, Replay
from llama3.train.source_shares import SourceShares
from llama3.train.step import Outcome

GIB = 2**30
LOG_EVERY_S = 5.0
RATE_STEPS = 20
"""Steps whose speed foretells the time that remains."""
PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
"""Dense bf16 FLOP/s by the name that the driver gives (NVIDIA data sheets; sparse figures are twice these)."""


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    step: float
    data_wait: float
    checkpoint: float | None
    """Of the checkpoint saved since the step before, if one was."""


class Recorder:
    """Journal, replay and speed of one stage; made by the leading process only."""

    def __init__(
        self, work: Path, span: StageSpan, stream: TokenStream, model: Transformer, world: World, position: int
    ) -> None:
        """Open the journal of `work` and count this attempt, which goes on from `position`."""
        self.span, self.stream, self.model, self.world = span, stream, model, world
        self.schedule = Schedule(stream.recipe)
        self.journal = Journal(work / "journal.jsonl")
        earlier = read_journal(self.journal.path)
        self.replay = Replay(earlier, position)
        self.attempts = Attempts(work / "attempts.jsonl", world.size)
        self.useful_s = sum(record.metrics[metrics.STEP_S] for record in earlier)
        self.announced = False
        self.recent: deque[float] = deque(maxlen=RATE_STEPS)
        self.logged = time.monotonic()
        self.source_shares = SourceShares(stream, span.start)

    def add(self, step: Step, outcome: Outcome, timing: Timing) -> None:
        """Record a finished step, or compare it with its first run."""
        self.recent.append(step.batch / timing.step)
        values = {**self._training(step, outcome), **self._speed(step, timing), **self._memory()}
        known = self.replay.knows(Record(time.time(), step.end, values))
        if not known:
            self.useful_s += timing.step
            values |= {metrics.GOODPUT: self._goodput(), **self._data(step.end)}
            if not self.announced:
                self.announced = True
                values |= self.replay.metrics(self.attempts.restarts)
            self.journal.add(Record(time.time(), step.end, values))
        self._log(step, outcome, again=known)

    def _training(self, step: Step, outcome: Outcome) -> dict[str, float]:
        return {
            metrics.LOSS: outcome.loss,
            metrics.GRAD_NORM: outcome.grad_norm,
            metrics.LEARNING_RATE: self.schedule.lr_at(step.start),
            metrics.BATCH_TOKENS: step.batch,
            metrics.SEQ_LEN: step.seq,
            metrics.STEP: self.schedule.step_at(step.end),
            **{metrics.domain_loss(domain): loss for domain, loss in outcome.domain_loss.items()},
        }

    def _speed(self, step: Step, timing: Timing) -> dict[str, float]:
        per_device = step.batch / timing.step / self.world.size
        flops = flops_per_token(self.model.spec, self.model.rows, step.seq).causal * per_device
        values = {
            metrics.TOKENS_PER_S: step.batch / timing.step,
            metrics.TOKENS_PER_S_PER_DEVICE: per_device,
            metrics.TFLOPS_PER_DEVICE: flops / 1e12,
            metrics.STEP_S: timing.step,
            metrics.DATA_WAIT_S: timing.data_wait,
            metrics.REMAINING_S: (self.span.end - step.end) * len(self.recent) / sum(self.recent),
        }
        if timing.checkpoint is not None:
            values[metrics.CHECKPOINT_S] = timing.checkpoint
        if (peak := self._peak()) is not None:
            values[metrics.MFU] = flops / peak
        return values

    def _peak(self) -> float | None:
        if self.world.device.type != "cuda" or self.stream.recipe.compute != "bf16":
            return None
        return PEAKS.get(torch.cuda.get_device_name(self.world.device))

    def _memory(self) -> dict[str, float]:
        values = {metrics.HOST_GIB: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        if self.world.device.type == "cuda":
            values[metrics.DEVICE_GIB] = torch.cuda.max_memory_allocated(self.world.device) / GIB
        return values

    def _data(self, position: int) -> dict[str, float]:
        """Return the shares of the stage's tokens so far, asked and had, and epochs since the start of the run."""
        start, count = self.span.start, position - self.span.start
        before, now = self.stream.realised(start), self.stream.realised(position)
        planned = self.stream.planned(start, position)
        values = {metrics.epochs(leaf): epochs for leaf, epochs in self.stream.epochs(position).items()}
        for domain in (domain for domain in DOMAINS if domain in now):
            values[metrics.share(domain)] = (now[domain] - before[domain]) / count
            values[metrics.planned_share(domain)] = float(planned[domain] / count)
        return {**values, **self.source_shares.at(position)}

    def _goodput(self) -> float:
        elapsed = time.time() - self.attempts.started
        return min(1.0, self.useful_s / elapsed) if elapsed > 0 else 1.0

    def _log(self, step: Step, outcome: Outcome, again: bool) -> None:
        if time.monotonic() - self.logged < LOG_EVERY_S and step.end < self.span.end:
            return
        self.logged = time.monotonic()
        rate = sum(self.recent) / len(self.recent)
        log(
            f"position {readable(step.end)} of {readable(self.span.end)}, loss {outcome.loss:.4f}, "
            f"{rate:,.0f} tokens/s{' (again)' if again else ''}"
        )


def log(line: str) -> None:
    """Print one line of the trainer's log, now."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
