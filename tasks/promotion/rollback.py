"""Rollback: give an alias back to a model that held it before, without gate or evaluation, in seconds.

The artifact must exist; its bytes are not read again.
"""

from __future__ import annotations

import getpass
from contextlib import suppress
from typing import NamedTuple

from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.promotion.log import (
    CHAMPION,
    ROLLED_BACK,
    HeadMoved,
    Log,
    Promotion,
    PromotionLog,
    alias_changes,
    alias_history,
    current_label,
)
from herd.tasks.promotion.registry import show_log
from herd.tasks.runs.records import now
from herd.tasks.tracking.mlflow import MLflowTracker


class RollbackRequest(NamedTuple):
    """A person's request."""

    family: str
    alias: str = CHAMPION
    to: str = ""
    """Label of a model (`checkpoint/` may be left out), or number of a record in the log; empty: the one before."""
    by: str = ""
    comment: str = ""


def roll_back(root: Root, request: RollbackRequest) -> tuple[Promotion, bool]:
    """Give the alias back and return the record, and whether MLflow shows it.

    Raises ValueError if no model held the alias before, the named model did not, or its artifact is gone, and if
    the champion changes before the record is written: two people who see a bad champion must not go back twice.
    """
    family, alias, _, by, comment = request
    log = PromotionLog(root, family)
    champion = current_label(log.records, alias)
    while True:
        if (current := current_label(log.records, alias)) != champion:
            raise ValueError(
                f"rollback: {family}@{alias} was {champion} and is now {current}; look at it "
                f"(herd promotion-log {family}) and decide again"
            )
        target = _target(log.records, request)
        _check_artifact(root, log.records, alias, target.artifact)
        record = Promotion(
            time=now(),
            kind=ROLLED_BACK,
            run=target.run,
            family=family,
            artifact=target.artifact,
            digest=target.digest,
            position=target.position,
            alias=alias,
            champion=champion,
            against=len(log.records),
            by=by or getpass.getuser(),
            comment=comment,
        )
        try:
            promotion = log.append(record, log.head)
            break
        except HeadMoved:
            log.refresh()
    return promotion, show_log(MLflowTracker(root, family), log)


def _target(log: Log, request: RollbackRequest) -> Promotion:
    """Return the record of the reign to go back to. Raises ValueError naming the models that held the alias."""
    name, history = f"{request.family}@{request.alias}", alias_changes(log, request.alias)
    if not history:
        raise ValueError(f"rollback: no model of {request.family} was promoted to {request.alias} yet")
    champion = history[-1].artifact
    if not request.to:
        if len(earlier := alias_history(log, request.alias)) < 2:
            raise ValueError(f"rollback: {name} is {champion}, no model held it before; name one with --to")
        return earlier[-2]
    names = [(record, (record.artifact, record.artifact.rpartition("/")[2], str(record.n))) for record in history]
    matches = [record for record, aliases in names if request.to in aliases]
    if not matches:
        raise ValueError(
            f"rollback: {request.to!r} never held {name}; choose the label or the number of one that did: "
            + ", ".join(f"{record.n} {record.artifact}" for record in history)
        )
    if matches[-1].artifact == champion:
        raise ValueError(f"rollback: {champion} holds {name} already")
    return matches[-1]


def _check_artifact(root: Root, log: Log, alias: str, label: str) -> None:
    """Raise ValueError, naming the models to go back to, if files of the artifact `label` are missing."""
    store = open_store(root)
    try:
        artifact = store.load(label)
        if lost := artifact.missing():
            raise ValueError(f"{label} lacks {lost[0]}")
    except ValueError as error:
        whole = []
        for other in dict.fromkeys(record.artifact for record in alias_changes(log, alias)):
            if other not in (label, current_label(log, alias)):
                with suppress(ValueError):
                    whole.append(store.load(other).label)
        remedy = f"choose --to {' or '.join(whole)}" if whole else "no other model that held it exists"
        raise ValueError(f"rollback: {error}; {remedy}") from error
