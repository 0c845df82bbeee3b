"""A prepared view of MLflow's chart page: which runs, which charts, in which order, over tokens.

MLflow keeps what its "Share" button shares as a tag of the experiment: `mlflow.sharedViewState.<key>` holds JSON with
a name, two times, and the state of the page as JSON text, deflated if it begins with `deflate;`. The page loads it with
`viewStateShareKey=<key>`, unless the address itself has a filter. The fields are those of MLflow 3.17; a version that
names them otherwise shows its own charts of the same runs. A tag takes 20,000 bytes; five runs need about 3,000.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any

from llama3.recipe.section import DOMAINS
from llama3.train import metrics

TAG = "mlflow.sharedViewState."
BASELINE = ["Parameters"]
LINES = {
    "Loss": [metrics.LOSS],
    "Loss by domain": [metrics.domain_loss(domain) for domain in DOMAINS],
    "Schedule": [metrics.LEARNING_RATE, metrics.BATCH_TOKENS, metrics.SEQ_LEN],
    "Throughput": [metrics.TOKENS_PER_S, metrics.MFU, metrics.GOODPUT],
}
"""Section -> its charts over tokens."""
EVALUATIONS, DIFFERENCES = "Evaluations", "What differs"
COLUMNS = {"Loss": 1, "Loss by domain": 2, "Throughput": 2, DIFFERENCES: 1}
"""Charts side by side; elsewhere three."""


def view_key(run_ids: list[str]) -> str:
    """Return the key of the view of these runs; the same runs share one."""
    return "herd-" + hashlib.sha256(" ".join(run_ids).encode()).hexdigest()[:16]


def view_tag(names: list[str], run_ids: list[str], keys: set[str], created_ms: int) -> str:
    """Return the value of the tag; `keys` are the metrics that the runs have."""
    state = json.dumps(_state(run_ids, keys), separators=(",", ":"))
    packed = "deflate;" + base64.b64encode(zlib.compress(state.encode(), 9)).decode()
    word = {"name": " and ".join(names), "createdAt": created_ms, "updatedAt": created_ms, "state": packed}
    return json.dumps(word, ensure_ascii=False)


def _state(run_ids: list[str], keys: set[str]) -> dict[str, Any]:
    sections = [_section(name) for name in (*LINES, EVALUATIONS, DIFFERENCES)]
    charts = [_line(name, key) for name, shown in LINES.items() for key in shown if key in keys]
    scores = sorted(key for key in keys if key.startswith("eval/"))
    charts += [_chart("BAR", EVALUATIONS, key) for key in scores]
    charts.append(_difference(run_ids[0]))
    placed = {chart["metricKey"] for chart in charts}
    others = sorted({key.rpartition("/")[0] for key in keys - placed})
    quoted = ", ".join(f"'{run_id}'" for run_id in run_ids)
    return {
        "searchFilter": f"attributes.run_id IN ({quoted})",
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": charts,
        "compareRunSections": [*sections, *(_section(name, display=False) for name in others)],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _section(name: str, display: bool = True) -> dict[str, Any]:
    place = {"uuid": _id("section", name), "name": name, "display": display, "columns": COLUMNS.get(name, 3)}
    return {**place, "isReordered": True, "deleted": False, "isGenerated": not display}


def _line(section: str, key: str) -> dict[str, Any]:
    axes = {"xAxisKey": "step", "xAxisScaleType": "linear", "scaleType": "linear", "selectedXAxisMetricKey": ""}
    smooth = {"lineSmoothness": 0, "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "ignoreOutliers": False}
    y_axis = {"selectedMetricKeys": [key], "yAxisKey": "metric", "yAxisExpressions": [], "range": {}}
    return {**_chart("LINE", section, key), **axes, **smooth, **y_axis}


def _difference(baseline: str) -> dict[str, Any]:
    what = {"compareGroups": BASELINE, "chartName": "Recipe fields that differ", "baselineColumnUuid": baseline}
    flags = {"showChangeFromBaseline": False, "showDifferencesOnly": True}
    return {**_chart("DIFFERENCE", DIFFERENCES, ""), **what, **flags}


def _chart(kind: str, section: str, key: str) -> dict[str, Any]:
    return {
        "uuid": _id(kind, key),
        "type": kind,
        "runsCountToCompare": 10,
        "metricSectionId": _id("section", section),
        "deleted": False,
        "isGenerated": False,
        "metricKey": key,
        "displayName": key,
    }


def _id(*words: str) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:20]
