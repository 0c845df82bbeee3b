"""One training stage as a tracked step: launch the trainer, follow its journal, commit what it made.

The trainer is a process that knows neither Prefect nor MLflow. Here its journal is read, shown, and sent to MLflow in
batches; when it dies, it is started again as a fresh launch that resumes from its newest good checkpoint, as long as
every attempt gets further than the one before.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from llama3.recipe.load import resolved
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.tokens.stream import TokenStream
from llama3.train import metrics
from llama3.train.job import TrainJob
from storage.artifact import MANIFEST, Artifact, Design, file_digest
from storage.filesystem import write_atomic
from tasks.follow import Follower, send_series
from tasks.launch import TrainingFailed, launch_local
from tasks.step import Context, ensure

VERSION = 1
LAST_STEPS = 16
"""The loss at a stage's end is the mean of so many steps; a single batch is a few documents."""


@task(name="pretrain", task_run_name="pretrain-{stage}", tags=["pretrain"], cache_policy=NO_CACHE, persist_result=False)
def train_stage(
    context: Context, stage: str, tokens: Artifact, tokenizer: Artifact, parent: Artifact | None
) -> Artifact:
    """Return the checkpoint artifact at the end of `stage`: state to go on from, model, and every metric."""
    span = Schedule(context.recipe).span(stage)
    design = _design(context, span, tokens, parent)
    runs = [context.record.mlflow_run]

    def build(folder: Path, mlflow_run: str) -> dict[str, Any]:
        work = context.scratch / f"{stage}-{design.key[:16]}"
        _train(context, span, _job(context, span, tokens, parent, work), [*runs, mlflow_run])
        for item in (work / "result").iterdir():
            item.rename(folder / item.name)
        shutil.copytree(tokenizer.path, folder / "model", dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        shutil.rmtree(work)
        return _facts(span, folder)

    def show(artifact: Artifact, mlflow_run: str) -> None:
        send_series(context, [*runs, mlflow_run], artifact.path / "metrics.parquet")
        digest = artifact.manifest.files["model/model.safetensors"].sha256
        context.tracker.checkpoint_model([mlflow_run, *runs], artifact.label, artifact.path.as_uri(), span.end, digest)

    return ensure(context, stage, design, build, show)


def _design(context: Context, span: StageSpan, tokens: Artifact, parent: Artifact | None) -> Design:
    """Everything that decides the stage's result, and nothing of where it runs."""
    recipe = context.recipe
    plain = resolved(recipe)
    parameters = {
        "model": {key: value for key, value in plain["model"].items() if key != "preset"},
        "optimizer": plain["optimizer"],
        "lr": {**plain["lr"], "stage": str(span.stage.lr or "")},
        "compute": recipe.compute,
        "seed": recipe.seed,
        "mix": {domain: str(share) for domain, share in span.shares.items()},
        "shape": [[part.start, part.seq, part.batch, part.steps] for part in span.segments],
        "average": span.stage.average,
        "stream": TokenStream(tokens.path, recipe).identity(span.start, span.end),
    }
    inputs = {"tokens": tokens.key, "parent": parent.key if parent else "fresh weights"}
    return Design("checkpoint", f"{recipe.name}-{span.name}", VERSION, parameters, inputs)


def _job(context: Context, span: StageSpan, tokens: Artifact, parent: Artifact | None, work: Path) -> Path:
    cluster = context.cluster
    job = TrainJob(
        recipe=context.folder / "recipe.yaml",
        stage=span.name,
        tokens=tokens.path,
        parent=parent.path / "state" if parent else None,
        work=work,
        micro_batch=cluster.micro_batch,
        device=cluster.device,
        threads=max(1, cluster.threads // cluster.processes),
    )
    path = work / "job.json"
    write_atomic(path, job.model_dump_json(indent=1))
    return path


def _train(context: Context, span: StageSpan, job: Path, runs: list[str]) -> None:
    """Run the trainer until the stage is complete. Raises TrainingFailed when an attempt gets no further."""
    log = context.folder / "logs" / f"{span.name}.log"
    artifact = create_progress_artifact(0.0, key=f"{context.record.name}-{span.name}", description=f"stage {span.name}")
    furthest = -1
    with context.console.progress(span.name, span.tokens) as line:
        follower = Follower(context, runs, job.parent / "journal.jsonl", span.steps, line)

        def report(tokens_done: float) -> None:
            update_progress_artifact(artifact, 100.0 * tokens_done / span.tokens)  # type: ignore[arg-type]

        while True:
            launch = launch_local(job, context.cluster, log)
            status = follower.follow(launch, span.start, report)
            if status == 0:
                report(span.tokens)
                return
            if follower.position <= furthest:
                raise TrainingFailed(
                    f"stage {span.name}: the trainer ended with status {status} ({log}):\n{launch.last_words()}"
                )
            furthest = follower.position
            context.console.say(f"  [yellow]{span.name}: the trainer died (status {status}); starting it again[/]")


def _facts(span: StageSpan, folder: Path) -> dict[str, Any]:
    table = parquet.read_table(folder / "metrics.parquet", filters=[("key", "=", metrics.LOSS)])
    losses = [row["value"] for row in sorted(table.to_pylist(), key=lambda row: row["position"])]
    return {
        "start": span.start,
        "end": span.end,
        "steps": span.steps,
        "first_loss": losses[0],
        "last_loss": sum(losses[-LAST_STEPS:]) / len(losses[-LAST_STEPS:]),
        "model_sha256": file_digest(folder / "model" / "model.safetensors"),
    }
