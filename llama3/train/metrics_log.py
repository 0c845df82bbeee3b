"""What the leading process records after each step: a journal line with all metrics, and now and then a line of log.

Steps that the journal already has are compared instead of written again. A rollback voids the journal's records after
it and is itself a line of the journal.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from llama3.model.flops import flops_per_token
from llama3.parallel.mesh import ParallelContext
from llama3.recipe.base import DOMAINS
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import tokens as readable
from llama3.tokens.stream import TokenStream
from llama3.train import metrics
from llama3.train.data_loader import Step
from llama3.train.incidents import Skip, SkippedRanges
from llama3.train.job import Predicted
from llama3.train.journal import Journal, Record, Rewind, read_journal, read_rewinds
from llama3.train.loss_spikes import StepResult, history
from llama3.train.peak_flops import described, device_name, peak_of

GIB = 2**30
RATE_STEPS = 20
"""Steps over which the speed is averaged to predict the remaining time."""
LAUNCHED = "HERD_LAUNCHED"
"""Environment variable with the start of an attempt, in seconds since 1970, if the launcher sets it."""
LOG_EVERY_S = 5.0
COMPARED = (metrics.LOSS, metrics.GRAD_NORM, metrics.SKIPPED)
"""What a replayed step is compared by."""
_ILLEGAL = re.compile(r"[^\w./-]+")
"""What MLflow does not accept in a key."""


def log(line: str) -> None:
    """Print one line of the trainer's log, now."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


@dataclass(frozen=True)
class StepTiming:
    """Seconds of one step on the leading process."""

    step: float
    data_wait: float
    checkpoint: float | None = None
    """That training stopped for the checkpoint begun since the step before, if any."""
    checkpoint_write: float | None = None
    """From the beginning to the commit of a checkpoint that was finished since the step before, if any."""


class Recorder:
    """Journal, replay and speed of one stage; made by the leading process only."""

    def __init__(
        self,
        work: Path,
        span: StageSpan,
        stream: TokenStream,
        rows: int,
        world: ParallelContext,
        position: int,
        skips: SkippedRanges,
        predicted: Predicted | None = None,
    ) -> None:
        """Open the journal of `work` and count this attempt, which continues at `position` with `skips` skipped."""
        self.predicted = predicted.by_seq if predicted and predicted.processes == world.size else {}
        self.span, self.stream, self.skips = span, stream, skips
        self.schedule = Schedule(stream.recipe)
        self.meter = Meter(stream.recipe, rows, world, span.end)
        self.journal = Journal(work / "journal.jsonl")
        for skip in skips.spans[len(read_rewinds(self.journal.path)) :]:  # killed between writing the two files
            self._add_rewind(skip)
        self.attempts = AttemptLog(work / "attempts.jsonl", world.size)
        self.logged = time.monotonic()
        self.first_step_recorded = False
        self._continue_from(position)
        log(self.meter.described())

    def add(self, step: Step, result: StepResult, timing: StepTiming, more: Mapping[str, float] | None = None) -> None:
        """Record a finished step with `more` metrics, or compare it with its first run.

        Numbers that are not finite are left out: the step is marked as skipped, and its incident file has them.
        """
        values = self._plan(step)
        values |= {metrics.LOSS: result.loss, metrics.GRAD_NORM: result.grad_norm, metrics.SPIKE_SCORE: result.score}
        values |= {metrics.domain_loss(domain): loss for domain, loss in result.domain_loss.items()}
        if result.skipped:
            values |= self._skip(step)
        values = {key: value for key, value in values.items() if math.isfinite(value)}
        values |= {**self.meter.speed(step, timing), **self.meter.memory(), **(more or {})}
        planned = self.predicted.get(step.seq, {})
        values |= planned
        if metrics.PLANNED_STEP_S in planned:
            values[metrics.STEP_ERROR] = planned[metrics.PLANNED_STEP_S] / values[metrics.STEP_S] - 1
        replayed = self._write(step, values, 0.0 if result.skipped else timing.step)
        if time.monotonic() - self.logged >= LOG_EVERY_S or step.end >= self.span.end:
            self.logged = time.monotonic()
            log(
                f"position {readable(step.end)} of {readable(self.span.end)}, loss {result.loss:.4f}, "
                f"{self.meter.tokens_per_s:,.0f} tokens/s{' (again)' if replayed else ''}"
            )

    def pass_over(self, step: Step) -> None:
        """Record a step whose batch is not trained on, because of a rollback."""
        self._write(step, self._plan(step) | self._skip(step), 0.0)

    def rewind(self, skip: Skip, position: int, trained_to: int) -> None:
        """Record that training went back from `trained_to` to the checkpoint at `position`, and will skip `skip`."""
        self.skips = self.skips.plus(skip)
        self._add_rewind(skip)
        self._continue_from(position, trained_to)

    def _continue_from(self, position: int, trained_to: int | None = None) -> None:
        records = read_journal(self.journal.path)
        self.replay = Replay(records, position, trained_to)
        self.past = history(records, position, self.stream.recipe.spikes.window)
        """What the spike detector continues from."""
        kept = [record.metrics for record in records if metrics.SKIPPED not in record.metrics]
        self.useful_s = sum(values[metrics.STEP_S] for values in kept)
        before = [record.metrics for record in records if record.position <= position]
        self.skipped_tokens = sum(values[metrics.BATCH_TOKENS] for values in before if metrics.SKIPPED in values)
        self.source_shares = SourceShares(self.stream, self.span.start)
        self.recovery_recorded = False

    def _add_rewind(self, skip: Skip) -> None:
        self.journal.add(Rewind(time.time(), skip.start, skip.end))
        self.journal.sync()

    def _write(self, step: Step, values: dict[str, float], useful_s: float) -> bool:
        """Write or compare one record; return whether the journal already has it."""
        if self.replay.knows(Record(time.time(), step.end, values)):
            return True
        self.useful_s += useful_s
        elapsed = time.time() - self.attempts.started
        values[metrics.GOODPUT] = min(1.0, self.useful_s / elapsed) if elapsed > 0 else 1.0
        values |= self._data_shares(step.end)
        if not self.recovery_recorded:  # the first new record of an attempt, or after a rollback
            self.recovery_recorded = True
            if not self.first_step_recorded and self.meter.first_step_s is not None:
                self.first_step_recorded, values[metrics.FIRST_STEP_S] = True, self.meter.first_step_s
            values |= self.replay.metrics(self.attempts.restarts, len(self.skips.spans))
        self.journal.add(Record(time.time(), step.end, values))
        return False

    def _plan(self, step: Step) -> dict[str, float]:
        return {
            metrics.LEARNING_RATE: self.schedule.lr_at(step.start),
            metrics.BATCH_TOKENS: step.batch,
            metrics.SEQ_LEN: step.seq,
            metrics.STEP: self.schedule.step_at(step.end),
        }

    def _skip(self, step: Step) -> dict[str, float]:
        self.skipped_tokens += step.batch
        return {metrics.SKIPPED: 1.0, metrics.SKIPPED_TOKENS: self.skipped_tokens}

    def _data_shares(self, position: int) -> dict[str, float]:
        """Return planned and realized shares of the stage's tokens so far, and epochs since the start of the run."""
        start, count = self.span.start, position - self.span.start
        before, now = self.stream.realised(start), self.stream.realised(position)
        planned = self.stream.planned(start, position)
        values = {metrics.epochs(leaf): epochs for leaf, epochs in self.stream.epochs(position).items()}
        for domain in (domain for domain in DOMAINS if domain in now):
            values[metrics.share(domain)] = (now[domain] - before[domain]) / count
            values[metrics.planned_share(domain)] = float(planned[domain] / count)
        return {**values, **self.source_shares.at(position)}


class Meter:
    """Speed and memory of a stage that ends at `end`: wall clock, waiting for data included, over all devices."""

    def __init__(self, recipe: Recipe, rows: int, world: ParallelContext, end: int) -> None:
        self.recipe, self.rows, self.world, self.end = recipe, rows, world, end
        self.device = device_name(world.device)
        self.first_step_s: float | None = None
        self._rates: deque[float] = deque(maxlen=RATE_STEPS)

    @property
    def tokens_per_s(self) -> float:
        """Over the last steps."""
        return sum(self._rates) / len(self._rates) if self._rates else 0.0

    def described(self) -> str:
        """Return devices, peak and formula in one line."""
        return f"{self.world.size} x {described(self.device, self.recipe.compute)}"

    def speed(self, step: Step, timing: StepTiming) -> dict[str, float]:
        """Return the metrics of a step that has just ended."""
        if self.first_step_s is None:
            launched = os.environ.get(LAUNCHED)
            self.first_step_s = time.time() - (float(launched) if launched else psutil.Process().create_time())
        rate = step.batch / timing.step
        self._rates.append(rate)
        device_rate = rate / self.world.size
        flops = flops_per_token(self.recipe.model, self.rows, step.seq)
        values = {
            metrics.TOKENS_PER_S: rate,
            metrics.TOKENS_PER_S_PER_DEVICE: device_rate,
            metrics.STEP_S: timing.step,
            metrics.DATA_WAIT_S: timing.data_wait,
            metrics.REMAINING_S: (self.end - step.end) / self.tokens_per_s,
            metrics.TFLOPS_PER_DEVICE: flops.causal * device_rate / 1e12,
        }
        if peak := peak_of(self.device, self.recipe.compute):  # an unknown device has no utilization
            values[metrics.MFU] = flops.causal * device_rate / peak.flops
            values[metrics.MFU_FULL] = flops.full * device_rate / peak.flops
        if timing.checkpoint is not None:
            values[metrics.CHECKPOINT_S] = timing.checkpoint
        if timing.checkpoint_write is not None:
            values[metrics.CHECKPOINT_WRITE_S] = timing.checkpoint_write
        return values

    def memory(self) -> dict[str, float]:
        """Return the memory of this process, present and peak."""
        values = {metrics.HOST_GIB: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        device = self.world.device
        if device.type == "cuda":
            values[metrics.DEVICE_GIB] = torch.cuda.memory_allocated(device) / GIB
            values[metrics.DEVICE_PEAK_GIB] = torch.cuda.max_memory_allocated(device) / GIB
            values[metrics.DEVICE_RESERVED_GIB] = torch.cuda.max_memory_reserved(device) / GIB
        return values


class SourceShares:
    """Planned and realized shares by source of a stage that starts at `start`, for domains with several sources.

    Planned is the domain's part of the mix, split among its sources by their tokens (pooled) or by their weights.
    """

    def __init__(self, stream: TokenStream, start: int) -> None:
        self.stream, self.start, self.counted = stream, start, start
        self.tokens: dict[str, int] = {}
        names = list(stream.sources(start, start))
        domains = [name.split("/", 1)[0] for name in names]
        self.shown = [name for name, domain in zip(names, domains, strict=True) if domains.count(domain) > 1]

    def at(self, position: int) -> dict[str, float]:
        """Return the metrics at `position`, which must not be before that of the previous call."""
        if not self.shown:
            return {}
        for name, count in self.stream.sources(self.counted, position).items():  # only what is new is counted
            self.tokens[name] = self.tokens.get(name, 0) + count
        self.counted = position
        total = position - self.start
        planned = self.stream.planned_sources(self.start, position)
        values = {}
        for name in self.shown:
            key = _ILLEGAL.sub("-", name)
            values[metrics.share(key)] = self.tokens.get(name, 0) / total
            values[metrics.planned_share(key)] = float(planned[name] / total)
        return values


class Replay:
    """The journal's steps after the position from which an attempt continues: trained a second time and compared.

    Equal losses and gradient norms show that the restart continues the interrupted run. Records that a rollback voided
    are not compared: their batches are skipped now.
    """

    def __init__(self, journal: Sequence[Record], position: int, trained_to: int | None = None) -> None:
        """Compare with the valid records of `journal`; `trained_to` is where a rollback went back from."""
        self.last = journal[-1].position if journal else position
        self.lost_tokens = max(0, (self.last if trained_to is None else trained_to) - position)
        self.largest: float | None = None
        """Largest difference so far, None before any step was compared."""
        self._records = {record.position: record for record in journal if record.position > position}

    def knows(self, record: Record) -> bool:
        """Return whether the journal already has this step; if so, compare the two."""
        if record.position > self.last:
            return False
        if before := self._records.get(record.position):
            # A number that only one of the records has counts in full.
            pairs = [(before.metrics.get(key, 0.0), record.metrics.get(key, 0.0)) for key in COMPARED]
            self.largest = max(self.largest or 0.0, *(abs(first - second) for first, second in pairs))
        return True

    def metrics(self, restarts: int, rollbacks: int = 0) -> dict[str, float]:
        """Return what the first new step after a restart or rollback records about it; {} if there was none."""
        if not restarts and not rollbacks:
            return {}
        values = {metrics.LOST_TOKENS: float(self.lost_tokens)}
        if restarts:
            values[metrics.RESTARTS] = float(restarts)
        if rollbacks:
            values[metrics.ROLLBACKS] = float(rollbacks)
        return values if self.largest is None else {**values, metrics.REPLAY_MAX_ABS_DIFF: self.largest}


class AttemptLog:
    """`attempts.jsonl` of a stage: one line per start of its trainer."""

    def __init__(self, path: Path, processes: int) -> None:
        """Record one more attempt."""
        fields = {"time": time.time(), "pid": os.getpid(), "processes": processes}
        with path.open("ab+") as file:
            file.seek(0)
            earlier = file.read()
            torn = b"" if earlier.endswith(b"\n") or not earlier else b"\n"
            file.write(torn + json.dumps(fields).encode() + b"\n")
        whole = [line for line in earlier.split(b"\n") if line.endswith(b"}")]
        self.restarts = len(whole)
        self.started: float = json.loads(whole[0])["time"] if whole else fields["time"]
        """When the stage was first started, in seconds since 1970."""
