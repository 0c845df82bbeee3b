"""What the leading process writes down after each step: a journal line, and now and then a line of log.

Steps that the journal has already are compared and not written again (see `replay`). A rollback makes the journal's
records after it void and is itself a line of it. A number that is not finite is left out: the step it belongs to is
marked as skipped, and `incidents` has it in words.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from llama3.parallel.mesh import World
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.section import DOMAINS, Domain
from llama3.recipe.units import tokens as readable
from llama3.tokens.stream import TokenStream
from llama3.train import metrics
from llama3.train.job import Predicted
from llama3.train.journal import Journal, Record, Rewind, read_journal, read_rewinds
from llama3.train.meter import Meter, Timing
from llama3.train.reader import Step
from llama3.train.replay import Attempts, Replay
from llama3.train.skips import Skip, Skips
from llama3.train.source_shares import SourceShares
from llama3.train.spikes import Found, history

LOG_EVERY_S = 5.0


class Finished(Found, Protocol):
    """What the host has read of a step that ended."""

    @property
    def domain_loss(self) -> Mapping[Domain, float]: ...


class Recorder:
    """Journal, replay and speed of one stage; made by the leading process only."""

    def __init__(
        self,
        work: Path,
        span: StageSpan,
        stream: TokenStream,
        rows: int,
        world: World,
        position: int,
        skips: Skips,
        predicted: Predicted | None = None,
    ) -> None:
        """Open the journal of `work` and count this attempt, which goes on from `position` past `skips`."""
        self.predicted = predicted.by_seq if predicted and predicted.processes == world.size else {}
        self.span, self.stream, self.skips = span, stream, skips
        self.schedule = Schedule(stream.recipe)
        self.meter = Meter(stream.recipe, rows, world, span.end)
        self.journal = Journal(work / "journal.jsonl")
        for skip in skips.spans[len(read_rewinds(self.journal.path)) :]:  # killed between the two files
            self._add_rewind(skip)
        self.attempts = Attempts(work / "attempts.jsonl", world.size)
        self.logged = time.monotonic()
        self.begun = False
        """Whether the journal knows when this attempt's first step ended."""
        self._go_on_from(position)
        log(self.meter.described())

    def add(self, step: Step, found: Finished, timing: Timing, more: Mapping[str, float] | None = None) -> None:
        """Record a finished step with `more` metrics, or compare it with its first run."""
        values = self._plan(step)
        values |= {metrics.LOSS: found.loss, metrics.GRAD_NORM: found.grad_norm, metrics.SPIKE_SCORE: found.score}
        values |= {metrics.domain_loss(domain): loss for domain, loss in found.domain_loss.items()}
        if found.skipped:
            values |= self._skip(step)
        values = {key: value for key, value in values.items() if math.isfinite(value)}
        values |= {**self.meter.speed(step, timing), **self.meter.memory(), **(more or {})}
        values |= self._prediction(values)
        again = self._enter(step, values, 0.0 if found.skipped else timing.step)
        self._log(step, found, again)

    def pass_over(self, step: Step) -> None:
        """Record a step whose batch is not trained on, because of a rollback."""
        self._enter(step, self._plan(step) | self._skip(step), 0.0)

    def rewind(self, skip: Skip, position: int, trained_to: int) -> None:
        """Note that training went back from `trained_to` to the checkpoint at `position`, to pass over `skip`.

        The records after `skip.start` are void from here on; those between `position` and it are replayed.
        """
        self.skips = self.skips.plus(skip)
        self._add_rewind(skip)
        self._go_on_from(position, trained_to)

    def _go_on_from(self, position: int, trained_to: int | None = None) -> None:
        records = read_journal(self.journal.path)
        self.replay = Replay(records, position, trained_to)
        self.past = history(records, position, self.stream.recipe.spikes.window)
        """What the judge of bad steps goes on from."""
        kept = [record.metrics for record in records if metrics.SKIPPED not in record.metrics]
        self.useful_s = sum(values[metrics.STEP_S] for values in kept)
        before = [record.metrics for record in records if record.position <= position]
        self.skipped_tokens = sum(values[metrics.BATCH_TOKENS] for values in before if metrics.SKIPPED in values)
        self.source_shares = SourceShares(self.stream, self.span.start)
        self.announced = False

    def _add_rewind(self, skip: Skip) -> None:
        self.journal.add(Rewind(time.time(), skip.start, skip.end))
        self.journal.sync()

    def _enter(self, step: Step, values: dict[str, float], useful_s: float) -> bool:
        """Write or compare one record; return whether the journal has it already."""
        if self.replay.knows(Record(time.time(), step.end, values)):
            return True
        self.useful_s += useful_s
        values |= {metrics.GOODPUT: self._goodput(), **self._data(step.end)}
        if not self.announced:
            self.announced = True
            values |= self._announcement()
        self.journal.add(Record(time.time(), step.end, values))
        return False

    def _announcement(self) -> dict[str, float]:
        """Return what the first new record of an attempt, or after a rollback, says besides."""
        told: dict[str, float] = {}
        if not self.begun and self.meter.first_step_s is not None:
            self.begun, told[metrics.FIRST_STEP_S] = True, self.meter.first_step_s
        return told | self.replay.metrics(self.attempts.restarts, len(self.skips.spans))

    def _prediction(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Return what the planner said of a step like this, and by how much it was wrong."""
        told = dict(self.predicted.get(int(measured[metrics.SEQ_LEN]), {}))
        if metrics.PLANNED_STEP_S in told:
            told[metrics.STEP_ERROR] = told[metrics.PLANNED_STEP_S] / measured[metrics.STEP_S] - 1
        return told

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

    def _log(self, step: Step, found: Finished, again: bool) -> None:
        if time.monotonic() - self.logged < LOG_EVERY_S and step.end < self.span.end:
            return
        self.logged = time.monotonic()
        log(
            f"position {readable(step.end)} of {readable(self.span.end)}, loss {found.loss:.4f}, "
            f"{self.meter.tokens_per_s:,.0f} tokens/s{' (again)' if again else ''}"
        )


def log(line: str) -> None:
    """Print one line of the trainer's log, now."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
