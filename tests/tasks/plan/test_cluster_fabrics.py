from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rich.console import Console

from herd.llama3.train import metrics
from herd.storage.root import Root
from herd.tasks.plan.cluster import ClusterProjection, compare_fabrics, fabrics_table, segment_metrics
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.llama3.planner.plan_samples import CLUSTER, recipe


def clusters(folder: Path) -> list[str]:
    """Write the small cluster on hashed RoCE and on InfiniBand."""
    ways = {"hashed": ("roce", "ecmp"), "spread": ("infiniband", "adaptive")}
    for name, (network, routing) in ways.items():
        described = {**CLUSTER, "name": name, "network": network, "routing": routing, "queue_pairs": 1}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(described))
    return [str(folder / f"{name}.yaml") for name in ways]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root.parse(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def found(root: Root, tmp_path_factory: pytest.TempPathFactory) -> list[ClusterProjection]:
    return compare_fabrics(root, recipe(), clusters(tmp_path_factory.mktemp("clusters")), ["64"])


def history(root: Root, name: str) -> dict[str, list[tuple[int, float]]]:
    """Return the metrics of a plan's MLflow run."""
    tracker = MLflowTracker(root, f"{recipe().name}-plan")
    (run,) = [
        run
        for run in tracker.client.search_runs([tracker.experiment])
        if run.data.tags["herd.run"] == f"plan-{recipe().name}-{name}"
    ]
    told = {key: tracker.client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    assert run.info.status == "FINISHED"
    assert run.data.tags["cluster"] == name
    return {key: [(one.step, one.value) for one in series] for key, series in told.items()}


def test_the_fastest_cluster_comes_first(found: list[ClusterProjection]) -> None:
    assert {one.fabric.name for one in found} == {"spread", "hashed"}
    assert [one.days for one in found] == sorted(one.days for one in found)
    by = {one.fabric.name: one for one in found}
    assert by["spread"].share == 1.0 > by["hashed"].share
    assert by["spread"].days <= by["hashed"].days


def test_the_table_fits_100_columns(found: list[ClusterProjection]) -> None:
    console = Console(width=100, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(fabrics_table(found))
    lines = console.export_text().rstrip().splitlines()
    assert len(lines) == 3
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert lines[1].split()[0] == found[0].fabric.name
    assert lines[1].split()[-1] == "+0.0%"


def test_json_has_what_the_table_shows(found: list[ClusterProjection]) -> None:
    for one in found:
        told = one.as_json()
        assert told["gpu_hours"] == pytest.approx(told["days"] * 24 * 64)
        assert told["cluster"] == one.fabric.name
        assert told["run"] == ""  # no MLflow server


def test_each_is_an_mlflow_run_with_the_metrics_of_training(root: Root, found: list[ClusterProjection]) -> None:
    """Positions are tokens, from a part's first to its last; GPU-hours end at the total."""
    for one in found:
        told = history(root, one.fabric.name)
        main, long = one.projection.segments
        assert sorted(told[metrics.STEP_S]) == sorted(
            (position, part.best.time.total)
            for part in (main, long)
            for position in (part.segment.start, part.segment.end)
        )
        position, hours = max(told[metrics.GPU_HOURS])
        assert position == long.segment.end
        assert hours == pytest.approx(one.gpu_hours)
        assert set(told) == {*segment_metrics(main, 0.9), metrics.GPU_HOURS}


def test_a_second_comparison_replaces_the_first(root: Root, found: list[ClusterProjection], tmp_path: Path) -> None:
    (again,) = compare_fabrics(root, recipe(), clusters(tmp_path)[1:], ["32"])
    told = history(root, "spread")
    assert {value for _, value in told[metrics.STEP_S]} == {part.best.time.total for part in again.projection.segments}
    assert len(told[metrics.GPU_HOURS]) == 2


def test_nothing_is_recorded_before_all_clusters_are_known_to_do(tmp_path: Path) -> None:
    root = Root.parse(tmp_path / "root")
    cases = {
        "cluster: 'none-such' is unknown hardware": ([*clusters(tmp_path), "none-such"], ["64"]),
        "gpus: 128 are more than the 64": (["roce-24k", *clusters(tmp_path)], ["128"]),
        "gpus: anneal is not a stage of the recipe": (clusters(tmp_path), ["anneal=8"]),
        "gpus: 'many' is not a number": (clusters(tmp_path), ["many"]),
    }
    for told, (named, gpus) in cases.items():
        with pytest.raises(ValueError, match=told):
            compare_fabrics(root, recipe(), named, gpus)
    assert not root.local.exists()


def test_part_metrics_agree_with_each_other(found: list[ClusterProjection]) -> None:
    part = found[0].projection.main
    told = segment_metrics(part, 0.9)
    per_gpu = told[metrics.TOKENS_PER_S_PER_DEVICE]
    assert told[metrics.TOKENS_PER_S] == pytest.approx(per_gpu * 64)
    assert told[metrics.TOKENS_PER_S] * told[metrics.STEP_S] == pytest.approx(part.segment.batch)
    assert told[metrics.MFU] == pytest.approx(told[metrics.TFLOPS_PER_DEVICE] / 989)
    assert told[metrics.GOODPUT] == 0.9
