"""The training loop of one stage: from the newest good checkpoint, or the stage before, to a committed result.

A stage that is killed at any moment and started again gives the same bits as an uninterrupted one on the same number of
processes: all state is in the checkpoint, and the data are a function of the position.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llama3.model.files import open_model, save_model
from llama3.parallel.mesh import ParallelContext, run_on_rank0_and_broadcast
from llama3.recipe.frozen import check_past
from llama3.recipe.load import RecipeError, load_recipe, to_yaml
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe, check_batches
from llama3.recipe.units import Cadence
from llama3.tokens.batch import Batches
from llama3.tokens.stream import TokenStream
from llama3.train import metrics
from llama3.train.averaging import FILE, Averaging, Choice, choose, parts_of
from llama3.train.checkpoint.dcp import save_state
from llama3.train.checkpoint.manager import Checkpoints, SaveFailed, load_state
from llama3.train.checkpoint.manifest import CheckpointManifest
from llama3.train.data_loader import Step, read_ahead, steps_from
from llama3.train.incidents import SkippedRanges
from llama3.train.job import Pace, TrainJob
from llama3.train.journal import abandon, read_journal, to_parquet
from llama3.train.loss_spikes import SpikeDetector, SpikeGuard, StepDecision, StepResult, incident_line, write_incident
from llama3.train.metrics_log import Recorder, StepTiming, log
from llama3.train.precision import Precision
from llama3.train.profiler import Profiler, expect_nothing, expect_step
from llama3.train.state import TrainState
from llama3.train.stragglers import Stragglers
from llama3.train.train_step import Engine, Pending
from llama3.train.validation import HeldOutScores
from llama3.train.validation_rows import HeldOut
from storage.filesystem import sync_folder, write_atomic
from storage.page_cache import brought, lazy_of

GROUP_BYTES = 2**30
"""Bytes of tensors that `weights_of` holds at a time."""
THREADS = 4
"""Threads that read a saved state."""
KEPT = ("skips.json", "incidents", "profile")
"""Files and folders of the stage that are copied into its result if they exist."""


class Stopped(FloatingPointError):
    """The recipe ends the run at a bad step; the text names position, reason and the file with its documents."""


class RollBack(Exception):
    """Training goes back to before a spike; `decision` names the batches to skip after that."""

    def __init__(self, decision: StepDecision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


class Trainer:
    """One stage of a recipe, trained by this process and its peers."""

    def __init__(self, job: TrainJob, recipe: Recipe, world: ParallelContext, stop: Callable[[], bool]) -> None:
        """Build and load the state; `stop` returns whether to end early. Raises ValueError for an invalid job."""
        self.job, self.recipe, self.world, self.stop = job, recipe, world, stop
        self.span, self.stream, self.state, self.checkpoints, origin = open_stage(job, recipe, world)
        self.schedule = Schedule(recipe)
        self.skips = world.from_leader(SkippedRanges.read(job.work) if world.leads else SkippedRanges())
        self.averaging = Averaging(self.span)
        self.recorder: Recorder | None = None
        if world.leads:
            rows, position = self.state.rows, self.state.position
            self.recorder = Recorder(job.work, self.span, self.stream, rows, world, position, self.skips, job.predicted)
            log(f"stage {job.stage}: position {position} of {self.span.start} to {self.span.end}, from {origin}")
        self._write_pace(Pace(save_s=Pace.read(job.work).save_s))
        self.profiler = Profiler(job.profile, job.work, world.rank, world.device)
        self.stragglers = Stragglers.among(self.state.parts.values(), world)
        self.held_out: HeldOutScores | None = None
        documents = HeldOut.read(job.work)
        if documents is not None and recipe.evaluate.every != "never":
            always = {*self.averaging.positions, self.span.end}
            self.held_out = HeldOutScores(documents, recipe, always, world, job.micro_batch * world.layout.pp)
        self._start_loop()

    def run(self) -> bool:
        """Train and commit `result`; return False if asked to stop before. Raises Stopped at a bad step."""
        while True:
            try:
                done = self._train()
                break
            except RollBack as rollback:
                self._roll_back(rollback.decision)
            except Stopped:
                self.checkpoints.finish()  # the save in progress is good: it began before the bad step
                raise
        expect_nothing()
        if trace_line := self.profiler.close():
            log(trace_line)
        self.checkpoints.finish()
        if done:
            self._write_pace(self.pace.model_copy(update={"saving_since": time.time()}))
            choose_model = partial(choose, self.state, self.span, self.held_out, self.engine.nats)
            commit_result(self.job, self.recipe, self.state, self.world, self.recorder, choose_model)
        elif self.checkpoints.failures:
            raise SaveFailed(self.checkpoints.failures[-1])
        return done

    def _start_loop(self) -> None:
        """Set up spike detection, engine and save cadence at the state's position: at start and after a rollback."""
        past = self.world.from_leader(self.recorder.past if self.recorder is not None else None)
        assert past is not None
        guard = SpikeGuard(self.recipe.spikes, self.world.device)
        guard.restore(past)
        self.spike_detector = SpikeDetector(self.recipe, self.span, past, self.skips)
        self.engine = Engine(self.state, self.recipe, self.job, self.world, guard)
        self.due = Due(self.recipe.checkpoint.every, self.state.position)
        self.blocked_s: float | None = None
        self.in_flight: tuple[Pending, float] | None = None
        """The step that the device works on, and the seconds that training waited for its data."""

    def _train(self) -> bool:
        """Train to the end of the stage; return False if asked to stop before.

        On a GPU the host reads a step while the device runs the next one, so requests to stop or save take effect one
        step later. A CPU has finished the step when `train_step` returns.
        """
        self.step_began = data_began = time.perf_counter()
        steps = steps_from(self.span, self.state.position)
        for step, batch in read_ahead(Batches(self.stream), steps, self.world):
            data_wait_s = time.perf_counter() - data_began
            if self.skips.covers(step.start):
                results = self._finish_step()
                self.state.position = step.end
                self.averaging.add(self.state, step.end)
                if self.recorder is not None:
                    self.recorder.pass_over(step)
            else:
                save = self.world.leads and self.due.late()
                expect_step(self.job.timeout_s)
                if trace_line := self.profiler.step():
                    log(trace_line)
                if self.stragglers is not None:
                    self.stragglers.begin(self.schedule.step_at(step.start), data_wait_s)
                pending = self.engine.train_step(step, batch, self.schedule.lr_at(step.start), self.stop(), save)
                self.averaging.add(self.state, step.end)
                results = self._finish_step()
                self.in_flight = pending, data_wait_s
                # Held-out documents must be scored before the next step changes the weights.
                scored = self.held_out is not None and self.held_out.due(step)
                if self.world.device.type == "cpu" or scored:
                    results += self._finish_step()

            stop = any(result.stop for result in results)
            save = self.due.passed(step.end) or any(result.save for result in results)
            if step.end < self.span.end and (stop or save):
                self._finish_step()
                self._write_pace(self.pace.model_copy(update={"saving_since": time.time()}))
                if self.recorder is not None:
                    self.recorder.journal.sync()  # a checkpoint must not be ahead of the journal on the disk
                self.blocked_s = self.checkpoints.begin(self.state, self.span.name)
                self.due.saved(self.state.position)
                self.step_began = time.perf_counter()  # saving is not part of the next step's time
                if stop:
                    return False
            data_began = time.perf_counter()
        self._finish_step()
        return True

    def _finish_step(self) -> list[StepResult]:
        """Read the step in flight, if any, record it and act on the decision about it. Returns its result.

        A bad step has changed nothing, so continuing, going back and stopping are all still possible.
        """
        if self.in_flight is None:
            return []
        (pending, data_wait_s), self.in_flight = self.in_flight, None
        result, step = pending.read(), pending.step
        now = time.perf_counter()
        decision = self.spike_detector.judge(step, result)
        straggler = self.stragglers.window() if self.stragglers is not None else None
        scores: dict[str, float] = {}
        if decision.kind == "go on" and self.held_out is not None and self.held_out.due(step):
            began = time.perf_counter()
            scores = self.held_out.scores(self.engine.nats)
            scores[metrics.HELD_OUT_S] = time.perf_counter() - began
        for line in straggler.named if straggler is not None and self.world.leads else ():
            log(line)
        if decision.kind != "stop" and self.recorder is not None:
            step_s, write_s = now - self.step_began, [saved.total_s for saved in self.checkpoints.poll()]
            pace = Pace(
                step_s=step_s if step_s > 1.2 * self.pace.step_s else self.pace.step_s,
                save_s=max([self.pace.save_s, *write_s]),
                saving_since=self.pace.saving_since if self.checkpoints.saving else 0.0,
            )
            if pace != self.pace:
                self._write_pace(pace)
            timing = StepTiming(step_s, data_wait_s, self.blocked_s, write_s[-1] if write_s else None)
            self.recorder.add(step, result, timing, {**(straggler.metrics() if straggler else {}), **scores})
            self.blocked_s = None
        self.step_began = time.perf_counter() if scores else now
        if decision.kind != "go on":
            self._handle_bad_step(step, result, decision)
        return [result]

    def _handle_bad_step(self, step: Step, result: StepResult, decision: StepDecision) -> None:
        """Write an incident file with the documents of a bad step; raise Stopped or RollBack if that was decided."""
        line = ""
        if self.world.leads:
            incident = write_incident(self.job.work, self.job.tokens, self.recipe, step, result, decision)
            line = incident_line(step, decision, incident)
            log(line)
        if decision.kind == "stop":
            raise Stopped(self.world.from_leader(line))
        if decision.kind == "roll back":
            raise RollBack(decision)

    def _roll_back(self, decision: StepDecision) -> None:
        """Load the newest checkpoint before the batches to be skipped, and prepare to continue from it."""
        assert decision.skip is not None
        self.in_flight, trained_to = None, self.state.position
        self.skips = self.skips.plus(decision.skip)
        restart = self.job.restart_damaged
        if self.checkpoints.resume(self.state, before=decision.skip.start, anew=restart).path is None:
            begin(self.state, self.job, self.recipe, self.span, self.world)
        if self.world.leads:  # only now: the checkpoints past that point, which do not know of the skip, are deleted
            self.skips.write(self.job.work)
        if self.recorder is not None:
            self.recorder.rewind(decision.skip, self.state.position, trained_to)
        self._start_loop()

    def _write_pace(self, pace: Pace) -> None:
        self.pace = pace
        if self.world.leads:
            pace.write(self.job.work)


class Due:
    """When the next checkpoint is due: after a time, or past a multiple of tokens."""

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


def open_stage(
    job: TrainJob, recipe: Recipe, world: ParallelContext
) -> tuple[StageSpan, TokenStream, TrainState, Checkpoints, str]:
    """Return span, tokens, state and checkpoints of the stage of `job`, and where the state came from, for the log.

    Every process calls it. Raises ValueError if the job's parts do not fit each other. The state comes from the newest
    good checkpoint of the stage, else from `begin`. A stage that was begun under another recipe continues only if the
    past is the same (see `recipe.frozen`).
    """
    schedule = Schedule(recipe)
    try:
        span = schedule.span(job.stage)
    except KeyError:
        known = ", ".join(span.name for span in schedule.trained)
        raise ValueError(f"stage: {job.stage!r} is not in the recipe; its stages are {known}") from None
    rows = int(json.loads(brought(job.tokens / "tokens.json").read_text())["rows"])
    check_batches(span, world.layout.dp(world.size))
    world.layout.check(recipe.model, rows, world.size)
    for segment in span.segments:
        world.layout.check_sequence(segment.seq)
    stream = TokenStream(job.tokens, recipe)
    lazy = lazy_of(job.tokens)
    if lazy is not None and lazy.limit_bytes < stream.block_bytes:
        raise ValueError(
            f"token_cache: {lazy.limit_bytes:,} bytes do not hold a block of documents of each source, and every batch "
            f"would download whole blocks again; write at least {stream.block_bytes:,}, better four times as much"
        )
    precision = Precision.of(recipe, world.device)
    state = TrainState(recipe, rows, precision, world, span.start, exact=job.deterministic)
    folder, keep = job.work / "checkpoints", recipe.checkpoint.keep
    checkpoints = Checkpoints(folder, keep, world, uri=job.checkpoints, work=job.work, say=log)
    restored = checkpoints.resume(state, anew=job.restart_damaged)
    for reason in restored.skipped if world.leads else ():
        log(f"checkpoint passed over: {reason}")
    if checkpoints.restore(restored) and world.leads:
        log("the journal was brought from the object store: another machine trained up to here")
    origin = f"checkpoint {restored.path.name}" if restored.path else begin(state, job, recipe, span, world)
    run_on_rank0_and_broadcast(world, lambda: _adopt_recipe(job, recipe, stream, span.start, state.position))
    run_on_rank0_and_broadcast(world, lambda: write_atomic(job.trained_recipe, to_yaml(recipe)))
    checkpoints.prepare(state)
    return span, stream, state, checkpoints, origin


def begin(state: TrainState, job: TrainJob, recipe: Recipe, span: StageSpan, world: ParallelContext) -> str:
    """Set `state` to the beginning of the stage; return where it came from, for the log.

    In this order: the stage before (`parent`), the weights of a model (`start`), initial weights of the recipe's seed.
    """
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
    run_on_rank0_and_broadcast(world, lambda: _check_shape(start, recipe, state.rows))
    model = open_model(start)
    state.fill(lambda name, _: model.tensor(name), world)
    return f"weights of {start}"


def _check_shape(folder: Path, recipe: Recipe, rows: int) -> None:
    """Raise ValueError unless the model in `folder` has the recipe's shape with `rows` embedding rows."""
    model = open_model(folder)
    labels = {"preset", "max_seq"}
    expected = (recipe.model.model_dump(mode="json", exclude=labels), rows)
    stored = (model.spec.model_dump(mode="json", exclude=labels), model.rows)
    if expected != stored:
        raise ValueError(
            f"start: {folder} holds a model of shape {stored}, the recipe asks {expected}; change model: to it"
        )


def _adopt_recipe(job: TrainJob, recipe: Recipe, stream: TokenStream, start: int, position: int) -> None:
    """Accept a recipe with the same past, and discard what was trained after `position`. Raises RecipeError."""
    if job.trained_under(recipe) or not job.trained_recipe.exists():
        return
    trained = load_recipe(job.trained_recipe)
    check_past(trained, recipe, position)
    if TokenStream(job.tokens, trained).identity(start, position) != stream.identity(start, position):
        raise RecipeError(
            f"mix: the tokens before {position} were read under mixes that ended elsewhere, and the past of a run "
            "cannot change; write the old stages again, or begin a new run"
        )
    abandon(job.work / "journal.jsonl", position)


# The result of a stage: training state, model, metrics; built in a hidden folder and renamed when complete.


def commit_result(
    job: TrainJob,
    recipe: Recipe,
    state: TrainState,
    world: ParallelContext,
    recorder: Recorder | None,
    choose: Callable[[], Choice | None],
) -> None:
    """Write `result` into the stage's folder; every process calls it.

    `choose` decides which weights are the model, and may overwrite the weights in memory. The leading process makes the
    model from the state on the disk, so the model need not fit into the memory of any process.
    """
    building = job.work / ".result"
    if world.leads:
        shutil.rmtree(building, ignore_errors=True)
    world.wait()
    save_state(building / "state", state, job.stage, world)
    choice = choose()
    if recorder is None:
        return
    averaged = state.averaged if choice is None or choice.kept == "average" else 0
    save_model(building / "model", recipe.model, state.rows, weights_of(building / "state", averaged))
    if choice is not None:
        full = choice.model_copy(update={"parts": parts_of(recorder.span, read_journal(recorder.journal.path))})
        write_atomic(building / FILE, full.model_dump_json(indent=1) + "\n")
        log(str(full))
    recorder.journal.sync()
    to_parquet(recorder.journal.path, building / "metrics.parquet")
    for name in KEPT:
        source = job.work / name
        if source.is_dir():
            shutil.copytree(source, building / name)
        elif source.exists():
            shutil.copy2(source, building / name)
    sync_folder(building)
    building.rename(job.work / "result")
    sync_folder(job.work)


def weights_of(folder: Path, averaged: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, whole tensor) of the training state in `folder`, sorted by name.

    Memory holds one group of tensors, whatever the size of the model and its layout. `averaged` is as in the
    manifest: above 0, the weights are the running sum over that many positions divided by it. The files are not
    verified: the caller has just written or verified them.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    prefix = "average." if averaged else "model."
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    names = sorted(name for name in stored if name.startswith(prefix))
    group: dict[str, Tensor] = {}
    for name in names:
        group[name] = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)  # type: ignore[union-attr]
        if name != names[-1] and sum(tensor.nbytes for tensor in group.values()) < GROUP_BYTES:
            continue
        load(dict(group), storage_reader=HuggingFaceStorageReader(str(folder), THREADS), no_dist=True)
        for loaded, tensor in group.items():
            yield loaded.partition(".")[2], tensor / averaged if averaged else tensor
        group = {}
