"""Runs side by side: recipe fields that differ, results, and curves.

Tables and an HTML page are made from records and artifacts and need no server. If an MLflow server answers, its chart
page is prepared instead.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.request
import zlib
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Any, NamedTuple
from urllib.parse import quote

from rich.table import Table

from herd.llama3.evaluate.gate import number
from herd.llama3.evaluate.scores import LANGUAGE
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.load import resolved
from herd.llama3.train import metrics
from herd.llama3.train.journal import Series, read_series
from herd.storage.artifact import flatten
from herd.storage.filesystem import write_atomic
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.figures import as_svg, styled, subplots
from herd.tasks.html import Curve, chart, render
from herd.tasks.runs.provenance import differences_line, provenance_facts
from herd.tasks.runs.records import RunRecord, Runs
from herd.tasks.tracking.mlflow_store import call_server, server_uri
from herd.tasks.tracking.steps import scores_of

POINTS = 500
"""Of a curve on the page, which is 650 pixels wide; more would be drawn over each other."""
PALETTE = ("#3b6fb6", "#d1603d", "#3f9b6c", "#8a63b8", "#b8860b", "#c2477f", "#2f9aa8", "#6b7280")
FIGURES = {
    "Loss": ("Training loss, nats per token, against tokens seen.", {metrics.LOSS: "nats per token"}),
    "Loss by domain": (
        "The same for the tokens of each domain.",
        {metrics.domain_loss(domain): f"{domain}, nats per token" for domain in DOMAINS},
    ),
    "Schedule": (
        "Learning rate, and tokens of a step and tokens seen at once, as trained.",
        {metrics.LEARNING_RATE: "learning rate", metrics.BATCH_TOKENS: "batch, tokens", metrics.SEQ_LEN: "sequence, tokens"},  # noqa: E501
    ),
    "Throughput": (
        "Tokens per second, and the share of the time that went into steps that count.",
        {metrics.TOKENS_PER_S: "tokens/s", metrics.GOODPUT: "goodput"},
    ),
}  # fmt: skip
"""Title -> note, and the metrics with the names of their axes."""
SHOWN = ("train/loss", "throughput/tokens_per_s", "time/goodput")
"""Series in the table of results, as the mean of their last tenth: one batch depends on the domains it drew."""
FOLDER = "comparisons"
LOCAL_SERVER = "http://127.0.0.1:5000"
Rows = list[tuple[str, list[str]]]
"""Names, each with its value in each run."""
THINNED = """
WITH points AS (SELECT key, position, value FROM read_parquet($tables) WHERE list_contains($keys, key)),
spans AS (SELECT key, count(*) AS total, max(position) AS high FROM points GROUP BY key),
steps AS (
    SELECT max(position) FROM points WHERE key = (SELECT arg_max(key, total) FROM spans)
    GROUP BY position * $points // (SELECT max(high) FROM spans)
)
SELECT key, position, value FROM points JOIN spans USING (key)
WHERE total <= $points OR position = high OR position IN (FROM steps) ORDER BY key, position
"""
"""At most `points` of each series, evenly over the tokens, and always its last one."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    record: RunRecord
    series: dict[str, Series]
    scores: dict[str, float]
    results: dict[str, float]
    """Tokens trained on, means of the last tenth of SHOWN, and the scores."""


class Comparison(NamedTuple):
    """Runs side by side."""

    names: list[str]
    runs: list[ComparedRun]
    differences: Rows
    """Recipe fields that differ."""
    results: Rows
    """Headline results."""
    languages: Rows
    """Bits per byte of one language each, of few documents; `results` leaves them out."""
    made_with: Rows
    """Code, software, devices, layout and cluster that differ."""
    line: str
    """The same in a line; empty if nothing differs."""

    def as_dict(self) -> dict[str, Any]:
        """Return what differs, a text for each run in the order of `runs`, and the results of each run as numbers."""
        results = [
            {"state": run.record.state, "verdict": run.record.verdict or None, **run.results} for run in self.runs
        ]
        return {
            "runs": self.names,
            "recipe": dict(self.differences),
            "made_with": dict(self.made_with),
            "results": results,
        }


def compare_runs(root: Root, names: list[str]) -> Comparison:
    """Return the comparison of runs. Raises ValueError for fewer than two runs or an unknown one."""
    if len(names) < 2:
        raise ValueError(f"compare: {len(names)} run given; name at least two")
    runs, store = Runs(root), open_store(root)
    compared, recipes, positions, last, facts = [], [], [], [], []
    for record in [runs.find(name) for name in names]:
        artifacts = [store.load(step.artifact) for name, step in record.steps.items() if name != "evaluate-champion"]
        stages = [artifact for artifact in artifacts if artifact.manifest.kind == "checkpoint"]
        scores: dict[str, float] = {}
        for artifact in artifacts:
            if artifact.manifest.kind in ("evaluation", "gate"):
                scores |= scores_of(artifact)
        tables = [stage.path_of("metrics.parquet") for stage in stages]
        keys = [key for _, shown in FIGURES.values() for key in shown]
        series = read_series(tables, THINNED, keys=keys, points=POINTS)
        plain = resolved(runs.recipe(record.name))
        recipes.append(flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}}))
        positions.append(max((int(stage.metadata["end"]) for stage in stages), default=0))
        environments = [stage.metadata.get("environment", {}) for stage in stages]
        facts.append(provenance_facts(record.code, record.provenance, environments))
        tails = {key: series[key][-metrics.window(len(series[key])) :] for key in SHOWN if series.get(key)}
        costs = {f"cost/{name}": amount for name, amount in record.cost.items()}
        last.append({**{key: fmean(value for _, value in tail) for key, tail in tails.items()}, **scores, **costs})
        compared.append(ComparedRun(record, series, scores, {"tokens": positions[-1], **last[-1]}))

    def text(value: object) -> str:
        return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    fields = sorted({key for recipe in recipes for key in recipe})
    differences = [(key, [text(recipe.get(key)) for recipe in recipes]) for key in fields]
    results = [
        ("verdict", [run.record.verdict or run.record.state for run in compared]),
        ("tokens", [f"{position:,}" for position in positions]),
    ]
    for key in sorted({key for values in last for key in values}):
        results.append((key, [number(values[key]) if key in values else "" for values in last]))
    languages = [row for row in results if LANGUAGE in row[0]]
    results = [row for row in results if LANGUAGE not in row[0]]
    named = dict.fromkeys(key for each in facts for key in each)
    made_with = {key: [each.get(key, "") for each in facts] for key in named}
    unequal = [row for row in made_with.items() if len(set(row[1])) > 1]
    line = differences_line(made_with)
    differences = [row for row in differences if len(set(row[1])) > 1]
    return Comparison(names, compared, differences, results, languages, unequal, line)


def comparison_tables(compared: Comparison) -> list[Table]:
    """Return three tables, a column per run: recipe fields that differ, with what else they were made, the results."""
    tables = []
    shown = (("recipe", compared.differences), ("made with", compared.made_with), ("result", compared.results))
    for title, rows in shown:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(title)
        for name in compared.names:
            table.add_column(name, justify="right")
        for key, values in rows or [("(no difference)", [""] * len(compared.names))]:
            table.add_row(key, *values)
        tables.append(table)
    return tables


def comparison_url(root: Root, compared: Comparison) -> str:
    """Write the comparison as one self-contained HTML file; return its address, or MLflow's if a server answers."""
    page = root.file(FOLDER, "-".join(compared.names)[:200] + ".html")
    text = _html(compared)
    write_atomic(page, text)
    if not root.is_local:
        root.write(text, FOLDER, page.name)
    return _mlflow_url([run.record for run in compared.runs]) or page.as_uri()


def _html(compared: Comparison) -> str:
    figures = []
    for title, (note, keys) in FIGURES.items():
        if any(run.series.get(key) for run in compared.runs for key in keys):
            figures.append((title, note, _curves(compared.runs, keys)))
    if scores := sorted({key for run in compared.runs for key in run.scores if LANGUAGE not in key}):
        figures.append(("Evaluations", "The last score of each kind.", _bars(compared.runs, scores)))
    tables = [
        ("Results", "Loss, tokens/s and goodput: mean of the last tenth of the steps.", compared.results),
        ("Recipe fields that differ", "", compared.differences),
        ("Code, software, devices and cluster that differ", "", compared.made_with),
    ]
    return render(
        "comparison.html",
        names=compared.names,
        line=compared.line,
        tables=tables,
        languages=compared.languages,
        figures=figures,
    )


def _curves(runs: list[ComparedRun], axes: dict[str, str]) -> str:
    """Return one chart for each metric, one line for each run; `axes` are the names of its axis."""
    charts = []
    for key, axis in axes.items():
        curves = [
            Curve(run.record.name, run.series.get(key, []), PALETTE[index % len(PALETTE)])
            for index, run in enumerate(runs)
        ]
        if any(curve.points for curve in curves):
            charts.append(chart(axis, curves))
    return f'<div class="charts">{"".join(charts)}</div>'


@styled
def _bars(runs: list[ComparedRun], keys: list[str]) -> str:
    """Draw one small panel for each score, because their units differ."""
    columns = min(4, len(keys))
    rows = -(-len(keys) // columns)
    figure, axes = subplots(rows, columns, figsize=(9, 2.2 * rows), squeeze=False)
    for axis, key in zip(axes.flat, keys, strict=False):
        for index, run in enumerate(runs):
            if (value := run.scores.get(key)) is not None:
                axis.bar(index, value, color=PALETTE[index % len(PALETTE)])
                axis.text(index, value, number(value), ha="center", va="bottom", fontsize=8)
        axis.set_title(key.removeprefix("eval/"), fontsize=9)
        axis.set_xticks(range(len(runs)), [run.record.name for run in runs], fontsize=8)
        axis.grid(axis="x", visible=False)
    for axis in axes.flat[len(keys) :]:
        axis.set_visible(False)
    return as_svg(figure)


# A prepared view of MLflow's chart page. MLflow keeps what its "Share" button shares in a tag of the experiment,
# `mlflow.sharedViewState.<key>`: JSON with the state of the page as text, deflated if it begins with `deflate;`. The
# page loads it with `viewStateShareKey=<key>`. Field names are those of MLflow 3.17; another version shows its own
# charts. A tag takes 20,000 bytes; five runs need about 3,000.

TAG = "mlflow.sharedViewState."
LINES = {title: list(keys) for title, (_, keys) in FIGURES.items()}
LINES["Throughput"] = [metrics.TOKENS_PER_S, metrics.MFU, metrics.GOODPUT]
"""Section -> its charts over tokens."""
EVALUATIONS, DIFFERENCES = "Evaluations", "What differs"
COLUMNS = {"Loss": 1, "Loss by domain": 2, "Throughput": 2, DIFFERENCES: 1}
"""Charts side by side; elsewhere three."""


def _mlflow_url(records: list[RunRecord]) -> str:
    """Return the address of MLflow's prepared charts of the runs, or "" if no MLflow server answers.

    Runs of one family get charts over tokens, those of several MLflow's plain comparison.
    """
    server = server_uri() or LOCAL_SERVER
    if not all(record.mlflow_experiment for record in records):
        return ""
    run_ids, experiments = [record.mlflow_run for record in records], {record.mlflow_experiment for record in records}
    try:
        urllib.request.urlopen(f"{server}/health", timeout=2).close()
        known = [call_server(server, f"runs/get?run_id={run_id}")["run"]["data"] for run_id in run_ids]
    except (OSError, ValueError, KeyError):  # no MLflow, or one that does not have these runs
        return ""
    if len(experiments) == 1:
        keys = {metric["key"] for data in known for metric in data.get("metrics", [])}
        created = round(max(datetime.fromisoformat(record.started).timestamp() for record in records) * 1000)
        key, experiment = chart_view_key(run_ids), records[0].mlflow_experiment
        tag = chart_view_tag([record.name for record in records], run_ids, keys, created)
        view = {"experiment_id": experiment, "key": TAG + key, "value": tag}
        with suppress(OSError):  # an account that may only read
            call_server(server, "experiments/set-experiment-tag", view)
            shown = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={key}"
            return f"{server}/#/experiments/{experiment}/runs?{shown}"
    ids, spaces = (quote(json.dumps(value, separators=(",", ":"))) for value in (run_ids, sorted(experiments)))
    return f"{server}/#/compare-runs?runs={ids}&experiments={spaces}&workflowType=machine_learning"


def chart_view_key(run_ids: list[str]) -> str:
    """Return the key of the view of these runs; the same runs share a view."""
    return "herd-" + hashlib.sha256(" ".join(run_ids).encode()).hexdigest()[:16]


def chart_view_tag(names: list[str], run_ids: list[str], keys: set[str], created_ms: int) -> str:
    """Return the value of the tag; `keys` are the metrics that the runs have."""

    def digest(*words: str) -> str:
        return hashlib.sha256(" ".join(words).encode()).hexdigest()[:20]

    def section(name: str, display: bool = True) -> dict[str, Any]:
        view = {"uuid": digest("section", name), "name": name, "display": display, "columns": COLUMNS.get(name, 3)}
        return {**view, "isReordered": True, "deleted": False, "isGenerated": not display}

    def chart(kind: str, section: str, key: str, **more: Any) -> dict[str, Any]:
        view = {"uuid": digest(kind, key), "type": kind, "runsCountToCompare": 10}
        view |= {"metricSectionId": digest("section", section), "deleted": False, "isGenerated": False}
        return {**view, "metricKey": key, "displayName": key, **more}

    line = {
        "xAxisKey": "step", "xAxisScaleType": "linear", "scaleType": "linear", "selectedXAxisMetricKey": "",
        "lineSmoothness": 0, "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "ignoreOutliers": False,
        "yAxisKey": "metric", "yAxisExpressions": [], "range": {},
    }  # fmt: skip
    difference = {
        "compareGroups": ["Parameters"], "chartName": "Recipe fields that differ", "baselineColumnUuid": run_ids[0],
        "showChangeFromBaseline": False, "showDifferencesOnly": True,
    }  # fmt: skip
    charts = [
        chart("LINE", name, key, **line, selectedMetricKeys=[key])
        for name, shown in LINES.items()
        for key in shown
        if key in keys
    ]
    charts += [chart("BAR", EVALUATIONS, key) for key in sorted(keys) if key.startswith("eval/")]
    charts.append(chart("DIFFERENCE", DIFFERENCES, "", **difference))
    hidden = sorted({key.rpartition("/")[0] for key in keys - {chart["metricKey"] for chart in charts}})
    quoted = ", ".join(f"'{run_id}'" for run_id in run_ids)
    sections = [section(name) for name in (*LINES, EVALUATIONS, DIFFERENCES)]
    state = {
        "searchFilter": f"attributes.run_id IN ({quoted})",
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": charts,
        "compareRunSections": [*sections, *(section(name, display=False) for name in hidden)],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    text = json.dumps(state, separators=(",", ":"))
    packed = "deflate;" + base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    view = {"name": " and ".join(names), "createdAt": created_ms, "updatedAt": created_ms, "state": packed}
    return json.dumps(view, ensure_ascii=False)
