"""Which artifacts hold an alias in the registry: the ones that must not be deleted."""

from __future__ import annotations

from storage.root import Root
from tasks.runs import Runs
from tasks.tracking import Tracker
from tasks.tracking_uri import tracking_uri

WAIT_S = 60.0


def labels_with_alias(root: Root) -> list[str]:
    """Return the labels of the checkpoints that hold any alias of any registered model of the root's families.

    Raises ValueError if the registry does not answer: it might know a champion.
    """
    uri = tracking_uri(root)
    if uri.startswith("sqlite:///") and not (root.local / "mlflow.db").exists():
        return []
    families = sorted({record.family for record in Runs(root).all()})
    return [label for family in families for label in _labels(Tracker(root, family))]


def _labels(tracker: Tracker) -> list[str]:
    if not tracker.wait_until_available(WAIT_S, print):
        raise ValueError(f"MLflow at {tracker.uri} does not answer, and it might know a champion; start it first")
    versions = [
        tracker.client.get_model_version(model.name, version)
        for model in tracker.client.search_registered_models(f"name = '{tracker.family}'")
        for version in set(model.aliases.values())
    ]
    return [version.tags["herd.artifact"] for version in versions if "herd.artifact" in version.tags]
