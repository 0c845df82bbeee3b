"""Calibrations as artifacts: the newest of a device counts, damage is passed over, MLflow shows the points."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from herd.llama3.planner.device_curves import ELEMENTWISE, GEMM, Calibration
from herd.storage.artifact import Artifact
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.plan.calibrate import (
    FILE,
    calibration_lines,
    calibration_table,
    device_slug,
    load_calibration,
    measure_and_store,
    metric_points,
    newest_calibration,
    show_calibration,
    store_calibration,
)
from herd.tasks.tracking.mlflow import MLflowTracker


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, Calibration, Artifact, str]:
    """A root with a measurement of this machine, and what was said of it."""
    from herd.llama3.planner.calibrate import REACH

    root, text = Root.parse(tmp_path_factory.mktemp("measured")), StringIO()
    small = replace(REACH["cpu"], rows=128, sides=(32, 64), widths=(64, 128))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REACH, "cpu", small)  # bf16 products of the usual sizes take 15 CPU s
        found, artifact = measure_and_store(root, TerminalConsole(RichConsole(file=text, width=120)), "cpu", 0.01)
    return root, found, artifact, text.getvalue()


@pytest.fixture
def found(measured: tuple[Root, Calibration, Artifact, str]) -> Calibration:
    return measured[1]


def on(found: Calibration, device: str, half: float) -> Calibration:
    curves = replace(found.curves, device=device, gemm=replace(found.curves.gemm, half=half))
    return replace(found, curves=curves)


@pytest.mark.slow
def test_the_newest_of_a_device_counts(tmp_path: Path, found: Calibration) -> None:
    root = Root.parse(tmp_path)
    assert load_calibration(root, "a card") is None
    for half, device in ((1.0, "a card"), (2.0, "a card"), (3.0, "A-card")):  # two names with one slug
        store_calibration(root, on(found, device, half), 1.0, "abc")
    curves = load_calibration(root, "a card")
    assert curves is not None
    assert curves.gemm.half == 2.0
    assert load_calibration(root, "a card", "fp8") is None
    assert newest_calibration(root, "A-card") == on(found, "A-card", 3.0)


def test_the_same_measurement_is_one_artifact(tmp_path: Path, found: Calibration) -> None:
    root = Root.parse(tmp_path)
    first, second = (store_calibration(root, found, 1.0, "abc") for _ in range(2))
    assert first.label == second.label
    assert len(open_store(root).all("calibration")) == 1
    assert first.metadata["points"] == len(found.points)


def test_a_damaged_one_gives_way_to_an_older_one(tmp_path: Path, found: Calibration) -> None:
    root = Root.parse(tmp_path)
    store_calibration(root, on(found, "a card", 1.0), 1.0, "abc")
    last = store_calibration(root, on(found, "a card", 2.0), 1.0, "abc")
    text = last.path_of(FILE).read_text()
    last.path_of(FILE).chmod(0o644)
    last.path_of(FILE).write_text(text.replace('"half": 2.0', '"half": 9.0'))
    curves = load_calibration(root, "a card")
    assert curves is not None
    assert curves.gemm.half == 1.0


def test_measuring_stores_and_shows(measured: tuple[Root, Calibration, Artifact, str]) -> None:
    root, found, artifact, text = measured
    assert load_calibration(root, found.curves.device) == found.curves
    assert artifact.label.startswith(f"calibration/{device_slug(found.curves.device)}-")
    assert text.split() == ["measures", "products", "measures", "attention", "measures", "elementwise"]
    tracker = MLflowTracker(root, "calibration")
    (run,) = tracker.client.search_runs([tracker.experiment])
    assert (run.info.status, run.data.params["artifact"]) == ("FINISHED", artifact.label)
    side = min(found.points[0].shape[1:])
    rates = [one.rate / 1e12 for one in found.points if one.what == GEMM and min(one.shape[1:]) == side]
    shown = [value for size, value in tracker.series(run.info.run_id, "calibration/gemm_tflops") if size == side]
    assert sorted(shown) == pytest.approx(sorted(rates))
    assert show_calibration(root, found, artifact) == run.info.run_id
    assert root.names("runs") == []


def test_metrics_hold_measurement_and_curve(found: Calibration) -> None:
    points = metric_points(found, 1_700_000_000.0)
    assert len(points) == 2 * len(found.points) + 3
    memory = [one.value for one in points if one.key == "calibration/elementwise_gb_s_curve"]
    assert memory == pytest.approx([found.curves.memory.bytes_per_s / 1e9] * len(memory))
    assert len(memory) == sum(one.what == ELEMENTWISE for one in found.points)


def test_the_table_shows_every_point_and_how_far_the_curve_is_off(found: Calibration) -> None:
    text = StringIO()
    RichConsole(file=text, width=80).print(calibration_table(found))
    lines = text.getvalue().splitlines()
    assert "…" not in text.getvalue()
    kinds = list(dict.fromkeys(one.what for one in found.points))
    assert len(lines) == 1 + len(kinds) + len(found.points)
    shown = [line for line in lines if line.startswith("  ") and line.split()[0] != "ms"]
    points = [one for kind in kinds for one in found.points if one.what == kind]
    for line, point in zip(shown, points, strict=True):
        assert line.split()[-1] == f"{found.miss(point):+.0%}"
    assert lines[1].strip() == "products, TFLOP/s"
    assert lines[2].split()[:5] == ["128", "x", "32", "x", "32"]


def test_the_lines_state_the_range(found: Calibration) -> None:
    text = "\n".join(calibration_lines(found))
    assert "32 to 128 rows, sides of 32 to 64" in text
    assert "128 to 256 tokens" in text
    assert found.curves.source in text


def test_names_of_devices_become_names_of_artifacts() -> None:
    assert device_slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert device_slug("AMD EPYC 9B14 96-Core Processor (rev 1)") == "amd-epyc-9b14-96-core-processor-rev-1"
    assert device_slug("???") == "device"


def test_what_is_stored_is_json_that_others_read(tmp_path: Path, found: Calibration) -> None:
    artifact = store_calibration(Root.parse(tmp_path), found, 1.0, "abc")
    data = json.loads(artifact.path_of(FILE).read_text())
    assert data["curves"]["gemm"]["half"] == found.curves.gemm.half
    assert len(data["points"]) == len(found.points)


def test_a_plan_reads_curves_without_mlflow_and_torch() -> None:
    code = "import sys, herd.tasks.plan.calibrate; assert not {'torch', 'mlflow'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
