"""MLflow's model registry as herd uses it: one registered model per recipe family, aliases for roles.

A version points at a checkpoint artifact; no bytes are copied. The gate's table is written as version tags, so that
the registry page answers why a model is, or is not, the champion. Aliases show the promotion log and are never read to
decide anything; `show_aliases` makes them true from any state. Every method raises while MLflow is away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.artifact import Artifact
from storage.root import Root
from tasks.promotion.log import ALIASES, Log, PromotionLog, holders, version_description, version_tags
from tasks.runs.records import Runs
from tasks.tracking.mlflow import Tracker, is_absence
from tasks.tracking.mlflow_store import tracking_uri

NO_ALIAS = "INVALID_PARAMETER_VALUE"
"""What MLflow answers, with these words, where a model has no such alias."""


class Registry:
    """The registered model of one family. Every method raises MlflowException if MLflow does not answer."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.name = tracker, tracker.family

    @property
    def client(self) -> Any:
        return self.tracker.client

    def holder(self, alias: str) -> Any | None:
        """Return the model version that holds `alias`, or None."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_model_version_by_alias(self.name, alias)
        except MlflowException as error:
            if is_absence(error) or error.error_code == NO_ALIAS:
                return None
            raise

    def find(self, label: str) -> Any | None:
        """Return the version of the checkpoint artifact called `label`, or None."""
        return self.versions().get(label)

    def versions(self) -> dict[str, Any]:
        """Return the versions by label of their checkpoint artifact; of several for one, the first that is found."""
        found = self.client.search_model_versions(f"name = '{self.name}'")
        return {each.tags["herd.artifact"]: each for each in reversed(found) if "herd.artifact" in each.tags}

    def version(self, checkpoint: Artifact, run: str, mlflow_run: str, model_id: str) -> Any:
        """Return the version of `checkpoint`, made if there is none."""
        if self._model() is None:
            self.client.create_registered_model(self.name, description=f"Models of the recipe family {self.name}")
        return self.find(checkpoint.label) or self._create(checkpoint, run, mlflow_run, model_id)

    def note(self, version: str, tags: Mapping[str, str]) -> None:
        """Write the gate's table, or whatever else is to be read there, as tags of the version."""
        from mlflow.exceptions import MlflowException

        for key, value in tags.items():
            try:
                self.client.set_model_version_tag(self.name, version, key, value)
            except MlflowException:  # two who write a new tag both insert it, and one gets an error: now it is there
                self.client.set_model_version_tag(self.name, version, key, value)

    def show(self, log: PromotionLog, *labels: str) -> list[str]:
        """Show what the log says: all aliases (see `show_aliases`), and the tags of the models `labels`.

        MLflow has no compare-and-set, so of two processes the one that read less may write last: whoever wrote reads
        the log again, and writes again if it has grown.
        """
        changes: list[str] = []
        while True:
            count = len(log.records)
            changes += self.show_aliases(log.records)
            log.refresh()
            if len(log.records) == count:
                break
        versions = self.versions() if labels else {}
        for label in labels:
            if label in versions:
                version = str(versions[label].version)
                self.note(version, version_tags(log.records, label))
                self.client.update_model_version(self.name, version, version_description(log.records, label))
        return changes

    def show_aliases(self, log: Log) -> list[str]:
        """Give each alias to whom the log gives it, and take it from everybody else; return what that changed.

        An alias whose model is not registered here is held by nobody: better none than another model. Aliases that
        the log does not decide on stay as they are, and so do all while it is empty.
        """
        model = self._model()
        if model is None or not log:
            return []
        versions, before = self.versions(), {alias: str(version) for alias, version in model.aliases.items()}
        wanted = {alias: str(versions[label].version) for alias, label in holders(log).items() if label in versions}
        for alias, version in wanted.items():
            if before.get(alias) != version:
                self.client.set_registered_model_alias(self.name, alias, version)
        managed = ALIASES | {record.alias for record in log}
        gone = [alias for alias in before if alias in managed and alias not in wanted]
        for alias in gone:
            self.client.delete_registered_model_alias(self.name, alias)
        moved = [f"{alias}: version {version}" for alias, version in wanted.items() if before.get(alias) != version]
        return [*moved, *(f"{alias}: none" for alias in gone)]

    def _model(self) -> Any | None:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_registered_model(self.name)
        except MlflowException as error:
            if not is_absence(error):
                raise
            return None

    def _create(self, checkpoint: Artifact, run: str, mlflow_run: str, model_id: str) -> Any:
        tags = {
            "herd.run": run,
            "herd.artifact": checkpoint.label,
            "herd.digest": checkpoint.facts["model_sha256"],
            "position": str(checkpoint.facts["end"]),
        }
        source, run_id = f"models:/{model_id}", self.tracker.run_id(mlflow_run)
        return self.client.create_model_version(self.name, source, run_id=run_id, tags=tags, model_id=model_id)


# Which artifacts hold an alias in the registry: the ones that must not be deleted.

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
