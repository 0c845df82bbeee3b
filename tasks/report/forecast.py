"""The forecast in a run's report: what a run of ten times the compute would score, from all runs under the root.

Points are the evaluated checkpoints of all runs with equal task digests, at the training FLOPs of their schedule and
shape (causal attention counted). Runs that began from other weights are left out: their compute is unknown. Where
enough smaller runs exist, this run's own score is forecast from them and shown beside the measured one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llama3.evaluate.scores import GOLD, PREFIX, SCORES_FILE, Score, gold_key, read_scores
from llama3.model.files import CONFIG, read_config
from llama3.model.flops import trained_flops
from llama3.recipe.schema import Recipe
from llama3.studies.forecast import EvaluatedPoint, Fit, Forecast, fit
from storage.artifact import Artifact, Store
from storage.digests import READERS, each
from storage.object_artifact import open_store
from storage.root import Root
from tasks.runs.records import RunRecord, Runs

FURTHER = 10.0
"""Compute of the forecast, in multiples of the largest run's."""
FIGURES = 6
"""Benchmarks that are drawn: those with the most questions."""
EVALUATE = "evaluate-"


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """One evaluated checkpoint."""

    run: str
    evaluation: str
    """Label of its artifact."""
    flops: float
    scores: dict[str, Score]

    def point(self, key: str) -> EvaluatedPoint:
        """Return it as a point of the benchmark `key`."""
        accuracy = self.scores[key]
        return EvaluatedPoint(self.run, self.flops, self.scores[gold_key(key)].value, accuracy.value, accuracy.n)


@dataclass(frozen=True)
class ForecastRow:
    """One forecast."""

    task: str
    of: str
    """What is forecast, and from what."""
    forecast: Forecast
    measured: float | None
    points: int
    runs: int


@dataclass(frozen=True)
class ForecastSection:
    """What the report shows."""

    rows: list[ForecastRow]
    lacking: dict[str, str]
    """Benchmark -> why it has no forecast."""
    figures: list[tuple[str, str, str]]
    """(title, explanation, SVG)"""


def forecast_section(root: Root, run: str) -> ForecastSection | None:
    """Return the forecasts for the benchmarks that `run` was evaluated on; None where there are too few runs for any.

    Raises ValueError if there is no such run.
    """
    Runs(root).find(run)
    found = evaluated(root)
    last = _last(root, run, found)
    if last is None:
        return None
    rows: list[ForecastRow] = []
    lacking: dict[str, str] = {}
    fits: dict[str, Fit] = {}
    for key in sorted(key for key in last.scores if gold_key(key) in last.scores):
        same = [one for one in found if _same_questions(one, last, key)]
        try:
            fits[key] = _fit(same, last, key)
        except ValueError as error:
            lacking[key] = str(error).removeprefix("forecast: ")
            continue
        rows += _rows(fits[key], same, last, key)
    if not rows:
        return None
    drawn = sorted(fits, key=lambda key: (-last.scores[key].n, key))[:FIGURES]
    return ForecastSection(rows, lacking, [_figure(fits[key], key) for key in drawn])


def evaluated(root: Root) -> list[EvaluatedCheckpoint]:
    """Return the evaluated checkpoints of all runs under `root`, each once, those of the oldest runs first."""
    runs, store = Runs(root), open_store(root)
    once: dict[str, EvaluatedCheckpoint] = {}
    for group in each(lambda record: list(_of_run(runs, store, record)), runs.all(), READERS):
        for one in group:
            once.setdefault(one.evaluation, one)
    return list(once.values())


def _of_run(runs: Runs, store: Store, record: RunRecord) -> Iterator[EvaluatedCheckpoint]:
    stages = [step.removeprefix(EVALUATE) for step in record.steps if step.startswith(EVALUATE)]
    try:
        recipe = runs.recipe(record.name)
    except ValueError:  # written by another version
        return
    if recipe.start is not None:
        return
    for stage in stages:
        if stage in record.steps:
            checkpoint, evaluation = record.steps[stage].artifact, record.steps[f"{EVALUATE}{stage}"].artifact
            try:
                yield _evaluated(record.name, recipe, store.at(checkpoint), store.at(evaluation))
            except ValueError:  # deleted by retention
                continue


def _evaluated(run: str, recipe: Recipe, checkpoint: Artifact, evaluation: Artifact) -> EvaluatedCheckpoint:
    spec, rows = read_config(checkpoint.part(f"model/{CONFIG}").parent)
    flops = trained_flops(recipe, spec, rows, checkpoint.facts["end"])
    return EvaluatedCheckpoint(run, evaluation.label, flops, read_scores(evaluation.part(SCORES_FILE).parent))


def _last(root: Root, run: str, found: list[EvaluatedCheckpoint]) -> EvaluatedCheckpoint | None:
    """Return the evaluation of the run's last evaluated checkpoint, which an earlier run may have made."""
    labels = {step.artifact for name, step in Runs(root).find(run).steps.items() if name.startswith(EVALUATE)}
    return max((one for one in found if one.evaluation in labels), key=lambda one: one.flops, default=None)


def _same_questions(one: EvaluatedCheckpoint, last: EvaluatedCheckpoint, key: str) -> bool:
    return all(name in one.scores and one.scores[name].requests == last.scores[name].requests for name in _keys(key))


def _keys(key: str) -> tuple[str, str]:
    return key, gold_key(key)


def _fit(found: list[EvaluatedCheckpoint], last: EvaluatedCheckpoint, key: str) -> Fit:
    return fit([one.point(key) for one in found], last.scores[key].chance or 0.0)


def _rows(whole: Fit, found: list[EvaluatedCheckpoint], last: EvaluatedCheckpoint, key: str) -> Iterator[ForecastRow]:
    """Yield the forecast of a larger run, and that of this one from smaller ones where they are enough."""
    yield _row(whole, key, f"a run of {FURTHER:g} x the compute", FURTHER * whole.largest, None)
    smaller = [one for one in found if one.run != last.run and one.flops < last.flops]
    try:
        before = _fit(smaller, last, key)
    except ValueError:
        return
    yield _row(before, key, f"{last.run}, from smaller runs", last.flops, last.scores[key].value)


def _row(made: Fit, key: str, of: str, flops: float, measured: float | None) -> ForecastRow:
    runs = len({point.run for point in made.points})
    return ForecastRow(key.removeprefix(PREFIX), of, made.at(flops), measured, len(made.points), runs)


def _figure(made: Fit, key: str) -> tuple[str, str, str]:
    from tasks.report import plots  # matplotlib

    name = key.removeprefix(PREFIX)
    note = (
        f"Left: nats per byte of the gold answer ({GOLD}/{name}) against training operations; the line is fitted to "
        "the last checkpoint of each run (filled). Right: accuracy against those nats. Bands and bars are 95 % "
        f"intervals; the square is a run of {FURTHER:g} x the compute of the largest."
    )
    return f"Forecast: {name}", note, plots.forecast(made, made.at(FURTHER * made.largest))
