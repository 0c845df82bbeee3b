"""TensorBoard event files of a run: <root>/tensorboard/<run>, and below it a folder per step.

Keys and steps are those of MLflow. A remote root has the files in its local working folder.
"""

from __future__ import annotations

import logging
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from herd.storage.root import Root
from herd.tasks.tracking.mlflow import MetricPoint

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
log = logging.getLogger(__name__)


class TensorBoard:
    """The event files of one run: its curves, and in a folder for each step those of the step."""

    def __init__(self, root: Root, run: str) -> None:
        self.folder = root.local / FOLDER / run
        self._events: dict[str, EventFiles] = {}
        self._lock = threading.Lock()  # an evaluation beside training has a thread
        self._failed = False

    def add(self, step: str, points: list[MetricPoint], of_run: bool = False) -> None:
        """Write points of `step`, with `of_run` also to the curves of the run; those that were written are left out."""
        if not points:
            return
        try:
            with self._lock:
                for name in (step, *([""] if of_run else [])):
                    if name not in self._events:
                        self._events[name] = EventFiles(self.folder / name)
                    self._events[name].add(points)
        except OSError as error:  # monitoring must not stop a run
            if not self._failed:
                log.warning("TensorBoard files in %s cannot be written: %s", self.folder, error)
            self._failed = True

    def close(self, step: str) -> None:
        with self._lock:
            if events := self._events.pop(step, None):
                events.close()


def package_faults() -> list[str]:
    """Return an error if the package that writes event files is missing."""
    if find_spec("tensorboard") is None:
        return ["tracking.tensorboard: true needs the package tensorboard; pip install 'herd-llm[tensorboard]'"]
    return []


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
