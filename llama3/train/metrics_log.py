"""What rank 0 records after each step: a journal line with all metrics, and a line of log every few seconds.

Steps that the journal already has are compared instead of written again.
"""

from __future__ import annotations

import math
import os
import re
import resource
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from herd.llama3.model.flops import flops_per_token
from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import tokens as readable
from herd.llama3.tokens.conversations import ConversationStream
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.train import metrics
from herd.llama3.train.callbacks import Callback, StepResult, StepTiming, log
from herd.llama3.train.data_loader import Step
from herd.llama3.train.device import describe_device, device_name, peak_flops
from herd.llama3.train.job import HourlyCosts, PredictedStepTimes
from herd.llama3.train.journal import (
    Journal,
    Record,
    Rewind,
    SkippedRange,
    SkippedRanges,
    add_attempt,
    device_hours,
    iter_journal,
    read_attempts,
    read_rewinds,
)
from herd.llama3.train.loss_spikes import history

GIB = 2**30
RATE_STEPS = 20
"""Steps over which the speed is averaged to predict the remaining time."""
LAUNCHED = "HERD_LAUNCHED"
"""Environment variable with the start of an attempt, in seconds since 1970, if the launcher sets it."""
LOG_EVERY_S = 5.0
COMPARED = (metrics.LOSS, metrics.GRAD_NORM, metrics.SKIPPED)
"""What a replayed step is compared by."""
ILLEGAL = re.compile(r"[^\w./-]+")
"""What MLflow does not accept in a key."""


class Recorder(Callback):
    """Journal, replay and speed of one stage, on rank 0. Comes after the callbacks that add metrics."""

    def __init__(
        self,
        work: Path,
        span: StageSpan,
        stream: TokenStream | ConversationStream,
        vocab_size: int,
        world: ParallelContext,
        position: int,
        skips: SkippedRanges,
        predicted: PredictedStepTimes | None = None,
        costs: HourlyCosts | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Open the journal of `work` and count this attempt, which continues at `position` with `skips` skipped.

        `environment` is what this attempt runs on.
        """
        self.predicted = predicted.by_seq if predicted and predicted.processes == world.size else {}
        self.span, self.stream, self.skips = span, stream, skips
        self.schedule = stream.recipe.schedule
        self.meter = Meter(stream.recipe, vocab_size, world, span.end)
        self.journal = Journal(work / "journal.jsonl")
        for skip in skips.ranges[len(read_rewinds(self.journal.path)) :]:  # killed between writing the two files
            self._add_rewind(skip)
        self.costs, self.hours_before = costs or HourlyCosts(), device_hours(work)
        self.began = time.time()
        add_attempt(work, {"time": self.began, "pid": os.getpid(), "processes": world.size, "environment": environment})
        attempts = read_attempts(work)
        self.restarts, self.stage_began = len(attempts) - 1, float(attempts[0]["time"])
        self.logged = time.monotonic()
        self.first_step_recorded = self.recovery_recorded = False
        self._continue_from(position)
        log(f"{world.size} x {describe_device(self.meter.device, stream.recipe.precision)}")

    def on_step_end(self, step: Step, result: StepResult) -> None:
        """Record a finished step with what other callbacks measured, or compare it with its first run.

        Numbers that are not finite are left out: the step is marked as skipped, and its incident file has them.
        """
        if result.decision.kind == "stop":
            return
        trained = result.decision.kind != "excluded"
        values: dict[str, float] = {
            metrics.LEARNING_RATE: self.schedule.lr_at(step.start),
            metrics.BATCH_TOKENS: step.batch,
            metrics.SEQ_LEN: step.seq_len,
            metrics.STEP: self.schedule.step_at(step.end),
            metrics.LOSS: result.loss,
            metrics.GRAD_NORM: result.grad_norm,
            metrics.SPIKE_SCORE: result.score,
            **{metrics.domain_loss(domain): loss for domain, loss in result.domain_loss.items()},
        }
        if self.span.stage.kind == "sft":
            values[metrics.TARGET_TOKENS] = result.targets
        if result.skipped:
            self.skipped_tokens += step.batch
            values |= {metrics.SKIPPED: 1.0, metrics.SKIPPED_TOKENS: self.skipped_tokens}
        values = {key: value for key, value in values.items() if math.isfinite(value)}
        if trained:
            planned = self.predicted.get(step.seq_len, {})
            values |= {**self.meter.measure(step, result.timing), **planned}
            if metrics.PLANNED_STEP_S in planned:
                values[metrics.STEP_ERROR] = planned[metrics.PLANNED_STEP_S] / values[metrics.STEP_S] - 1
        values |= result.metrics

        replayed = self.replay.knows(Record(time.time(), step.end, values))
        if not replayed:
            self.useful_s += 0.0 if result.skipped else result.timing.step
            now = time.time()
            elapsed = now - self.stage_began
            values[metrics.GOODPUT] = min(1.0, self.useful_s / elapsed) if elapsed > 0 else 1.0
            hours = self.hours_before + self.meter.world.size * (now - self.began) / 3600
            values |= {metrics.cost(name): amount for name, amount in self.costs.so_far(hours).items()}
            if not self.recovery_recorded:  # the first new record of an attempt, or after a rollback
                self.recovery_recorded = True
                if not self.first_step_recorded and self.meter.first_step_s is not None:
                    self.first_step_recorded, values[metrics.FIRST_STEP_S] = True, self.meter.first_step_s
                values |= self.replay.metrics(self.restarts, len(self.skips.ranges))
            self.journal.add(Record(time.time(), step.end, values))
        if trained and (time.monotonic() - self.logged >= LOG_EVERY_S or step.end >= self.span.end):
            self.logged = time.monotonic()
            log(
                f"position {readable(step.end)} of {readable(self.span.end)}, loss {result.loss:.4f}, "
                f"{self.meter.tokens_per_s:,.0f} tokens/s{' (again)' if replayed else ''}"
            )

    def on_save_start(self) -> None:
        """Sync the journal: a checkpoint must not be ahead of the journal on the disk."""
        self.journal.sync()

    def rewind(self, skip: SkippedRange, position: int, trained_to: int) -> None:
        """Record that training went back from `trained_to` to the checkpoint at `position`, and will skip `skip`."""
        self.skips = self.skips.plus(skip)
        self._add_rewind(skip)
        self._continue_from(position, trained_to)

    def _continue_from(self, position: int, trained_to: int | None = None) -> None:
        self.useful_s = self.skipped_tokens = 0.0
        later: list[Record] = []

        def records() -> Iterator[Record]:  # one pass for all sums: the journal does not fit into memory
            for record in iter_journal(self.journal.path):
                if metrics.SKIPPED not in record.metrics:
                    self.useful_s += record.metrics[metrics.STEP_S]
                elif record.position <= position:
                    self.skipped_tokens += record.metrics[metrics.BATCH_TOKENS]
                if record.position > position:
                    later.append(record)
                yield record

        self.past = history(records(), position, self.stream.recipe.spikes.window)
        """What the spike detector continues from."""
        self.replay = Replay(later, position, trained_to)
        self.recovery_recorded = False

    def _add_rewind(self, skip: SkippedRange) -> None:
        self.journal.add(Rewind(time.time(), skip.start, skip.end))
        self.journal.sync()


class Meter:
    """Speed and memory of a stage that ends at `end`: wall clock, waiting for data included, over all devices."""

    def __init__(self, recipe: Recipe, vocab_size: int, world: ParallelContext, end: int) -> None:
        self.recipe, self.vocab_size, self.world, self.end = recipe, vocab_size, world, end
        self.device = device_name(world.device)
        self.first_step_s: float | None = None
        self.tokens_per_s = 0.0
        """Over the last steps."""
        self._last: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)
        """Tokens and seconds of each; the mean of their rates would give short steps too much weight."""

    def measure(self, step: Step, timing: StepTiming) -> dict[str, float]:
        """Return the metrics of a step that has just ended, and the memory of this process."""
        if self.first_step_s is None:
            launched = os.environ.get(LAUNCHED)
            self.first_step_s = time.time() - (float(launched) if launched else psutil.Process().create_time())
        rate = step.batch / timing.step
        self._last.append((step.batch, timing.step))
        self.tokens_per_s = sum(tokens for tokens, _ in self._last) / sum(seconds for _, seconds in self._last)
        device, device_rate = self.world.device, rate / self.world.size
        flops = flops_per_token(self.recipe.model, self.vocab_size, step.seq_len)
        values = {
            metrics.TOKENS_PER_S: rate,
            metrics.TOKENS_PER_S_PER_DEVICE: device_rate,
            metrics.STEP_S: timing.step,
            metrics.DATA_WAIT_S: timing.data_wait,
            metrics.REMAINING_S: (self.end - step.end) / self.tokens_per_s,
            metrics.TFLOPS_PER_DEVICE: flops.causal * device_rate / 1e12,
        }
        if peak := peak_flops(self.device, self.recipe.precision):  # an unknown device has no utilization
            values[metrics.MFU] = flops.causal * device_rate / peak.flops
            values[metrics.MFU_FULL] = flops.full * device_rate / peak.flops
        if timing.checkpoint is not None:
            values[metrics.CHECKPOINT_S] = timing.checkpoint
        values[metrics.HOST_GIB] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        if device.type == "cuda":
            values[metrics.DEVICE_GIB] = torch.cuda.memory_allocated(device) / GIB
            values[metrics.DEVICE_PEAK_GIB] = torch.cuda.max_memory_allocated(device) / GIB
            values[metrics.DEVICE_RESERVED_GIB] = torch.cuda.max_memory_reserved(device) / GIB
        return values


class DataShares(Callback):
    """Planned and realized shares of a stage's tokens so far, and epochs since the start of the run.

    By domain, and by source for domains with several: planned is the domain's share, split among its sources by their
    tokens (pooled) or by their weights.
    """

    def __init__(self, stream: TokenStream | ConversationStream, start: int) -> None:
        self.stream, self.start, self.counted = stream, start, start
        self.tokens: dict[str, int] = {}
        names = list(stream.sources(start, start))
        domains = [name.split("/", 1)[0] for name in names]
        self.shown = [name for name, domain in zip(names, domains, strict=True) if domains.count(domain) > 1]

    def on_step_end(self, step: Step, result: StepResult) -> None:
        result.metrics.update(self.metrics_at(step.end))

    def metrics_at(self, position: int) -> dict[str, float]:
        total = position - self.start
        before, now = self.stream.realized(self.start), self.stream.realized(position)
        planned = self.stream.planned(self.start, position)
        values = {metrics.epochs(dataset): epochs for dataset, epochs in self.stream.epochs(position).items()}
        for domain in now:
            values[metrics.fraction(domain)] = (now[domain] - before[domain]) / total
            values[metrics.target_fraction(domain)] = float(planned.get(domain, 0) / total)
        if not self.shown:
            return values
        if position < self.counted:  # a rollback
            self.tokens, self.counted = {}, self.start
        for name, count in self.stream.sources(self.counted, position).items():  # only what is new is counted
            self.tokens[name] = self.tokens.get(name, 0) + count
        self.counted = position
        planned_sources = self.stream.planned_sources(self.start, position)
        for name in self.shown:
            key = ILLEGAL.sub("-", name)
            values[metrics.fraction(key)] = self.tokens.get(name, 0) / total
            values[metrics.target_fraction(key)] = float(planned_sources[name] / total)
        return values


class Replay:
    """The journal's steps after the position from which an attempt continues: trained a second time and compared.

    Records that a rollback voided are not compared: their batches are skipped now.
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
        """Return the metrics of a restart or rollback for the first new step after it; {} if there was none."""
        if not restarts and not rollbacks:
            return {}
        values = {metrics.LOST_TOKENS: float(self.lost_tokens)}
        if restarts:
            values[metrics.RESTARTS] = float(restarts)
        if rollbacks:
            values[metrics.ROLLBACKS] = float(rollbacks)
        return values if self.largest is None else {**values, metrics.REPLAY_MAX_ABS_DIFF: self.largest}
