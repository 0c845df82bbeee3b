"""The report of a run: self-contained HTML pages (the run, its data) and a markdown version.

It queries run record, manifests, metric Parquet and MLflow and leaves out what it does not find. The same run gives the
same content every time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment

from llama3.evaluate.gate import GateRow
from llama3.evaluate.scores import GOLD, PREFIX, SCORES_FILE, Score, gold_key, read_scores
from llama3.model.files import CONFIG, read_config
from llama3.model.flops import trained_flops
from llama3.recipe.units import tokens
from llama3.studies.forecast import EvaluatedPoint, Forecast, ForecastFit, fit_forecast
from llama3.train import metrics
from storage.digests import READERS, parallel_map
from storage.filesystem import write_atomic
from storage.object_artifact import open_store
from storage.root import Root
from tasks.format import templates
from tasks.report.data import DataPage, ReportData, collect_report_data
from tasks.runs.records import RunRecord, Runs
from tasks.step import Context
from tasks.tracking import prefect_artifacts

# The forecast in a run's report: the score of a run of ten times the compute, from all runs under the root.
#
# Points are the evaluated checkpoints of all runs with equal task digests, at the training FLOPs of their schedule
# and shape (causal attention counted). Runs that started from other weights are left out: their compute is unknown.
# If there are enough smaller runs, the run's own score is forecast from them and shown beside the measured one.

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
        accuracy = self.scores[key]
        return EvaluatedPoint(self.run, self.flops, self.scores[gold_key(key)].value, accuracy.value, accuracy.n)


@dataclass(frozen=True)
class ForecastRow:
    """One forecast of a benchmark."""

    task: str
    of: str
    """The run that is forecast, and the runs that it is forecast from."""
    forecast: Forecast
    measured: float | None
    points: int
    runs: int


@dataclass(frozen=True)
class ForecastSection:
    """Forecasts in the report."""

    rows: list[ForecastRow]
    lacking: dict[str, str]
    """Benchmark -> why it has no forecast."""
    figures: list[tuple[str, str, str]]
    """(title, explanation, SVG)"""


def forecast_section(root: Root, run: str) -> ForecastSection | None:
    """Return the forecasts for the benchmarks that `run` was evaluated on; None if there are too few runs for any.

    Raises ValueError if there is no such run.
    """
    steps, checkpoints = Runs(root).find(run).steps, evaluated_checkpoints(root)
    labels = {step.artifact for name, step in steps.items() if name.startswith(EVALUATE)}
    own = [checkpoint for checkpoint in checkpoints if checkpoint.evaluation in labels]
    if not own:
        return None
    last = max(own, key=lambda checkpoint: checkpoint.flops)  # an earlier run may have made it
    rows: list[ForecastRow] = []
    lacking: dict[str, str] = {}
    fits: dict[str, ForecastFit] = {}

    def fitted(points: list[EvaluatedCheckpoint], key: str) -> ForecastFit:
        return fit_forecast([checkpoint.point(key) for checkpoint in points], last.scores[key].chance or 0.0)

    def add(fitted: ForecastFit, key: str, of: str, flops: float, measured: float | None) -> None:
        runs = len({point.run for point in fitted.points})
        task = key.removeprefix(PREFIX)
        rows.append(ForecastRow(task, of, fitted.predict(flops), measured, len(fitted.points), runs))

    for key in sorted(key for key in last.scores if gold_key(key) in last.scores):
        digests = {name: last.scores[name].requests for name in (key, gold_key(key))}
        same = [
            checkpoint
            for checkpoint in checkpoints
            if all(name in checkpoint.scores and checkpoint.scores[name].requests == digests[name] for name in digests)
        ]
        try:
            fits[key] = fitted(same, key)
        except ValueError as error:
            lacking[key] = str(error).removeprefix("forecast: ")
            continue
        add(fits[key], key, f"a run of {FURTHER:g} x the compute", FURTHER * fits[key].largest, None)
        smaller = [point for point in same if point.run != last.run and point.flops < last.flops]
        with suppress(ValueError):  # too few smaller runs
            add(fitted(smaller, key), key, f"{last.run}, from smaller runs", last.flops, last.scores[key].value)
    if not rows:
        return None
    drawn = sorted(fits, key=lambda key: (-last.scores[key].n, key))[:FIGURES]
    return ForecastSection(rows, lacking, [_figure(fits[key], key) for key in drawn])


def evaluated_checkpoints(root: Root) -> list[EvaluatedCheckpoint]:
    """Return the evaluated checkpoints of all runs under `root`, each once, those of the oldest runs first."""
    runs, store = Runs(root), open_store(root)

    def of_run(record: RunRecord) -> list[EvaluatedCheckpoint]:
        try:
            recipe = runs.recipe(record.name)
        except ValueError:  # written by another version
            return []
        checkpoints: list[EvaluatedCheckpoint] = []
        for step, entry in record.steps.items() if recipe.init_from is None else ():
            stage = record.steps.get(step.removeprefix(EVALUATE))
            if not step.startswith(EVALUATE) or stage is None:
                continue
            with suppress(ValueError):  # deleted by retention
                checkpoint, evaluation = store.load(stage.artifact), store.load(entry.artifact)
                config, rows = read_config(checkpoint.part(f"model/{CONFIG}").parent)
                flops = trained_flops(recipe, config, rows, checkpoint.metadata["end"])
                scores = read_scores(evaluation.part(SCORES_FILE).parent)
                checkpoints.append(EvaluatedCheckpoint(record.name, evaluation.label, flops, scores))
        return checkpoints

    once: dict[str, EvaluatedCheckpoint] = {}
    for checkpoints in parallel_map(of_run, runs.all(), READERS):
        for checkpoint in checkpoints:
            once.setdefault(checkpoint.evaluation, checkpoint)
    return list(once.values())


def _figure(fitted: ForecastFit, key: str) -> tuple[str, str, str]:
    from tasks.report import plots  # imports matplotlib

    name = key.removeprefix(PREFIX)
    note = (
        f"Left: nats per byte of the gold answer ({GOLD}/{name}) against training operations; the line is fitted to "
        "the last checkpoint of each run (filled). Right: accuracy against those nats. Bands and bars are 95 % "
        f"intervals; the square is a run of {FURTHER:g} x the compute of the largest."
    )
    return f"Forecast: {name}", note, plots.forecast_plot(fitted, fitted.predict(FURTHER * fitted.largest))


def write_report(context: Context) -> Path:
    """Write the report into the run's folder, and show it in MLflow and Prefect; return the HTML page."""
    page = make_report(context.root, context.record.name)
    for path in (page, page.with_suffix(".md"), page.with_name("data.html")):
        if path.exists():
            context.tracker.log_file(context.record.mlflow_run, path)
    prefect_artifacts.markdown("report", page.with_suffix(".md").read_text(), context.record.name)
    prefect_artifacts.flush()
    return page


def make_report(root: Root, run: str) -> Path:
    """Write `report.html` and `report.md` of `run`; return the HTML page. Raises ValueError if there is no such run."""
    data, forecast, runs = collect_report_data(root, run), forecast_section(root, run), Runs(root)
    page = runs.folder(run) / "report.html"
    write_atomic(page, _render("report.html", data, _figures(data), forecast))
    write_atomic(page.with_suffix(".md"), _render("report.md", data, [], forecast))
    if data.page is not None:
        write_atomic(page.with_name("data.html"), render_data(data.page))
    for file in (page, page.with_suffix(".md"), page.with_name("data.html")):
        if file.exists():
            runs.publish(run, file.name)
    return page


def _figures(data: ReportData) -> list[tuple[str, str, str]]:
    """Return (title, explanation, SVG) of every figure that the run has data for."""
    if not data.stages:
        return []
    from tasks.report import plots  # imports matplotlib

    figures = [
        ("Loss", "Training loss in nats per token against tokens seen, all stages as one curve.", plots.loss(data)),
        ("Loss by domain", "The same, for the tokens of each domain.", plots.domain_loss(data)),
    ]
    if data.series.get(metrics.HELD_OUT):
        note = (
            "Bits per byte of a few held-out documents, scored by the trainer; all: weighted by the first stage's mix."
        )
        figures.append(("Held-out documents while training", note, plots.held_out(data)))
    figures += [
        ("Learning rate and batch", "The schedule as it was trained.", plots.schedule(data)),
        ("Throughput", "Tokens per second of each step.", plots.throughput(data)),
        ("Mix", "Planned share of each domain (outline) and realized share (filled), in tokens.", plots.mix(data)),
    ]
    if data.evaluations:
        figures.append(("Bits per byte", "On held-out documents; bars are 95 % intervals.", plots.bits_per_byte(data)))
        if svg := plots.needle_heatmap(data.evaluations[next(reversed(data.evaluations))]):
            figures.append((plots.TITLE, plots.NOTE, svg))
    return figures


def _render(name: str, data: ReportData, figures: list[tuple[str, str, str]], forecast: ForecastSection | None) -> str:
    return _environment(name).get_template(name).render(data=data, figures=figures, forecast=forecast)


def render_data(page: DataPage) -> str:
    """Return the data page as HTML."""
    from llama3.data.curate import explain  # imports numba
    from tasks.report import plots  # imports matplotlib

    note = "Documents by size, powers of two: filled those that are kept, in outline all that were read."
    figures = [("Lengths", "lengths", note, plots.length_histogram(page))] if page.lengths else []
    environment = _environment("data.html")
    environment.filters["explain"] = explain
    return environment.get_template("data.html").render(page=page, figures=figures)


def _environment(name: str) -> Environment:
    environment = templates(name)
    environment.filters |= {
        "tokens": tokens,
        "num": _number,
        "interval": _interval,
        "count": lambda value: f"{value:,}",
        "megabytes": lambda size: f"{size / 1e6:,.2f}" if size < 1e8 else f"{size / 1e6:,.0f}",
        "round_tokens": lambda count: "" if count is None else tokens(int(float(f"{count:.2g}"))),
        "seconds": lambda value: f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min",
        "when": lambda text: datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S UTC") if text else "",
    }
    return environment


def _number(value: Any, digits: int = 4) -> str:
    return "" if value is None or value != value else f"{value:.{digits}g}"


def _interval(ends: GateRow | Score, digits: int = 4) -> str:
    low, high = _number(ends.low, digits), _number(ends.high, digits)
    return f"{low} .. {high}" if low and high else ""
