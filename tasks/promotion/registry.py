"""MLflow's model registry: a registered model per recipe family, a version per judged checkpoint, aliases for roles.

A version points at a checkpoint artifact; no bytes are copied. The gate's table is written as version tags. Aliases
show the promotion log and are never read to decide anything. Every method raises MlflowException while MLflow is away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herd.storage.artifact import Artifact
from herd.storage.root import Root
from herd.tasks.promotion.log import (
    ALIASES,
    Log,
    PromotionLog,
    current_aliases,
    gate_decisions,
    version_description,
    version_tags,
)
from herd.tasks.runs.records import RunRecord, Runs, mark_open
from herd.tasks.tracking.mlflow import MLflowTracker, is_absence
from herd.tasks.tracking.mlflow_store import tracking_uri

NO_ALIAS = "INVALID_PARAMETER_VALUE"
"""MLflow's error code where a model has no such alias."""
WAIT_S = 60.0
REPORT = "report"
"""Tag of a version: the address of its run's report in MLflow's pages."""
LIMIT = 5000
"""Characters of a description that every database of MLflow takes."""


def _description(line: str, report: str, card: str) -> str:
    """Return a version's description in markdown: the decision in a line, with the report, then the card.

    Of a card that is too long, whole sections are left out at its end.
    """
    head = " · ".join(part for part in (line, f"[report]({report})" if report else "") if part)
    room = LIMIT - len(head) - 2
    while len(card) > room:
        card = card.rpartition("\n## ")[0].rstrip()
    return "\n\n".join(part for part in (head, card) if part)


class Registry:
    """The registered model of one family."""

    def __init__(self, tracker: MLflowTracker) -> None:
        self.tracker, self.name = tracker, tracker.family

    @property
    def client(self) -> Any:
        return self.tracker.client

    def version_with_alias(self, alias: str) -> Any | None:
        """Return the model version that has `alias`, or None."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_model_version_by_alias(self.name, alias)
        except MlflowException as error:
            if is_absence(error) or error.error_code == NO_ALIAS:
                return None
            raise

    def versions(self) -> dict[str, Any]:
        """Return the versions by label of their checkpoint artifact; of several for one, the first that is listed."""
        versions = self.client.search_model_versions(f"name = '{self.name}'")
        return {each.tags["herd.artifact"]: each for each in reversed(versions) if "herd.artifact" in each.tags}

    def version(self, checkpoint: Artifact, run: str, mlflow_run: str, model_id: str) -> Any:
        """Return the version of `checkpoint`, created if there is none."""
        if self._model() is None:
            self.client.create_registered_model(self.name, description=f"Models of the recipe family {self.name}")
        if known := self.versions().get(checkpoint.label):
            return known
        tags = {
            "herd.run": run,
            "herd.artifact": checkpoint.label,
            "herd.digest": checkpoint.metadata["model_sha256"],
            "position": str(checkpoint.metadata["end"]),
        }
        source, run_id = f"models:/{model_id}", self.tracker.run_id(mlflow_run)
        return self.client.create_model_version(self.name, source, run_id=run_id, tags=tags, model_id=model_id)

    def set_tags(self, version: Any, tags: Mapping[str, str]) -> None:
        """Write the tags, such as the gate's table, that `version` has not or with another value."""
        from mlflow.exceptions import MlflowException

        for key, value in tags.items():
            if version.tags.get(key) == value:
                continue
            try:
                self.client.set_model_version_tag(self.name, version.version, key, value)
            except MlflowException:  # another process inserted the same new tag: now it can be updated
                self.client.set_model_version_tag(self.name, version.version, key, value)

    def publish(self, log: PromotionLog) -> list[str]:
        """Write the log's state to MLflow: all aliases (see `set_aliases`), tags and description of each version.

        Only what differs is written, so that a pass after a crash completes it. Returns the aliases that changed.
        """
        changes: list[str] = []
        while True:
            # MLflow has no compare-and-set: the process that read an older log may write last. So read the log again
            # after writing, and write again if it has grown.
            count = len(log.records)
            changes += self.set_aliases(log.records)
            log.refresh()
            if len(log.records) == count:
                break
        judged = {record.artifact for record in log.records}
        for label, version in self.versions().items() if judged else ():
            if label in judged:
                self.set_tags(version, version_tags(log.records, label))
                before, report = version.description or "", version.tags.get(REPORT, "")
                text = _description(version_description(log.records, label), report, before.partition("\n\n")[2])
                if text != before:
                    self.client.update_model_version(self.name, version.version, text)
        return changes

    def describe(self, log: Log, label: str, report: str, card: str) -> None:
        """Write the address of the report and the card to the version of the model `label`, if it is registered.

        A later `publish` changes only the first line.
        """
        if version := self.versions().get(label):
            self.set_tags(version, {REPORT: report})
            text = _description(version_description(log, label), report, card)
            self.client.update_model_version(self.name, version.version, text)

    def set_aliases(self, log: Log) -> list[str]:
        """Set each alias on its holder by the log and delete it elsewhere; return what that changed.

        An alias whose model is not registered here is deleted: no holder is better than a wrong one. Aliases that the
        log does not decide stay as they are, and so do all while it is empty.
        """
        model = self._model()
        if model is None or not log:
            return []
        versions, before = self.versions(), {alias: str(version) for alias, version in model.aliases.items()}
        target = {
            alias: str(versions[label].version) for alias, label in current_aliases(log).items() if label in versions
        }
        for alias, version in target.items():
            if before.get(alias) != version:
                self.client.set_registered_model_alias(self.name, alias, version)
        managed = ALIASES | {record.alias for record in log}
        removed = [alias for alias in before if alias in managed and alias not in target]
        for alias in removed:
            self.client.delete_registered_model_alias(self.name, alias)
        moved = [f"{alias}: version {version}" for alias, version in target.items() if before.get(alias) != version]
        return [*moved, *(f"{alias}: none" for alias in removed)]

    def _model(self) -> Any | None:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_registered_model(self.name)
        except MlflowException as error:
            if not is_absence(error):
                raise
            return None


def labels_with_alias(root: Root) -> list[str]:
    """Return the labels of the checkpoints that hold any alias of the root's families: they must not be deleted.

    Raises ValueError if the registry does not answer: it might know a champion.
    """
    uri = tracking_uri(root)
    if uri.startswith("sqlite:///") and not (root.local / "mlflow.db").exists():
        return []
    labels: list[str] = []
    tracker = MLflowTracker(root, "")
    if not tracker.reach.wait(WAIT_S, print):
        why = f"MLflow at {tracker.uri} does not answer ({tracker.reach.why}), and it might know a champion"
        raise ValueError(tracker.fault or f"{why}; start it first")
    for family in sorted({record.family for record in Runs(root).all()}):
        versions = [
            tracker.client.get_model_version(model.name, version)
            for model in tracker.client.search_registered_models(f"name = '{family}'")
            for version in set(model.aliases.values())
        ]
        labels += [version.tags["herd.artifact"] for version in versions if "herd.artifact" in version.tags]
    return labels


# Run record, MLflow run and aliases follow the promotion log, never lead it: after a crash in between, the next command
# or `reconcile` completes them.


def apply(runs: Runs, record: RunRecord, tracker: MLflowTracker, log: PromotionLog) -> bool:
    """Write the newest decision on run `record`, whose lease is held.

    Returns whether MLflow shows it. If MLflow is away the run is marked, so that `reconcile` sends what is missing.
    Raises OSError if the root does not answer.
    """
    record.verdict = gate_decisions(log.records, record.judged_in or record.name)[-1].kind
    runs.save(record)
    tracker.set_tags(record.mlflow_run, {"verdict": record.verdict})
    shown = show_log(tracker, log)
    if tracker.stale:
        record.mlflow_stale = True
        runs.save(record)
        mark_open(runs.root, record.name)
    return shown


def show_log(tracker: MLflowTracker, log: PromotionLog) -> bool:
    """Make MLflow's aliases and versions follow `log`; False if it is away."""
    return tracker.reach.attempt(lambda: Registry(tracker).publish(log) is not None, False)
