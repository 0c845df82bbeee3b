"""Records of promotion logs, made of what a test cares about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from herd.llama3.evaluate.gate import Check, Evidence, MeasuredScore
from herd.storage.artifact import Artifact
from herd.storage.root import Root
from herd.tasks.promotion.log import PROMOTED, HeadMoved, Kind, Log, Promotion, PromotionLog, current_label
from tests.tasks.standing_root import commit

FAMILY = "tiny"


def judged_record(number: int, kind: Kind = PROMOTED, log: Log = (), **more: Any) -> Promotion:
    """Return the record of a judgement on model `number`, of the run of that number."""
    scores = {"eval/bpb": MeasuredScore(value=2.5, better="lower", requests="r" * 64)}
    check = Check(metric="integrity/files", passed=True, reason="as committed")
    evidence = Evidence(rules={}, candidate=scores, checks=(check,))
    given = {
        "time": "2026-11-22T10:00:00+00:00",
        "kind": kind,
        "run": f"{FAMILY}-{number}",
        "family": FAMILY,
        "artifact": f"checkpoint/tiny-main-{number:08x}",
        "digest": f"{number:064x}",
        "position": 100 * number,
        "alias": "champion",
        "champion": current_label(log, "champion"),
        "against": len(log),
        "gate": evidence.decide(),
        "evidence": evidence,
    }
    return Promotion(**{**given, **more})


def add(root: Root, number: int, kind: Kind = PROMOTED, **more: Any) -> Promotion:
    """Append the record of a judgement to the log of the family."""
    log = PromotionLog(root, FAMILY)
    return log.append(judged_record(number, kind, log.records, **more), log.head)


def append_to(log: PromotionLog, decide: Callable[[Log], Promotion]) -> Promotion:
    """Append what `decide` makes of the log, decided again while others come first."""
    while True:
        log.refresh()
        try:
            return log.append(decide(log.records), log.head)
        except HeadMoved:
            continue


def champions(root: Root, count: int) -> list[Artifact]:
    """Commit models 1 to `count` and promote one after the other."""
    facts = {"end": 100, "model_sha256": "f" * 64}
    made = [commit(root, "checkpoint", "tiny-main", facts, seed=str(number)) for number in range(1, count + 1)]
    for number, artifact in enumerate(made, start=1):
        add(root, number, artifact=artifact.label)
    return made
