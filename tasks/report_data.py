"""What a report shows, gathered from the run record, manifests, Parquet files (by DuckDB) and MLflow."""

from __future__ import annotations

import json
from dataclasses import dataclass

import duckdb

from llama3.evaluate.gate import Decision
from llama3.evaluate.scores import Score, read_scores
from llama3.recipe.load import to_yaml
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS
from llama3.train import metrics
from llama3.train.averaging import Choice
from storage.artifact import Artifact
from storage.remote_store import open_store
from storage.root import Root
from tasks.data_page import DataPage, data_page
from tasks.promotion_log import last_promotion
from tasks.runs import RunRecord, Runs
from tasks.tracking import Tracker

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
