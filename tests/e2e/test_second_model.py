"""The second model of a family, as a newcomer trains it: the gate lets a better one pass and refuses a worse one."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.evaluate.scores import Score, read_scores
from herd.storage.artifact import Store
from herd.storage.root import Root
from herd.tasks.promotion.log import last_promotion
from tests.e2e.conftest import Herd, NewHerd, record

QUICKSTART = str(Path(__file__).parents[2] / "recipes/quickstart.yaml")
CLUSTERS = 8
"""From so many on, clusters are drawn and not scaled."""


def scores(herd: Herd, run: str) -> dict[str, Score]:
    store = Store(herd.root)
    return read_scores(store.load(record(herd, run).steps["evaluate-anneal"].artifact).path)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 400 s of CPU
def test_a_better_second_quickstart_is_promoted_and_a_worse_third_refused(new_herd: NewHerd, tmp_path: Path) -> None:
    herd = new_herd(tmp_path / "root")
    herd("run", QUICKSTART, "--set", "lr.peak=1e-3")
    herd("run", QUICKSTART)
    herd("run", QUICKSTART, "--set", "lr.peak=5e-4", status=3)
    verdicts = [record(herd, f"quickstart-{number}").verdict for number in (1, 2, 3)]
    assert verdicts == ["promoted", "promoted", "rejected"]
    values = [scores(herd, f"quickstart-{number}")["eval/bpb"].value for number in (1, 2, 3)]
    assert values[1] < values[0] < values[2]
    clustered = [score for key, score in scores(herd, "quickstart-2").items() if key.startswith("eval/bpb/")]
    assert len(clustered) == 4
    for score in clustered:
        assert score.clusters >= CLUSTERS or score.clusters == 0, (score.key, score.amount)
    last = last_promotion(Root.parse(herd.root), "quickstart-3")
    assert last is not None
    assert last.gate is not None
    refused = [row for row in last.gate.rows if not row.passed]
    assert "eval/bpb" in {row.metric for row in refused}
    assert any("clusters, design effect" in row.reason for row in last.gate.rows)
