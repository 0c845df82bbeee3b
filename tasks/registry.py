"""MLflow's model registry as herd uses it: one registered model per recipe family, aliases for roles.

A version points at a checkpoint artifact; no bytes are copied. The gate's table is written as version tags, so that
the registry page answers why a model is, or is not, the champion. Unlike the rest of what is sent to MLflow, these
calls raise while it is away: "there is no champion" must never be read from a server that does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflow.exceptions import MlflowException

from storage.artifact import Artifact
from tasks.promotions import CHALLENGER, Promotion, holders
from tasks.reach import is_absence
from tasks.tracking import Tracker

CANDIDATE = "candidate"
NO_ALIAS = "INVALID_PARAMETER_VALUE"
"""What MLflow answers, with these words, where a model has no such alias."""


class Registry:
    """The registered model of one family. Every method raises MlflowException if MLflow does not answer."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.client, self.name = tracker, tracker.client, tracker.family

    def holder(self, alias: str) -> Any | None:
        """Return the model version that holds `alias`, or None."""
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

    def register(self, checkpoint: Artifact, run: str, mlflow_run: str, model_id: str) -> Any:
        """Return the version of `checkpoint`, made if there is none, and make it the candidate."""
        version = self.version(checkpoint, run, mlflow_run, model_id)
        self.promote(str(version.version), CANDIDATE)
        return version

    def version(self, checkpoint: Artifact, run: str, mlflow_run: str, model_id: str) -> Any:
        """Return the version of `checkpoint`, made if there is none."""
        try:
            self.client.get_registered_model(self.name)
        except MlflowException as error:
            if not is_absence(error):
                raise
            self.client.create_registered_model(self.name, description=f"Models of the recipe family {self.name}")
        return self.find(checkpoint.label) or self._create(checkpoint, run, mlflow_run, model_id)

    def _create(self, checkpoint: Artifact, run: str, mlflow_run: str, model_id: str) -> Any:
        tags = {
            "herd.run": run,
            "herd.artifact": checkpoint.label,
            "herd.digest": checkpoint.facts["model_sha256"],
            "position": str(checkpoint.facts["end"]),
        }
        source, run_id = f"models:/{model_id}", self.tracker.run_id(mlflow_run)
        return self.client.create_model_version(self.name, source, run_id=run_id, tags=tags, model_id=model_id)

    def note(self, version: str, tags: Mapping[str, str]) -> None:
        """Write the gate's table, or whatever else is to be read there, as tags of the version."""
        for key, value in tags.items():
            self.client.set_model_version_tag(self.name, version, key, value)

    def promote(self, version: str, alias: str) -> None:
        """Give `alias` to a version, away from whichever holds it."""
        self.client.set_registered_model_alias(self.name, alias, version)

    def show_aliases(self, decisions: list[Promotion]) -> None:
        """Give each alias to whom the decisions (of every family, oldest first) gave it last.

        One whose model is not registered here stays as it is: a run that this server was not told of yet.
        """
        mine, versions = [decision for decision in decisions if decision.family == self.name], self.versions()
        wanted = {alias: decision.artifact for (_, alias), decision in holders(mine).items()}
        registered = [decision.artifact for decision in mine if decision.artifact in versions]
        if registered:
            wanted[CANDIDATE] = registered[-1]
        for alias, label in wanted.items():
            version, held = versions.get(label), self.holder(alias)
            if version is not None and (held is None or held.version != version.version):
                self.promote(str(version.version), alias)
        if CHALLENGER not in wanted and self.holder(CHALLENGER) is not None:
            self.client.delete_registered_model_alias(self.name, CHALLENGER)
