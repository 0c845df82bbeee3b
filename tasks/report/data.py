"""What a report shows, gathered from the run record, manifests, Parquet files (by DuckDB) and MLflow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq

from llama3.data.accounting import FINDINGS, KEPT, explain
from llama3.evaluate.gate import Decision
from llama3.evaluate.scores import Score, read_scores
from llama3.recipe.base import DOMAINS
from llama3.recipe.load import to_yaml
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.train import metrics
from llama3.train.averaging import Choice
from storage.artifact import Artifact
from storage.object_artifact import open_store
from storage.root import Root
from tasks.promotion.log import last_promotion
from tasks.runs.records import RunRecord, Runs
from tasks.tracking.mlflow import Tracker

Row = dict[str, Any]


STEPS = ("read", "filter", "url", "exact", "near", "contaminated", "topic", "written")


TITLES = {
    "read": "not read",
    "filter": "rules",
    "url": "older versions",
    "exact": "exact copies",
    "near": "near copies",
    "contaminated": "evaluation sets",
    "topic": "topic caps",
    "written": "lines removed",
}


COUNTS = ("read", "read_bytes", "kept", "kept_bytes", "held_out", "held_out_bytes")


@dataclass(frozen=True)
class DropRow:
    """One line of the table of documents: an outcome, and (documents, bytes) of it by domain."""

    name: str
    step: str
    meaning: str
    domains: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class FunnelStep:
    """What one step took in and gave on, over all domains."""

    title: str
    documents: int
    dropped: int
    bytes: int
    dropped_bytes: int
    dropped_tokens: float | None
    """About; None where no tokenizer is known yet."""


@dataclass(frozen=True)
class DataPage:
    run: str
    outcomes: list[DropRow]
    funnel: list[FunnelStep]
    sources: list[Row]
    lengths: list[Row]
    languages: list[Row]
    clusters: list[Row]
    lines: list[Row]
    contamination: list[Row]
    ratios: dict[str, list[Row]]
    """Evaluation set -> examples with at least each ratio."""
    contaminated: list[Row]
    samples: dict[str, dict[str, list[Row]]]
    """Domain -> outcome -> documents."""
    facts: dict[str, Any]
    fertility: dict[str, Any]
    domains: tuple[str, ...] = DOMAINS


def data_page(run: str, curated: Artifact, tokenizer: Artifact | None) -> DataPage:
    """Gather the data page of `run` from its artifacts."""
    ledger = pq.read_table(curated.path / "ledger.parquet").to_pylist()
    facts = tokenizer.facts if tokenizer else {}
    return DataPage(
        run=run,
        outcomes=_outcomes(ledger),
        funnel=_funnel(ledger, facts.get("bytes_per_token", {})),
        sources=_sources(ledger),
        samples=_samples_by_outcome(_table(curated, "samples")),
        lengths=_table(curated, "lengths"),
        languages=_table(curated, "languages"),
        clusters=_table(curated, "clusters"),
        lines=_table(curated, "lines"),
        contamination=_table(curated, "contamination"),
        ratios={
            name: list(rows) for name, rows in groupby(_table(curated, "ratios"), key=lambda row: str(row["benchmark"]))
        },
        contaminated=_table(curated, "contaminated"),
        facts=curated.facts,
        fertility=facts,
    )


def _table(curated: Artifact, name: str) -> list[Row]:
    path: Path = curated.path / FINDINGS / f"{name}.parquet"
    rows: list[Row] = pq.read_table(path).to_pylist() if path.is_file() else []
    return rows


def _outcomes(ledger: list[Row]) -> list[DropRow]:
    """Return the outcomes in the order of the steps; what is kept comes first."""
    order = {"kept": -2, "held_out": -1}
    ledger = sorted(ledger, key=lambda line: (order.get(line["outcome"], STEPS.index(line["step"])), line["outcome"]))
    found = []
    for (outcome, step), lines in groupby(ledger, key=lambda line: (line["outcome"], line["step"])):
        domains: dict[str, tuple[int, int]] = {}
        for line in lines:
            documents, size = domains.get(line["domain"], (0, 0))
            domains[line["domain"]] = (documents + line["documents"], size + line["bytes"])
        found.append(DropRow(outcome, step, explain(outcome), domains))
    return found


def _funnel(ledger: list[Row], bytes_per_token: dict[str, float]) -> list[FunnelStep]:
    documents, size = sum(line["documents"] for line in ledger), sum(line["bytes"] for line in ledger)
    steps = []
    for step in STEPS:
        gone = [line for line in ledger if line["step"] == step and line["outcome"] not in KEPT]
        dropped, dropped_bytes = sum(line["documents"] for line in gone), sum(line["bytes"] for line in gone)
        if dropped:
            tokens = [line["bytes"] / bytes_per_token[line["domain"]] for line in gone if bytes_per_token]
            about = sum(tokens) if tokens else None
            steps.append(FunnelStep(TITLES[step], documents, dropped, size, dropped_bytes, about))
        documents, size = documents - dropped, size - dropped_bytes
    return steps


def _sources(ledger: list[Row]) -> list[Row]:
    """Return read, kept and held-out documents and bytes by source; kept means the same as in the outcomes."""
    sources: dict[tuple[str, str], Row] = {}
    for line in ledger:
        key = (line["domain"], line["source"])
        row = sources.setdefault(key, {"domain": key[0], "source": key[1], **dict.fromkeys(COUNTS, 0)})
        for name in ("read", *({line["outcome"]} & set(KEPT))):
            row[name] += line["documents"]
            row[f"{name}_bytes"] += line["bytes"]
    return sorted(sources.values(), key=lambda row: (DOMAINS.index(row["domain"]), -row["read_bytes"], row["source"]))


def _samples_by_outcome(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["domain"], {}).setdefault(row["outcome"], []).append(row)
    return {
        domain: dict(sorted(found[domain].items(), key=lambda item: (item[0] not in KEPT, item[0])))
        for domain in DOMAINS
        if domain in found
    }


Series = list[tuple[int, float]]
"""(position in tokens, value)"""


@dataclass(frozen=True)
class StageRow:
    name: str
    start: int
    end: int
    steps: int
    seq: str
    batch: int
    first_loss: float
    last_loss: float
    bits_per_byte: float | None
    """Of held-out text at the stage's end."""
    tokens_per_s: float
    goodput: float | None
    seconds: float
    outcome: str
    artifact: str

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class MixRow:
    stage: str
    domain: str
    planned: float
    realised: float
    tokens: int


@dataclass(frozen=True)
class ReportData:
    record: RunRecord
    recipe: Recipe
    recipe_yaml: str
    stages: list[StageRow]
    series: dict[str, Series]
    mix: list[MixRow]
    ledger: dict[str, dict[str, tuple[int, int]]]
    """Outcome -> domain -> (documents, bytes)."""
    page: DataPage | None
    """What the data page shows; None until documents are curated."""
    evaluations: dict[str, dict[str, Score]]
    notes: list[str]
    """What a reader of scores and weights should know: averages kept, tasks left out, questions that were too long."""
    samples: list[dict[str, str]]
    decision: Decision | None
    mlflow: dict[str, str]
    """Tags of the run's MLflow page."""
    domains: tuple[str, ...] = DOMAINS

    @property
    def bits_per_byte(self) -> float | None:
        """Overall bits per byte of the final model."""
        scores = self.evaluations.get(self.recipe.stages[-1].name, {})
        return scores["eval/bpb"].value if "eval/bpb" in scores else None


def collect(root: Root, name: str) -> ReportData:
    """Return what is known of run `name`, finished or not. Raises ValueError if there is no such run."""
    runs, store = Runs(root), open_store(root)
    record, recipe = runs.find(name), runs.recipe(name)
    made = {step: store.at(entry.artifact) for step, entry in record.steps.items()}
    trained = {span.name: made[span.name] for span in Schedule(recipe).trained if span.name in made}
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        series = _series(connection, trained)
    evaluations = _evaluations(made)
    page = data_page(name, made["curate"], made.get("tokenizer")) if "curate" in made else None
    return ReportData(
        record=record,
        recipe=recipe,
        recipe_yaml=to_yaml(recipe),
        stages=[_stage_row(recipe, record, stage, artifact, series) for stage, artifact in trained.items()],
        series=series,
        mix=_mix(series, trained),
        ledger=_ledger(page),
        page=page,
        evaluations={stage: read_scores(artifact.path) for stage, artifact in evaluations.items()},
        notes=_notes(trained, evaluations),
        samples=_samples(evaluations.get(recipe.stages[-1].name)),
        decision=_decision(root, name),
        mlflow=_mlflow(root, record),
    )


def _series(connection: duckdb.DuckDBPyConnection, trained: dict[str, Artifact]) -> dict[str, Series]:
    """Return every metric of the run as one continuous series over all its stages."""
    if not trained:
        return {}
    rows = connection.execute(
        "SELECT key, position, value FROM read_parquet(?) ORDER BY key, position",
        [[str(artifact.part("metrics.parquet")) for artifact in trained.values()]],
    ).fetchall()
    series: dict[str, Series] = {}
    for key, position, value in rows:
        series.setdefault(key, []).append((position, value))
    return series


def _mix(series: dict[str, Series], trained: dict[str, Artifact]) -> list[MixRow]:
    """Return planned and realised shares by stage: the trainer's running shares at the stage's last step."""
    rows = []
    for stage, artifact in trained.items():
        start, end = artifact.facts["start"], artifact.facts["end"]
        for domain in DOMAINS:
            realised = dict(series.get(metrics.share(domain), [])).get(end)
            planned = dict(series.get(metrics.planned_share(domain), [])).get(end, 0.0)
            if realised is not None:
                rows.append(MixRow(stage, domain, planned, realised, round(realised * (end - start))))
    return rows


def _ledger(page: DataPage | None) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the outcomes by name; what is kept comes first."""
    outcomes = sorted(page.outcomes if page else [], key=lambda outcome: (*_first(outcome.name), outcome.name))
    return {outcome.name: outcome.domains for outcome in outcomes}


def _first(name: str) -> tuple[bool, bool]:
    return name != "kept", name != "held_out"


def _stage_row(
    recipe: Recipe, record: RunRecord, stage: str, artifact: Artifact, series: dict[str, Series]
) -> StageRow:
    span = Schedule(recipe).span(stage)
    facts = artifact.facts
    speeds = sorted(_within(series.get(metrics.TOKENS_PER_S, []), facts["start"], facts["end"]))
    goodput = _within(series.get(metrics.GOODPUT, []), facts["start"], facts["end"])
    held_out = _within(series.get(metrics.HELD_OUT, []), facts["start"], facts["end"])
    lengths = span.lengths
    return StageRow(
        name=stage,
        start=facts["start"],
        end=facts["end"],
        steps=facts["steps"],
        seq=str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}..{lengths[-1]}",
        batch=span.segments[-1].batch,
        first_loss=facts["first_loss"],
        last_loss=facts["last_loss"],
        bits_per_byte=held_out[-1] if held_out else None,
        tokens_per_s=speeds[len(speeds) // 2] if speeds else 0.0,
        goodput=goodput[-1] if goodput else None,
        seconds=artifact.manifest.seconds,
        outcome=record.steps[stage].outcome,
        artifact=artifact.label,
    )


def _within(series: Series, start: int, end: int) -> list[float]:
    return [value for position, value in series if start < position <= end]


def _evaluations(made: dict[str, Artifact]) -> dict[str, Artifact]:
    """Return the evaluations by stage; the champion's too, unless it is one of this run's own."""
    found = {step.removeprefix("evaluate-"): made[step] for step in made if step.startswith("evaluate-")}
    champion = found.pop("champion", None)
    if champion is None or champion.label in {artifact.label for artifact in found.values()}:
        return found
    return {**found, "champion": champion}


def _samples(evaluation: Artifact | None) -> list[dict[str, str]]:
    if evaluation is None:
        return []
    samples: list[dict[str, str]] = json.loads(evaluation.part("generations.json").read_text())
    return samples


def _decision(root: Root, run: str) -> Decision | None:
    found = last_promotion(root, run)
    return found.decision if found else None


def _notes(trained: dict[str, Artifact], evaluations: dict[str, Artifact]) -> list[str]:
    averages = {stage: artifact.facts["average"] for stage, artifact in trained.items() if "average" in artifact.facts}
    notes = [f"{stage}: {Choice.model_validate(average)}" for stage, average in averages.items()]
    for stage, artifact in evaluations.items():
        facts = artifact.facts
        notes += [f"{stage}: {task} was left out: {why}" for task, why in facts.get("skipped", {}).items()]
        long = "longer than the window, so they were not asked and count as wrong"
        notes += [f"{stage}: {count} questions of {key} are {long}" for key, count in facts.get("too_long", {}).items()]
        vague = "were not judged: they count neither as right nor as wrong, and the gate decides nothing on them"
        notes += [f"{stage}: {count} questions of {key} {vague}" for key, count in facts.get("unjudged", {}).items()]
    return notes


def _mlflow(root: Root, record: RunRecord) -> dict[str, str]:
    """Return the tags of the run's page; those that were noted beside its record where MLflow has no such page."""
    tracker = Tracker(root, record.family)
    tags = (tracker.tags(record.mlflow_run) if record.mlflow_run else {}) or tracker.noted_tags(record.name)
    return {key: value for key, value in sorted(tags.items()) if value and not key.startswith("mlflow.")}
