"""Status and retention of a root in an object store, from another machine than the one that trains."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from herd.llama3.train import metrics
from herd.storage.object_artifact import open_store
from herd.storage.objects import put_bytes
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.operate import doctor
from herd.tasks.operate.gc import COPY, delete_items, plan_gc
from herd.tasks.report.progress import run_progress
from herd.tasks.runs.records import Runs
from herd.tasks.runs.work_dirs import IN_PROGRESS
from herd.tasks.stages.alerts import Alert, emit_alert, read_alerts
from tests.tasks.standing_root import begun, commit, tiny, train


def test_another_machine_sees_the_newest_checkpoint_and_what_was_stored_with_it(bucket: str, tmp_path: Path) -> None:
    here = Root.parse(f"{bucket}/status", scratch=str(tmp_path / "here"))
    there = Root.parse(f"{bucket}/status", scratch=str(tmp_path / "there"))
    recipe = tiny()
    record = begun(here, recipe)
    record.state = "interrupted"
    Runs(here).save(record)
    work = train(here, recipe, record, steps=8, saved=8)
    checkpoint = next((work / "checkpoints").iterdir())
    place = here.join(IN_PROGRESS, work.name)
    found = run_progress(there, [record])[0]
    assert (found.step, found.position, found.saved is not None) == ("main", 16_384, True)  # the stage before

    journal = (work / "journal.jsonl").read_bytes()
    put_bytes(
        f"{place}/journal/{checkpoint.name}-a-0001-000.jsonl", b'{"before":null,"start":0,"files":{}}\n' + journal
    )
    put_bytes(f"{place}/{checkpoint.name}/a-0001/manifest.json", b"{}")
    found = run_progress(there, [record])[0]
    assert found.position == int(checkpoint.name)
    assert found.saved is not None
    assert time.time() - found.saved.time < 60
    assert found.last(metrics.GOODPUT) == 0.93


def test_alerts_are_seen_from_everywhere(bucket: str, tmp_path: Path) -> None:
    here = Root.parse(f"{bucket}/alerts", scratch=str(tmp_path / "here"))
    there = Root.parse(f"{bucket}/alerts", scratch=str(tmp_path / "there"))
    for number in range(2):
        alert = Alert(time=number, kind="disk", run="tiny-1", stage="main", text="full", position=number)
        emit_alert(here, TerminalConsole(), alert)
    assert [alert.position for alert in read_alerts(there, "tiny-1")] == [0, 1]


def test_remote_artifacts_and_local_copies_are_deleted_and_what_is_used_stays(bucket: str, tmp_path: Path) -> None:
    root = Root.parse(f"{bucket}/retention", scratch=str(tmp_path))
    kept = begun(root, tiny())  # its state is running, and so it is an open run
    lost = commit(root, "checkpoint", "other-main", {"end": 1}, tokens="0" * 64)
    later = time.time() + 86_400
    plan = plan_gc(root, 1, 3600, [], later)
    assert {(item.label, item.kind) for item in plan.doomed} == {(lost.label, "checkpoint"), (lost.label, COPY)}
    deleted = delete_items(root, plan)
    assert {item.kind for item in deleted} == {"checkpoint", COPY}
    assert not root.file(lost.label).exists()
    with pytest.raises(ValueError, match="not found under"):
        open_store(root).load(lost.label)
    for step in kept.steps.values():
        open_store(root).load(step.artifact).verify()


def test_the_doctor_measures_a_store_and_leaves_nothing(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "REMOTE_TRIAL", 1 << 20)
    root = Root.parse(f"{bucket}/doctor", scratch=str(tmp_path))
    found = {finding.check: finding for finding in doctor.check_root(root)}
    assert list(found) == ["root", "clock"]
    assert found["root"].what.startswith(f"{root.uri}: writes ")
    assert found["clock"].state == "ok"
    assert re.fullmatch("[0-5] s from that of the store", found["clock"].what)
    assert root.names() == []
    monkeypatch.setattr(doctor.time, "time", lambda: 1e9)  # of a machine in 2001, whose requests a store refuses
    assert {finding.check: finding for finding in doctor.check_root(root)}["clock"].state == "fail"
