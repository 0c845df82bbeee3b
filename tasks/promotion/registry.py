"""MLflow's model registry: a registered model per recipe family, a version per judged checkpoint, aliases for roles.

A version points at a checkpoint artifact; no bytes are copied. Its description has the gate's table. Aliases follow the
promotion log, and one that a person moved stays (`Registry.set_aliases`). Every method raises MlflowException while
MLflow is away.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from herd.llama3.evaluate.gate import GateRow
from herd.storage.artifact import Artifact
from herd.storage.digests import SIGNING, TRUSTED
from herd.storage.lease import lease
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.promotion.log import (
    ALIASES,
    FOLDER,
    MOVED,
    ROLLED_BACK,
    HeadMoved,
    Log,
    Promotion,
    PromotionLog,
    alias_changes,
    current_aliases,
    decisive_record,
    gate_decisions,
    version_description,
    version_history,
    version_tags,
)
from herd.tasks.runs.records import RunRecord, Runs, mark_open, now
from herd.tasks.tracking.events import emit, resource_id
from herd.tasks.tracking.mlflow import MLflowTracker, is_absence
from herd.tasks.tracking.mlflow_store import tracking_uri

NO_ALIAS = "INVALID_PARAMETER_VALUE"
"""MLflow's error code where a model has no such alias."""
WAIT_S = 60.0
LIMIT = 5000
"""Characters of a description that every database of MLflow takes."""
TABLE = 2500
"""Characters of the gate's table in it."""
RULE = "\n\n---\n\n"
"""A line across the description, between what decided on the model and its card."""
SUPERSEDED = re.compile(r"gate\..*|judged_again|rollback|report|position|herd\.digest")
"""Tags of versions that earlier herds wrote; the description, the logged model and `tokens` have it now."""
WRITTEN = "herd.aliases"
"""Tag of the registered model: alias -> the version that herd set last, or two while it changes it."""
SOMEBODY = "unknown"
"""Who moved an alias: MLflow keeps no author of that, not even with a login."""
logger = logging.getLogger(__name__)


def gate_table(rows: Sequence[GateRow], limit: int = LIMIT) -> str:
    """Return the gate's table in markdown, what failed first; rows beyond `limit` characters are counted."""
    shown = sorted((row for row in rows if not row.without_champion), key=lambda row: row.passed)
    lines = ["| score | rule | result |", "|---|---|---|"]
    for number, row in enumerate(shown):
        result = "**FAIL** " * (not row.passed) + "not checked: " * (not row.checked) + row.reason
        lines.append(f"| {row.metric} | {row.rule} | {result.replace('|', '/')} |")
        if sum(map(len, lines)) + len(lines) > limit:
            lines[-1] = f"\n{len(shown) - number} more rows"
            break
    if count := len(rows) - len(shown):
        lines.append(f"\n{count} score{'s' * (count > 1)} passed because there was no champion yet to compare with")
    return "\n".join(lines)


def _description(log: Log, label: str, report: str, card: str) -> str:
    """Return a version's description in markdown: what decided on the model, with the report and the table, the card.

    Of a card that is too long, whole sections are left out at its end.
    """
    line, record = version_description(log, label), decisive_record(log, label)
    head = " · ".join(part for part in (line, f"[report]({report})" if report else "") if part)
    rows = record.decision.rows if record else ()
    parts = [head, *version_history(log, label), gate_table(rows, TABLE) if rows else ""]
    decision = "\n\n".join(part for part in parts if part)[: LIMIT - len(RULE)] + RULE
    while len(decision) + len(card) > LIMIT:
        card = card.rpartition("\n## ")[0].rstrip()
    return decision + card


def _card(description: str) -> str:
    """Return the card in a version's description; an earlier herd wrote a line before it."""
    decision, line, card = description.partition(RULE)
    return card if line else decision.partition("\n\n")[2]


class AliasState(NamedTuple):
    """The aliases of a family in MLflow against those of its promotion log."""

    shown: dict[str, str]
    """Alias -> version in MLflow, empty if no version has it; so are all."""
    target: dict[str, str]
    """By the log."""
    written: dict[str, list[str]] | None
    """What herd set last, or was about to set; None if an earlier herd set it, which did not note it."""
    labels: dict[str, str]
    """Version -> label of its checkpoint."""

    def moved(self) -> dict[str, str]:
        """Return the aliases that are not where herd has put them."""
        if self.written is None:
            return {}
        return {alias: at for alias, at in self.shown.items() if at not in (*self.written[alias], self.target[alias])}

    def stays(self, alias: str) -> bool:
        """Return whether the log has decided nothing since herd set `alias`."""
        return self.written is not None and self.written[alias][-1] == self.target[alias]


class Registry:
    """The registered model of one family."""

    def __init__(self, tracker: MLflowTracker) -> None:
        self.tracker, self.name = tracker, tracker.family

    @property
    def client(self) -> Any:
        return self.tracker.client

    def _describe_model(self, model: Any | None) -> None:
        """Create the registered model, or describe it if it has no description of a person's."""
        first = f"Models of the recipe family {self.name}"
        text = (
            f"{first}. The promotion log (`herd promotion-log {self.name}`) decides which is the champion. Moving its "
            "alias here to a model that was champion before is a rollback, as by "
            f"`herd rollback {self.name}`. Any other change of an alias stays until the next decision, and herd goes "
            "on with its own champion."
        )
        if model is None:
            self.client.create_registered_model(self.name, description=text)
        elif model.description == first:
            self.client.update_registered_model(self.name, text)

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
            self._describe_model(None)
        if known := self.versions().get(checkpoint.label):
            return known
        tags = {"herd.run": run, "herd.artifact": checkpoint.label}
        source, run_id = f"models:/{model_id}", self.tracker.run_id(mlflow_run)
        return self.client.create_model_version(self.name, source, run_id=run_id, tags=tags, model_id=model_id)

    def set_tags(self, version: Any, tags: Mapping[str, str]) -> None:
        """Write the tags that `version` has not or with another value, and delete those that are superseded."""
        from mlflow.exceptions import MlflowException

        for key, value in tags.items():
            if version.tags.get(key) == value:
                continue
            try:
                self.client.set_model_version_tag(self.name, version.version, key, value)
            except MlflowException:  # another process inserted the same new tag: now it can be updated
                self.client.set_model_version_tag(self.name, version.version, key, value)
        for key in filter(SUPERSEDED.fullmatch, version.tags):
            with suppress(MlflowException):  # another process deleted it
                self.client.delete_model_version_tag(self.name, version.version, key)

    def publish(self, log: PromotionLog) -> list[str]:
        """Write the log's state to MLflow: all aliases (see `set_aliases`), tags and description of each version.

        Only what differs is written, so that a pass after a crash completes it. Returns the aliases that changed.
        """
        changes: list[str] = []
        while True:
            # A process that read an older log may write last: so read it again, and write again if it has grown.
            count = len(log.records)
            changes += self.set_aliases(log)
            log.refresh()
            if len(log.records) == count:
                break
        judged = {record.artifact for record in log.records}
        for label, version in self.versions().items() if judged else ():
            if label in judged:
                before = version.description or ""
                address = re.search(r"\[report\]\(([^)]*)\)", before.partition("\n")[0])
                report = address[1] if address else version.tags.get("report", "")
                self._describe(version, log.records, label, report, _card(before))
                self.set_tags(version, version_tags(log.records, label))
        return changes

    def describe(self, log: Log, label: str, report: str, card: str) -> None:
        """Write the address of the report and the card to the version of the model `label`, if it is registered.

        A later `publish` keeps them.
        """
        if version := self.versions().get(label):
            self._describe(version, log, label, report, card)

    def _describe(self, version: Any, log: Log, label: str, report: str, card: str) -> None:
        text = _description(log, label, report, card)
        if text != version.description:
            self.client.update_model_version(self.name, version.version, text)

    def set_aliases(self, log: PromotionLog) -> list[str]:
        """Set each alias on its holder by the log and delete it elsewhere; return what that changed.

        An alias that is not where herd has put it was moved by a person, and stays until the log decides anew. That is
        recorded: as a rollback if the model held the alias before, else as `moved in MLflow`.

        An alias whose model is not registered here is deleted: no holder is better than a wrong one. Aliases that the
        log does not decide stay as they are, and so do all while it is empty.
        """
        if not log.records or not self._is_behind(log.records):
            return []
        # One process at a time: MLflow has no compare-and-set, and a slow writer would pass for a person.
        with lease(self.tracker.root, f"{FOLDER}/{self.name}", f"aliases of {self.name}", wait=lambda holder: None):
            log.refresh()
            if (state := self._alias_state(log.records)) is None:
                return []
            for alias in state.moved():
                if self._note_move(log, state, alias):
                    return []  # the log has grown: `publish` comes again
            if state.written is None:
                self._describe_model(self._model())
            return self._write_aliases(state)

    def _is_behind(self, log: Log) -> bool:
        """Return whether aliases of MLflow, or the note of what herd has set, differ from the log."""
        state = self._alias_state(log)
        if state is None:
            return False
        if state.written != {alias: [at] for alias, at in state.target.items()}:
            return True
        moved = state.moved()
        unnoted = [alias for alias in moved if not _noted(log, alias, *_move(state, alias))]
        return bool(unnoted) or any(
            state.shown[alias] != at for alias, at in state.target.items() if alias not in moved
        )

    def _alias_state(self, log: Log) -> AliasState | None:
        """Return the state of the aliases that the log decides; None if no model is registered."""
        model = self._model()
        if model is None:
            return None
        versions, written = self.versions(), json.loads(model.tags.get(WRITTEN, "null"))
        managed, holders = ALIASES | {record.alias for record in log} | (written or {}).keys(), current_aliases(log)
        at = {label: str(version.version) for label, version in versions.items()}
        shown = {alias: str(version) for alias, version in model.aliases.items()}
        return AliasState(
            {alias: shown.get(alias, "") for alias in managed},
            {alias: at.get(holders.get(alias, ""), "") for alias in managed},
            None if written is None else {alias: written.get(alias, "").split(" ") for alias in managed},
            {version: label for label, version in at.items()},
        )

    def _note_move(self, log: PromotionLog, state: AliasState, alias: str) -> bool:
        """Say that a person moved `alias`, and record it unless that is done; return whether the log has grown."""
        label, comment = _move(state, alias)
        if _noted(log.records, alias, label, comment):
            return False
        name, stays = f"{self.name}@{alias}", state.stays(alias)
        earlier = [record for record in alias_changes(log.records, alias) if record.artifact == label]
        signed = os.environ.get(SIGNING) or os.environ.get(TRUSTED)  # who may write to MLflow must not sign by it
        decides = bool(stays and earlier and not signed) and _is_whole(self.tracker.root, label)
        model = earlier[-1] if earlier else decisive_record(log.records, label) if label else None
        held = current_aliases(log.records).get(alias, "")
        record = Promotion(
            time=now(),
            kind=ROLLED_BACK if decides else MOVED,
            run=model.run if model else "",
            family=self.name,
            artifact=label,
            digest=model.digest if model else "",
            position=model.position if model else 0,
            alias=alias,
            champion=held,
            against=len(log.records),
            by=SOMEBODY,
            comment=f"{comment} in MLflow" if decides else comment,
        )
        if stays:
            try:
                log.append(record, log.head)
            except HeadMoved:
                return True
            except ValueError:  # the log must be signed and this process has no key: another one records it
                return False
        after = (
            f"herd goes on with {held or 'none'} until its next decision; to change it: herd rollback or herd promote"
        )
        if decides:
            after = f"recorded as a rollback from {held}"
        elif not stays:
            after = f"the decision that came meanwhile gives it to {held or 'none'}"
        text = f"{comment}{f' ({label})' * bool(label)} in MLflow, author unknown; {after}"
        logger.warning("%s: %s", name, text)
        payload = {"run": self.name, "stage": alias, "root": self.tracker.root.uri, "text": text}
        emit("herd.alert.moved", resource_id(f"family/{self.name}"), name, payload)
        return stays

    def _write_aliases(self, state: AliasState) -> list[str]:
        """Set and delete aliases and note what they are; return what changed."""
        stay = {alias for alias in state.moved() if state.stays(alias)}
        changed = {alias: at for alias, at in state.target.items() if state.shown[alias] != at and alias not in stay}
        if changed:  # noted before, so that after a crash both versions are known as herd's
            self._note_written(
                {**state.target, **{alias: f"{state.shown[alias]} {at}" for alias, at in changed.items()}}
            )
        for alias, at in changed.items():
            if at:
                self.client.set_registered_model_alias(self.name, alias, at)
            else:
                self.client.delete_registered_model_alias(self.name, alias)
        self._note_written(state.target)
        return [f"{alias}: {f'version {at}' if at else 'none'}" for alias, at in changed.items()]

    def _note_written(self, versions: Mapping[str, str]) -> None:
        text = json.dumps({alias: at for alias, at in sorted(versions.items()) if at})
        self.client.set_registered_model_tag(self.name, WRITTEN, text)

    def _model(self) -> Any | None:
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_registered_model(self.name)
        except MlflowException as error:
            if not is_absence(error):
                raise
            return None


def _move(state: AliasState, alias: str) -> tuple[str, str]:
    """Return the label of the model that `alias` was moved to, empty for none of herd's, and the move in words."""
    at = state.shown[alias]
    return state.labels.get(at, ""), f"set to version {at}" if at else "deleted"


def _noted(log: Log, alias: str, label: str, comment: str) -> bool:
    """Return whether the log has the move of an alias already."""
    moves = [record for record in log if (record.kind, record.alias) == (MOVED, alias)]
    return bool(moves) and (moves[-1].artifact, moves[-1].comment) == (label, comment)


def _is_whole(root: Root, label: str) -> bool:
    """Return whether no file of the artifact `label` is missing."""
    try:
        return not open_store(root).load(label).missing()
    except ValueError:
        return False


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
