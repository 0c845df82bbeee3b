"""The training loop of one stage: from the newest good checkpoint (or the stage before) to a committed result.

A stage that was killed at any moment and started again gives the same bits as one that was not, on the same number of
processes: all state is in the checkpoint, and the data are a function of the position. A loss or gradient that is not a
number ends the attempt before it reaches the weights; nothing is skipped silently.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from llama3.model.files import save_model
from llama3.parallel.mesh import World
from llama3.recipe.checks import check_batches
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Cadence
from llama3.tokens.batch import Batch, Batches
from llama3.tokens.stream import TokenStream
from llama3.train.checkpoint import Checkpoints, load_state, save_state
from llama3.train.job import TrainJob
from llama3.train.journal import to_parquet
from llama3.train.manifest import Manifest
from llama3.train.optimizer import clip
from llama3.train.precision import Precision
from llama3.train.reader import Step, read_ahead, steps_from
from llama3.train.recorder import Recorder, Timing, log
from llama3.train.state import TrainState, average_positions
from llama3.train.step import Outcome, take_gradients
from storage.filesystem import sync_folder


class NotFinite(FloatingPointError):
    """Loss or gradient is infinite or not a number; the text names the position."""


class Trainer:
    """One stage of a recipe, trained by this process and its peers."""

    def __init__(self, job: TrainJob, recipe: Recipe, world: World, stop: Callable[[], bool]) -> None:
        """Make model and optimizer and load what there is to go on from; `stop` tells whether to leave early.

        Raises ValueError if the job's parts do not fit each other.
        """
        check_batches(recipe, world.size)
        self.job, self.recipe, self.world, self.stop = job, recipe, world, stop
        self.schedule = Schedule(recipe)
        self.span = self._span(job.stage)
        self.stream = TokenStream(job.tokens, recipe)
        self.precision = Precision.of(recipe, world.device)
        rows = int(json.loads((job.tokens / "tokens.json").read_text())["rows"])
        self.state = TrainState(recipe, rows, self.precision.master, world, self.span.start)
        self.checkpoints = Checkpoints(job.work / "checkpoints", recipe.checkpoint.keep, world)
        origin = self._go_on()
        self.due = Due(recipe.checkpoint.every, self.state.position)
        self.average_at = set(average_positions(self.span))
        self.recorder: Recorder | None = None
        self.checkpoint_s: float | None = None
        if world.leads:
            self.recorder = Recorder(job.work, self.span, self.stream, self.state.model, world, self.state.position)
            log(
                f"stage {job.stage}: position {self.state.position} of {self.span.start} to {self.span.end}, "
                f"from {origin}; {world.size} process(es), {job.threads} thread(s) each, {world.device.type}, "
                f"{recipe.compute}"
            )

    def run(self) -> bool:
        """Train to the end of the stage and commit `result`; return False if told to stop before.

        Raises NotFinite.
        """
        steps = steps_from(self.span, self.state.position)
        began = time.perf_counter()
        for step, batch in read_ahead(Batches(self.stream), steps, self.world.rank, self.world.size):
            waited = time.perf_counter() - began
            outcome = self._step(step, batch)
            self._record(step, outcome, Timing(time.perf_counter() - began, waited, self.checkpoint_s))
            self.checkpoint_s = None
            if step.end < self.span.end and (outcome.stop or outcome.save):
                self._save()
                if outcome.stop:
                    return False
            began = time.perf_counter()
        self._finish()
        return True

    def _span(self, stage: str) -> StageSpan:
        try:
            return self.schedule.span(stage)
        except KeyError:
            known = ", ".join(span.name for span in self.schedule.spans)
            raise ValueError(f"stage: {stage!r} is not in the recipe; its stages are {known}") from None

    def _go_on(self) -> str:
        """Load the newest good checkpoint, or the stage before; return where from, in words."""
        found = self.checkpoints.newest()
        for reason in found.skipped if self.world.leads else ():
            log(f"checkpoint passed over: {reason}")
        if found.path is not None and found.manifest is not None:
            load_state(found.path, found.manifest, self.state, self.world)
            return f"checkpoint {found.path.name}"
        if self.job.parent is None:
            if self.span.start:
                raise ValueError(f"parent: stage {self.span.name} starts at {self.span.start}; name the stage before")
            return f"initial weights of seed {self.recipe.seed}"
        self._load_parent(self.job.parent)
        return f"{self.job.parent}"

    def _load_parent(self, parent: Path) -> None:
        manifest = self.world.from_leader(Manifest.verified(parent) if self.world.leads else None)
        assert manifest is not None
        if manifest.position != self.span.start:
            raise ValueError(
                f"parent: {parent} ends at {manifest.position}, stage {self.span.name} starts at {self.span.start}; "
                "name the state of the stage before"
            )
        load_state(parent, manifest, self.state, self.world, average=False)

    def _step(self, step: Step, batch: Batch) -> Outcome:
        state = self.state
        save = self.world.leads and self.due.at(step.end)
        outcome = take_gradients(
            state.model, batch, self.job.micro_batch, self.precision, self.world, self.stop(), save
        )
        if not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
            raise NotFinite(
                f"position {step.start}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; nothing of this step "
                "is kept. Look at its documents, or lower lr.peak"
            )
        clip(state.model, outcome.grad_norm, self.recipe.optimizer.clip)
        for group in state.optimizer.param_groups:
            group["lr"] = self.schedule.lr_at(step.start)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.position = step.end
        if step.end in self.average_at:
            state.add_to_average()
        return outcome

    def _record(self, step: Step, outcome: Outcome, timing: Timing) -> None:
        if self.recorder is not None:
            self.recorder.add(step, outcome, timing)

    def _save(self) -> None:
        began = time.perf_counter()
        if self.recorder is not None:
            self.recorder.journal.sync()
        self.checkpoints.save(self.state, self.span.name)
        self.due.saved(self.state.position)
        self.checkpoint_s = time.perf_counter() - began

    def _finish(self) -> None:
        """Commit `result`: built beside its place, renamed when whole."""
        building, work = self.job.work / ".result", self.job.work
        if self.world.leads:
            shutil.rmtree(building, ignore_errors=True)
        self.world.wait()
        save_state(building / "state", self.state, self.span.name, self.world)
        weights = self.state.weights()
        if self.recorder is not None:
            save_model(building / "model", self.recipe.model, self.state.model.rows, weights)
            self.recorder.journal.sync()
            to_parquet(self.recorder.journal.path, building / "metrics.parquet")
            sync_folder(building)
            building.rename(work / "result")
            sync_folder(work)
        self.world.wait()


class Due:
    """When the next checkpoint is: after a time, or past a multiple of tokens."""

    def __init__(self, every: Cadence, position: int) -> None:
        self.every = every
        self.saved(position)

    def saved(self, position: int) -> None:
        """Count from here."""
        self.position, self.time = position, time.monotonic()

    def at(self, position: int) -> bool:
        """Return whether a checkpoint is due at `position`, now."""
        if self.every.unit == "seconds":
            return time.monotonic() - self.time >= self.every.amount
        return position // self.every.amount > self.position // self.every.amount
