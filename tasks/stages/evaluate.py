"""Score a checkpoint's model as a tracked step."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE
from rich.markup import escape

from herd.llama3.evaluate.gate import Decision, GateRow, decide
from herd.llama3.evaluate.held_out import (
    NGRAM_BPB,
    ValidationDocument,
    candidate_documents,
    document_bytes,
    ngram_bits_per_byte,
    read_validation_documents,
)
from herd.llama3.evaluate.long_context_gate import METRICS
from herd.llama3.evaluate.main import MISTAKE, REFUSED, EvaluateJob, GateScores
from herd.llama3.evaluate.needle import KEY as NEEDLE
from herd.llama3.evaluate.scores import read_scores
from herd.llama3.evaluate.suite import mean_bits_per_byte, stage_suite_name, suite_inputs, with_suite
from herd.llama3.recipe import keys
from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.load import digest, to_yaml
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Tokens
from herd.llama3.statistics.estimates import normal
from herd.llama3.train import metrics
from herd.llama3.train.journal import Record
from herd.storage.artifact import MANIFEST, Artifact, ArtifactSpec
from herd.storage.digests import digest_file
from herd.storage.filesystem import is_local, write_atomic
from herd.tasks.cluster import Cluster
from herd.tasks.errors import EvaluationFailed, GateFailed
from herd.tasks.launch.base import Excluded, launch_key, launcher_of, wait
from herd.tasks.launch.devices import place_evaluation
from herd.tasks.launch.hosts import Hosts
from herd.tasks.launch.local import Agents
from herd.tasks.runs.work_dirs import committed
from herd.tasks.stages.alerts import alert_gate_failed
from herd.tasks.step import Context, ensure_in_scratch, link_files
from herd.tasks.tracking.events import checkpoint_saved
from herd.tasks.tracking.steps import scores_of

# The trainer's launcher starts the processes that evaluate. Scores have the same bytes on any number of replicas; split
# over tp, likelihoods differ by rounding, 1e-5.


def run_evaluation(
    recipe: Recipe,
    model: Path,
    documents: Path,
    folder: Path,
    work: Path,
    cluster: Cluster,
    agents: Agents,
    gate: GateScores | None = None,
    tokenizer: Path | None = None,
    conversations: Path | None = None,
    excluded: Excluded = dict,
) -> dict[str, Any]:
    """Score the model in `model` into `folder`; return the metadata of `evaluate`.

    `tokenizer` is its folder if that is another, `conversations` the file of held-out ones. With `gate` the scores are
    those of a long-context gate. Nothing runs on the `excluded` hosts. `work` keeps finished work, so that another
    attempt, or another call after a kill, continues. Raises ValueError as `evaluate` does, OSError for a full disk, and
    EvaluationFailed if `cluster.attempts` attempts died.
    """
    layout, processes = place_evaluation(recipe, cluster)
    work.mkdir(parents=True, exist_ok=True)
    write_atomic(work / "recipe.yaml", to_yaml(recipe))
    job = EvaluateJob(
        recipe=work / "recipe.yaml",
        model=model,
        tokenizer=tokenizer or model,
        documents=documents,
        conversations=conversations,
        gate=gate,
        work=work,
        layout=layout,
        threads=cluster.nodes.cpus_per_process if cluster.nodes else max(1, cluster.threads // processes),
        device=cluster.trainer_device,
        backend=cluster.backend,
        timeout_s=max(cluster.timeout_s, 1800),  # the others may have longer texts to read
    )
    path = work / "job.json"
    write_atomic(path, job.model_dump_json(indent=1))
    launcher = launcher_of(cluster, launch_key(path), agents, excluded)
    for attempt in range(1, cluster.attempts + 1):
        if job.facts.exists():  # a flow was killed after its evaluation
            break
        logs = work / "logs" / f"attempt-{len(list(work.glob('logs/attempt-*'))) + 1}"
        outcome = wait(launcher.live(path) or launcher.start(path, processes, logs), lambda: agents.stopped)
        if outcome.status == 0:
            break
        mistakes = [line for line in outcome.message.splitlines() if line.startswith(MISTAKE)]
        if outcome.status == REFUSED and mistakes:
            raise ValueError(mistakes[-1].removeprefix(MISTAKE))
        if outcome.cause == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))
        if attempt == cluster.attempts:
            raise EvaluationFailed(f"an evaluator ended with status {outcome.status}:\n{outcome.message}")
    link_files(job.result, folder)  # not moved: after a kill before the commit, the next attempt needs it
    facts: dict[str, Any] = json.loads(job.facts.read_text())
    return facts


# Scoring reads the first documents by id, which are in the first files of each domain: only these are fetched.

BYTES_PER_TOKEN = 8
"""An upper bound; documents are truncated to a row of tokens later."""


def validation_folder(curated: Artifact, count: int) -> Path:
    """Return the folder of `curated`, with the files of the first `count` held-out documents of each domain."""
    for domain in DOMAINS:
        missing = candidate_documents(domain, count)
        for name in sorted(name for name in curated.manifest.files if name.startswith(f"documents/{domain}-")):
            if missing <= 0:
                break
            splits = pq.read_table(curated.path_of(name), columns=["split"])["split"].to_pylist()
            missing -= splits.count("held_out")
    return curated.folder


def write_validation_rows(recipe: Recipe, curated: Path, tokenizer: Path, work: Path) -> bool:
    """Write the documents that the trainer scores between steps into `work`; return False if there are none.

    `curated` is the folder with the documents (see `validation_folder`).
    """
    from herd.llama3.tokens.tokenizer import Tokenizer
    from herd.llama3.train.validation import pack_sequences

    count, seq_len = recipe.evaluate.val_documents, min(min(stage.lengths) for stage in recipe.stages)
    try:
        documents: list[ValidationDocument] = read_validation_documents(curated, count, BYTES_PER_TOKEN * seq_len)
    except ValueError:  # curate.validation_fraction: 0; the evaluation says so
        return False
    work.mkdir(parents=True, exist_ok=True)
    pack_sequences(documents, Tokenizer.load(tokenizer), seq_len).write(work)
    return True


VERSION = 6


@task(name="evaluate", task_run_name="evaluate-{name}", cache_policy=NO_CACHE, persist_result=False)
def evaluate_model(
    context: Context,
    name: str,
    checkpoint: Artifact,
    curated: Artifact,
    conversations: Artifact | None = None,
    suite: str = "",
) -> Artifact:
    """Return the scores of `checkpoint` on what `curated` and `conversations` hold out, by `suite` or the recipe's.

    `name` is the stage that ends with it, or `champion`.
    """
    usual = stage_suite_name(context.recipe, name)
    recipe = with_suite(context.recipe, suite or usual)
    spec, chats = _evaluation(recipe, checkpoint.manifest.name, checkpoint.key, curated, conversations)
    step = f"evaluate-{name}" if suite in ("", usual) else f"evaluate-{name}-{Path(suite).stem}"

    def build(folder: Path, work: Path) -> dict[str, Any]:
        documents = validation_folder(curated, recipe.evaluate.documents)
        model, cluster = checkpoint.path_of("model"), context.cluster
        excluded = Hosts(context.root).excluded
        metadata = run_evaluation(
            recipe, model, documents, folder, work, cluster, context.agents, None, None, chats, excluded
        )
        return {**metadata, **_ngram_baseline(recipe, documents)}

    return ensure_in_scratch(context, step, spec, build)


def _ngram_baseline(recipe: Recipe, documents: Path) -> dict[str, float]:
    """Return the bits per byte of a 5-gram, whole and by domain; nothing if the recipe does not ask for it."""
    if not recipe.evaluate.ngram_baseline:
        return {}
    shares: dict[Domain, float] = {domain: float(share) for domain, share in recipe.first_mix.items()}
    chosen = read_validation_documents(documents, recipe.evaluate.documents, document_bytes(recipe))
    by_domain = ngram_bits_per_byte(documents, shares, chosen)
    scores = {f"{NGRAM_BPB}/{domain}": bits for domain, bits in by_domain.items()}
    mean = mean_bits_per_byte(recipe, {key: normal(bits, 0.0, 1) for key, bits in scores.items()}, NGRAM_BPB)
    return {NGRAM_BPB: mean.value, **scores}


def _evaluation(
    recipe: Recipe, name: str, checkpoint: str, curated: Artifact, conversations: Artifact | None
) -> tuple[ArtifactSpec, Path | None]:
    """Return the artifact of the scores of the checkpoint with the key `checkpoint`, by the suite of `recipe`, and the
    file of held-out conversations, if there are any."""
    from herd.llama3.tokens.conversations import HELD_OUT  # imports numba

    spec = ArtifactSpec(
        kind="evaluation",
        name=name,
        version=VERSION,
        parameters=keys.evaluation(recipe),
        inputs={"checkpoint": checkpoint, "curated": curated.key, **suite_inputs(recipe)},
    )
    if conversations is None:
        return spec, None
    spec.inputs["conversations"] = conversations.key
    return spec, conversations.path_of(HELD_OUT)


# Scores of a stage in progress: the supervisor pins a checkpoint every `evaluate.every` tokens and sends an event; the
# deployment `evaluate-checkpoint` scores what is pinned, on other machines, while the trainer continues.


class CheckpointQueue:
    """Checkpoints of a stage in progress that wait to be scored. They are pinned, so that retention keeps them."""

    REASON = "evaluate"
    WAITING = 2
    """Checkpoints that may wait; the newest are scored, older ones are skipped."""
    PINNED_S = 7 * 86_400.0
    """How long a checkpoint waits to be scored, at most."""

    def __init__(self, folder: str) -> None:
        """`folder` has the checkpoints: a path, or the URI of an object store."""
        from herd.llama3.train.checkpoint.storage import Pins  # imports torch

        self.folder = folder
        self.pins = Pins(str(Path(folder).parent) if is_local(folder) else folder)

    def add(self, position: int, before: Iterable[int] = ()) -> None:
        """Have `position` scored, or the mean of it and of the checkpoints `before` it."""
        for other in before:
            self.pins.add(other, f"{self.REASON} {position}", self.PINNED_S)
        self.pins.add(position, self.REASON, self.PINNED_S)

    def remove(self, position: int) -> None:
        for other in self.before(position):
            self.pins.remove(other, f"{self.REASON} {position}")
        self.pins.remove(position, self.REASON)

    def before(self, position: int) -> list[int]:
        """Return the earlier checkpoints whose mean with `position` is scored, newest first."""
        return sorted(
            (at for at, reasons in self.pins.all().items() if f"{self.REASON} {position}" in reasons), reverse=True
        )

    def waiting(self) -> list[int]:
        """Return the positions, newest first."""
        return sorted((at for at, reasons in self.pins.all().items() if self.REASON in reasons), reverse=True)

    def fetch(self, position: int, scratch: Path) -> Path:
        """Return a folder with the files of a checkpoint, downloaded below `scratch` if they are remote.

        Raises FileNotFoundError if it was removed, and DamagedCheckpoint for wrong bytes of a remote one.
        """
        import torch

        from herd.llama3.parallel.mesh import ParallelContext
        from herd.llama3.train.checkpoint.storage import RemoteCheckpointStore

        folder = f"{self.folder}/{position:018}"
        if is_local(folder):
            if not Path(folder, MANIFEST).is_file():
                raise FileNotFoundError(f"{folder}: the checkpoint was removed")
            return Path(folder)
        store = RemoteCheckpointStore(self.folder, scratch, self.REASON)
        refs = [ref for ref in store.refs() if ref.position == position]
        if not refs:
            raise FileNotFoundError(f"{folder}: the checkpoint was removed")
        alone = ParallelContext(0, 1, torch.device("cpu"))
        path, manifest = store.open(refs[-1], alone)
        store.download(path, manifest, alone, manifest.files)
        manifest.write(path)
        return path


class CheckpointOffers:
    """Offers checkpoints of a stage for evaluation as they are committed, one for each `evaluate.every` tokens."""

    def __init__(self, context: Context, span: StageSpan, folder: str) -> None:
        self.context, self.span, self.folder = context, span, folder
        self.every, self.mean_of = context.recipe.evaluate.every, context.recipe.evaluate.mean_of
        self.offered = span.start

    def observe(self, records: Sequence[Record]) -> None:
        """Look at new journal records; if a save ended, offer its checkpoint."""
        if self.every == "never" or not any(metrics.CHECKPOINT_WRITE_S in record.metrics for record in records):
            return
        saved = [checkpoint.position for checkpoint in islice(committed(self.folder), self.mean_of)]
        if not saved or saved[0] // self.every == self.offered // self.every:
            return
        self.offered = saved[0]
        if saved[0] < self.span.end:
            CheckpointQueue(self.folder).add(saved[0], saved[1:])
            checkpoint_saved(self.context.record, self.context.root.uri, self.span.name, saved[0], self.folder)


def evaluate_waiting(context: Context, stage: str, folder: str, curated: Artifact, tokenizer: Artifact) -> list[str]:
    """Score the checkpoints of `stage` that wait in `folder`, newest first; return a line for each, also for skipped.

    Two calls at once share the work: the artifact's lease lets one score a checkpoint.
    """
    from herd.llama3.train.checkpoint.manifest import DamagedCheckpoint  # imports torch

    queue, lines = CheckpointQueue(folder), list[str]()
    while waiting := queue.waiting():
        for position in waiting[CheckpointQueue.WAITING :]:
            queue.remove(position)
            lines.append(f"{position:,}: skipped, {CheckpointQueue.WAITING} newer checkpoints wait")
        position = waiting[0]
        try:
            scored = evaluate_checkpoint(context, stage, position, folder, curated, tokenizer)
            means = {key: value for key, value in sorted(scores_of(scored).items()) if key.count("/") == 1}
            of = f" (mean of {count} checkpoints)" if (count := scored.metadata["mean_of"]) > 1 else ""
            lines.append(f"{position:,}{of}: " + ", ".join(f"{key} {value:.4f}" for key, value in means.items()))
        except (FileNotFoundError, DamagedCheckpoint) as error:  # the stage ended, somebody deleted it, or wrong bytes
            lines.append(f"{position:,}: not scored, {error}")
        queue.remove(position)
    return lines


@task(
    name="evaluate-checkpoint", task_run_name="evaluate-{stage}-{position}", cache_policy=NO_CACHE, persist_result=False
)
def evaluate_checkpoint(
    context: Context, stage: str, position: int, folder: str, curated: Artifact, tokenizer: Artifact
) -> Artifact:
    """Return the scores of a checkpoint in progress, which also go to the run's curves at `position`.

    With `evaluate.mean_of` they are those of the mean of its weights and of the checkpoints before it.
    """
    suite = context.recipe.evaluate.deferred_suite or context.recipe.evaluate.suite
    recipe, step = with_suite(context.recipe, suite), f"evaluate-{stage}-{position}"
    scratch = context.scratch / f"{step}-checkpoint"
    try:
        queue = CheckpointQueue(folder)
        saved = [queue.fetch(at, scratch / str(at)) for at in (position, *queue.before(position))]
        keys_ = [digest_file(checkpoint / MANIFEST).sha256 for checkpoint in saved]
        name, key = f"{recipe.name}-{stage}-{position}", keys_[0] if len(keys_) == 1 else digest(keys_)
        spec, conversations = _evaluation(recipe, name, key, curated, context.recorded("conversations"))

        def build(result: Path, work: Path) -> dict[str, Any]:
            documents = validation_folder(curated, recipe.evaluate.documents)
            metadata = run_evaluation(
                recipe,
                saved[0] if len(saved) == 1 else _mean_of(saved, scratch / "mean"),
                documents,
                result,
                work,
                context.cluster,
                context.agents,
                tokenizer=tokenizer.path,
                conversations=conversations,
                excluded=Hosts(context.root).excluded,
            )
            return {**metadata, "position": position, "mean_of": len(saved)}

        return ensure_in_scratch(context, step, spec, build)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _mean_of(checkpoints: Sequence[Path], folder: Path) -> Path:
    """Write the model of the mean of the weights of `checkpoints` into `folder`, and return it."""
    from herd.llama3.model.files import open_model
    from herd.llama3.model.merge import MergedModel

    merged = MergedModel({path.name: open_model(path) for path in checkpoints}, [1.0] * len(checkpoints))
    folder.mkdir(parents=True)
    merged.save(folder)
    return folder


# The gates between the sequence lengths of a long-context stage, as tracked steps.
#
# The scores are an artifact, so a restarted run does not measure them again; each run decides from them and the
# recipe's thresholds, so a changed threshold takes effect at once. A failed gate ends the run before the next
# length.

GATE_VERSION = 1


@task(name="gate", task_run_name="gate-{name}", cache_policy=NO_CACHE, persist_result=False)
def check_long_context_gates(
    context: Context, name: str, checkpoint: Artifact, began: Artifact | None, curated: Artifact
) -> Decision:
    """Judge `checkpoint`, the end of the stage or part called `name`, by the stage's gates.

    `began` is the checkpoint that the whole stage started from. Raises GateFailed if a gate fails.
    """
    schedule = context.recipe.schedule
    span = schedule.span(name)
    gates = span.stage.gates
    first = next(number for number, segment in enumerate(schedule.segments) if segment.stage == span.stage.name)
    short = schedule.segments[first - 1].seq_len if "short-context" in gates else None  # the length before the stage
    before = None
    if short is not None:
        assert began is not None
        before = read_scores(_scores(context, f"{span.stage.name}-start", began, curated, short, None).path)
    needle = span.lengths[-1] if "needle" in gates else None
    scores = _scores(context, name, checkpoint, curated, short, needle)
    decision = decide({METRICS[gate]: rule for gate, rule in gates.items()}, read_scores(scores.path), before)
    write_atomic(context.folder / f"gate-{name}.json", decision.model_dump_json(indent=1))
    rows = [row for row in decision.rows if row.metric in METRICS.values() or not row.passed]
    for row in rows:
        context.console.log(f"  {escape(_line(row))}")
    if not decision.accepted:
        reasons = "; ".join(_line(row) for row in rows if not row.passed)
        position = checkpoint.metadata["end"]
        alert_gate_failed(context.root, context.console, context.record.name, name, reasons, position)
        raise GateFailed(_remedies(schedule, span, rows, scores))
    return decision


def _scores(
    context: Context, name: str, checkpoint: Artifact, curated: Artifact, short: int | None, needle: int | None
) -> Artifact:
    recipe = context.recipe
    spec = ArtifactSpec(
        kind="gate",
        name=checkpoint.manifest.name,
        version=GATE_VERSION,
        parameters=keys.gate(recipe, short, needle),
        inputs={"checkpoint": checkpoint.key, "curated": curated.key},
    )

    def build(folder: Path, work: Path) -> dict[str, Any]:
        gate, model = GateScores(short=short, needle=needle), checkpoint.path_of("model")
        excluded = Hosts(context.root).excluded
        return run_evaluation(
            recipe, model, curated.path, folder, work, context.cluster, context.agents, gate, excluded=excluded
        )

    return ensure_in_scratch(context, f"gate-{name}", spec, build)


def _line(row: GateRow) -> str:
    """Return a gate's measured value, its rule, and whether it is passed."""
    verdict = "passed" if row.passed else "failed"
    if row.metric not in METRICS.values() or row.candidate is None:
        return f"{row.metric} {verdict}: {row.reason}"
    if row.metric == NEEDLE:
        return f"needle {verdict}: {row.candidate:.1%} of the sentences found; the gate requires {row.rule}"
    return (
        f"short-context {verdict}: {row.candidate:.4f} bits per byte, {row.champion:.4f} before the stage; "
        f"the gate allows {row.threshold:.4f} ({row.rule})"
    )


def _remedies(schedule: Schedule, span: StageSpan, rows: list[GateRow], scores: Artifact) -> str:
    """Return the numbers of a failed gate and the changes of the recipe that let the run continue."""
    stage, last = span.stage, span.segments[-1]
    prefix = f"{NEEDLE}/depth_"
    depths = [(int(key.removeprefix(prefix)), scores.metadata[key]) for key in sorted(scores.metadata) if prefix in key]
    return "\n".join(
        [
            f"stages.{stage.name}.gates: {span.name} does not pass at sequence {last.seq_len}; "
            f"the run stops at position {last.end:,}",
            *(f"  {_line(row)}" for row in rows),
            *(["  needle by depth: " + ", ".join(f"{d} %: {share:.0%}" for d, share in depths)] if depths else []),
            "change one of these fields and start the run again:",
            f"  stages.{stage.name}.{_longer(schedule, span)}  # trains twice as long at this length",
            f"  stages.{stage.name}.gates: {_loosened(span, rows)}  # accepts this model",
        ]
    )


def _longer(schedule: Schedule, span: StageSpan) -> str:
    """Return the field and value that double the training at this length and keep the other lengths."""
    segments = schedule.span(span.stage.name).segments
    sizes = [Tokens(segment.tokens) for segment in segments]
    last = span.part if span.part is not None else len(sizes) - 1
    sizes[last] = Tokens(2 * sizes[last])
    if len(sizes) > 1:
        return f"for: [{', '.join(map(str, sizes))}]" + (" in place of until" if span.stage.until else "")
    return f"until: {Tokens(span.start + sizes[0])}" if span.stage.until else f"for: {sizes[0]}"


def _loosened(span: StageSpan, rows: list[GateRow]) -> str:
    """Return the gates of the recipe, with the bounds of failed gates set to the measured values."""
    measured = {row.metric: row for row in rows}
    gates = []
    for gate, rule in span.stage.gates.items():
        row, text = measured[METRICS[gate]], str(rule)
        if not row.passed and row.candidate is not None and gate == "needle":
            text = f"at least {math.floor(100 * row.candidate) / 100:g}"
        elif not row.passed and row.candidate is not None and row.champion is not None:
            text = f"no worse than {math.ceil(1000 * (row.candidate / row.champion - 1)) / 10:g}%"
        gates.append(f"{gate}: {text}")
    return f"{{{', '.join(gates)}}}"
