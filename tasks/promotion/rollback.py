"""Rollback: give an alias back to a model that held it before, without gate or evaluation, in seconds.

The artifact must exist; its bytes are not read again. If the champion changes meanwhile nothing is done, or two people
would go back twice.
"""

from __future__ import annotations

import getpass
from contextlib import suppress
from typing import NamedTuple

from storage.object_artifact import open_store
from storage.root import Root
from tasks.promotion.log import CHAMPION, ROLLED_BACK, Log, Promotion, PromotionLog, changes, reigning, reigns
from tasks.runs.records import now
from tasks.tracking.mlflow import Tracker
from tasks.tracking.registry import Registry


class RollbackRequest(NamedTuple):
    """What a person asks for."""

    family: str
    alias: str = CHAMPION
    to: str = ""
    """Label of a model (`checkpoint/` may be left out), or place of a record in the log; empty: the one before."""
    by: str = ""
    comment: str = ""


def roll_back(root: Root, wanted: RollbackRequest) -> tuple[Promotion, bool]:
    """Give the alias back and return the record, and whether MLflow shows it.

    Raises ValueError if no model held the alias before, the one that is named did not, or its artifact is gone.
    """
    log = PromotionLog(root, wanted.family)
    seen = reigning(log.records, wanted.alias)
    wanted = wanted._replace(by=wanted.by or getpass.getuser())

    def write(records: Log) -> Promotion:
        if (champion := reigning(records, wanted.alias)) != seen:
            raise ValueError(
                f"rollback: {wanted.family}@{wanted.alias} was {seen} and is {champion} by now; look at it "
                f"(herd promotions {wanted.family}) and decide again"
            )
        return _record(root, records, wanted, seen)

    promotion = log.append(write)
    return promotion, show(log, promotion)


def show(log: PromotionLog, promotion: Promotion) -> bool:
    """Show in MLflow who holds what now, and on both versions why; return whether it does."""

    tracker = Tracker(log.root, log.family)
    registry = Registry(tracker)
    labels = (promotion.artifact, promotion.champion)
    return tracker.reach.attempt(lambda: registry.show(log, *labels) is not None, False)


def _record(root: Root, log: Log, wanted: RollbackRequest, champion: str) -> Promotion:
    target = _target(log, wanted)
    try:
        artifact = open_store(root).at(target.artifact)
    except ValueError as error:
        raise ValueError(f"rollback: {error}; {_others(root, log, wanted.alias, target)}") from error
    if lost := artifact.missing():
        raise ValueError(f"rollback: {target.artifact} lacks {lost[0]}; {_others(root, log, wanted.alias, target)}")
    return Promotion(
        time=now(),
        kind=ROLLED_BACK,
        run=target.run,
        family=wanted.family,
        artifact=target.artifact,
        digest=target.digest,
        position=target.position,
        alias=wanted.alias,
        champion=champion,
        against=len(log),
        by=wanted.by,
        comment=wanted.comment,
    )


def _target(log: Log, wanted: RollbackRequest) -> Promotion:
    """Return the record of the reign to go back to. Raises ValueError naming those that there were."""
    name, held = f"{wanted.family}@{wanted.alias}", changes(log, wanted.alias)
    if not held:
        raise ValueError(f"rollback: no model of {wanted.family} was promoted to {wanted.alias} yet")
    if not wanted.to:
        if len(pile := reigns(log, wanted.alias)) < 2:
            raise ValueError(f"rollback: {name} is {held[-1].artifact}, no model held it before; name one with --to")
        return pile[-2]
    found = [one for one in held if wanted.to in (one.artifact, one.artifact.rpartition("/")[2], str(one.n))]
    if not found:
        raise ValueError(
            f"rollback: {wanted.to!r} never held {name}; choose the label or the number of one that did: "
            + ", ".join(f"{record.n} {record.artifact}" for record in held)
        )
    if found[-1].artifact == held[-1].artifact:
        raise ValueError(f"rollback: {found[-1].artifact} holds {name} already")
    return found[-1]


def _others(root: Root, log: Log, alias: str, gone: Promotion) -> str:
    """Say which other models that held the alias can be gone back to."""
    store, there = open_store(root), []
    for label in dict.fromkeys(record.artifact for record in changes(log, alias)):
        if label not in (gone.artifact, reigning(log, alias)):
            with suppress(ValueError):
                there.append(store.at(label).label)
    return f"choose --to {' or '.join(there)}" if there else "no other model that held it is there"
