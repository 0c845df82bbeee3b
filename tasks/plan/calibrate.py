"""`herd plan calibrate`: measures this machine, stores the result, and shows it in MLflow.

One artifact per measurement, `calibration/<device>-<key8>` with points and curves; the newest of a device counts. The
MLflow experiment `calibration` gets a run per measurement whose x axis is the size (smaller side of a product, length
of a sequence, width) and not the position in tokens.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress

from rich.table import Table

from herd.llama3.planner.device_curves import BACK, ELEMENTWISE, FORWARD, GEMM, Calibration, Curves, MeasuredPoint
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.digests import digest_json
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.console import Console
from herd.tasks.runs.provenance import code_version
from herd.tasks.step import CALIBRATION
from herd.tasks.tracking.mlflow import MetricPoint, MLflowTracker

FILE, VERSION = "calibration.json", 1
KEYS = {
    GEMM: "calibration/gemm_tflops",
    FORWARD: "calibration/attention_tflops",
    BACK: "calibration/attention_backward_tflops",
    ELEMENTWISE: "calibration/elementwise_gb_s",
}


def store_calibration(root: Root, calibration: Calibration, seconds: float, code: str) -> Artifact:
    """Commit a calibration that took `seconds`. The same measurement twice is one artifact."""
    store, curves, text = open_store(root), calibration.curves, calibration.as_json()
    parameters = {
        "device": curves.device,
        "dtype": curves.dtype,
        "threads": calibration.threads,
        "torch": calibration.torch,
    }
    spec = ArtifactSpec(CALIBRATION, device_slug(curves.device), VERSION, parameters, {"measured": digest_json(text)})
    facts = {
        "date": calibration.date,
        "ceiling": curves.gemm.ceiling,
        "half": curves.gemm.half,
        "gemm_miss": calibration.gemm_miss,
        "points": len(calibration.points),
    }
    with store.staging() as folder:
        (folder / FILE).write_text(text)
        return store.commit(spec, folder, facts, "herd plan calibrate", code, seconds)


def load_calibration(root: Root, device: str, dtype: str = "bf16") -> Curves | None:
    """Return the newest measured curves of a device (by its driver's name) under `root`, or None."""
    calibration = newest_calibration(root, device, dtype)
    return calibration.curves if calibration else None


def newest_calibration(root: Root, device: str, dtype: str = "bf16") -> Calibration | None:
    """Return the newest readable calibration of a device, with its points, or None."""
    for artifact in reversed(open_store(root).all(CALIBRATION)):
        manifest = artifact.manifest
        parameters = manifest.parameters
        if (parameters.get("device"), parameters.get("dtype"), manifest.version) == (device, dtype, VERSION):
            with suppress(OSError, ValueError):
                artifact.verify()
                return Calibration.from_json(artifact.path_of(FILE).read_text())
    return None


def calibration_table(calibration: Calibration) -> Table:
    """Return a row per point, by kind: time, spread, rate, and the curve's rate and error; 80 characters wide."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("", "ms", "spread", "rate", "curve", "time off"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for kind in dict.fromkeys(point.what for point in calibration.points):
        points = [point for point in calibration.points if point.what == kind]
        unit, name = rate_unit(points[0])
        table.add_row(f"[bold]{kind}[/], {name}")
        for point in points:
            table.add_row(
                f"  {format_sizes(point)}",
                f"{point.seconds * 1e3:,.3f}",
                f"{point.spread:.0%}",
                f"{point.rate / unit:,.3g}",
                f"{point.amount / calibration.predicted_s(point) / unit:,.3g}",
                f"{calibration.miss(point):+.0%}",
            )
    return table


def calibration_lines(calibration: Calibration) -> list[str]:
    """Return the curves as text, and their measured ranges."""
    curves, gemm, lengths = calibration.curves, calibration.curves.gemm, calibration.curves.attention.lengths
    threads = f" on {calibration.threads} of its threads" if calibration.threads else ""
    lines = [
        f"device     {curves.device}{threads}, {curves.dtype}, torch {calibration.torch}; {curves.source}",
        f"products   {gemm.ceiling:.3f} of {gemm.peak_flops / 1e12:,.4g} TFLOP/s, half of that at a side of "
        f"{gemm.half:,.0f}; misses the points by {calibration.gemm_miss:.0%}",
    ]
    if gemm.measured:
        (rows, most_rows), (side, most_side), _ = gemm.measured
        lines.append(f"           measured on {rows:,} to {most_rows:,} rows, sides of {side:,} to {most_side:,}")
    return [
        *lines,
        f"attention  measured over {lengths[0]:,} to {lengths[-1]:,} tokens",
        f"memory     {curves.memory.bytes_per_s / 1e9:,.4g} GB/s in norms, sums and SwiGLU",
    ]


def device_slug(device: str) -> str:
    """Return a device's name as an artifact name: nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def rate_unit(point: MeasuredPoint) -> tuple[float, str]:
    """Return the unit of a point's rate, and its name."""
    return (1e9, "GB/s") if point.what == ELEMENTWISE else (1e12, "TFLOP/s")


def format_sizes(point: MeasuredPoint) -> str:
    """Return a point's sizes as text."""
    return " x ".join(f"{size:,}" for size in point.shape)


def measure_and_store(
    root: Root, console: Console, device: str = "auto", seconds: float = 60.0
) -> tuple[Calibration, Artifact]:
    """Measure `device` (auto, cpu or cuda) of this machine for about `seconds`; return the result and its artifact.

    Raises ValueError for no time and for a missing device, before anything is measured.
    """
    from herd.llama3.planner.calibrate import calibrate  # imports torch

    began = time.monotonic()
    seen: set[str] = set()

    def log(point: MeasuredPoint) -> None:
        kind = point.what.split()[0]
        if kind not in seen:
            console.log(f"[dim]  measures {kind}[/]")
        seen.add(kind)

    calibration = calibrate(device, seconds, log)
    artifact = store_calibration(root, calibration, time.monotonic() - began, code_version())
    show_calibration(root, calibration, artifact)
    return calibration, artifact


def show_calibration(root: Root, calibration: Calibration, artifact: Artifact) -> str:
    """Send a calibration to MLflow and return the run's handle; an artifact has one run however often it is sent."""
    tracker = MLflowTracker(root, CALIBRATION)
    manifest = artifact.manifest
    tags = {
        "herd.run": artifact.label,
        "kind": CALIBRATION,
        "stage": calibration.date[:10],
        "artifact.key": artifact.key[:16],
    }
    handle = tracker.open_child("", manifest.name, tags)
    tracker.log_params(handle, {**manifest.parameters, "source": calibration.curves.source, "artifact": artifact.label})
    tracker.log_points([handle], metric_points(calibration, artifact.created))
    tracker.close(handle, "FINISHED")
    return handle


def metric_points(calibration: Calibration, at: float) -> list[MetricPoint]:
    """Return each measured rate and the curve's rate over the size, and the constants of the fit."""
    points = []
    for point in calibration.points:
        key, unit = KEYS[point.what], rate_unit(point)[0]
        size = min(point.shape[1:]) if point.what == GEMM else point.shape[1]
        points.append(MetricPoint(key, point.rate / unit, at, size))
        points.append(MetricPoint(f"{key}_curve", point.amount / calibration.predicted_s(point) / unit, at, size))
    gemm = calibration.curves.gemm
    constants = {"gemm_ceiling": gemm.ceiling, "gemm_half": gemm.half, "gemm_miss": calibration.gemm_miss}
    return points + [MetricPoint(f"calibration/{name}", value, at, 0) for name, value in constants.items()]
