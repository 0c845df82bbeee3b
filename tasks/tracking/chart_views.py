"""Prepared views of MLflow's chart page: of chosen runs, and of all runs of an experiment.

MLflow keeps what its "Share" button shares in a tag of the experiment, `mlflow.sharedViewState.<key>`: JSON with the
state of the page as text, deflated if it begins with `deflate;`. The page loads it with `viewStateShareKey=<key>`.
Field names are those of MLflow 3.17; another version shows its own charts. A tag takes 20,000 bytes; five runs need
about 3,000.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

from herd.llama3.recipe.base import DOMAINS
from herd.llama3.train import metrics

TAG = "mlflow.sharedViewState."
ALL_RUNS = "herd"
"""Key of the view of all runs of an experiment."""
LINES = {
    "Loss": (metrics.LOSS, metrics.HELD_OUT),
    "Loss by domain": tuple(metrics.domain_loss(domain) for domain in DOMAINS),
    "Schedule": (metrics.LEARNING_RATE, metrics.BATCH_TOKENS, metrics.SEQ_LEN),
    "Throughput": (metrics.TOKENS_PER_S, metrics.MFU, metrics.GOODPUT),
}
"""Section -> its charts over tokens."""
CHARTED = {key for keys in LINES.values() for key in keys} | {"eval/core", "eval/bpb"}
"""Metrics in the view of all runs."""
RENAMED = {"": "Model metrics", "system": "System metrics"}
"""Prefix of keys -> MLflow's name of their section, where it is another."""
EVALUATIONS, DIFFERENCES = "Evaluations", "What differs"
COLUMNS = {"Loss": 2, "Loss by domain": 2, "Throughput": 2, DIFFERENCES: 1}
"""Charts side by side; elsewhere three."""


def chart_page(server: str, experiment: str, key: str = ALL_RUNS) -> str:
    """Return the address of a prepared view."""
    shown = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={key}"
    return f"{server}/#/experiments/{experiment}/runs?{shown}"


def chart_view_key(run_ids: list[str]) -> str:
    """Return the key of the view of these runs; the same runs share a view."""
    return "herd-" + hashlib.sha256(" ".join(run_ids).encode()).hexdigest()[:16]


def chart_view_tag(name: str, keys: set[str], created_ms: int, run_ids: Sequence[str] = ()) -> str:
    """Return the value of the tag of a view with charts of the metrics `keys`.

    It shows `run_ids`, the oldest first, and the parameters that differ; without them every run, the newest first, but
    not their steps.
    """

    def digest(*texts: str) -> str:
        return hashlib.sha256(" ".join(texts).encode()).hexdigest()[:20]

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
    charts = [
        chart("LINE", name, key, **line, selectedMetricKeys=[key])
        for name, shown in LINES.items()
        for key in shown
        if key in keys
    ]
    charts += [chart("BAR", EVALUATIONS, key) for key in sorted(keys) if key.startswith("eval/")]
    if run_ids:
        difference = {
            "compareGroups": ["Parameters"], "chartName": "Recipe fields that differ",
            "baselineColumnUuid": run_ids[0], "showChangeFromBaseline": False, "showDifferencesOnly": True,
        }  # fmt: skip
        charts.append(chart("DIFFERENCE", DIFFERENCES, "", **difference))
    others = keys - {chart["metricKey"] for chart in charts}
    prefixes = {key.rpartition("/")[0] for key in others}
    hidden = sorted(RENAMED.get(prefix, prefix) for prefix in prefixes)
    quoted = ", ".join(f"'{run_id}'" for run_id in run_ids)
    sections = [section(name) for name in (*LINES, EVALUATIONS, *([DIFFERENCES] if run_ids else []))]
    state = {
        "searchFilter": f"attributes.run_id IN ({quoted})" if run_ids else "tags.kind = 'run'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": bool(run_ids),
        "runsHiddenMode": "SHOW_ALL" if run_ids else "FIRST_10_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [*sections, *(section(name, display=False) for name in hidden)],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    text = json.dumps(state, separators=(",", ":"))
    packed = "deflate;" + base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    view = {"name": name, "createdAt": created_ms, "updatedAt": created_ms, "state": packed}
    return json.dumps(view, ensure_ascii=False)
