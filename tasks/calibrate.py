"""`herd plan calibrate`: measures this machine, stores what was found, and shows it in MLflow.

The experiment `calibration` gets one run a measurement; its x axis is the size (smaller side of a product, length of a
sequence, width), the one place where it is not the position in tokens. Given up: a measurement that is interrupted
leaves nothing.
"""

from __future__ import annotations

import time

from llama3.cluster.calibrate import calibrate
from llama3.cluster.calibration import BACK, ELEMENTWISE, FORWARD, GEMM, Calibration
from llama3.cluster.calibration import Point as Measured
from storage.artifact import Artifact
from storage.root import Root
from tasks.calibrations import KIND, store_calibration, unit_of
from tasks.console import Console
from tasks.step import code_version
from tasks.tracking import Point, Tracker

KEYS = {
    GEMM: "calibration/gemm_tflops",
    FORWARD: "calibration/attention_tflops",
    BACK: "calibration/attention_backward_tflops",
    ELEMENTWISE: "calibration/elementwise_gb_s",
}


def measure_and_store(
    root: Root, console: Console, device: str = "auto", seconds: float = 60.0
) -> tuple[Calibration, Artifact]:
    """Measure `device` (auto, cpu or cuda) of this machine for about `seconds`; return what was found and stored.

    Raises ValueError for no time and for a device that is not there, before anything is measured.
    """
    began = time.monotonic()

    seen: set[str] = set()

    def say(point: Measured) -> None:
        kind = point.what.split()[0]
        if kind not in seen:
            console.say(f"[dim]  measures {kind}[/]")
        seen.add(kind)

    found = calibrate(device, seconds, say)
    artifact = store_calibration(root, found, time.monotonic() - began, code_version())
    show_calibration(root, found, artifact)
    return found, artifact


def show_calibration(root: Root, found: Calibration, artifact: Artifact) -> str:
    """Send what was found to MLflow and return the run's handle; the same artifact is one run however often sent."""
    tracker = Tracker(root, KIND)
    made = artifact.manifest
    tags = {"herd.run": artifact.label, "kind": KIND, "stage": found.date[:10], "artifact.key": artifact.key[:16]}
    handle = tracker.open_child("", made.name, tags)
    tracker.log_params(handle, {**made.parameters, "source": found.curves.source, "artifact": artifact.label})
    tracker.log_points([handle], metric_points(found, artifact.created))
    tracker.close(handle, "FINISHED")
    return handle


def metric_points(found: Calibration, at: float) -> list[Point]:
    """Return each measured rate and what the curve says of it, over its size, and the constants of the fit."""
    points = []
    for one in found.points:
        key, unit = KEYS[one.what], unit_of(one)[0]
        size = min(one.shape[1:]) if one.what == GEMM else one.shape[1]
        points.append(Point(key, one.rate / unit, at, size))
        points.append(Point(f"{key}_curve", one.amount / found.predicted_s(one) / unit, at, size))
    gemm = found.curves.gemm
    constants = {"gemm_ceiling": gemm.ceiling, "gemm_half": gemm.half, "gemm_miss": found.gemm_miss}
    return points + [Point(f"calibration/{name}", value, at, 0) for name, value in constants.items()]
