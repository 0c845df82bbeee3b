"""Open the tracker of a recipe family. This is the only module that knows which sinks exist."""

from __future__ import annotations

from importlib.util import find_spec

from herd.llama3.recipe.sections import Tracking
from herd.storage.root import Root
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.prometheus import folder_faults
from herd.tasks.tracking.tracker import Tracker, TrackerGroup


def open_tracker(root: Root, family: str, tracking: Tracking | None = None) -> Tracker:
    """Return MLflow, together with the sinks that `tracking` switches on. Raises ValueError as `tracking_faults`."""
    tracking, sinks = tracking or Tracking(), list[Tracker]()
    if faults := tracking_faults(tracking):
        raise ValueError("\n".join(faults))
    if tracking.tensorboard:
        from herd.tasks.tracking.tensorboard import TensorBoardTracker

        sinks.append(TensorBoardTracker(root))
    main = MLflowTracker(root, family)
    return TrackerGroup(main, sinks) if sinks else main


def tracking_faults(tracking: Tracking) -> list[str]:
    """Return an error for each sink whose package or folder is missing."""
    if faults := folder_faults():
        return faults
    if tracking.tensorboard and find_spec("tensorboard") is None:
        return ["tracking.tensorboard: true needs the package tensorboard; pip install 'herd-llm[tensorboard]'"]
    return []


def mlflow_of(tracker: Tracker) -> MLflowTracker:
    """Return the MLflow tracker in `tracker`, for the model registry, outages and backfills."""
    main = tracker.main if isinstance(tracker, TrackerGroup) else tracker
    assert isinstance(main, MLflowTracker)
    return main
