"""One training stage as a tracked step: launch the trainer, follow its journal, commit what it made.

The trainer is processes that know neither Prefect nor MLflow. Here their journal is read, shown, and sent to MLflow in
batches; when one dies or hangs, all are started again as a fresh launch that resumes from the newest good checkpoint,
on as many processes as are there, as long as attempts get further. How each attempt ended is a file beside its logs.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as parquet
from prefect import task
from prefect.cache_policies import NO_CACHE
from rich.markup import escape

from llama3.model.files import weight_files
from llama3.recipe.load import digest, resolved
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.units import Bytes
from llama3.train import metrics
from llama3.train.averaging import FILE as AVERAGE
from llama3.train.averaging import Choice
from llama3.train.incidents import SkippedRanges
from llama3.train.job import TERMINATED, AttemptResult, TrainJob
from llama3.train.main import REFUSED
from storage.artifact import MANIFEST, Artifact, ArtifactSpec, file_digest
from storage.filesystem import write_atomic
from storage.lease import folder_lease
from storage.objects import remove_all
from storage.page_cache import lazy_folder
from tasks.errors import TrainingFailed
from tasks.launch.base import Launch, Launcher, fitting, launch_key
from tasks.launch.launchers import launcher_of
from tasks.plan.predict import predict
from tasks.runs.progress import IN_PROGRESS, name_of_work, newest
from tasks.stages.alerts import Alerts
from tasks.stages.evaluate import held_out_folder, write_held_out
from tasks.stages.follow import Follower
from tasks.step import Context, WorkInProgress, ensure, link_files
from tasks.tracking.prefect_artifacts import StagePage, stage_done

VERSION = 1
SILENCE = 2
"""So many timeouts without a step are a hang; after one, the processes notice each other's."""


@task(name="pretrain", task_run_name="pretrain-{stage}", cache_policy=NO_CACHE, persist_result=False)
def train_stage(
    context: Context, stage: str, tokens: Artifact, tokenizer: Artifact, parent: Artifact | None, curated: Artifact
) -> Artifact:
    """Return the checkpoint artifact at the end of `stage`: state to go on from, model, and every metric.

    `parent` is the checkpoint of the stage before, or the weights that the first stage starts from. The trainer scores
    held-out documents of `curated` now and then, which changes no weight.
    """
    span = Schedule(context.recipe).span(stage)
    context = replace(context, cluster=context.cluster.at(span.stage.name, stage))
    design = _design(context, span, tokens, parent)
    made_from, apart = design.inputs, context.record.apart(stage)
    work = context.scratch / name_of_work(context.recipe, span, made_from["tokens"], made_from["parent"], apart)
    kept = _checkpoints(context, work)

    def build(folder: Path, mlflow_run: str) -> dict[str, Any]:
        _write_held_out(context, span, curated, tokenizer, work)
        job = _job(context, span, tokens, parent, work)
        _train(context, span, job, [context.record.mlflow_run, mlflow_run])
        link_files(work / "result", folder)  # not moved: killed before the commit, the next attempt finds it whole
        shutil.copytree(tokenizer.path, folder / "model", dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        return _facts(span, folder)

    def done() -> None:
        if kept:
            remove_all(kept)

    artifact = ensure(
        context, stage, design, build, WorkInProgress(work.name, partial(_resumes, span, work, kept), done)
    )
    if "average" in artifact.facts:
        context.console.say(f"  {'average':<18}{Choice.model_validate(artifact.facts['average'])}")
    stage_done(context, stage)
    return artifact


def _write_held_out(context: Context, span: StageSpan, curated: Artifact, tokenizer: Artifact, work: Path) -> None:
    asked = context.recipe.evaluate
    if asked.every == "never":
        return
    documents = held_out_folder(curated, asked.every_documents)
    if not write_held_out(context.recipe, documents, tokenizer.path, work):
        context.console.say(f"  [yellow]{span.name}: no held-out document to score while training[/]")


def _design(context: Context, span: StageSpan, tokens: Artifact, parent: Artifact | None) -> ArtifactSpec:
    """Everything that decides the stage's result, and nothing of where it runs."""
    from llama3.tokens.stream import TokenStream

    recipe = context.recipe
    plain = resolved(recipe)
    schedule = Schedule(recipe).rates(span.start, span.end)
    rates = [rate for _, rate in schedule]
    parameters = {
        "model": {key: value for key, value in plain["model"].items() if key not in ("preset", "max_seq")},
        "optimizer": plain["optimizer"],
        "lr": f"{rates[0]:.3g} to {rates[-1]:.3g}, peak {max(rates):.3g}",
        "rates": digest(schedule)[:16],
        "z_loss": recipe.z_loss,
        "compute": recipe.compute,
        "seed": recipe.seed,
        "mix": {domain: str(share) for domain, share in span.shares.items()},
        "shape": [[part.start, part.seq, part.batch, part.steps] for part in span.segments],
        "average": str(span.stage.average) if span.stage.average else None,
        **({"keep": span.stage.keep} if span.stage.keep != "average" else {}),
        "stream": TokenStream(lazy_folder(tokens, 0), recipe).identity(span.start, span.end),
    }
    inputs = {"tokens": tokens.key, "parent": parent.key if parent else "fresh weights"}
    return ArtifactSpec("checkpoint", f"{recipe.name}-{span.name}", VERSION, parameters, inputs)


def _job(context: Context, span: StageSpan, tokens: Artifact, parent: Artifact | None, work: Path) -> Path:
    cluster = context.cluster
    job = TrainJob(
        recipe=context.runs.local_recipe(context.record.name),
        stage=span.name,
        tokens=lazy_folder(tokens, int(Bytes.parse(cluster.token_cache))),
        parent=parent.part("state") if parent and parent.manifest.kind == "checkpoint" else None,
        start=parent.part("model") if parent and parent.manifest.kind == "weights" else None,
        work=work,
        micro_batch=cluster.micro_batch,
        device=cluster.trainer_device,
        threads=cluster.process_threads,
        timeout_s=cluster.timeout_s,
        layout=cluster.layout,
        deterministic=cluster.deterministic,
        profile=cluster.profile,
        checkpoints=_checkpoints(context, work),
        predicted=predict(context.root, context.recipe, cluster, span),
        restart_damaged=context.restart_damaged,
    )
    path = work / "job.json"
    write_atomic(path, job.model_dump_json(indent=1))
    return path


def _resumes(span: StageSpan, work: Path, kept: str | None) -> int | None:
    """Return how many tokens of a stage in progress are trained, as its progress line counts; None if it begins."""
    if (work / "result").is_dir():
        return span.tokens
    saved = newest([str(work / "checkpoints"), *([kept] if kept else [])])
    return saved.position - span.start if saved else None


def _checkpoints(context: Context, work: Path) -> str | None:
    """Return where the checkpoints of the stage that works in `work` are kept, if not there."""
    place = context.cluster.checkpoints.rstrip("/")
    if not place and not context.root.is_local:
        place = context.root.join(IN_PROGRESS)
    return f"{place}/{work.name}" if place else None


def _train(context: Context, span: StageSpan, job: Path, runs: list[str]) -> None:
    """Run the trainer until the stage is complete. Raises TrainingFailed when attempts get no further."""
    name = context.record.name
    page = StagePage(name, span.name, span.start, span.tokens)
    alerts = Alerts(context.root, name, span.name, context.console, context.recipe.spikes, job.parent)
    by = launcher_of(context.cluster, launch_key(job), context.agents)
    with context.console.progress(span.name, span.tokens) as line:
        follower = Follower(context, runs, job.parent / "journal.jsonl", span.steps, line, span.end, alerts, page)
        attempts, timeout_s = StageAttempts(context, span, by), context.cluster.timeout_s
        while True:
            before = follower.position
            launch = attempts.start(job)
            outcome = follower.follow(launch, span.start, SILENCE * timeout_s, context.cluster.startup_s)
            if outcome.status == 0:
                return
            attempts.ended(outcome, progress=follower.position > before)


class StageAttempts:
    """The attempts at one stage: how many processes each gets, where its logs are, and when it is time to give up."""

    def __init__(self, context: Context, span: StageSpan, launcher: Launcher) -> None:
        self.context, self.span, self.launcher = context, span, launcher
        self.logs = context.folder / "logs" / span.name
        self.fruitless = 0

    def start(self, job: Path) -> Launch:
        """Start the next attempt on the processes that are there, or follow one that a lost supervisor left running.

        Raises TrainingFailed if they are too few.
        """
        live = self.launcher.live(job)
        if live is not None:
            self._say(f"follows {live.label}, which goes on without its supervisor")
            self.folder = live.logs
            return live
        with folder_lease(job.parent, f"stage {self.span.name}", lambda by: self._say(f"waits for {by}, which saves")):
            pass  # the ranks of a supervisor that was killed are told to save, and may take their time
        asked = self.context.cluster.processes
        processes = fitting(self.span, self.context.cluster, self.launcher.capacity())
        if processes != asked:
            self._say(f"starts on {processes} processes instead of {asked}; the data stay the same")
        self.folder = self.logs / f"attempt-{len(list(self.logs.glob('attempt-*'))) + 1}"
        return self.launcher.start(job, processes, self.folder)

    def ended(self, outcome: AttemptResult, progress: bool) -> None:
        """Take note of an attempt that left the stage unfinished.

        Raises TrainingFailed when it was one too many, and OSError for a full disk, on which another one would end too.
        """
        if os.strerror(errno.ENOSPC) in outcome.words:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        self.fruitless = 0 if progress else self.fruitless + 1
        if outcome.status == REFUSED or self.fruitless >= self.context.cluster.attempts:
            raise TrainingFailed(
                f"stage {self.span.name}: the trainer ended with status {outcome.status} and no new step, "
                f"{self.fruitless} time(s) in a row ({self.folder}):\n{outcome.words}"
            )
        how = "was told to stop" if outcome.status == TERMINATED else f"died (status {outcome.status})"
        self._say(f"the trainer {how}; starting it again")
        for words in outcome.words.splitlines()[:1]:
            self._say(words)

    def _say(self, text: str) -> None:
        self.context.console.say(f"  [yellow]{self.span.name}: {escape(text)}[/]")


def _facts(span: StageSpan, folder: Path) -> dict[str, Any]:
    table = parquet.read_table(folder / "metrics.parquet", filters=[("key", "=", metrics.LOSS)])
    choice = _choice(folder)
    losses = [row["value"] for row in sorted(table.to_pylist(), key=lambda row: row["position"])]
    window = metrics.window(len(losses))  # a single batch is a few documents
    held_out = parquet.read_table(folder / "metrics.parquet", filters=[("key", "=", metrics.HELD_OUT)]).to_pylist()
    return {
        "start": span.start,
        "end": span.end,
        "steps": span.steps,
        "first_loss": fmean(losses[:window]),
        "last_loss": fmean(losses[-window:]),
        **({"bits_per_byte": max(held_out, key=lambda row: row["position"])["value"]} if held_out else {}),
        "model_sha256": _model_digest(folder / "model"),
        "skips": SkippedRanges.read(folder).facts(),
        **({"average": choice.model_dump(mode="json")} if choice is not None else {}),
    }


def _choice(folder: Path) -> Choice | None:
    """Return what the trainer kept of a stage with an average."""
    path = folder / AVERAGE
    return Choice.model_validate_json(path.read_text()) if path.exists() else None


def _model_digest(folder: Path) -> str:
    """Return the digest of a model's weights: of its one file, or of the digests of its files in order."""
    files = sorted(set(weight_files(folder).values()))
    return file_digest(files[0]) if len(files) == 1 else digest([file_digest(path) for path in files])
