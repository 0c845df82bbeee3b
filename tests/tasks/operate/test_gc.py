"""What is referenced is never deleted; what is not, is, once it is old."""

from __future__ import annotations

import io
import os
import re
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import flow, get_client, task
from prefect.client.schemas.filters import FlowRunFilter
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Completed, Failed, Running, State
from rich.console import Console as RichConsole

from herd.flows.maintenance import clean_up
from herd.llama3.evaluate.gate import Decision
from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.storage.filesystem import write_atomic
from herd.storage.lease import lease
from herd.storage.object_artifact import open_store
from herd.storage.objects import list_objects, put_bytes
from herd.storage.root import Root
from herd.tasks.console import TerminalConsole
from herd.tasks.operate import gc
from herd.tasks.operate.gc import (
    COPY,
    GcItem,
    GcPlan,
    delete_items,
    delete_rows,
    gc_rows,
    plan_gc,
    plan_rows,
    with_inputs,
)
from herd.tasks.operate.owners import TAG
from herd.tasks.promotion.log import Promotion, PromotionLog, aliased_labels, last_promotion
from herd.tasks.runs.records import PENDING_APPROVAL, RunRecord, Runs, StepRecord, mark_open
from herd.tasks.study.records import Studies, StudyRecord
from tests.tasks.standing_root import commit

LATER = 20 * 86400.0
"""Days are made to pass by telling the plan another time."""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.parse(tmp_path)


def chain(root: Root, family: str, seed: int) -> list[Artifact]:
    """Commit tokens, a first and a last checkpoint; all families share one collection."""
    collected = commit(root, "collected", "shared")
    tokens = commit(root, "tokens", family, collected=collected.key, seed=str(seed))
    first = commit(root, "checkpoint", f"{family}-ramp", tokens=tokens.key)
    return [collected, tokens, first, commit(root, "checkpoint", f"{family}-main", tokens=tokens.key, parent=first.key)]


def day(ago: float) -> str:
    """Return the time so many days before the one that plans are made at."""
    return datetime.fromtimestamp(time.time() + LATER - ago * 86400, UTC).isoformat(timespec="milliseconds")


def ended(
    root: Root, number: int, artifacts: list[Artifact], state: str = "finished", family: str = "tiny"
) -> RunRecord:
    record = RunRecord(
        name=f"{family}-{number}",
        family=family,
        recipe_digest="0" * 64,
        state=state,  # type: ignore[arg-type]
        started=day(30 - number),
        code="abc",
        steps={
            artifact.manifest.name + artifact.manifest.kind: StepRecord(artifact=artifact.label, outcome="created")
            for artifact in artifacts
        },
    )
    Runs(root).save(record)
    return record


def promoted(root: Root, run: str, artifact: Artifact, kind: str = "promoted", at: int = 1) -> Promotion:
    promotion = Promotion(
        time=day(30 - at),
        kind=kind,  # type: ignore[arg-type]
        run=run,
        family="tiny",
        artifact=artifact.label,
        digest="f" * 64,
        position=100,
        alias="champion",
        gate=Decision(accepted=True, rows=()),
    )
    log = PromotionLog(root, "tiny")
    return log.append(promotion, log.head)


def doomed(plan: GcPlan) -> set[str]:
    return {item.label for item in plan.doomed}


def planned(root: Root, keep: int = 1, aliases: tuple[str, ...] = (), older: float = 86400.0) -> GcPlan:
    return plan_gc(root, keep, older, aliases, time.time() + LATER)


def test_the_artifacts_of_older_runs_go_and_those_of_the_newest_stay(root: Root) -> None:
    old, new = chain(root, "tiny", 1), chain(root, "tiny", 2)
    ended(root, 1, old)
    ended(root, 2, new)
    assert doomed(planned(root)) == {artifact.label for artifact in old[1:]}  # both stand on the collection
    assert doomed(planned(root, keep=2)) == set()


def test_the_champion_the_one_before_a_challenger_and_what_they_stand_on_stay(root: Root) -> None:
    chains = [chain(root, "tiny", number) for number in range(1, 7)]
    for number, artifacts in enumerate(chains, start=1):
        ended(root, number, artifacts)
    for number in (1, 2, 3):  # each takes over from the one before
        promoted(root, f"tiny-{number}", chains[number - 1][-1], at=number)
    promoted(root, "tiny-4", chains[3][-1], PENDING_APPROVAL, at=4)
    gone = doomed(planned(root, aliases=(chains[4][-1].label,)))
    assert gone == {artifact.label for artifact in chains[0][1:]}


def test_what_an_old_champion_was_found_to_do_stays(root: Root) -> None:
    """Its card and the next comparison read the evaluation, which nothing is made from."""
    old, new = chain(root, "tiny", 1), chain(root, "tiny", 2)
    first, last = (commit(root, "evaluation", made.manifest.name, checkpoint=made.key) for made in old[-2:])
    ended(root, 1, [*old, first, last])
    ended(root, 2, new)
    assert doomed(planned(root)) == {artifact.label for artifact in [*old[1:], first, last]}
    promoted(root, "tiny-1", old[-1])
    assert doomed(planned(root)) == {first.label}


def test_what_the_report_of_a_study_is_made_from_stays_as_long_as_the_study_is_there(root: Root) -> None:
    chains = [chain(root, "tiny", number) for number in range(1, 5)]
    for number, (artifacts, digest) in enumerate(zip(chains, "abcd", strict=True), start=1):
        record = ended(root, number, artifacts)
        record.recipe_digest = digest
        Runs(root).save(record)
    variants = ["a", "b", "never run"]
    study = StudyRecord(
        name="tiny", digest="0", kind="compare", recipe="r", started=day(9), code="abc", recipes=variants
    )
    Studies(root).save(study)
    assert doomed(planned(root)) == {artifact.label for artifact in chains[2][1:]}
    root.remove("studies", "tiny")
    assert doomed(planned(root)) == {artifact.label for artifacts in chains[:3] for artifact in artifacts[1:]}


def test_the_newest_calibration_of_each_device_stays(root: Root) -> None:
    store, made = open_store(root), []
    for device, measured in (("cpu", "1"), ("cpu", "2"), ("gpu", "1")):
        parameters = {"device": device, "dtype": "bf16"}
        with store.staging() as folder:
            (folder / "calibration.json").write_text(measured)
            design = ArtifactSpec("calibration", device, 1, parameters, {"measured": measured})
            made.append(store.commit(design, folder, {}, "a test", "abc", 1.0))
    plan = plan_gc(root, 1, 0.0, (), now=made[-1].created + 1e6)
    assert doomed(plan) == {made[0].label}


def test_the_artifacts_of_unfinished_runs_stay(root: Root) -> None:
    for number, state in enumerate(("failed", "interrupted", "running", "finished"), start=1):
        ended(root, number, chain(root, "tiny", number), state)
    assert doomed(planned(root)) == set()


def test_a_run_that_nobody_went_on_with_for_long_is_given_up(root: Root) -> None:
    ended(root, -2, chain(root, "tiny", 1), "failed")  # 32 days ago
    ended(root, 1, chain(root, "tiny", 2))
    assert len(doomed(planned(root))) == 3


def test_what_is_new_or_being_made_or_of_a_family_at_work_stays(root: Root) -> None:
    lost = chain(root, "tiny", 1)
    other = commit(root, "tokens", "other", seed="9")
    assert doomed(planned(root, older=2 * LATER)) == set()
    with lease(root, other.label, "a maker"):
        assert doomed(planned(root)) == {artifact.label for artifact in lost}
    ended(root, 7, [], "running")
    with lease(root, "runs/tiny-7", "tiny-7"):
        assert doomed(planned(root)) == {other.label, lost[0].label}


def test_what_comes_into_use_between_plan_and_deletion_stays(root: Root) -> None:
    lost = chain(root, "tiny", 1)
    plan = planned(root)
    ended(root, 3, lost[:2], "running")
    with lease(root, lost[2].label, "a maker"):
        deleted = delete_items(root, plan)
    assert {item.label for item in deleted} == {lost[3].label}
    assert open_store(root).load(lost[2].label)


@pytest.mark.parametrize("damaged", ["manifest", "another file"])
def test_nothing_of_a_family_goes_while_its_champion_is_damaged(damaged: str, root: Root) -> None:
    chains = [chain(root, "tiny", number) for number in range(1, 4)]
    for number, artifacts in enumerate(chains, start=1):
        ended(root, number, artifacts)
        promoted(root, f"tiny-{number}", artifacts[-1], at=number)
    other = chain(root, "other", 9)
    champion = chains[2][-1]
    file = "manifest.json" if damaged == "manifest" else next(iter(champion.manifest.files))
    path = root.local / champion.label / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    lines = list[str]()
    deleted = delete_items(root, planned(root), lines.append)
    assert {item.label for item in deleted} == {artifact.label for artifact in other[1:]}
    (line,) = lines
    assert re.search(rf"tiny .* damaged: {champion.label}/{file} .*herd rollback", line)


def test_a_run_that_started_between_plan_and_deletion_keeps_its_family(root: Root) -> None:
    chain(root, "tiny", 1)
    plan = planned(root)
    ended(root, 3, [], "running")
    with lease(root, "runs/tiny-3", "tiny-3"):
        assert {item.label.split("/")[0] for item in delete_items(root, plan)} == {"collected"}


@pytest.mark.parametrize(
    ("family", "state", "left"), [("tiny", "running", 3), ("other", "running", 1), ("other", "finished", 1)]
)
def test_what_comes_into_use_during_the_deletions_stays(
    root: Root, family: str, state: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the family begins, or one of another family reuses an artifact, while the first is deleted."""
    ended(root, 9, [], family="old")
    lost = [commit(root, "tokens", "tiny", seed=str(seed)) for seed in range(4)]
    plan, delete, gone = planned(root, keep=1), Store.delete, list[str]()

    with ExitStack() as stack:

        def begin(store: Store, label: str) -> None:
            delete(store, label)
            gone.append(label)
            if len(gone) == 1:
                reused = next(artifact for artifact in lost if artifact.label != label)
                record = ended(root, 3, [reused] if family == "other" else [], state, family)
                mark_open(root, record.name)
                if family == "tiny":
                    stack.enter_context(lease(root, f"runs/{record.name}", record.name))

        monkeypatch.setattr(Store, "delete", begin)
        assert [item.label for item in delete_items(root, plan)] == gone
    assert {each.label for each in lost}.difference(gone) == {each.label for each in open_store(root).all("tokens")}
    assert len(lost) - len(gone) == left


def test_half_done_work_goes_after_a_month_unless_somebody_is_at_it(root: Root) -> None:
    for name in ("main-1a2b3c4d", "curate-5e6f7a8b"):
        write_atomic(root.local / "work" / name / "checkpoints" / "4096" / "weights.bin", b"0" * 4096)
    early, late = (plan_gc(root, 1, 0, [], now=time.time() + days * 86400) for days in (29, 31))
    assert early.doomed == []
    assert {item.label for item in late.doomed} == {"work/main-1a2b3c4d", "work/curate-5e6f7a8b"}
    assert late.freed >= 2 * 4096
    with lease(root, "work/curate-5e6f7a8b", "tiny-2"):
        assert [item.label for item in delete_items(root, late)] == ["work/main-1a2b3c4d"]
    assert [path.name for path in (root.local / "work").iterdir()] == ["curate-5e6f7a8b"]


def test_checkpoints_of_given_up_work_leave_the_object_store(bucket: str, tmp_path: Path) -> None:
    root = Root.parse(f"{bucket}/herd", scratch=str(tmp_path / "scratch"))
    for name in ("main-1a2b3c4d", "anneal-5e6f7a8b"):
        put_bytes(root.join("in-progress", name, "4096", "weights.bin"), b"0" * 4096)
    plan = plan_gc(root, 1, 0, [], now=time.time() + 31 * 86400)
    assert {(item.label, item.bytes) for item in plan.doomed} == {
        ("work/main-1a2b3c4d", 4096),
        ("work/anneal-5e6f7a8b", 4096),
    }
    assert len(delete_items(root, plan)) == 2
    assert list_objects(root.join("in-progress")) == {}


def test_page_caches_in_use_stay_and_only_what_was_brought_of_artifacts_is_listed(bucket: str, tmp_path: Path) -> None:
    root = Root.parse(f"{bucket}/caches", scratch=str(tmp_path / "scratch"))
    used, lost = commit(root, "tokens", "tiny"), commit(root, "tokens", "other")
    ended(root, 7, [used], "running")
    caches = {artifact.label: root.file("lazy", artifact.label) for artifact in (used, lost)}
    for artifact in (used, lost):
        shard = caches[artifact.label] / artifact.manifest.attempt / "shard.bin"
        write_atomic(shard, b"x")
        os.truncate(shard, 2**30)
    others = [root.file(*names) for names in (("logs", "flow.log"), ("work", "main-1a2b3c4d", "manifest.json"))]
    for path in others:
        write_atomic(path, "x")
    plan = planned(root)
    why = {item.copy: item.why for item in plan.items if item.kind == COPY}
    assert why == {
        used.folder: "a run needs it",
        caches[used.label]: "a run needs it",
        lost.folder: "",
        caches[lost.label]: "",
    }
    assert {item.label for item in plan.items if item.kind == COPY} == {used.label, lost.label}
    assert plan.freed < 2**20  # holes take no space
    assert {item.label for item in delete_items(root, plan)} == {lost.label}
    assert {path for path in why if path and path.exists()} == {used.folder, caches[used.label]}
    assert all(path.exists() for path in others)


def test_bytes_are_reported_by_kind_and_a_dry_run_deletes_nothing(root: Root) -> None:
    old, new = chain(root, "tiny", 1), chain(root, "tiny", 2)
    ended(root, 1, old)
    ended(root, 2, new)
    plan = planned(root)
    rows = {row["kind"]: row for row in gc_rows(plan, None)}
    assert rows["checkpoint"]["deleted"] == rows["checkpoint"]["kept"] == "2"
    assert rows["collected"]["deleted"] == "0"
    assert rows["all"]["deleted bytes"] == f"{sum(artifact.bytes for artifact in old[1:])} B"
    assert all(open_store(root).load(artifact.label) for artifact in old)


def test_the_flow_lists_and_then_deletes(root: Root) -> None:
    ended(root, 1, chain(root, "tiny", 1))
    new = ended(root, 2, chain(root, "tiny", 2))
    printed = io.StringIO()
    console = TerminalConsole(RichConsole(file=printed, width=200))
    assert "dry run: 3 of 7 would be deleted" in clean_up(root, 1, "0 s", True, console)
    assert printed.getvalue().count("would delete checkpoint/tiny-") == 2
    assert clean_up(root, 1, "0 s", False, console).startswith("deleted ")
    assert "dry run: 0 of 4" in clean_up(root, 1, "0 s", True, console)
    assert all(open_store(root).load(step.artifact) for step in new.steps.values())


@pytest.mark.parametrize(
    ("keep", "ages", "names"),
    [
        (0, ("7 d", ""), "keep_runs: 0"),
        (1, ("7", ""), "older_than: '7' is not a time"),
        (1, ("7 d", "90"), "databases: '90' is not a time"),
    ],
)
def test_wrong_words_are_refused(root: Root, keep: int, ages: tuple[str, str], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        clean_up(root, keep, ages[0], False, TerminalConsole(RichConsole(file=io.StringIO())), ages[1])


def test_the_log_names_what_must_stay(root: Root) -> None:
    first, second = chain(root, "tiny", 1)[-1], chain(root, "tiny", 2)[-1]
    promoted(root, "tiny-1", first, at=1)
    assert set(aliased_labels(root)) == {first.label}
    promoted(root, "tiny-2", second, PENDING_APPROVAL, at=2)
    assert set(aliased_labels(root)) == {first.label, second.label}
    last = last_promotion(root, "tiny-2")
    assert last is not None
    assert last.kind == PENDING_APPROVAL
    assert last_promotion(root, "tiny-9") is None


def test_flow_runs_are_read_page_by_page_and_deleted_with_all_that_is_below_them() -> None:
    """More than one page of runs, of children, and levels of them."""
    old, now = datetime.fromtimestamp(0, UTC), 1000.0
    listed = [SimpleNamespace(id=UUID(int=n), name=f"run-{n}", tags=[TAG], end_time=old) for n in range(120)]
    below = {1: range(200, 260), 200: [300], 300: [400]}
    calls: list[list[int]] = []

    def read(flow_run_filter: FlowRunFilter, limit: int | None = None, offset: int = 0) -> list[Any]:
        if limit is not None:
            return listed[offset : offset + limit]
        assert flow_run_filter.parent_flow_run_id is not None
        parents = [parent.int for parent in flow_run_filter.parent_flow_run_id.any_ or []]
        return [SimpleNamespace(id=UUID(int=n)) for parent in parents for n in below.get(parent, [])]

    def request(method: str, path: str, json: dict[str, Any]) -> Any:
        assert (method, path, json["limit"]) == ("POST", "/flow_runs/bulk_delete", 50)
        calls.append([UUID(name).int for name in json["flow_runs"]["id"]["any_"]])
        return SimpleNamespace(json=lambda: {"deleted": json["flow_runs"]["id"]["any_"]})

    client = SimpleNamespace(read_flow_runs=read, request=request)
    links = {str(UUID(int=7)): True, str(UUID(int=8)): False}
    items = {item.label: item for item in gc._flow_runs(client, links, 10.0, now)}
    assert len(items) == 120
    assert {name for name, item in items.items() if item.why} == {"run-7"}
    assert items["run-119"].age_s == now
    assert [UUID(name).int for name in gc._delete_flow_runs(client, [str(UUID(int=n)) for n in (1, 2)], 0.0)] == [1, 2]
    assert [len(call) for call in calls] == [2, 50, 12]
    assert sorted(n for call in calls for n in call) == [1, 2, *range(200, 260), 300, 400]


@given(st.data())
def test_what_is_referenced_is_never_deleted(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A random graph of artifacts, runs and aliases: every path from what is kept leads to what is there."""
    root = Root.parse(tmp_path_factory.mktemp("graph"))
    artifacts: list[Artifact] = []
    for number in range(data.draw(st.integers(1, 8))):
        parents = data.draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else []
        inputs = {f"input{place}": artifacts[parent].key for place, parent in enumerate(parents)}
        artifacts.append(commit(root, data.draw(st.sampled_from(["tokens", "checkpoint"])), f"a{number}", **inputs))
    places = st.lists(st.integers(0, len(artifacts) - 1), max_size=3)
    records = [
        ended(
            root, number, [artifacts[place] for place in data.draw(places)], data.draw(st.sampled_from(STATES)), family
        )
        for number, family in enumerate(data.draw(st.lists(st.sampled_from(["tiny", "other"]), max_size=4)), start=1)
    ]
    aliases = [artifacts[place].label for place in data.draw(places)]
    keep = data.draw(st.integers(1, 3))
    gone = {item.label for item in delete_items(root, planned(root, keep, tuple(aliases)))}

    by_label = {artifact.label: artifact for artifact in artifacts}
    for family in ("tiny", "other"):
        newest = [record for record in records if record.family == family][-keep:]
        open_ones = [record for record in records if record.state != "finished"]  # all are younger than a month
        for record in [*newest, *open_ones]:
            assert not with_inputs([step.artifact for step in record.steps.values()], by_label) & gone
    assert not with_inputs(aliases, by_label) & gone
    left = {artifact.label for kind in ("tokens", "checkpoint") for artifact in open_store(root).all(kind)}
    assert left == set(by_label) - gone
    referenced = {step.artifact for record in records for step in record.steps.values()} | set(aliases)
    assert gone >= set(by_label) - with_inputs(referenced, by_label)  # and what nothing ever referred to does go


STATES = ["finished", "finished", "failed", "running"]


@flow(name="retained")
def pipeline() -> None:
    """What flow runs of these tests are runs of; it never runs."""


@task
def variant() -> None: ...


def test_old_flow_runs_go_with_their_children_and_what_a_kept_run_links_to_stays(
    root: Root, prefect_server: dict[str, str]
) -> None:
    with temporary_settings({PREFECT_API_URL: prefect_server["api"]}), get_client(sync_client=True) as client:

        def made(state: State[None], tag: str = TAG, parent: UUID | None = None) -> str:
            return str(client.create_flow_run(pipeline, state=state, tags=[tag], parent_task_run_id=parent).id)

        old, retried, linked, parent = (made(Completed()) for _ in range(4))
        running, foreign = made(Running()), made(Failed(), "of others")
        child = made(Completed(), "", client.create_task_run(variant, UUID(parent), "0").id)
        record = ended(root, 1, [])
        record.prefect_run = linked
        Runs(root).save(record)

        def listed(older_than_s: float) -> dict[str, GcItem]:
            rows = plan_rows(root, planned(root), 1, older_than_s, (), client).items
            mine = (old, retried, linked, parent, running, foreign, child)
            return {item.ids[0]: item for item in rows if item.ids and item.ids[0] in mine}

        assert listed(LATER + 60) == {}, "they are younger"
        items = listed(LATER - 60)
        assert {name: item.why for name, item in items.items()} == {
            **dict.fromkeys((old, retried, parent), ""),
            linked: "a kept run links to it",
        }
        client.set_flow_run_state(UUID(retried), AwaitingRetry(), force=True)  # since it was listed
        deleted = delete_rows(root, GcPlan(tuple(items.values()), time.time() + LATER), LATER - 60, client)
        assert {item.ids[0] for item in deleted} == {old, parent}
        for name in (linked, retried, running, foreign):
            client.read_flow_run(UUID(name))
        for name in (old, parent, child):
            with pytest.raises(ObjectNotFound):
                client.read_flow_run(UUID(name))
