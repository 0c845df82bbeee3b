"""Gauges of running stages for Prometheus: a text file per run in the folder HERD_PROMETHEUS_DIR.

node_exporter's textfile collector serves the folder. A file is replaced every few seconds while its run trains, and
removed when the run ends; one that stays behind a killed run shows its age as `node_textfile_mtime_seconds`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from herd.llama3.train import metrics
from herd.llama3.train.journal import Record
from herd.storage.filesystem import write_atomic
from herd.storage.root import Root

VARIABLE = "HERD_PROMETHEUS_DIR"
INTERVAL_S = 5.0
"""Between two writes of a file."""
GAUGES = {
    "herd_position_tokens": ("Tokens trained on since the start of the run.", ""),
    "herd_last_step_timestamp_seconds": ("When the newest step ended.", ""),
    "herd_last_checkpoint_timestamp_seconds": ("When the newest checkpoint of the stage was committed.", ""),
    "herd_loss": ("Training loss, nats per token, mean of the last steps.", metrics.LOSS),
    "herd_tokens_per_second": ("Training speed.", metrics.TOKENS_PER_S),
    "herd_mfu_ratio": (
        "Model FLOPs utilization, 6N + causal attention; absent if the device's peak is unknown.",
        metrics.MFU,
    ),
    "herd_goodput_ratio": ("Share of the stage's time that went into steps that count.", metrics.GOODPUT),
    "herd_remaining_seconds": ("Time to the end of the stage at the present speed.", metrics.REMAINING_S),
    "herd_restarts": ("Restarts of the stage's trainer.", metrics.RESTARTS),
    "herd_held_out_bits_per_byte": ("Newest score on held-out text.", metrics.HELD_OUT),
}
"""Name -> help, and the metric whose newest value it is; "": computed here."""
log = logging.getLogger(__name__)


class Gauges:
    """The gauges of one stage."""

    def __init__(self, root: Root, run: str, stage: str) -> None:
        """Does nothing if HERD_PROMETHEUS_DIR is not set."""
        self.path = gauge_file(root, run)
        labels = {"run": run, "stage": stage, "root": root.uri}
        self.labels = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
        self.values: dict[str, float] = {"herd_restarts": 0.0}
        self.written_at = float("-inf")

    def update(self, records: Sequence[Record], loss: float | None) -> None:
        """Take new records of the journal, oldest first, and the smoothed loss; write the file now and then."""
        if self.path is None:
            return
        for record in records:
            self.values["herd_position_tokens"] = float(record.position)
            self.values["herd_last_step_timestamp_seconds"] = record.time
            if metrics.CHECKPOINT_WRITE_S in record.metrics:
                self.values["herd_last_checkpoint_timestamp_seconds"] = record.time
            self.values |= {name: record.metrics[key] for name, (_, key) in GAUGES.items() if key in record.metrics}
        if loss is not None:
            self.values["herd_loss"] = loss
        if time.monotonic() - self.written_at < INTERVAL_S:
            return
        self.written_at = time.monotonic()
        try:
            write_atomic(self.path, self.text())
        except OSError as error:  # monitoring must not stop a run
            log.warning("%s: %s cannot be written: %s", VARIABLE, self.path, error)

    def text(self) -> str:
        """Return the file: Prometheus' text format."""
        lines = []
        for name, (help_, _) in GAUGES.items():
            if name in self.values:
                lines += [f"# HELP {name} {help_}", f"# TYPE {name} gauge"]
                lines.append(f"{name}{{{self.labels}}} {self.values[name]!r}")
        return "\n".join(lines) + "\n"


def gauge_file(root: Root, run: str) -> Path | None:
    """Return the file of a run, None if HERD_PROMETHEUS_DIR is not set; two roots may have runs of one name."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) / f"herd-{run}-{hashlib.sha256(root.uri.encode()).hexdigest()[:8]}.prom" if folder else None


def remove_gauges(root: Root, run: str) -> None:
    """Remove the file of a run that ended: its series end."""
    with suppress(OSError):
        if (path := gauge_file(root, run)) is not None:
            path.unlink(missing_ok=True)


def folder_faults() -> list[str]:
    """Return an error if files cannot be written to HERD_PROMETHEUS_DIR."""
    folder = os.environ.get(VARIABLE)
    try:
        if folder:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        return [f"{VARIABLE}: {folder} cannot be written ({error.strerror}); name the folder of node_exporter's "
                "--collector.textfile.directory, or unset it"]  # fmt: skip
    return []


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
