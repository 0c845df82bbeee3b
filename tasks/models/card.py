"""The training of a model, from the runs under a root, for its card, and the card in MLflow's registry.

It queries run record, recipe and manifests and leaves out what it does not find. Shares of domains, sources and
licenses are counted from the token stream, up to the checkpoint's position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from matplotlib.ticker import FuncFormatter

from herd.llama3.evaluate.scores import read_scores
from herd.llama3.export.card import Card, MixLine, SourceRow, StageLine, Training, render
from herd.llama3.model.files import CONFIG, read_config
from herd.llama3.recipe.base import DOMAINS, Decides, chosen_fields
from herd.llama3.recipe.keys import STREAM
from herd.llama3.recipe.load import to_yaml
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import tokens
from herd.llama3.tokens.inspect import TokenCount, inspect, stream_position
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE
from herd.llama3.train import metrics
from herd.llama3.train.journal import read_series
from herd.storage.artifact import Artifact, Store
from herd.storage.digests import digest_json
from herd.storage.object_artifact import open_store
from herd.storage.page_cache import lazy_folder
from herd.storage.root import Root
from herd.tasks.figures import styled, subplots
from herd.tasks.html import DIM, INK
from herd.tasks.promotion.log import gate_decisions, read_log
from herd.tasks.promotion.registry import Registry
from herd.tasks.runs.records import MERGED, RunRecord, Runs, evaluation_of
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.mlflow_store import report_page

CURVE = "training-loss.png"
SPOKEN = 0.01
"""Smallest share of the tokens of a language that the card's header names."""
MEANS, MIN_STEPS = 50, 4
"""Points of a card's smooth curve, each the mean of its share of the steps, and the fewest steps of a mean."""


@dataclass(frozen=True)
class TrainedCheckpoint:
    """A checkpoint and its run."""

    store: Store
    checkpoint: Artifact
    record: RunRecord
    recipe: Recipe

    @property
    def end(self) -> int:
        return int(self.checkpoint.metadata["end"])

    @property
    def stages(self) -> list[tuple[StageSpan, Artifact]]:
        """The stages up to the checkpoint, in order."""
        spans = [span for span in self.recipe.schedule.trained if span.name in self.record.steps]
        return [(span, self.step(span.name)) for span in spans if span.end <= self.end]

    def step(self, name: str) -> Artifact:
        """Return the artifact of the run's step `name`."""
        return self.store.load(self.record.steps[name].artifact)


def make_card(root: Root, name: str, model: Path, folder: Path, form: str, dtype: str, license: str) -> Card:
    """Return the card of the model folder `model`, found by `name`; its curve is drawn into `folder`."""
    config, vocab_size = read_config(model)
    chat = (model / TEMPLATE_FILE).is_file()
    trained = _trained(root, name, model)
    if trained is None:
        return Card(Path(name).resolve().name, config, vocab_size, form, dtype, license, chat=chat)
    return Card(
        name=trained.record.family,
        config=config,
        vocab_size=vocab_size,
        form=form,
        dtype=dtype,
        license=license,
        training=_training(trained, folder),
        digests=_digests(trained),
        chat=chat,
    )


def _trained(root: Root, name: str, model: Path) -> TrainedCheckpoint | None:
    """Return the checkpoint that the model folder is part of and its run, or None for a folder from elsewhere."""
    store, runs, folder = open_store(root), Runs(root), model.resolve().parent
    try:
        checkpoint = store.load("/".join(folder.parts[-2:]))
    except ValueError:  # not the name of an artifact, or it does not exist
        return None
    if checkpoint.folder.resolve() != folder:
        return None
    for known in (name, checkpoint.manifest.created_by):
        with suppress(ValueError):  # no such run, or not the name of a run
            record = runs.find(known)
            if checkpoint.label in {step.artifact for step in record.steps.values()}:
                return TrainedCheckpoint(store, checkpoint, record, runs.recipe(known))
    return None


def _training(trained: TrainedCheckpoint, folder: Path) -> Training:
    """Return stages, token counts and scores, as far as the artifacts exist; the curve is drawn into `folder`."""
    stages = trained.stages
    lines = [_stage_line(span, artifact) for span, artifact in stages]
    if lines:
        draw_curve([artifact for _, artifact in stages], lines, folder / CURVE)
    shards = None
    with suppress(KeyError, ValueError):  # deleted by garbage collection
        shards = trained.step("tokenize")
    composition = _composition(trained, shards) if shards else Composition()
    evaluation = evaluation_of(trained.store, trained.record, trained.checkpoint)
    return Training(
        run=trained.record.name,
        tokens=trained.end,
        stages=lines,
        mix=composition.mix,
        languages=composition.languages,
        sources=composition.sources,
        licenses=composition.licenses,
        scores=read_scores(evaluation.path) if evaluation else {},
        curve=CURVE if lines else "",
        recipe=to_yaml(trained.recipe),
        merged=trained.checkpoint.metadata.get(MERGED, {}),
    )


def _stage_line(span: StageSpan, checkpoint: Artifact) -> StageLine:
    lengths, batch = sorted(set(span.lengths)), span.segments[-1].batch
    seq_len = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return StageLine(span.name, span.start, span.end, seq_len, batch, span.stage.mix, checkpoint.metadata["last_loss"])


@dataclass(frozen=True)
class Composition:
    """What the training tokens consist of, by domain, language, source and license."""

    mix: list[MixLine] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    sources: list[SourceRow] = field(default_factory=list)
    licenses: list[SourceRow] = field(default_factory=list)


def _composition(trained: TrainedCheckpoint, shards: Artifact) -> Composition:
    """Count the token stream up to the checkpoint, and the conversations of its stages."""
    recipe, spans = trained.recipe, [span for span, _ in trained.stages]
    begin = recipe.schedule.trained[0].start  # above 0 if the run continues another run's checkpoint
    seen = inspect(lazy_folder(shards, 0), recipe, begin, stream_position(recipe, trained.end), limit=0)
    total = trained.end - begin

    def source_rows(uses: Mapping[str, TokenCount]) -> list[SourceRow]:
        return [SourceRow(name, use.tokens, use.tokens / total, use.documents) for name, use in uses.items()]

    composition = Composition(sources=source_rows(seen.sources), licenses=source_rows(seen.licenses))
    for domain in DOMAINS:
        planned = sum(float(span.shares.get(domain, 0)) * span.tokens for span in spans) / total
        count = seen.domains.get(domain, TokenCount(0, 0)).tokens
        if planned or count:
            composition.mix.append(MixLine(domain, planned, count, count / total))
    for name, use in seen.languages.items():
        if use.tokens >= SPOKEN * total and re.fullmatch("[a-z]{2,3}", name) and name != "und":
            composition.languages.append(name)
    if conversation_tokens := sum(span.tokens - span.mix_tokens for span in spans):
        metadata = trained.step("conversations").metadata

        def source_row(label: str, tokens_in_source: int) -> SourceRow:
            share = tokens_in_source / metadata["tokens"]  # every epoch has all conversations
            count = conversation_tokens * share
            return SourceRow(label, round(count), count / total, round(metadata["conversations"] * share))

        for name, source in metadata["sources"].items():
            composition.sources.append(source_row(f"conversations: {name}", source["tokens"]))
        for name, amount in metadata["licenses"].items():
            composition.licenses.append(source_row(name, amount))
    return composition


def _digests(trained: TrainedCheckpoint) -> dict[str, str]:
    """Return digests of the model and its inputs, the commit of the code, and the studies behind the recipe."""
    checkpoint, record, recipe = trained.checkpoint, trained.record, trained.recipe
    digests = {
        "checkpoint": checkpoint.label,
        "weights, sha256 in training": str(checkpoint.metadata["model_sha256"]),
        "recipe": record.recipe_digest,
        "code commit": checkpoint.manifest.code,
    }
    if "tokenizer" in record.steps:
        digests["tokenizer"] = str(trained.step("tokenizer").metadata["digest"])
    if "tokens" in checkpoint.manifest.inputs:
        digests["data mix"] = data_mix_digest(recipe, checkpoint.manifest.inputs["tokens"], trained.end)
    if "conversations" in checkpoint.manifest.inputs:
        digests["conversations"] = checkpoint.manifest.inputs["conversations"]
    if recipe.init_from is not None:
        digests["started from"] = recipe.init_from.path
        if "init-weights" in record.steps:
            digests["started from, as an artifact"] = record.steps["init-weights"].artifact
    digests |= {f"changed by study {number}": str(study) for number, study in enumerate(recipe.studies, 1)}
    for domain, source in ((domain, source) for domain, listed in recipe.sources.items() for source in listed):
        if (verdict := source.annealing_verdict) is not None:
            digests[f"{domain}: {source.name or source.uri}"] = f"{verdict} (study {verdict.study} {verdict.digest})"
    return digests


def describe_model(root: Root, record: RunRecord, mlflow: MLflowTracker) -> None:
    """Write the report's address and the card of the model that `record` had judged to its version in MLflow."""
    log = read_log(root, record.family)
    if not (decisions := gate_decisions(log, record.name)) or not mlflow.experiment:
        return
    label = decisions[-1].artifact
    report = report_page("", mlflow.experiment, mlflow.run_id(record.mlflow_run))
    card = ""
    with suppress(ValueError, OSError), TemporaryDirectory() as folder:  # deleted, or the root is away
        card = _short_card(root, record.name, open_store(root).load(label), Path(folder))
    mlflow.reach.attempt(lambda: Registry(mlflow).describe(log, label, report, card), None)


def _short_card(root: Root, run: str, checkpoint: Artifact, folder: Path) -> str:
    """Return the card of a checkpoint without what belongs to an exported folder."""
    model = checkpoint.path_of(f"model/{CONFIG}").parent  # of a remote root, not the weights
    card = make_card(root, run, model, folder, "hf", "fp32", "")
    if card.training is not None:
        card = replace(card, training=replace(card.training, curve=""))
    return f"{card.notice}\n\n## Model{render(card).partition('## Model')[2].partition('## Provenance')[0]}".rstrip()


def data_mix_digest(recipe: Recipe, tokens: str, end: int) -> str:
    """Return the digest of the inputs that determine the training tokens up to `end`.

    They are the key of the shards, the fields of the recipe that a stream of tokens depends on, and the stages with
    their shapes and mixes.
    """

    def of_stream(path: str, _: Decides) -> bool:
        return path in ("seed", "stages.extra_sources", *STREAM)

    spans = []
    for span in recipe.schedule.trained:
        if span.start < end:
            shapes = [[segment.start, segment.steps, segment.seq_len, segment.batch] for segment in span.segments]
            shares = {domain: str(share) for domain, share in span.shares.items()}
            spans.append([span.name, shapes, shares, chosen_fields(span.stage, of_stream, "stages")])
    fields = {name: value for name, value in chosen_fields(recipe, of_stream).items() if name != "stages"}
    return digest_json({"tokens": tokens, "end": end, "fields": fields, "stages": spans})


@styled
def draw_curve(stages: list[Artifact], lines: list[StageLine], path: Path) -> None:
    """Write the training loss of `stages` against tokens as a PNG; not every page that shows a README shows SVG.

    `lines` mark where each stage begins.
    """
    query = "SELECT key, position, value FROM read_parquet($tables) WHERE key = $key ORDER BY position"
    tables = (stage.path_of("metrics.parquet") for stage in stages)
    points = dict(read_series(tables, query, key=metrics.LOSS).get(metrics.LOSS, []))
    positions = sorted(points)
    losses = [points[position] for position in positions]
    size = max(MIN_STEPS, len(losses) // MEANS)
    means = [[fmean(v[start : start + size]) for start in range(0, len(v), size)] for v in (positions, losses)]
    figure, axis = subplots(figsize=(8, 3.4))
    axis.plot(positions, losses, color=DIM, linewidth=0.9, label="each step")
    axis.plot(*means, color=INK, linewidth=1.8, label=f"mean of {size} steps")
    for line in lines:
        if line.start:
            axis.axvline(line.start, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        middle = (line.start + line.end) / 2
        axis.text(middle, 1.02, line.name, transform=axis.get_xaxis_transform(), ha="center", fontsize=9)
    axis.set_xlim(0, lines[-1].end)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axis.set_xlabel("tokens")
    axis.set_ylabel("training loss, nats per token")
    axis.legend()
    figure.savefig(path, format="png", dpi=130, metadata={"Software": None})
