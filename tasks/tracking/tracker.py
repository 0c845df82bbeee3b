"""The interface of experiment trackers, and a group of trackers as one.

Flows, stages and studies hold a `Tracker`; `herd.tasks.tracking.mlflow` opens it. The step of a point is the position
in tokens. A tracker never raises and never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class MetricPoint(NamedTuple):
    key: str
    value: float
    time: float
    """Seconds since 1970, when it was recorded."""
    position: int
    """Tokens trained on, from the start of the run."""


class Tracker(Protocol):
    """Where metrics, params, tags and files of runs go. A handle names an open run, study or step of a run."""

    @property
    def complete(self) -> set[str]:
        """Handles of stages that received every point while their trainer ran."""
        ...

    def open_run(
        self,
        name: str,
        tags: dict[str, str],
        params: dict[str, Any],
        start: float | None = None,
        parent: str = "",
        over: bool = False,
    ) -> str:
        """Open or resume the run `name` and return its handle.

        `start` is in seconds since 1970 (None: now), `parent` is the handle of its study. A run that is `over` keeps
        its status.
        """
        ...

    def open_study(self, name: str, digest: str, tags: dict[str, str], params: dict[str, Any]) -> str:
        """Open or resume a study, the parent of its runs, and return its handle."""
        ...

    def open_child(
        self, parent: str, run: str, tags: dict[str, str], start: float | None = None, over: bool = False
    ) -> str:
        """Open or resume a step of run `run`, identified by its tags kind, stage and artifact.key."""
        ...

    def log_params(self, handle: str, params: dict[str, Any]) -> None: ...

    def log_points(self, handles: Iterable[str], points: list[MetricPoint], model_id: str | None = None) -> bool:
        """Log metrics to each handle and return whether all were taken; points may be sent repeatedly.

        `model_id` also attaches them to the model that `checkpoint_model` returned.
        """
        ...

    def log_inputs(self, handle: str, datasets: list[dict[str, Any]]) -> None:
        """Log training data; each mapping has name, digest, uri and profile."""
        ...

    def checkpoint_model(self, handles: list[str], label: str, uri: str, position: int, digest: str) -> str:
        """Log a checkpoint artifact as an output, without its bytes, and return the id of its model, or ""."""
        ...

    def log_file(self, handle: str, path: Path) -> None: ...

    def set_tags(self, handle: str, tags: dict[str, str]) -> None: ...

    def close(self, handle: str, status: str, end: float | None = None) -> None:
        """End a run as FINISHED, FAILED or KILLED, at `end` (seconds since 1970) or now."""
        ...


class TrackerGroup:
    """A main tracker and further sinks as one. Handles are those of `main`, each mapped to the handles of the sinks.

    Sinks are called first, because `main` may be a server that blocks until its time-out.
    """

    def __init__(self, main: Tracker, sinks: Sequence[Tracker]) -> None:
        self.main, self.sinks, self.complete = main, sinks, main.complete
        self._handles: dict[str, list[tuple[Tracker, str]]] = {}

    def open_run(self, name: str, tags: dict[str, str], params: dict[str, Any], *args: Any, **options: Any) -> str:
        handle = self.main.open_run(name, tags, params, *args, **options)
        return self._map(handle, lambda sink: sink.open_run(name, tags, params))

    def open_study(self, name: str, digest: str, tags: dict[str, str], params: dict[str, Any]) -> str:
        handle = self.main.open_study(name, digest, tags, params)
        return self._map(handle, lambda sink: sink.open_study(name, digest, tags, params))

    def open_child(self, parent: str, run: str, tags: dict[str, str], *args: Any, **options: Any) -> str:
        if parent and parent not in self._handles:  # another process opened the run
            self._map(parent, lambda sink: sink.open_run(run, {}, {}))
        parents = dict(self._handles.get(parent, []))
        handle = self.main.open_child(parent, run, tags, *args, **options)
        return self._map(handle, lambda sink: sink.open_child(parents.get(sink, ""), run, tags))

    def _map(self, handle: str, open_in: Callable[[Tracker], str]) -> str:
        self._handles[handle] = [(sink, open_in(sink)) for sink in self.sinks]
        return handle

    def _all(self, handle: str) -> list[tuple[Tracker, str]]:
        return [*self._handles.get(handle, []), (self.main, handle)]

    def log_params(self, handle: str, params: dict[str, Any]) -> None:
        for tracker, own in self._all(handle):
            tracker.log_params(own, params)

    def log_points(self, handles: Iterable[str], points: list[MetricPoint], model_id: str | None = None) -> bool:
        handles = [*handles]
        for handle in handles:
            for sink, own in self._handles.get(handle, []):
                sink.log_points([own], points)
        return self.main.log_points(handles, points, model_id)

    def log_inputs(self, handle: str, datasets: list[dict[str, Any]]) -> None:
        for tracker, own in self._all(handle):
            tracker.log_inputs(own, datasets)

    def checkpoint_model(self, handles: list[str], label: str, uri: str, position: int, digest: str) -> str:
        for handle in handles:
            for sink, own in self._handles.get(handle, []):
                sink.checkpoint_model([own], label, uri, position, digest)
        return self.main.checkpoint_model(handles, label, uri, position, digest)

    def log_file(self, handle: str, path: Path) -> None:
        for tracker, own in self._all(handle):
            tracker.log_file(own, path)

    def set_tags(self, handle: str, tags: dict[str, str]) -> None:
        for tracker, own in self._all(handle):
            tracker.set_tags(own, tags)

    def close(self, handle: str, status: str, end: float | None = None) -> None:
        for tracker, own in self._all(handle):
            tracker.close(own, status, end)
