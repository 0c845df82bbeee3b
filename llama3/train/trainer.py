"""The training loop of one stage: from the newest good checkpoint (or the stage before) to a committed result.

A stage that was killed at any moment and started again gives the same bits as one that was not, on the same number of
processes: all state is in the checkpoint, and the data are a function of the position. The loop hands a step to the
device and, on GPUs, looks at the step before it meanwhile: journal, verdict, whether to save. A bad step (see `spikes`)
has changed nothing by then, so going on, going back and stopping are all still possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from llama3.parallel.mesh import World
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Cadence
from llama3.tokens.batch import Batches
from llama3.train import metrics
from llama3.train.attempt import Pace
from llama3.train.averaging import Averaging, choose
from llama3.train.batch_documents import told, write_incident
from llama3.train.checkpoint import SaveFailed
from llama3.train.engine import Engine, Pending
from llama3.train.finish import commit_result
from llama3.train.held_out import HeldOutScores
from llama3.train.held_out_rows import HeldOut
from llama3.train.job import TrainJob
from llama3.train.meter import Timing
from llama3.train.opening import begin, open_stage
from llama3.train.profile import Profiler, expect_nothing, expect_step
from llama3.train.reader import Share, Step, read_ahead, steps_from
from llama3.train.recorder import Recorder, log
from llama3.train.skips import Skips
from llama3.train.spikes import Judge, SpikeGuard, Verdict
from llama3.train.step import Outcome
from llama3.train.stragglers import Stragglers


class Stopped(FloatingPointError):
    """The recipe ends the run at a bad step; the text names position, reason and the file with its documents."""


class RollBack(Exception):
    """Training goes back to before a spike; `verdict` says which batches it passes over then."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


def looks_later(device: torch.device) -> bool:
    """Return whether a step is looked at while the next one runs; a CPU has done it when the call returns."""
    return device.type != "cpu"


@dataclass(frozen=True)
class Ahead:
    """The step that the device works on, and how long its data were waited for."""

    pending: Pending
    waited_s: float


class Trainer:
    """One stage of a recipe, trained by this process and its peers."""

    def __init__(self, job: TrainJob, recipe: Recipe, world: World, stop: Callable[[], bool]) -> None:
        """Make model and optimizer and load what there is to go on from; `stop` tells whether to leave early.

        Raises ValueError if the job's parts do not fit each other.
        """
        self.job, self.recipe, self.world, self.stop = job, recipe, world, stop
        opened = open_stage(job, recipe, world)
        self.span, self.stream, self.state, self.checkpoints = (
            opened.span,
            opened.stream,
            opened.state,
            opened.checkpoints,
        )
        self.schedule = Schedule(recipe)
        self.skips = world.from_leader(Skips.read(job.work) if world.leads else Skips())
        self.averaging = Averaging(self.span)
        self.recorder: Recorder | None = None
        if world.leads:
            rows, position = self.state.rows, self.state.position
            self.recorder = Recorder(job.work, self.span, self.stream, rows, world, position, self.skips, job.predicted)
            log(f"stage {job.stage}: position {position} of {self.span.start} to {self.span.end}, from {opened.origin}")
        self._note(Pace(save_s=Pace.read(job.work).save_s))
        self.profiler = Profiler(job.profile, job.work, world.rank, world.device)
        self.stragglers = Stragglers.among(self.state.parts.values(), world)
        self.held_out = self._held_out()
        self._take_up()

    def run(self) -> bool:
        """Train to the end of the stage and commit `result`; return False if told to stop before.

        Raises Stopped at a bad step, if the recipe says so.
        """
        while True:
            try:
                done = self._train()
                break
            except RollBack as back:
                self._go_back(back.verdict)
            except Stopped:
                self.checkpoints.finish()  # the one on its way is good: it was begun before the bad step
                raise
        expect_nothing()
        if written := self.profiler.close():
            log(written)
        self.checkpoints.finish()
        if done:
            self._note(self.pace.model_copy(update={"saving_since": time.time()}))
            choose_one = partial(choose, self.state, self.span, self.held_out, self.engine.nats)
            commit_result(self.job, self.recipe, self.state, self.world, self.recorder, choose_one)
        elif self.checkpoints.failures:
            raise SaveFailed(self.checkpoints.failures[-1])
        return done

    def _take_up(self) -> None:
        """Begin to judge and to save from where the state stands: at the start, and after going back."""
        past = self.world.from_leader(self.recorder.past if self.recorder is not None else None)
        assert past is not None
        guard = SpikeGuard(self.recipe.spikes, self.world.device)
        guard.restore(past)
        self.judge = Judge(self.recipe, self.span, past, self.skips)
        self.engine = Engine(self.state, self.recipe, self.job, self.world, guard)
        self.due = Due(self.recipe.checkpoint.every, self.state.position)
        self.blocked_s: float | None = None
        self.ahead: Ahead | None = None

    def _train(self) -> bool:
        """Train to the end of the stage; return False if told to stop before."""
        self.settled = began = time.perf_counter()
        for step, share in read_ahead(Batches(self.stream), steps_from(self.span, self.state.position), self.world):
            waited = time.perf_counter() - began
            asked = self._pass_over(step) if self.skips.covers(step.start) else self._take(step, share, waited)
            stop = any(outcome.stop for outcome in asked)
            if step.end < self.span.end and (stop or self.due.passed(step.end) or any(out.save for out in asked)):
                self._settle()
                self._save()
                if stop:
                    return False
            began = time.perf_counter()
        self._settle()
        return True

    def _take(self, step: Step, share: Share, waited_s: float) -> list[Outcome]:
        """Hand a step to the device; return what became known, of this step or of the one before."""
        save = self.world.leads and self.due.late()
        expect_step(self.job.timeout_s)
        if written := self.profiler.step():
            log(written)
        if self.stragglers is not None:
            self.stragglers.begin(self.schedule.step_at(step.start), waited_s)
        pending = self.engine.take(step, share, self.schedule.lr_at(step.start), self.stop(), save)
        self._count(step)
        before = self._settle()
        self.ahead = Ahead(pending, waited_s)
        scored = self.held_out is not None and self.held_out.due(step)  # before the next step changes the weights
        return before if looks_later(self.world.device) and not scored else before + self._settle()

    def _pass_over(self, step: Step) -> list[Outcome]:
        before = self._settle()
        self.state.position = step.end
        self._count(step)
        if self.recorder is not None:
            self.recorder.pass_over(step)
        return before

    def _count(self, step: Step) -> None:
        self.averaging.add(self.state, step.end)

    def _settle(self) -> list[Outcome]:
        """Wait for the step that the device works on, if any, and draw the consequences. Returns its outcome."""
        if self.ahead is None:
            return []
        ahead, self.ahead = self.ahead, None
        outcome, step = ahead.pending.read(), ahead.pending.step
        now = time.perf_counter()
        verdict = self.judge.judge(step, outcome)
        slow = self.stragglers.window() if self.stragglers is not None else None
        scores = self._scores(step) if verdict.kind == "go on" else {}
        for line in slow.named if slow is not None and self.world.leads else ():
            log(line)
        if verdict.kind != "stop" and self.recorder is not None:
            written = [saved.total_s for saved in self.checkpoints.poll()]
            self._pace(now - self.settled, written)
            timing = Timing(now - self.settled, ahead.waited_s, self.blocked_s, written[-1] if written else None)
            self.recorder.add(step, outcome, timing, {**(slow.metrics() if slow else {}), **scores})
            self.blocked_s = None
        self.settled = time.perf_counter() if scores else now
        if verdict.kind != "go on":
            self._bad(step, outcome, verdict)
        return [outcome]

    def _held_out(self) -> HeldOutScores | None:
        """Return what scores held-out documents, if the job brings any and the recipe asks for it."""
        held = HeldOut.read(self.job.work)
        if held is None or self.recipe.evaluate.every == "never":
            return None
        layout = self.world.layout
        always = {*self.averaging.positions, self.span.end}
        return HeldOutScores(held, self.recipe, always, self.world, self.job.micro_batch * layout.pp)

    def _scores(self, step: Step) -> dict[str, float]:
        """Return the scores of held-out documents and what they cost, where they are due; all processes agree on it."""
        if self.held_out is None or not self.held_out.due(step):
            return {}
        began = time.perf_counter()
        scores = self.held_out.scores(self.engine.nats)
        return {**scores, metrics.HELD_OUT_S: time.perf_counter() - began}

    def _bad(self, step: Step, outcome: Outcome, verdict: Verdict) -> None:
        """Write down a bad step and its documents, and end or go back if the verdict says so."""
        line = ""
        if self.world.leads:
            incident = write_incident(self.job.work, self.job.tokens, self.recipe, step, outcome, verdict)
            line = told(step, verdict, incident)
            log(line)
        if verdict.kind == "stop":
            raise Stopped(self.world.from_leader(line))
        if verdict.kind == "roll back":
            raise RollBack(verdict)

    def _go_back(self, verdict: Verdict) -> None:
        """Load the newest checkpoint before the batches to be passed over, and go on from there past them."""
        assert verdict.skip is not None
        self.ahead, trained_to = None, self.state.position
        self.skips = self.skips.plus(verdict.skip)
        anew = self.job.restart_damaged
        if self.checkpoints.resume(self.state, before=verdict.skip.start, anew=anew).path is None:
            begin(self.state, self.job, self.recipe, self.span, self.world)
        if self.world.leads:  # once the checkpoints past that point are gone: none of them knows of the skip
            self.skips.write(self.job.work)
        if self.recorder is not None:
            self.recorder.rewind(verdict.skip, self.state.position, trained_to)
        self._take_up()

    def _pace(self, step_s: float, written: list[float]) -> None:
        """Say how long steps and saves take, when there is something new about it."""
        known = self.pace
        pace = Pace(
            step_s=step_s if step_s > 1.2 * known.step_s else known.step_s,
            save_s=max([known.save_s, *written]),
            saving_since=known.saving_since if self.checkpoints.saving else 0.0,
        )
        if pace != known:
            self._note(pace)

    def _note(self, pace: Pace) -> None:
        self.pace = pace
        if self.world.leads:
            pace.write(self.job.work)

    def _save(self) -> None:
        """Begin to write a checkpoint of the state, whose journal is on the disk first."""
        self._note(self.pace.model_copy(update={"saving_since": time.time()}))
        if self.recorder is not None:
            self.recorder.journal.sync()
        self.blocked_s = self.checkpoints.begin(self.state, self.span.name)
        self.due.saved(self.state.position)
        self.settled = time.perf_counter()  # the next step's time is its own


class Due:
    """When the next checkpoint is: after a time, or past a multiple of tokens."""

    def __init__(self, every: Cadence, position: int) -> None:
        self.every = every
        self.saved(position)

    def saved(self, position: int) -> None:
        """Count from here."""
        self.position, self.time = position, time.monotonic()

    def passed(self, position: int) -> bool:
        """Return whether a checkpoint is due at `position` by tokens: known to every process alike."""
        if self.every.unit == "seconds":
            return False
        return position // self.every.amount > self.position // self.every.amount

    def late(self) -> bool:
        """Return whether one is due by this process's clock."""
        return self.every.unit == "seconds" and time.monotonic() - self.time >= self.every.amount
