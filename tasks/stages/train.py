"""One training stage as a tracked step, and the weights it starts from: launch, follow the journal, commit the model.

The trainer's processes know neither Prefect nor MLflow: this task reads their journal and sends it to MLflow. When a
process dies or hangs, all are started again from the newest good checkpoint, on as many processes as are available, as
long as attempts make progress.
"""

from __future__ import annotations

import errno
import json
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

from herd.llama3.model.files import weights_digest
from herd.llama3.model.flops import parameter_count
from herd.llama3.recipe import keys
from herd.llama3.recipe.load import RecipeError
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.units import Bytes, Tokens
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer
from herd.llama3.train import metrics
from herd.llama3.train.averaging import FILE as AVERAGE
from herd.llama3.train.averaging import Choice
from herd.llama3.train.device import ENVIRONMENT
from herd.llama3.train.job import TERMINATED, AttemptResult, HourlyCosts, TrainJob
from herd.llama3.train.journal import SkippedRanges, device_hours
from herd.llama3.train.main import REFUSED
from herd.storage.artifact import MANIFEST, Artifact, ArtifactSpec
from herd.storage.filesystem import write_atomic
from herd.storage.lease import folder_lease
from herd.storage.objects import remove_all
from herd.storage.page_cache import lazy_folder
from herd.tasks.cluster import Cluster
from herd.tasks.errors import TrainingFailed
from herd.tasks.launch.base import Launch, Launcher, fitting, launch_key, launcher_of
from herd.tasks.launch.hosts import Hosts, accused
from herd.tasks.launch.local import visible_gpus
from herd.tasks.models.start import (
    alias_label,
    find_init_checkpoint,
    init_from_faults,
    tokenizer_faults,
    with_local_models,
)
from herd.tasks.runs.provenance import hourly_costs
from herd.tasks.runs.work_dirs import kept_checkpoints, newest, work_dir_name
from herd.tasks.stages.alerts import Alerts
from herd.tasks.stages.evaluate import CheckpointOffers, validation_folder, write_validation_rows
from herd.tasks.stages.follow import JournalTailer
from herd.tasks.step import Context, WorkInProgress, ensure_artifact, link_files
from herd.tasks.tracking.prefect_artifacts import StagePage, stage_done
from herd.tasks.tracking.prometheus import Gauges
from herd.tasks.tracking.steps import StageCurves, Thinning

VERSION = 2
WEIGHTS_VERSION = 3
"""Of `init_weights`."""
SILENCE = 2
"""Timeouts without a step after which a trainer hangs; after one, the processes notice a peer that hangs."""


@task(name="pretrain", task_run_name="pretrain-{stage}", cache_policy=NO_CACHE, persist_result=False)
def train_stage(
    context: Context,
    stage: str,
    tokens: Artifact,
    tokenizer: Artifact,
    parent: Artifact | None,
    curated: Artifact,
    conversations: Artifact | None = None,
) -> Artifact:
    """Return the checkpoint artifact at the end of `stage`: state to go on from, model, and every metric.

    `parent` is the checkpoint of the stage before, or the weights that the first stage starts from. The trainer scores
    held-out documents of `curated`, which changes no weight. A stage of kind `sft` trains on `conversations`, and its
    model has a chat template.
    """
    span = context.recipe.schedule.span(stage)
    _announce(context, span)
    context = replace(context, cluster=context.cluster.for_stage(span.stage.name, stage))
    spec = _spec(context, span, tokens, parent, conversations)
    work = context.scratch / work_dir_name(context.recipe, span, spec.inputs, context.record.work_dir_key(stage))
    kept = kept_checkpoints(context.root, context.cluster.checkpoints, work.name)

    def build(folder: Path, mlflow_run: str) -> dict[str, Any]:
        settings = context.recipe.evaluate
        if settings.val_interval != "never":
            documents = validation_folder(curated, settings.val_documents)
            if not write_validation_rows(context.recipe, documents, tokenizer.path, work):
                context.console.log(f"  [yellow]{span.name}: no held-out document to score while training[/]")
        job = _job(context, span, tokens, parent, conversations, work, kept)
        offers = CheckpointOffers(context, span, kept or str(work / "checkpoints"))
        _train(context, span, job, [context.record.mlflow_run, mlflow_run], offers)
        link_files(work / "result", folder)  # not moved: after a kill before the commit, the next attempt needs it
        copy_tokenizer(tokenizer, folder / "model")
        if conversations is not None:
            from herd.llama3.tokens.chat_template import TEMPLATE

            write_atomic(folder / "model" / TEMPLATE_FILE, Tokenizer.load(tokenizer.path).template or TEMPLATE)
        costs, hours, provenance = _costs(context.cluster, parent), device_hours(work), context.record.provenance
        return {
            **_facts(span, folder),
            "cost": costs.of(hours),
            "cost_so_far": costs.so_far(hours),
            **({"provenance": provenance.model_dump()} if provenance else {}),
        }

    def done() -> None:
        if kept:
            remove_all(kept)

    artifact = ensure_artifact(
        context, stage, spec, build, WorkInProgress(work.name, partial(_resumes, span, work, kept), done)
    )
    if "average" in artifact.metadata:
        context.console.log(f"  {'average':<18}{Choice.model_validate(artifact.metadata['average'])}")
    stage_done(context.record, context.recipe, stage, artifact)
    return artifact


def _announce(context: Context, span: StageSpan) -> None:
    """Print the changes from the stage before to this stage."""
    spans = [span for stage in context.recipe.schedule.spans for span in stage.parts]
    number = [span.name for span in spans].index(span.name)
    before = spans[number - 1] if number else None
    if before is None:
        context.console.log(
            f"[bold]{span.name}[/]: seq_len {span.segments[0].seq_len}, batch {Tokens(span.segments[0].batch)}"
        )
        return
    old, new = before.segments[-1], span.segments[0]
    fields = {
        "seq_len": (old.seq_len, new.seq_len),
        "batch": (Tokens(old.batch), Tokens(new.batch)),
        "mix": (before.stage.mix, span.stage.mix),
        "kind": (before.stage.kind, span.stage.kind),
    }
    changes = [f"{name} {left} -> {right}" for name, (left, right) in fields.items() if left != right]
    if span.stage.lr is not None:
        changes.append(f"lr {span.stage.lr}")
    changed = ", ".join(changes) or "same shape"
    context.console.log(f"[bold]{before.name} -> {span.name}[/]: {changed}; stream continues at token {span.start:,}")


def _spec(
    context: Context, span: StageSpan, tokens: Artifact, parent: Artifact | None, conversations: Artifact | None
) -> ArtifactSpec:
    """Return the parameters that decide the stage's result; the cluster is not among them."""
    from herd.llama3.tokens.conversations import ConversationStream
    from herd.llama3.tokens.stream import TokenStream

    recipe = context.recipe
    documents = TokenStream(lazy_folder(tokens, 0), recipe)
    stream = documents if conversations is None else ConversationStream(conversations.path, documents, span)
    parameters = keys.checkpoint(recipe, span, stream.identity(span.start, span.end))
    inputs = {"tokens": tokens.key, "parent": parent.key if parent else "fresh weights"}
    if conversations is not None:
        inputs["conversations"] = conversations.key
    return ArtifactSpec("checkpoint", f"{recipe.name}-{span.name}", VERSION, parameters, inputs)


def _job(
    context: Context,
    span: StageSpan,
    tokens: Artifact,
    parent: Artifact | None,
    conversations: Artifact | None,
    work: Path,
    checkpoints: str | None,
) -> Path:
    """Write the job file of the stage into `work`; return its path. `checkpoints`: their URI, if not in `work`."""
    cluster = context.cluster
    job = TrainJob(
        recipe=context.runs.local_recipe(context.record.name),
        stage=span.name,
        tokens=lazy_folder(tokens, int(Bytes.parse(cluster.token_cache))),
        conversations=None if conversations is None else conversations.path,
        parent=parent.path_of("state") if parent and parent.manifest.kind == "checkpoint" else None,
        start=parent.path_of("model") if parent and parent.manifest.kind == "weights" else None,
        work=work,
        micro_batch=cluster.micro_batch,
        device=cluster.trainer_device,
        backend=cluster.backend,
        threads=cluster.process_threads,
        timeout_s=cluster.timeout_s,
        layout=cluster.layout,
        deterministic=cluster.deterministic,
        profile=cluster.profile,
        checkpoints=checkpoints,
        predicted=context.predict(cluster, span),
        costs=_costs(cluster, parent),
        restart_damaged=context.restart_damaged,
        health_s=cluster.health_s,
        preflight=cluster.nodes is not None and cluster.nodes.preflight,
    )
    path = work / "job.json"
    write_atomic(path, job.model_dump_json(indent=1))
    return path


def _costs(cluster: Cluster, parent: Artifact | None) -> HourlyCosts:
    gpus = cluster.trainer_device == "cuda" or (
        cluster.trainer_device == "auto" and cluster.launcher == "local" and visible_gpus() > 0
    )
    return hourly_costs(cluster, gpus, parent.metadata.get("cost_so_far", {}) if parent else {})


def _resumes(span: StageSpan, work: Path, kept: str | None) -> int | None:
    """Return how many tokens of a stage in progress are trained; None if it begins."""
    if (work / "result").is_dir():
        return span.tokens
    saved = newest([str(work / "checkpoints"), *([kept] if kept else [])])
    return saved.position - span.start or None if saved else None


def _train(context: Context, span: StageSpan, job: Path, runs: list[str], offers: CheckpointOffers) -> None:
    """Run the trainer until the stage is complete. Raises TrainingFailed when attempts make no progress."""
    name = context.record.name
    page = StagePage(name, span.name, span.start, span.tokens)
    alerts = Alerts(context.root, name, span.name, context.console, context.recipe.spikes, job.parent)
    curves = StageCurves(context.sinks, span.name, Thinning(span.steps, span.end))
    hosts, readers = Hosts(context.root), (Gauges(context.root, name, span.name), curves)
    launcher = launcher_of(context.cluster, launch_key(job), context.agents, hosts.excluded)
    journal = job.parent / "journal.jsonl"
    with context.console.progress(span.name, span.tokens) as line:
        follower = JournalTailer(
            context, runs, journal, span.steps, line, span.end, alerts, page, offers, readers, hosts
        )
        attempts, timeout_s = StageAttempts(context, span, launcher, hosts), context.cluster.timeout_s
        while True:
            before = follower.position
            launch = attempts.start(job)
            outcome = follower.follow(launch, span.start, SILENCE * timeout_s, context.cluster.startup_s)
            if outcome.status == 0:
                return
            if outcome.status != TERMINATED:
                alerts.attempt_failed(outcome.cause, outcome.message)
                context.tracker.set_tags(runs[-1], {"cause": outcome.cause})
            attempts.ended(outcome, progress=follower.position > before)


class StageAttempts:
    """The attempts at one stage: number of processes, log folder, and when to give up."""

    def __init__(self, context: Context, span: StageSpan, launcher: Launcher, hosts: Hosts | None = None) -> None:
        """`hosts` is the ledger of the root, in which deaths are recorded."""
        self.context, self.span, self.launcher = context, span, launcher
        self.hosts = hosts or Hosts(context.root)
        self.logs = context.folder / "logs" / span.name
        self.fruitless = 0
        self.excluded: dict[str, str] = {}
        """The excluded hosts when the attempt started."""

    def start(self, job: Path) -> Launch:
        """Start the next attempt on the available processes, or follow one that still runs without its supervisor.

        Raises TrainingFailed if the processes are too few.
        """
        self.excluded = self.hosts.excluded()
        live = self.launcher.live(job)
        if live is not None:
            self._say(f"follows {live.label}, which still runs without its supervisor")
            self.folder = live.logs
            return live
        with folder_lease(job.parent, f"stage {self.span.name}", lambda by: self._say(f"waits for {by}, which saves")):
            pass  # the ranks of a killed supervisor may still be saving
        cluster = self.context.cluster
        try:
            processes = fitting(self.span, cluster, self.launcher.capacity())
        except TrainingFailed as error:
            excluded = "".join(f"\n  {host}: {why}" for host, why in self.excluded.items())
            raise TrainingFailed(f"{error}" + (f"; excluded (herd hosts):{excluded}" if excluded else "")) from None
        if processes != cluster.processes:
            self._say(f"starts on {processes} processes instead of {cluster.processes}; the data stay the same")
        self.folder = self.logs / f"attempt-{len(list(self.logs.glob('attempt-*'))) + 1}"
        return self.launcher.start(job, processes, self.folder)

    def ended(self, outcome: AttemptResult, progress: bool) -> None:
        """Count an attempt that did not finish the stage. Raises TrainingFailed to give up, OSError for a full disk."""
        if outcome.cause == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        excluded = self._record_death(outcome)
        self.fruitless = 0 if progress or excluded else self.fruitless + 1  # the next one runs elsewhere
        if outcome.status == REFUSED or self.fruitless >= self.context.cluster.attempts:
            raise TrainingFailed(
                f"stage {self.span.name}: {outcome.cause}: the trainer ended with status {outcome.status} and no new "
                f"step, {self.fruitless} time(s) in a row ({self.folder}):\n{outcome.message}"
            )
        how = "was stopped" if outcome.status == TERMINATED else f"died ({outcome.cause}, status {outcome.status})"
        self._say(f"the trainer {how}; starting it again")
        for line in outcome.message.splitlines()[:1]:
            self._say(line.removesuffix(":"))

    def _record_death(self, outcome: AttemptResult) -> bool:
        """Record on which host the attempt died; return whether this or a fault has excluded a host since its start."""
        if host := accused(self.folder, outcome, self.context.cluster.nodes is not None):
            self.hosts.record(host, "died", outcome.cause, self.context.record.name)
        new = {name: why for name, why in self.hosts.excluded().items() if name not in self.excluded}
        for name, why in new.items():
            self._say(f"host {name} is excluded: {why}; herd hosts --clear {name} takes it back")
        return bool(new)

    def _say(self, text: str) -> None:
        self.context.console.log(f"  [yellow]{self.span.name}: {escape(text)}[/]")


def _facts(span: StageSpan, folder: Path) -> dict[str, Any]:
    """Return the artifact's metadata from the result of the stage in `folder`."""
    table = parquet.read_table(folder / "metrics.parquet", filters=[("key", "=", metrics.LOSS)])
    path = folder / AVERAGE
    average = Choice.model_validate_json(path.read_text()).model_dump(mode="json") if path.exists() else None
    losses = [row["value"] for row in sorted(table.to_pylist(), key=lambda row: row["position"])]
    window = metrics.window(len(losses))  # a single batch is a few documents
    held_out = parquet.read_table(folder / "metrics.parquet", filters=[("key", "=", metrics.HELD_OUT)]).to_pylist()
    return {
        "start": span.start,
        "end": span.end,
        "steps": span.steps,
        "first_loss": fmean(losses[:window]),
        "last_loss": metrics.mean_loss(losses),
        **({"bits_per_byte": max(held_out, key=lambda row: row["position"])["value"]} if held_out else {}),
        "model_sha256": weights_digest(folder / "model"),
        "skips": SkippedRanges.read(folder).as_dicts(),
        "environment": json.loads((folder / ENVIRONMENT).read_text()),
        **({"average": average} if average is not None else {}),
    }


def copy_tokenizer(tokenizer: Artifact, model: Path) -> None:
    """Write the tokenizer's files into a model folder."""
    shutil.copytree(tokenizer.path, model, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))


# What training starts from: imported weights, or a checkpoint of another run


@task(name="init-weights", cache_policy=NO_CACHE, persist_result=False)
def init_weights(context: Context, tokenizer: Artifact) -> Artifact:
    """Return the weights of the recipe's `init_from` as an artifact, or the checkpoint that it names.

    Raises ValueError if they do not fit the recipe.
    """
    from herd.llama3.export.convert import chat_template_of, import_weights, weights_state

    recipe = context.recipe
    assert recipe.init_from is not None
    if recipe.init_from.is_checkpoint:
        return _checkpoint(context, Tokenizer.load(tokenizer.path))
    local, loaded = with_local_models(context.root, recipe), Tokenizer.load(tokenizer.path)
    start, path, vocab_size = local.init_from, recipe.init_from.path, loaded.vocab_size
    assert start is not None
    label = alias_label(context.root, path)
    parameters = keys.weights(local, label or weights_state(path), vocab_size)
    spec = ArtifactSpec("weights", recipe.name, WEIGHTS_VERSION, parameters, {"tokenizer": tokenizer.key})

    def build(folder: Path, _: str) -> dict[str, Any]:
        config = import_weights(start, folder / "model", recipe.model, vocab_size)
        copy_tokenizer(tokenizer, folder / "model")
        if template := chat_template_of(Path(start.path), start.format, loaded):
            write_atomic(folder / "model" / TEMPLATE_FILE, template)
        return {
            "from": label or path,
            "parameters": parameter_count(config, vocab_size),
            "end": 0,
            "model_sha256": weights_digest(folder / "model"),
        }

    return ensure_artifact(context, "init-weights", spec, build)


def _checkpoint(context: Context, tokenizer: Tokenizer) -> Artifact:
    """Return the checkpoint that the recipe starts from: reused, as a stage of another run is."""
    if faults := init_from_faults(context.store, context.runs, context.recipe):
        raise RecipeError("\n".join(faults))
    checkpoint = find_init_checkpoint(context.store, context.runs, context.recipe)
    if faults := list(tokenizer_faults(context.recipe, checkpoint, tokenizer)):
        raise RecipeError("\n".join(faults))
    manifest = checkpoint.manifest
    spec = ArtifactSpec(manifest.kind, manifest.name, manifest.version, manifest.parameters, manifest.inputs)

    def build(folder: Path, _: str) -> dict[str, Any]:
        raise RecipeError(
            f"init_from.path: {checkpoint.label} is damaged; run {manifest.created_by} again, or start from another"
        )

    return ensure_artifact(context, "init-weights", spec, build)
