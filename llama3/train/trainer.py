"""The training loop of one stage: from the newest good checkpoint (or the stage before) to a committed result.

A stage that was killed at any moment and started again gives the same bits as one that was not, on the same number of
processes: all state is in the checkpoint, and the data are a function of the position. The loop hands a step to the
device and, on GPUs, looks at the step before it meanwhile: journal, verdict, whether to save. A bad step (see `spikes`)
has changed nothing by then, so going on, going back and stopping are all still possible.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from llama3.train.data_loader import LocalBatch, Step, read_ahead, steps_from
from llama3.train.incidents import SkippedRanges
from llama3.train.job import Pace, TrainJob
from llama3.train.journal import abandon, read_journal, to_parquet
from llama3.train.loss_spikes import SpikeDetector, SpikeGuard, StepDecision, told, write_incident
from llama3.train.metrics_log import Recorder, StepTiming, log
from llama3.train.precision import Precision
from llama3.train.profiler import Profiler, expect_nothing, expect_step
from llama3.train.state import TrainState
from llama3.train.stragglers import Stragglers
from llama3.train.train_step import Engine, Pending, StepResult
from llama3.train.validation import HeldOutScores
from llama3.train.validation_rows import HeldOut
from storage.filesystem import sync_folder, write_atomic
from storage.page_cache import brought, lazy_of

# Open a stage: check that job, recipe, layout and tokens fit, make the state, and load what there is to go on from.
#
# In this order: the newest good checkpoint of the stage; else the stage before (`parent`); else weights from
# elsewhere (`start`); else the initial weights of the recipe's seed. A stage that was begun under another recipe
# goes on only if the past is the same (see `recipe.past`).


@dataclass(frozen=True)
class Opened:
    """A stage that is ready to be trained from `state.position` on."""

    span: StageSpan
    stream: TokenStream
    state: TrainState
    checkpoints: Checkpoints
    origin: str
    """Where the state came from, in words."""


def open_stage(job: TrainJob, recipe: Recipe, world: ParallelContext) -> Opened:
    """Return the stage of `job`; every process calls it. Raises ValueError if the job's parts do not fit each other."""
    span = _span(recipe, job.stage)
    rows = int(json.loads(brought(job.tokens / "tokens.json").read_text())["rows"])
    check_batches(span, world.layout.dp(world.size))
    world.layout.check(recipe.model, rows, world.size)
    for segment in span.segments:
        world.layout.check_sequence(segment.seq)
    stream = TokenStream(job.tokens, recipe)
    _check_cache(job.tokens, stream)
    precision = Precision.of(recipe, world.device)
    state = TrainState(recipe, rows, precision, world, span.start, exact=job.deterministic)
    folder, keep = job.work / "checkpoints", recipe.checkpoint.keep
    checkpoints = Checkpoints(folder, keep, world, uri=job.checkpoints, work=job.work, say=log)
    found = checkpoints.resume(state, anew=job.restart_damaged)
    for reason in found.skipped if world.leads else ():
        log(f"checkpoint passed over: {reason}")
    if checkpoints.restore(found) and world.leads:
        log("the journal was brought from the object store: another machine trained up to here")
    origin = f"checkpoint {found.path.name}" if found.path else begin(state, job, recipe, span, world)
    run_on_rank0_and_broadcast(world, lambda: _take_past(job, recipe, stream, span.start, state.position))
    run_on_rank0_and_broadcast(world, lambda: write_atomic(job.trained_recipe, to_yaml(recipe)))
    checkpoints.prepare(state)
    return Opened(span, stream, state, checkpoints, origin)


def begin(state: TrainState, job: TrainJob, recipe: Recipe, span: StageSpan, world: ParallelContext) -> str:
    """Put `state` where the stage begins; return where from, in words."""
    if job.parent is not None:
        _load_parent(state, job.parent, span, world)
        return str(job.parent)
    if span.start:
        raise ValueError(f"parent: stage {span.name} starts at {span.start}; name the stage before")
    state.reset(recipe, span.start, world)
    if job.start is None:
        return f"initial weights of seed {recipe.seed}"
    start = job.start
    run_on_rank0_and_broadcast(world, lambda: _check_weights(start, recipe, state.rows))
    model = open_model(start)
    state.fill(lambda name, _: model.tensor(name), world)
    return f"weights of {start}"


def _span(recipe: Recipe, stage: str) -> StageSpan:
    schedule = Schedule(recipe)
    try:
        return schedule.span(stage)
    except KeyError:
        known = ", ".join(span.name for span in schedule.trained)
        raise ValueError(f"stage: {stage!r} is not in the recipe; its stages are {known}") from None


def _check_cache(tokens: Path, stream: TokenStream) -> None:
    lazy = lazy_of(tokens)
    if lazy is not None and lazy.limit_bytes < stream.block_bytes:
        raise ValueError(
            f"token_cache: {lazy.limit_bytes:,} bytes do not hold a block of documents of each source, and every batch "
            f"would bring whole blocks again; write at least {stream.block_bytes:,}, better four times as much"
        )


def _take_past(job: TrainJob, recipe: Recipe, stream: TokenStream, start: int, position: int) -> None:
    """Go on at `position` under a recipe that may have another future: what was trained past it is given up.

    Raises RecipeError if the past is another.
    """
    if job.trained_under(recipe) or not job.trained_recipe.exists():
        return
    trained = load_recipe(job.trained_recipe)
    check_past(trained, recipe, position)
    if TokenStream(job.tokens, trained).identity(start, position) != stream.identity(start, position):
        raise RecipeError(
            f"mix: the tokens before {position} were dealt under mixes that ended elsewhere, and the past of a run "
            "cannot change; write the old stages again, or begin a new run"
        )
    abandon(job.work / "journal.jsonl", position)


def _load_parent(state: TrainState, parent: Path, span: StageSpan, world: ParallelContext) -> None:
    manifest = run_on_rank0_and_broadcast(
        world, lambda: CheckpointManifest.read(parent)
    )  # the files are verified while they are loaded
    if manifest.position != span.start:
        raise ValueError(
            f"parent: {parent} ends at {manifest.position}, stage {span.name} starts at {span.start}; "
            "name the state of the stage before"
        )
    load_state(parent, manifest, state, world, average=False)


def _check_weights(folder: Path, recipe: Recipe, rows: int) -> None:
    """Raise ValueError if the model in `folder` is not of the recipe's shape with `rows` embedding rows."""
    model = open_model(folder)
    labels = {"preset", "max_seq"}
    mine = (recipe.model.model_dump(mode="json", exclude=labels), rows)
    theirs = (model.spec.model_dump(mode="json", exclude=labels), model.rows)
    if mine != theirs:
        raise ValueError(
            f"start: {folder} holds a model of shape {theirs}, the recipe asks {mine}; change model: to it"
        )


# The weights of a saved training state as whole tensors, a few at a time.
#
# Whoever wants the model reads it from the state on the disk instead of gathering it from processes: that works for
# every layout, and memory holds one group of tensors whatever the size of the model. What it gives up: the bytes
# are read once more.

GROUP_BYTES = 2**30
THREADS = 4


def weights_of(folder: Path, averaged: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, whole tensor) of the training state in `folder`, sorted by name.

    `averaged` as in its manifest: above 0, the weights are the running sum over so many positions divided by it. The
    files are trusted: whoever calls has just written or verified them.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    prefix = "average." if averaged else "model."
    known = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    group: dict[str, Tensor] = {}
    for name in sorted(name for name in known if name.startswith(prefix)):
        group[name] = torch.empty(known[name].size, dtype=known[name].properties.dtype)  # type: ignore[union-attr]
        if sum(tensor.nbytes for tensor in group.values()) >= GROUP_BYTES:
            yield from _read(folder, group, averaged)
            group = {}
    yield from _read(folder, group, averaged)


def _read(folder: Path, group: dict[str, Tensor], averaged: int) -> Iterator[tuple[str, Tensor]]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(dict(group), storage_reader=HuggingFaceStorageReader(str(folder), THREADS), no_dist=True)
    for name, tensor in group.items():
        yield name.partition(".")[2], tensor / averaged if averaged else tensor


# Commit the result of a stage: training state, model, metrics; built beside its place and renamed when whole.
#
# The model is made from the state on the disk, by the leading process alone, so it need not fit in the memory of
# any.

KEPT = ("skips.json", "incidents", "profile")
"""What else of a stage's folder stays with its result, where there is any."""


def commit_result(
    job: TrainJob,
    recipe: Recipe,
    state: TrainState,
    world: ParallelContext,
    recorder: Recorder | None,
    choose: Callable[[], Choice | None],
) -> None:
    """Write `result` into the stage's folder; every process calls it. `choose` says what the model is, and may lose
    the weights that are in memory."""
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
        _copy(job.work / name, building / name)
    sync_folder(building)
    building.rename(job.work / "result")
    sync_folder(job.work)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)


class Stopped(FloatingPointError):
    """The recipe ends the run at a bad step; the text names position, reason and the file with its documents."""


class RollBack(Exception):
    """Training goes back to before a spike; `verdict` says which batches it passes over then."""

    def __init__(self, verdict: StepDecision) -> None:
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

    def __init__(self, job: TrainJob, recipe: Recipe, world: ParallelContext, stop: Callable[[], bool]) -> None:
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
        self.skips = world.from_leader(SkippedRanges.read(job.work) if world.leads else SkippedRanges())
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
        self.judge = SpikeDetector(self.recipe, self.span, past, self.skips)
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

    def _take(self, step: Step, share: LocalBatch, waited_s: float) -> list[StepResult]:
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

    def _pass_over(self, step: Step) -> list[StepResult]:
        before = self._settle()
        self.state.position = step.end
        self._count(step)
        if self.recorder is not None:
            self.recorder.pass_over(step)
        return before

    def _count(self, step: Step) -> None:
        self.averaging.add(self.state, step.end)

    def _settle(self) -> list[StepResult]:
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
            timing = StepTiming(now - self.settled, ahead.waited_s, self.blocked_s, written[-1] if written else None)
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

    def _bad(self, step: Step, outcome: StepResult, verdict: StepDecision) -> None:
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

    def _go_back(self, verdict: StepDecision) -> None:
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
