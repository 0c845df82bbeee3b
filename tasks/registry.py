"""MLflow's model registry as herd uses it: one registered model per recipe family, aliases for roles.

A version points at a checkpoint artifact; no bytes are copied. The gate's table is written as version tags, so that
the registry page answers why a model is, or is not, the champion.
"""

from __future__ import annotations

from typing import Any

from mlflow.exceptions import MlflowException

from llama3.evaluate.gate import Decision
from storage.artifact import Artifact
from tasks.tracking import Tracker

CANDIDATE = "candidate"


class Registry:
    """The registered model of one family."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.client, self.name = tracker, tracker.client, tracker.family

    def holder(self, alias: str) -> Any | None:
        """Return the model version that holds `alias`, or None."""
        try:
            return self.client.get_model_version_by_alias(self.name, alias)
        except MlflowException:
            return None

    def register(self, checkpoint: Artifact, run: str, mlflow_run: str, model_id: str) -> Any:
        """Return the version of `checkpoint`, made if there is none, and make it the candidate."""
        try:
            self.client.get_registered_model(self.name)
        except MlflowException:
            self.client.create_registered_model(self.name, description=f"Models of the recipe family {self.name}")
        versions = self.client.search_model_versions(f"name = '{self.name}'")
        same = [version for version in versions if version.tags.get("herd.artifact") == checkpoint.label]
        version = same[0] if same else self._create(checkpoint, run, mlflow_run, model_id)
        self.client.set_registered_model_alias(self.name, CANDIDATE, version.version)
        return version

    def _create(self, checkpoint: Artifact, run: str, mlflow_run: str, model_id: str) -> Any:
        tags = {
            "herd.run": run,
            "herd.artifact": checkpoint.label,
            "herd.digest": checkpoint.facts["model_sha256"],
            "position": str(checkpoint.facts["end"]),
        }
        source = f"models:/{model_id}"
        return self.client.create_model_version(self.name, source, run_id=mlflow_run, tags=tags, model_id=model_id)

    def record(self, version: str, decision: Decision) -> None:
        """Write the gate's table as tags of the version."""
        tags = {"verdict": "promoted" if decision.accepted else "refused"}
        tags |= {f"gate.{row.metric}".replace("/", "."): row.reason for row in decision.rows}
        for key, value in tags.items():
            self.client.set_model_version_tag(self.name, version, key, value)

    def promote(self, version: str, alias: str) -> None:
        self.client.set_registered_model_alias(self.name, alias, version)
