"""The day a GPU is at hand: every row of it within a time, the most valuable first, and what differs from predictions.

Each row is measured in a process of its own, so that one that crashes or hangs costs its own time only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import torch

from benchmarks.rows import TRAIN_TARGETS, Row, failed, not_measured, number
from herd.llama3.train.device import describe_environment

ROWS = tuple(name for name in TRAIN_TARGETS if name.startswith("gpu/"))
LIMITS_S = {"gpu/chain": 700.0, "gpu/memory": 400.0}
LIMIT_S = 240.0
"""Maximum seconds of any other row, start and compilation included."""
LEAST_S = 20.0
CALIBRATION_S = 45.0


def day_rows(minutes: float, only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows whose names begin with one of `only` (default: all) as they are measured, within `minutes`."""
    end = time.monotonic() + 60 * minutes
    for name in ROWS:
        left = end - time.monotonic()
        if only and not name.removeprefix("gpu/").startswith(tuple(only)):
            continue
        yield (
            _row(name, min(left, LIMITS_S.get(name, LIMIT_S))) if left > LEAST_S else not_measured(name, "no time left")
        )


def _row(name: str, limit_s: float) -> Row:
    command = [sys.executable, "-m", "benchmarks", "train", "--only", name, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return failed(name, f"it took longer than {limit_s:.0f} s")
    try:
        (row,) = json.loads(done.stdout)["rows"]
    except (ValueError, KeyError):
        lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing was printed"]
        return failed(name, f"status {done.returncode}: {lines[-1]}")
    return Row(**row)


def calibration(root: Path) -> str:
    """Return what `herd plan calibrate` prints on this device."""
    words = ["plan", "calibrate", "--device", "cuda", "--seconds", str(CALIBRATION_S), "--root", str(root)]
    command = [sys.executable, "-m", "herd.flows.cli.main", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * CALIBRATION_S)
    except subprocess.TimeoutExpired:
        return f"failed: it took longer than {4 * CALIBRATION_S:.0f} s"
    return (done.stdout + done.stderr).strip()


def day_page(rows: Sequence[Row], environment: dict[str, str], calibrated: str, minutes: float) -> str:
    """Return the dated page: what was measured on what, and the rows that differ from their prediction."""
    facts = [f"- {name}: {value}" for name, value in environment.items() if name not in ("topology", "host")]
    table = [
        f"| {row.name} | {'-' if row.value is None else number(row.value)} | {row.unit} | {row.target} | "
        f"{ {True: 'yes', False: 'no', None: ''}[row.ok] } | {row.note.replace('|', '/')} |"
        for row in rows
    ]
    differ = [f"- {row.name}: {row.note}" for row in rows if row.ok is False]
    return "\n".join(
        [
            f"# A GPU, {date.today().isoformat()}",
            "",
            f"`make gpu-day` in {minutes:.0f} minutes.",
            "",
            *facts,
            "",
            "| row | value | unit | target | ok | |",
            "|---|---|---|---|---|---|",
            *table,
            "",
            "## Differences",
            "",
            *(differ or ["None."]),
            "",
            "## Calibration",
            "",
            "```",
            calibrated,
            "```",
            *(["", "## Topology", "", "```", environment["topology"], "```"] if environment.get("topology") else []),
            "",
        ]
    )


def measure_day(minutes: float, only: Sequence[str], out: Path) -> list[Row]:
    """Measure the rows, print each, and write the page to `out`. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError(
            "device: no CUDA device is visible (nvidia-smi); make install TORCH=cuda, on a machine with one"
        )
    began, rows = time.monotonic(), list[Row]()
    environment = describe_environment(torch.device("cuda"))
    for row in day_rows(minutes, only):
        rows.append(row)
        value = "-" if row.value is None else number(row.value)
        print(
            f"{row.name:<28}{value:>10} {row.unit:<24}{'' if row.ok is not False else 'differs  '}{row.note}",
            flush=True,
        )
    with tempfile.TemporaryDirectory(prefix="herd-gpu-day-") as temporary:
        calibrated = "" if only else calibration(Path(temporary))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(day_page(rows, environment, calibrated, (time.monotonic() - began) / 60))
    print(out)
    return rows
