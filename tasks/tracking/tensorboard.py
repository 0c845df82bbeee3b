"""A tracker that writes TensorBoard event files: <root>/tensorboard/<run>, and below it a folder per stage.

Keys and steps are those of MLflow. Only metrics are written. A remote root has the files in its local working folder.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herd.storage.root import Root
from herd.tasks.tracking.tracker import MetricPoint

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
log = logging.getLogger(__name__)


class TensorBoardTracker:
    """Event files of the runs under one root; a handle is a folder below `tensorboard`."""

    def __init__(self, root: Root) -> None:
        self.folder = root.local / FOLDER
        self.complete: set[str] = set()
        self._events: dict[str, EventFiles] = {}
        self._lock = threading.Lock()  # the sender's thread and the step's both log
        self._failed = False

    def open_run(self, name: str, *_: Any, **__: Any) -> str:
        return name

    def open_study(self, name: str, *_: Any, **__: Any) -> str:
        return name

    def open_child(self, parent: str, run: str, tags: dict[str, str], *_: Any, **__: Any) -> str:
        return f"{run}/{tags['stage']}"

    def log_points(self, handles: Iterable[str], points: list[MetricPoint], model_id: str | None = None) -> bool:
        if not points:
            return True
        try:
            with self._lock:
                for handle in handles:
                    if handle not in self._events:
                        self._events[handle] = EventFiles(self.folder / handle)
                    self._events[handle].add(points)
        except OSError as error:
            if not self._failed:
                log.warning("TensorBoard files in %s cannot be written: %s", self.folder, error)
            self._failed = True
            return False
        return True

    def close(self, handle: str, status: str, end: float | None = None) -> None:
        with self._lock:
            if events := self._events.pop(handle, None):
                events.close()

    def checkpoint_model(self, handles: list[str], label: str, uri: str, position: int, digest: str) -> str:
        return ""

    def _ignore(self, *_: Any) -> None:
        """Only metrics are written."""

    log_params = log_inputs = log_file = set_tags = _ignore


class EventFiles:
    """The event files of one folder and the points in them, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.series = read_points(folder)
        self._writer: SummaryWriter | None = None

    def add(self, points: list[MetricPoint]) -> None:
        """Write the points that are not in the files yet.

        A point voids those of its key at later positions that were recorded before it: training went back there.
        """
        new, replaced = list[MetricPoint](), False
        for point in points:
            series = self.series.setdefault(point.key, {})
            if point.position in series and series[point.position].time == point.time:
                continue
            new.append(point)
            if point.position <= next(reversed(series), -1):
                replaced = True
                after = {at: other for at, other in series.items() if at > point.position and other.time > point.time}
                before = {at: other for at, other in series.items() if at < point.position}
                self.series[point.key] = {**before, point.position: point, **after}
            else:
                series[point.position] = point
        if replaced:
            # TensorBoard drops every point from the purge step on, of all keys, so those are written again.
            first = min(point.position for point in new)
            self.close()
            time.sleep(1.0)  # TensorBoard orders files by name, which starts with the second of their creation
            new = [point for series in self.series.values() for at, point in series.items() if at >= first]
            self._open(first)
        elif new and self._writer is None:
            self._open(None)
        for point in sorted(new, key=lambda point: point.position):
            assert self._writer is not None
            self._writer.add_scalar(point.key, point.value, point.position, point.time)
        if self._writer is not None:
            self._writer.flush()

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=purge_step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_points(folder: Path) -> dict[str, dict[int, MetricPoint]]:
    """Return the points of a folder's event files by key and position, ascending; purged ones are left out."""
    if not any(folder.glob("events.out.tfevents.*")):
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every purge
    events = EventAccumulator(str(folder), {"scalars": 0})  # 0: keep all
    events.Reload()
    return {
        key: {
            event.step: MetricPoint(key, event.value, event.wall_time, event.step)
            for event in sorted(events.Scalars(key), key=lambda event: event.step)
        }
        for key in events.Tags()["scalars"]
    }
