"""What was measured of devices, under a root: one artifact a measurement, the newest of a device counts.

`calibration/<device>-<key8>` holds `calibration.json`, points and curves. A plan reads the curves from here and knows
no MLflow. Given up: measurements of one device are not mixed; the newest counts, also where an older one reaches
further.
"""

from __future__ import annotations

import re
from contextlib import suppress

from rich.table import Table

from llama3.cluster.calibration import ELEMENTWISE, Calibration, Point
from llama3.cluster.curves import Curves
from storage.artifact import Artifact, Design
from storage.digests import digest_json
from storage.remote_store import open_store
from storage.root import Root

KIND, FILE, VERSION = "calibration", "calibration.json", 1


def store_calibration(root: Root, found: Calibration, seconds: float, code: str) -> Artifact:
    """Commit what was measured in `seconds` by this version of the code. The same measurement twice is one artifact."""
    store, curves, text = open_store(root), found.curves, found.as_json()
    parameters = {"device": curves.device, "dtype": curves.dtype, "threads": found.threads, "torch": found.torch}
    design = Design(KIND, slug(curves.device), VERSION, parameters, {"measured": digest_json(text)})
    facts = {
        "date": found.date,
        "ceiling": curves.gemm.ceiling,
        "half": curves.gemm.half,
        "gemm_miss": found.gemm_miss,
        "points": len(found.points),
    }
    with store.staging() as folder:
        (folder / FILE).write_text(text)
        return store.commit(design, folder, facts, "herd plan calibrate", code, seconds)


def load_calibration(root: Root, device: str, dtype: str = "bf16") -> Curves | None:
    """Return the newest curves measured under `root` on the device that its driver calls so, or None."""
    found = newest_calibration(root, device, dtype)
    return found.curves if found else None


def newest_calibration(root: Root, device: str, dtype: str = "bf16") -> Calibration | None:
    """Return the newest calibration of a device, with its points, or None; one that cannot be read is passed over."""
    for artifact in reversed(open_store(root).all(KIND)):
        made = artifact.manifest
        if (made.parameters.get("device"), made.parameters.get("dtype"), made.version) == (device, dtype, VERSION):
            with suppress(OSError, ValueError):
                artifact.verify()
                return Calibration.from_json(artifact.part(FILE).read_text())
    return None


def calibration_table(found: Calibration) -> Table:
    """Return a row per point, by kind: how long, how steadily, and what the curve says of it; 80 characters wide."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in ("", "ms", "spread", "rate", "curve", "time off"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for kind in dict.fromkeys(point.what for point in found.points):
        points = [point for point in found.points if point.what == kind]
        unit, name = unit_of(points[0])
        table.add_row(f"[bold]{kind}[/], {name}")
        for point in points:
            table.add_row(
                f"  {sizes(point)}",
                f"{point.seconds * 1e3:,.3f}",
                f"{point.spread:.0%}",
                f"{point.rate / unit:,.3g}",
                f"{point.amount / found.predicted_s(point) / unit:,.3g}",
                f"{found.miss(point):+.0%}",
            )
    return table


def calibration_lines(found: Calibration) -> list[str]:
    """Return the curves in words, and where they hold."""
    curves, gemm, lengths = found.curves, found.curves.gemm, found.curves.attention.lengths
    threads = f" on {found.threads} of its threads" if found.threads else ""
    lines = [
        f"device     {curves.device}{threads}, {curves.dtype}, torch {found.torch}; {curves.source}",
        f"products   {gemm.ceiling:.3f} of {gemm.peak_flops / 1e12:,.4g} TFLOP/s, half of that at a side of "
        f"{gemm.half:,.0f}; misses the points by {found.gemm_miss:.0%}",
    ]
    if gemm.measured:
        (rows, most_rows), (side, most_side), _ = gemm.measured
        lines.append(f"           measured on {rows:,} to {most_rows:,} rows, sides of {side:,} to {most_side:,}")
    return [
        *lines,
        f"attention  measured over {lengths[0]:,} to {lengths[-1]:,} tokens",
        f"memory     {curves.memory.bytes_per_s / 1e9:,.4g} GB/s in norms, sums and SwiGLU",
    ]


def slug(device: str) -> str:
    """Return a device's name as that of an artifact: nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def unit_of(point: Point) -> tuple[float, str]:
    """Return what a point's rate is shown in, and its name."""
    return (1e9, "GB/s") if point.what == ELEMENTWISE else (1e12, "TFLOP/s")


def sizes(point: Point) -> str:
    """Return a point's sizes in words."""
    return " x ".join(f"{size:,}" for size in point.shape)
