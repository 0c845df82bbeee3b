"""The training loop of one stage: from the newest good checkpoint, or the stage before, to a committed result.

A stage that is killed at any moment and started again gives the same bits as an uninterrupted one on the same number of
processes: all state is in the checkpoint, and the data are a function of the position.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from herd.llama3.model.files import CheckpointModel, open_model, save_model
from herd.llama3.parallel.mesh import ParallelContext, run_on_rank0_and_broadcast
from herd.llama3.recipe.frozen import check_frozen_fields
from herd.llama3.recipe.load import RecipeError, load_recipe, to_yaml
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe, check_batches
from herd.llama3.recipe.units import Cadence
from herd.llama3.tokens.conversations import ConversationStream
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.train import metrics
from herd.llama3.train.averaging import FILE, Averaging, averaged_validation, select_weights
from herd.llama3.train.callbacks import Callback, StepDecision, StepResult, StepTiming, log
from herd.llama3.train.checkpoint.dcp import save_state
from herd.llama3.train.checkpoint.manager import Checkpoints, SaveFailed, load_state
from herd.llama3.train.checkpoint.manifest import CheckpointManifest
from herd.llama3.train.data_loader import Batches, Step, read_ahead, steps_from
from herd.llama3.train.device import ENVIRONMENT, DeviceTime, describe_environment, describe_links, device_name
from herd.llama3.train.job import StopEstimate, TrainJob
from herd.llama3.train.journal import SkippedRanges, discard_after, to_parquet
from herd.llama3.train.loss_spikes import Incidents, SpikeDetector, SpikeGuard, SpikeRollback, TrainingStopped
from herd.llama3.train.metrics_log import DataShares, Recorder
from herd.llama3.train.profiler import HangStacks, Profiler
from herd.llama3.train.state import Precision, TrainState
from herd.llama3.train.stragglers import Stragglers
from herd.llama3.train.train_step import Engine, Pending
from herd.llama3.train.validation import ValidationSequences, Validator
from herd.storage.filesystem import sync_folder, write_atomic
from herd.storage.page_cache import ensure_local, lazy_folder_of

COPIED = ("skips.json", "incidents", "profile")
"""Files and folders of the stage that are copied into its result if they exist."""


class Trainer:
    """One stage of a recipe, trained by this process and its peers."""

    def __init__(self, job: TrainJob, recipe: Recipe, world: ParallelContext, stop: Callable[[], bool]) -> None:
        """Build and load the state; `stop` returns whether to end early. Raises ValueError for an invalid job."""
        self.job, self.recipe, self.world, self.stop = job, recipe, world, stop
        self.pipelined = world.device.type != "cpu"
        """Whether the device runs a step while the host continues; a CPU has ended it when `train_step` returns."""
        self.span, self.stream, self.state, self.checkpoints, origin = setup_stage(job, recipe, world)
        self.schedule = recipe.schedule
        self.skips = world.broadcast_object(SkippedRanges.read(job.work) if world.is_rank0 else SkippedRanges())
        self.averaging = Averaging(self.span)
        self.recorder: Recorder | None = None
        hosts_and_devices = world.all_gather_object((socket.gethostname(), device_name(world.device)))
        self.environment = describe_environment(world.device, hosts_and_devices) if world.is_rank0 else {}
        if world.is_rank0:
            vocab_size, position = self.state.vocab_size, self.state.position
            self.environment |= {"layout": world.layout.text(world.size), "micro_batch": str(job.micro_batch)}
            if job.costs.basis:
                self.environment["costs"] = job.costs.basis
            self.recorder = Recorder(
                job.work,
                self.span,
                self.stream,
                vocab_size,
                world,
                position,
                self.skips,
                job.predicted,
                job.costs,
                self.environment,
            )
            log(f"stage {job.stage}: position {position} of {self.span.start} to {self.span.end}, from {origin}")
        self.validator: Validator | None = None
        sequences = ValidationSequences.read(job.work)
        if sequences is not None and recipe.evaluate.val_interval != "never":
            always, unit = {*self.averaging.positions, self.span.end}, job.micro_batch * world.layout.pp
            self.validator = Validator(sequences, recipe, always, world, unit, lambda batch: self.engine.nll(batch))
        copies = world.axis("dp").size
        callbacks: list[Callback | None] = [
            HangStacks(job.timeout_s),
            Profiler(job.profile, job.work, world.rank, world.device),
            Stragglers.among(self.state.model_parts.values(), world, self.schedule.step_at) if copies > 1 else None,
            self.validator,
            DataShares(self.stream, self.span.start) if world.is_rank0 else None,
            StopEstimator(job.work, self.checkpoints) if world.is_rank0 else None,
            self.recorder,  # after those that add metrics
            Incidents(job, recipe, world),  # last: it may end the run, or roll it back
        ]
        self.callbacks = [callback for callback in callbacks if callback is not None]

    def run(self) -> bool:
        """Train and commit `result`; return False if asked to stop before. Raises TrainingStopped at a bad step."""
        rollback = self.recipe.spikes.policy == "rollback"
        if rollback and not run_on_rank0_and_broadcast(self.world, self.checkpoints.positions):
            # A spike before any other save goes back to here.
            self.checkpoints.begin(self.state, self.span.name)
        while True:
            try:
                done = self._train()
                break
            except SpikeRollback as rollback:
                self._roll_back(rollback.decision)
            except TrainingStopped:
                self.checkpoints.finish()  # the save in progress is good: it began before the bad step
                raise
        for callback in self.callbacks:
            callback.on_train_end()
        self.checkpoints.finish()
        if done:
            self.commit_result()
        elif self.checkpoints.failures:
            raise SaveFailed(self.checkpoints.failures[-1])
        return done

    def _train(self) -> bool:
        """Train from the state's position to the end of the stage; return False if asked to stop before.

        On a GPU the host launches a step and then reads back the numbers of the step before, so that the device never
        waits for the host. Requests to stop or to save come with these numbers, so they take effect one step later.
        """
        past = self.world.broadcast_object(self.recorder.past if self.recorder is not None else None)
        assert past is not None
        guard = SpikeGuard(self.recipe.spikes, self.world.device)
        guard.restore(past)
        self.spike_detector = SpikeDetector(self.recipe, self.span, past, self.skips)
        self.engine = Engine(self.state, self.recipe, self.job, self.world, guard)
        self.step_clock = StepClock(self.world.device)
        due = SaveSchedule(self.recipe.checkpoint.every, self.state.position)
        launched: deque[LaunchedStep] = deque()  # steps whose numbers were not read back, oldest first
        checkpoint_s: float | None = None
        data_began = time.perf_counter()
        for step, batch in read_ahead(Batches(self.stream), steps_from(self.span, self.state.position), self.world):
            data_wait_s = time.perf_counter() - data_began

            # Forward, backward and update. On a GPU, `train_step` returns while the device computes.
            skipped = self.skips.covers(step.start)
            if not skipped:
                for callback in self.callbacks:
                    callback.on_step_start(step, data_wait_s)
                save = self.world.is_rank0 and due.late()
                pending = self.engine.train_step(step, batch, self.schedule.lr_at(step.start), self.stop(), save)
                launched.append(LaunchedStep(pending, data_wait_s, checkpoint_s))
                checkpoint_s = None
                self.averaging.add(self.state, step.end)

            # Read back the step before, while the device runs this one. Read this one too if it is the last, or if its
            # weights are scored before the next step changes them.
            scored = self.validator is not None and self.validator.due(step)
            read_all = skipped or scored or not self.pipelined or step.end == self.span.end
            results = []
            while len(launched) > (0 if read_all else 1):
                results.append(self._read_back(launched.popleft()))
            if skipped:  # only now: the numbers read above may have decided to roll back
                self.state.position = step.end
                self.averaging.add(self.state, step.end)
                self._show(step, StepResult.excluded())

            # Save: copy the state to host memory; a thread writes it while training continues.
            stop = any(result.stop for result in results)
            save = due.passed(step.end) or any(result.save for result in results)
            if (stop or save) and step.end < self.span.end:
                while launched:  # its numbers decide whether this state is worth saving
                    self._read_back(launched.popleft())
                for callback in self.callbacks:
                    callback.on_save_start()
                checkpoint_s = self.checkpoints.begin(self.state, self.span.name)
                due.saved(self.state.position)
                self.step_clock.restart()
                if stop:
                    return False
            data_began = time.perf_counter()
        return True

    def _read_back(self, launched: LaunchedStep) -> StepResult:
        """Wait until the device has ended the step; judge it, and show it to the callbacks, which may raise."""
        step, result = launched.pending.step, launched.pending.read()
        step_s = self.step_clock.lap(launched.pending.numbers.done)
        timing = StepTiming(step_s, launched.data_wait_s, launched.checkpoint_s)
        result = replace(result, decision=self.spike_detector.judge(step, result), timing=timing)
        self._show(step, result)
        if metrics.HELD_OUT_S in result.metrics:
            self.step_clock.restart()
        return result

    def _show(self, step: Step, result: StepResult) -> None:
        for callback in self.callbacks:
            callback.on_step_end(step, result)

    def _roll_back(self, decision: StepDecision) -> None:
        """Load the newest checkpoint before the batches to be skipped, and prepare to continue from it."""
        assert decision.skip is not None
        trained_to = self.state.position
        self.skips = self.skips.plus(decision.skip)
        restart = self.job.restart_damaged
        if self.checkpoints.resume(self.state, before=decision.skip.start, restart=restart).path is None:
            init_or_load(self.state, self.job, self.recipe, self.span, self.world)
        # Only now: the checkpoints past that point, which do not know of the skip, are not offered to a restart.
        if self.world.is_rank0:
            self.skips.write(self.job.work)
        if self.recorder is not None:
            self.recorder.rewind(decision.skip, self.state.position, trained_to)

    def commit_result(self) -> None:
        """Write `result` into the stage's folder, in a hidden folder that is renamed when complete.

        Rank 0 makes the model from the state on the disk, so the model need not fit into the memory of any process.
        """
        job, state = self.job, self.state
        for callback in self.callbacks:
            callback.on_save_start()
        building = job.work / ".result"
        if self.world.is_rank0:
            shutil.rmtree(building, ignore_errors=True)
        self.world.barrier()
        save_state(building / "state", state, job.stage, self.world)
        choice = select_weights(state, self.span, self.validator)  # may overwrite the weights in memory
        if self.recorder is None:
            return
        averaged, journal = state.averaged if choice is None or choice.kept == "average" else 0, self.recorder.journal
        saved = CheckpointModel(building / "state", "average." if averaged else "model.")
        dtype = next(iter(state.parameters.values())).dtype
        weights = ((name, (tensor / averaged).to(dtype) if averaged else tensor) for name, tensor in saved)
        save_model(building / "model", state.config, state.vocab_size, weights)
        if choice is not None:
            full = choice.model_copy(update={"by_position": averaged_validation(self.span, journal.path)})
            write_atomic(building / FILE, full.model_dump_json(indent=1) + "\n")
            log(str(full))
        to_parquet(journal.path, building / "metrics.parquet")
        environment = {**self.environment, **describe_links(self.world.device)}
        write_atomic(building / ENVIRONMENT, json.dumps(environment, indent=1))
        for name in COPIED:
            source = job.work / name
            if source.is_dir():
                shutil.copytree(source, building / name)
            elif source.exists():
                shutil.copy2(source, building / name)
        sync_folder(building)
        building.rename(job.work / "result")
        sync_folder(job.work)


class LaunchedStep(NamedTuple):
    """A step that the device may still work on, with what the host measured when it launched it."""

    pending: Pending
    data_wait_s: float
    """Seconds that training waited for the batch."""
    checkpoint_s: float | None
    """Seconds that training stopped before this step for a checkpoint; None if there was none."""


class StepClock:
    """Measures steps by the device's clock: from the end of the step before to the end of this one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Restart the clock of a step, to leave out work between steps (a save, scoring)."""
        self._began = DeviceTime(self.device)

    def lap(self, end: DeviceTime) -> float:
        """Return the seconds up to `end`, which the device has reached, and count from there."""
        began, self._began = self._began, end
        return end.seconds_since(began)


class StopEstimator(Callback):
    """Writes `stop_estimate.json` of the stage on rank 0: how long the trainer needs to stop."""

    def __init__(self, work: Path, checkpoints: Checkpoints) -> None:
        self.work, self.checkpoints = work, checkpoints
        self._write(StopEstimate(save_s=StopEstimate.read(work).save_s))

    def on_step_end(self, step: Step, result: StepResult) -> None:
        if result.decision.kind in ("stop", "excluded"):
            return
        estimate, step_s = self.estimate, result.timing.step
        write_s = [saved.total_s for saved in self.checkpoints.poll()]
        if write_s:
            result.metrics[metrics.CHECKPOINT_WRITE_S] = write_s[-1]
        new = StopEstimate(
            step_s=step_s if step_s > 1.2 * estimate.step_s else estimate.step_s,
            save_s=max([estimate.save_s, *write_s]),
            saving_since=estimate.saving_since if self.checkpoints.saving else 0.0,
        )
        if new != estimate:
            self._write(new)

    def on_save_start(self) -> None:
        self._write(self.estimate.model_copy(update={"saving_since": time.time()}))

    def _write(self, estimate: StopEstimate) -> None:
        self.estimate = estimate
        estimate.write(self.work)


class SaveSchedule:
    """When the next checkpoint is due: after a time, or at the first step past a multiple of tokens."""

    def __init__(self, every: Cadence, position: int) -> None:
        self.every = every
        self.saved(position)

    def saved(self, position: int) -> None:
        """Count from this position and moment on."""
        self.position, self.time = position, time.monotonic()

    def passed(self, position: int) -> bool:
        """Return whether a checkpoint is due at `position` by tokens: the same on every process."""
        if self.every.unit == "seconds":
            return False
        return position // self.every.amount > self.position // self.every.amount

    def late(self) -> bool:
        """Return whether a checkpoint is due by this process's clock."""
        return self.every.unit == "seconds" and time.monotonic() - self.time >= self.every.amount


# Opening a stage: check that job, recipe, layout and tokens fit, build the state, load what training continues from.


def setup_stage(
    job: TrainJob, recipe: Recipe, world: ParallelContext
) -> tuple[StageSpan, TokenStream | ConversationStream, TrainState, Checkpoints, str]:
    """Return span, tokens, state and checkpoints of the stage of `job`, and where the state came from, for the log.

    The state comes from the newest good checkpoint of the stage, else from `init_or_load`. Raises ValueError if
    the fields of the job contradict each other, or the stage began under a recipe with another past (`recipe.frozen`).
    """
    schedule = recipe.schedule
    try:
        span = schedule.span(job.stage)
    except KeyError:
        names = ", ".join(span.name for span in schedule.trained)
        raise ValueError(f"stage: {job.stage!r} is not in the recipe; its stages are {names}") from None
    vocab_size = int(json.loads(ensure_local(job.tokens / "tokens.json").read_text())["vocab_size"])
    check_batches(span, world.layout.dp(world.size))
    world.layout.check(recipe.model, vocab_size, world.size)
    for segment in span.segments:
        world.layout.check_sequence(segment.seq_len)
    stream = open_stream(job, recipe, span)
    lazy = lazy_folder_of(job.tokens)
    if lazy is not None and lazy.limit_bytes < stream.block_bytes:
        raise ValueError(
            f"token_cache: {lazy.limit_bytes:,} bytes do not hold a block of documents of each source, and every batch "
            f"would download whole blocks again; write at least {stream.block_bytes:,}, better four times as much"
        )
    precision = Precision.from_recipe(recipe, world.device)
    state = TrainState(recipe, vocab_size, precision, world, span.start, exact=job.deterministic)
    folder, keep = job.work / "checkpoints", recipe.checkpoint.keep
    rollback = recipe.rollback_tokens(span)
    checkpoints = Checkpoints(folder, keep, world, uri=job.checkpoints, work=job.work, rollback=rollback, log=log)
    restored = checkpoints.resume(state, restart=job.restart_damaged)
    for reason in restored.skipped if world.is_rank0 else ():
        log(f"checkpoint skipped: {reason}")
    if checkpoints.restore(restored) and world.is_rank0:
        log("downloaded the journal from the object store: another machine trained up to here")
    origin = f"checkpoint {restored.path.name}" if restored.path else init_or_load(state, job, recipe, span, world)
    run_on_rank0_and_broadcast(world, lambda: _adopt_recipe(job, recipe, stream, span, state.position))
    run_on_rank0_and_broadcast(world, lambda: write_atomic(job.trained_recipe, to_yaml(recipe)))
    checkpoints.snapshot.prepare(state.tensors())  # now, rather than while the first save blocks a step
    return span, stream, state, checkpoints, origin


def init_or_load(state: TrainState, job: TrainJob, recipe: Recipe, span: StageSpan, world: ParallelContext) -> str:
    """Set `state` to the beginning of the stage, from `parent`, `start` or the seed; return from what, for the log."""
    if job.parent is not None:
        parent = job.parent
        # The files are verified while they are loaded.
        manifest = run_on_rank0_and_broadcast(world, lambda: CheckpointManifest.read(parent))
        if manifest.position != span.start:
            raise ValueError(
                f"parent: {parent} ends at {manifest.position}, stage {span.name} starts at {span.start}; "
                "name the state of the stage before"
            )
        load_state(parent, manifest, state, world, average=False)
        return str(parent)
    if span.start:
        raise ValueError(f"parent: stage {span.name} starts at {span.start}; name the stage before")
    state.reset(recipe, span.start, world)
    if job.start is None:
        return f"initial weights of seed {recipe.seed}"
    start = job.start
    run_on_rank0_and_broadcast(world, lambda: _check_shape(start, recipe, state.vocab_size))
    model = open_model(start)
    state.fill(lambda name, _: model.tensor(name), world)
    state.loaded_seq_len = model.config.max_seq_len
    return f"weights of {start}"


def _check_shape(folder: Path, recipe: Recipe, vocab_size: int) -> None:
    """Raise ValueError unless the model in `folder` has the recipe's shape and `vocab_size`."""
    model = open_model(folder)
    expected, stored = (recipe.model.shape, vocab_size), (model.config.shape, model.vocab_size)
    if expected != stored:
        raise ValueError(
            f"init_from: {folder} holds a model of shape {stored}, the recipe has {expected}; change model: to it"
        )


def open_stream(job: TrainJob, recipe: Recipe, span: StageSpan) -> TokenStream | ConversationStream:
    """Return the data of a stage. Raises ValueError if they do not match the recipe."""
    stream = TokenStream(job.tokens, recipe)
    if span.stage.kind == "pretrain":
        return stream
    if job.conversations is None:
        raise ValueError(f"conversations: stage {span.name} is of kind sft; name the folder of its conversations")
    return ConversationStream(job.conversations, stream, span)


def _adopt_recipe(
    job: TrainJob, recipe: Recipe, stream: TokenStream | ConversationStream, span: StageSpan, position: int
) -> None:
    """Accept a recipe with the same past, and discard what was trained after `position`. Raises RecipeError."""
    if job.trained_under(recipe) or not job.trained_recipe.exists():
        return
    trained = load_recipe(job.trained_recipe)
    check_frozen_fields(trained, recipe, position)
    before = open_stream(job, trained, trained.schedule.span(span.name))
    if before.identity(span.start, position) != stream.identity(span.start, position):
        raise RecipeError(
            f"mix: the tokens before {position} were read under mixes that ended elsewhere, and the past of a run "
            "cannot change; write the old stages again, or begin a new run"
        )
    discard_after(job.work / "journal.jsonl", position)
