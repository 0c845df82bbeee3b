"""The promises of the storage protocol over hundreds of schedules, and that the simulation sees them broken."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from herd.storage import object_artifact, objects
from herd.storage.lease import BeatLease
from herd.storage.object_artifact import RemoteStore
from herd.tasks.promotion.log import PromotionLog
from tests.storage.simulation import FAULTS, Violation, play_seeds, simulate

MANY_SCHEDULES = int(os.environ.get("HERD_SCHEDULES", "2000"))
HAPPENED = (*FAULTS, "read", "two won")


@pytest.mark.fault("F2", "F5", "F12", "F14", "F24")
def test_no_schedule_breaks_a_promise() -> None:
    play_seeds(0, 200, HAPPENED)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_schedule_of_thousands_breaks_a_promise(record_property: Callable[[str, object], None]) -> None:
    record_property("summary", play_seeds(0, MANY_SCHEDULES, HAPPENED))


def test_a_seed_is_a_schedule() -> None:
    assert simulate(11).history == simulate(11).history


BROKEN: dict[str, tuple[Any, str, str, str]] = {
    "every attempt of a label is deleted": (
        RemoteStore, "delete", "remove_all(artifact.uri)", "remove_all(self.remote.join(label))",
    ),
    "files are deleted before the manifest": (
        RemoteStore, "delete", "remove(self._manifest(check_label(label)))", "remove_all(self.remote.join(label))",
    ),
    "a lease is not read back where two may win": (
        BeatLease, "_create", "if record is None or record.token != self.record.token:", "if False:",
    ),
    "a lease is held below a higher fence": (
        BeatLease, "_create", "if fences and fences[-1] > self.fence:", "if False:",
    ),
    "a manifest that was deleted is created again": (objects, "create_bytes", "if created:", "if False:"),
    "the newest record of the log is read once": (
        PromotionLog, "_read_on", "if self.records and self._read(len(self.records)) != self._text:", "if False:",
    ),
}  # fmt: skip
"""Fault -> owner, function, its line and another one. Audits found the second and third, this simulation the rest."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_protocol_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, line, other = BROKEN[fault]
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(line) == 1
    namespace: dict[str, Any] = {}
    source = source.replace(line, other).replace("super()", f"super({owner.__name__}, self)")
    exec(compile(source, f"<{fault}>", "exec"), vars(inspect.getmodule(owner)), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    if owner is objects:
        monkeypatch.setattr(object_artifact, name, namespace[name])
        monkeypatch.setattr("herd.storage.root.create_bytes", namespace[name])
    for seed in range(1_000):
        try:
            simulate(seed)
        except Violation as violation:
            print(f"{fault}: seed {seed}: {violation}")
            return
    pytest.fail("1,000 schedules did not find it")
