"""What the runs under a root know of a model, for its card.

A query over the run's record, its recipe and the manifests, like a report: what is not found is left out. Shares of
domains, sources and licences are counted from the token stream itself, up to the checkpoint's position and, for a run
that went on from a checkpoint of another run, from there.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llama3.evaluate.scores import Score, read_scores
from llama3.export.card import Card, MixLine, Origin, StageLine, Training
from llama3.model.files import read_config
from llama3.recipe.base import DOMAINS
from llama3.recipe.load import resolved, to_yaml
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.tokens.inspect import Count, Inspection, inspect
from storage.artifact import Artifact, Store
from storage.digests import digest_json
from storage.object_artifact import open_store
from storage.page_cache import lazy_folder
from storage.root import Root
from tasks.report.plots import draw_curve
from tasks.runs.records import RunRecord, Runs, evaluation_of

CURVE = "training-loss.png"
SPOKEN = 0.01
"""Least share of the tokens for a language to be named in the card's head."""


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the run that it is seen in."""

    store: Store
    checkpoint: Artifact
    record: RunRecord
    recipe: Recipe

    @property
    def end(self) -> int:
        """Position of the checkpoint."""
        return int(self.checkpoint.facts["end"])

    @property
    def begin(self) -> int:
        """Position from which the run trained: above 0 where it went on from a checkpoint of another."""
        return Schedule(self.recipe).trained[0].start

    @property
    def stages(self) -> list[tuple[StageSpan, Artifact]]:
        """The stages up to the checkpoint, in order."""
        spans = [span for span in Schedule(self.recipe).trained if span.name in self.record.steps]
        return [(span, self.step(span.name)) for span in spans if span.end <= self.end]

    def step(self, name: str) -> Artifact:
        """Return what the run's step `name` stands on."""
        return self.store.at(self.record.steps[name].artifact)


def card_of(root: Root, name: str, model: Path, folder: Path, form: str, dtype: str, licence: str) -> Card:
    """Return the card of the model folder `model`, which was called `name`; its curve is drawn into `folder`."""
    spec, rows = read_config(model)
    trained = _trained(root, name, model)
    if trained is None:
        return Card(Path(name).resolve().name, spec, rows, form, dtype, licence)
    return Card(
        name=trained.record.family,
        spec=spec,
        rows=rows,
        form=form,
        dtype=dtype,
        licence=licence,
        training=_training(trained, folder),
        digests=_digests(trained),
    )


def _trained(root: Root, name: str, model: Path) -> Trained | None:
    """Return the checkpoint that the model folder is part of and its run, or None for a folder from elsewhere."""
    store, runs, folder = open_store(root), Runs(root), model.resolve().parent
    try:
        checkpoint = store.at("/".join(folder.parts[-2:]))
    except ValueError:  # the folder is not called as an artifact is, or there is none of that name
        return None
    if checkpoint.folder.resolve() != folder:
        return None
    for known in (name, checkpoint.manifest.made_by):
        with suppress(ValueError):  # no such run, or no name of one
            record = runs.find(known)
            if checkpoint.label in {step.artifact for step in record.steps.values()}:
                return Trained(store, checkpoint, record, runs.recipe(known))
    return None


def _training(trained: Trained, folder: Path) -> Training:
    lines = [_line(span, artifact) for span, artifact in trained.stages]
    if lines:
        draw_curve([artifact for _, artifact in trained.stages], lines, folder / CURVE)
    seen = _seen(trained)
    return Training(
        run=trained.record.name,
        tokens=trained.end,
        stages=lines,
        mix=_mix(trained, seen) if seen else [],
        sources=_origins(seen.sources, seen.stop - seen.start) if seen else [],
        licences=_origins(seen.licences, seen.stop - seen.start) if seen else [],
        languages=_languages(seen) if seen else [],
        scores=_scores(trained),
        curve=CURVE if lines else "",
        recipe=to_yaml(trained.recipe),
    )


def _line(span: StageSpan, artifact: Artifact) -> StageLine:
    lengths = sorted(set(span.lengths))
    seq = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return StageLine(
        span.name, span.start, span.end, seq, span.segments[-1].batch, span.stage.mix, artifact.facts["last_loss"]
    )


def _seen(trained: Trained) -> Inspection | None:
    """Return what the run read of the token stream up to the checkpoint; None if the shards are gone."""
    try:
        shards = trained.step("tokenise")
    except (KeyError, ValueError):
        return None
    return inspect(lazy_folder(shards, 0), trained.recipe, trained.begin, trained.end, limit=0)


def _mix(trained: Trained, seen: Inspection) -> list[MixLine]:
    spans, total = [span for span, _ in trained.stages], seen.stop - seen.start
    rows = []
    for domain in DOMAINS:
        planned = sum(float(span.shares.get(domain, 0)) * span.tokens for span in spans) / total
        count = seen.domains.get(domain, Count(0, 0)).tokens
        if planned or count:
            rows.append(MixLine(domain, planned, count, count / total))
    return rows


def _origins(counts: dict[str, Count], total: int) -> list[Origin]:
    return [Origin(name, count.tokens, count.tokens / total, count.documents) for name, count in counts.items()]


def _languages(seen: Inspection) -> list[str]:
    total = seen.stop - seen.start
    spoken = [name for name, count in seen.languages.items() if count.tokens >= SPOKEN * total]
    return [name for name in spoken if re.fullmatch("[a-z]{2,3}", name) and name != "und"]


def _scores(trained: Trained) -> dict[str, Score]:
    """Return the scores of this checkpoint by the run's own suite; none if it has none, or they were deleted."""
    evaluation = evaluation_of(trained.store, trained.record, trained.checkpoint)
    return read_scores(evaluation.path) if evaluation else {}


def _digests(trained: Trained) -> dict[str, str]:
    """Return digests of what the model is and was made from, the commit of the code, and the studies behind it."""
    checkpoint, record = trained.checkpoint, trained.record
    found = {
        "checkpoint": checkpoint.label,
        "weights, sha256 in training": str(checkpoint.facts["model_sha256"]),
        "recipe": record.recipe_digest,
        "code commit": checkpoint.manifest.code,
    }
    if "tokenizer" in record.steps:
        found["tokenizer"] = str(trained.step("tokenizer").facts["digest"])
    if "tokens" in checkpoint.manifest.inputs:
        found["data mix"] = data_mix_digest(trained.recipe, checkpoint.manifest.inputs["tokens"], trained.end)
    if trained.recipe.start is not None:
        found["started from"] = trained.recipe.start.origin
        if "start" in record.steps:
            found["started from, as an artifact"] = record.steps["start"].artifact
    return {**found, **_studied(trained.recipe)}


def _studied(recipe: Recipe) -> dict[str, str]:
    """Return the studies that changed the recipe, and what was found about its sources."""
    found = {f"changed by study {number}": str(study) for number, study in enumerate(recipe.studies, 1)}
    for domain, source in ((domain, source) for domain, listed in recipe.sources.items() for source in listed):
        if source.judged is not None:
            found[f"{domain}: {source.name or source.uri}"] = (
                f"{source.judged} (study {source.judged.study} {source.judged.digest})"
            )
    return found


def data_mix_digest(recipe: Recipe, tokens: str, end: int) -> str:
    """Return the digest of what decides the training tokens up to `end`.

    That is the key of the shards, the seed, weights inside domains, and the stages with their shapes and mixes.
    """
    spans = [
        [
            span.name,
            [[segment.start, segment.steps, segment.seq, segment.batch] for segment in span.segments],
            {domain: str(share) for domain, share in span.shares.items()},
            *_read_beside(span),
        ]
        for span in Schedule(recipe).trained
        if span.start < end
    ]
    plain = resolved(recipe)
    weights = {domain: [source["weight"] for source in sources] for domain, sources in plain["sources"].items()}
    rules = {"seed": recipe.seed, "shards": plain["tokens"], "weights": weights}
    return digest_json({"tokens": tokens, "end": end, "stages": spans, **rules})


def _read_beside(span: StageSpan) -> list[object]:
    """Return what a stage adds to its mix, and which helping it reads, if either is asked for."""
    added = {name: str(share) for name, share in span.stage.add.items() if share}
    return [added, span.stage.draw] if added or span.stage.draw else []
