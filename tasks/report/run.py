"""The report of a run: self-contained HTML pages (the run, its data) and a markdown version.

It is a query over what was tracked (run record, manifests, metric Parquet through DuckDB, MLflow) and never a second
sink: writing it again from the same run gives the same content, and what it does not find it leaves out.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from llama3.data.accounting import explain
from llama3.evaluate.gate import GateRow
from llama3.evaluate.scores import Score
from llama3.recipe.units import tokens
from llama3.train import metrics
from storage.filesystem import write_atomic
from storage.root import Root
from tasks.report.data import DataPage, ReportData, collect
from tasks.report.forecast import ForecastSection, forecast_section
from tasks.runs.records import Runs
from tasks.step import Context
from tasks.tracking import prefect_artifacts

# The data page: where every document went. Token counts of documents that were never tokenized are estimates from the
# bytes per token of their domain.


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
    data = collect(root, run)
    runs = Runs(root)
    page = runs.place(run) / "report.html"
    forecast = forecast_section(root, run)
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
    from tasks.report import plots  # matplotlib

    figures = [
        ("Loss", "Training loss in nats per token against tokens seen, all stages as one curve.", plots.loss(data)),
        ("Loss by domain", "The same, for the tokens of each domain.", plots.domain_loss(data)),
        *_held_out(data),
        ("Learning rate and batch", "The schedule as it was trained.", plots.schedule(data)),
        ("Throughput", "Tokens per second of each step.", plots.throughput(data)),
        ("Mix", "Planned share of each domain (outline) and realised share (filled), in tokens.", plots.mix(data)),
    ]
    if data.evaluations:
        figures.append(("Bits per byte", "On held-out documents; bars are 95 % intervals.", plots.bits_per_byte(data)))
        found = plots.needles(data.evaluations[next(reversed(data.evaluations))])
        figures += [(plots.TITLE, plots.NOTE, found)] if found else []
    return figures


def _held_out(data: ReportData) -> list[tuple[str, str, str]]:
    if not data.series.get(metrics.HELD_OUT):
        return []
    from tasks.report import plots

    what = "Bits per byte of a few held-out documents, scored by the trainer; all: weighted by the first stage's mix."
    return [("Held-out documents while training", what, plots.held_out(data))]


def _render(name: str, data: ReportData, figures: list[tuple[str, str, str]], forecast: ForecastSection | None) -> str:
    return _environment(name).get_template(name).render(data=data, figures=figures, forecast=forecast)


def render_data(page: DataPage) -> str:
    """Return the data page as HTML."""
    from tasks.report import plots  # matplotlib

    note = "Documents by size, powers of two: filled those that are kept, in outline all that were read."
    figures = [("Lengths", "lengths", note, plots.lengths(page))] if page.lengths else []
    return _environment("data.html").get_template("data.html").render(page=page, figures=figures)


def _environment(name: str) -> Environment:
    environment = Environment(
        loader=PackageLoader("tasks"),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"tokens": tokens, "num": _number, "count": _count, "seconds": _seconds, "when": _when}
    environment.filters |= {"interval": _interval}
    environment.filters |= {"megabytes": _megabytes, "round_tokens": _round_tokens, "explain": explain}
    return environment


def _number(value: Any, digits: int = 4) -> str:
    return "" if value is None or value != value else f"{value:.{digits}g}"


def _interval(ends: GateRow | Score, digits: int = 4) -> str:
    low, high = _number(ends.low, digits), _number(ends.high, digits)
    return f"{low} .. {high}" if low and high else ""


def _count(value: int) -> str:
    return f"{value:,}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f}" if size < 1e8 else f"{size / 1e6:,.0f}"


def _round_tokens(count: float | None) -> str:
    return "" if count is None else tokens(int(float(f"{count:.2g}")))


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"


def _when(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S UTC") if text else ""
