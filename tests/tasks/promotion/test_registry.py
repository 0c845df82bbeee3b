"""What the registry writes for a log: aliases, tags and descriptions, and which checkpoints it protects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from herd.llama3.evaluate.gate import GateRow
from herd.storage.digests import SIGNING
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.promotion import registry as module
from herd.tasks.promotion.log import MOVED, REJECTED, ROLLED_BACK, PromotionLog, logged_label, version_description
from herd.tasks.promotion.registry import (
    LIMIT,
    RULE,
    SOMEBODY,
    TABLE,
    WRITTEN,
    Registry,
    _description,
    apply,
    gate_table,
    labels_with_alias,
)
from herd.tasks.runs.records import PENDING_APPROVAL, RunRecord, Runs
from tests.storage.test_digests_signing import key
from tests.tasks.promotion_samples import FAMILY, add, champions, judged_record


class Client:
    """A registered model of one family, with its calls in order; each call that writes a tag may fail once."""

    def __init__(self, *versions: tuple[str, str], aliases: dict[str, str] | None = None) -> None:
        self.listed = [
            SimpleNamespace(version=number, tags={"herd.artifact": label, "position": "100"}, description="")
            for number, label in versions
        ]
        self.aliases = aliases or {}
        self.tags: dict[str, str] = {}
        self.calls: list[tuple[str, ...]] = []
        self.conflicts = 0

    def get_registered_model(self, name: str) -> Any:
        if not self.listed:
            raise MlflowException("no model", error_code=RESOURCE_DOES_NOT_EXIST)
        return SimpleNamespace(name=name, aliases=dict(self.aliases), tags=dict(self.tags), description="a person's")

    def search_registered_models(self, query: str) -> list[Any]:
        return [self.get_registered_model(query.split("'")[1])]

    def search_model_versions(self, query: str) -> list[Any]:
        return self.listed

    def get_model_version(self, name: str, version: str) -> Any:
        return next(each for each in self.listed if each.version == version)

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self.calls.append(("set", alias, version))
        self.aliases[alias] = version

    def delete_registered_model_alias(self, name: str, alias: str) -> None:
        self.calls.append(("delete", alias))
        del self.aliases[alias]

    def set_registered_model_tag(self, name: str, key: str, value: str) -> None:
        assert self.conflicts >= 0, "the note cannot be written"
        self.tags[key] = value

    def delete_model_version_tag(self, name: str, version: str, key: str) -> None:
        self.calls.append(("delete tag", version, key))

    def set_model_version_tag(self, name: str, version: str, key: str, value: str) -> None:
        self.calls.append(("tag", version, key, value))
        if self.conflicts:
            self.conflicts -= 1
            raise MlflowException("another process inserted it")


def registry_of(client: Client, root: Root | None = None) -> Registry:
    return Registry(SimpleNamespace(client=client, family=FAMILY, root=root))  # type: ignore[arg-type]


LOG = [judged_record(1), judged_record(2), judged_record(3, REJECTED)]
FIRST, SECOND, THIRD = (record.artifact for record in LOG)


@pytest.fixture
def log(tmp_path: Path) -> PromotionLog:
    """A log with two champions, of which the first is whole, and a rejected model: FIRST, SECOND and THIRD."""
    root = Root.parse(tmp_path / "root")
    for record in LOG:
        log = PromotionLog(root, FAMILY)
        log.append(record, log.head)
    return log


def test_aliases_move_to_their_holders_and_away_from_all_others(log: PromotionLog) -> None:
    aliases = {"champion": "1", "candidate": "3", "challenger": "2", "staging": "3"}
    client = Client(("3", THIRD), ("2", SECOND), ("1", FIRST), aliases=aliases)
    changes = registry_of(client, log.root).set_aliases(log)
    assert sorted(client.calls) == [("delete", "challenger"), ("set", "champion", "2"), ("set", "previous", "1")]
    assert sorted(changes) == ["challenger: none", "champion: version 2", "previous: version 1"]
    assert client.aliases["staging"] == "3"
    assert registry_of(client, log.root).set_aliases(log) == []
    assert registry_of(Client(aliases=aliases), log.root).set_aliases(log) == [], "no model is registered"
    empty = PromotionLog(Root.parse(log.root.local / "empty"), FAMILY)
    assert registry_of(client, empty.root).set_aliases(empty) == [], "an empty log decides nothing"


def test_an_alias_whose_model_is_not_registered_is_held_by_none(log: PromotionLog) -> None:
    client = Client(("1", FIRST), aliases={"champion": "1", "previous": "1"})
    assert registry_of(client, log.root).set_aliases(log) == ["champion: none"]
    assert client.calls == [("delete", "champion")]


class Shared:
    """A family of three whole models in MLflow, of which two were champions and the last was rejected."""

    def __init__(self, folder: Path) -> None:
        self.root = Root.parse(folder)
        self.labels = [artifact.label for artifact in champions(self.root, 2)]
        add(self.root, 3, REJECTED)
        self.labels.append(THIRD)
        self.client = Client(*((str(number), label) for number, label in reversed([*enumerate(self.labels, 1)])))
        self.publish()
        assert self.client.aliases == {"champion": "2", "previous": "1", "candidate": "3"}
        self.client.calls.clear()

    def publish(self) -> list[str]:
        """Do what each pass of the reconciler does; return what it changed."""
        log, registry = PromotionLog(self.root, FAMILY), registry_of(self.client, self.root)
        before, changes = 0, list[str]()
        while len(log.records) != before:
            before = len(log.records)
            changes += registry.set_aliases(log)
            log.refresh()
        return changes

    @property
    def champion(self) -> str:
        return logged_label(self.root, FAMILY, "champion")

    @property
    def last(self) -> Any:
        return PromotionLog(self.root, FAMILY).records[-1]


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_a_person_who_moves_the_alias_to_an_earlier_champion_rolls_back(
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    shared.client.aliases["champion"] = "1"
    assert shared.publish() == ["previous: none"], "it follows from the rollback"
    assert shared.client.aliases["champion"] == "1", "it stays"
    record, first = shared.last, shared.labels[0]
    assert (record.kind, record.by, record.comment) == (ROLLED_BACK, SOMEBODY, "set to version 1 in MLflow")
    assert (record.artifact, record.champion, record.run) == (first, shared.labels[1], "tiny-1")
    assert shared.champion == first
    assert f"tiny@champion: set to version 1 ({first}) in MLflow, author unknown; recorded as a rollback" in caplog.text
    caplog.clear()
    assert (shared.publish(), caplog.text, shared.last.n) == ([], "", record.n), "once"
    add(shared.root, 4, artifact=shared.labels[1])
    assert "champion: version 2" in shared.publish(), "a decision of herd's moves it again"


@pytest.mark.parametrize(
    ("moved", "label", "comment"),
    [("3", THIRD, "set to version 3"), ("9", "", "set to version 9"), ("", "", "deleted")],
)
def test_an_alias_that_a_person_moved_elsewhere_stays_and_decides_nothing(
    shared: Shared, moved: str, label: str, comment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """To a rejected model, to a version that is not herd's, away."""
    del shared.client.aliases["champion"]
    shared.client.aliases |= {"champion": moved} if moved else {}
    for _ in range(2):
        assert shared.publish() == []
        assert shared.client.aliases.get("champion", "") == moved
    assert caplog.text.count(f"tiny@champion: {comment}") == 1
    record = shared.last
    assert (record.kind, record.artifact, record.comment, record.n) == (MOVED, label, comment, 4)
    assert shared.champion == shared.labels[1]
    add(shared.root, 4, REJECTED, artifact=shared.labels[0])
    assert shared.publish() == ["candidate: version 1"], "it stays until the champion is decided anew"
    add(shared.root, 5, artifact=shared.labels[0])
    assert "champion: version 1" in shared.publish()
    assert shared.client.aliases["champion"] == "1"


def test_a_move_that_a_decision_overtook_is_reported(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    shared.client.aliases["champion"] = "3"
    add(shared.root, 4, artifact=shared.labels[0])
    assert "champion: version 1" in shared.publish()
    assert f"set to version 3 ({THIRD}) in MLflow, author unknown; the decision that came meanwhile" in caplog.text
    assert shared.last.n == 4


def test_a_move_to_a_model_that_is_gone_decides_nothing(shared: Shared) -> None:
    open_store(shared.root).delete(shared.labels[0])
    shared.client.aliases["champion"] = "1"
    shared.publish()
    assert (shared.last.kind, shared.champion) == (MOVED, shared.labels[1])


def test_where_records_are_signed_a_move_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write to MLflow has no key; the process that notices the move may have one."""
    monkeypatch.setenv(SIGNING, key(tmp_path, "one")[0])
    shared = Shared(tmp_path / "root")
    shared.client.aliases["champion"] = "1"
    shared.publish()
    assert (shared.last.kind, shared.champion) == (MOVED, shared.labels[1])


@pytest.mark.parametrize("dies", ["before the alias", "after the alias"])
def test_what_a_crash_left_between_alias_and_note_is_herds_own(
    shared: Shared, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(shared.root, 4, artifact=shared.labels[0])
    with monkeypatch.context() as patch:
        if dies == "before the alias":
            patch.setattr(Client, "set_registered_model_alias", lambda *_: 1 / 0)
        else:
            set_alias = Client.set_registered_model_alias

            def last(client: Client, *call: str) -> None:
                set_alias(client, *call)
                client.conflicts = -1

            patch.setattr(Client, "set_registered_model_alias", last)
        with pytest.raises((ZeroDivisionError, AssertionError)):
            shared.publish()
    shared.client.conflicts = 0
    if dies == "after the alias":  # and the next decision gives it back before anything was published
        add(shared.root, 5, ROLLED_BACK, artifact=shared.labels[1])
    decisions = shared.last.n
    shared.publish()
    champion = "2" if dies == "after the alias" else "1"
    assert (shared.client.aliases["champion"], shared.client.aliases["candidate"]) == (champion, "1")
    assert shared.last.n == decisions, "nobody moved it"


def test_aliases_of_an_earlier_herd_without_the_note_are_set_as_before(shared: Shared) -> None:
    del shared.client.tags[WRITTEN]
    shared.client.aliases["champion"] = "1"
    assert shared.publish() == ["champion: version 2"]
    assert shared.last.n == 3


def test_of_two_versions_of_a_checkpoint_the_first_that_is_listed_counts() -> None:
    client = Client(("3", SECOND), ("2", SECOND), ("1", FIRST))
    assert {label: version.version for label, version in registry_of(client).versions().items()} == {
        SECOND: "3",
        FIRST: "1",
    }


def test_only_tags_that_differ_are_written_and_again_after_a_conflict() -> None:
    client = Client(("1", FIRST))
    client.conflicts = 1
    registry_of(client).set_tags(client.listed[0], {"verdict": "promoted", "herd.artifact": FIRST, "why": "x"})
    tag = ("tag", "1", "verdict", "promoted")
    assert client.calls == [tag, tag, ("tag", "1", "why", "x"), ("delete tag", "1", "position")]
    client.conflicts = 2
    with pytest.raises(MlflowException, match="another process"):
        registry_of(client).set_tags(client.listed[0], {"verdict": "promoted"})


def test_tags_that_the_description_replaces_are_deleted_and_a_persons_stay() -> None:
    client = Client(("1", FIRST))
    old = ("gate.eval.bpb", "gate.integrity.files", "judged_again", "rollback", "report", "herd.digest")
    client.listed[0].tags = dict.fromkeys((*old, "herd.artifact", "herd.run", "verdict", "gated", "owner"), "x")
    registry_of(client).set_tags(client.listed[0], {})
    assert client.calls == [("delete tag", "1", key) for key in old]


@pytest.mark.parametrize("over", [0, 1])
def test_a_description_has_whole_sections_up_to_the_limit(over: int) -> None:
    head = f"{version_description(LOG, FIRST)} · [report](http://x)"
    decision = f"{head}\n\n{gate_table(LOG[0].decision.rows)}{RULE}"
    first, last = "Free.", "\n\n## Data\n\n"
    last += "x" * (LIMIT - len(decision) - len(first + last) + over)
    text = _description(LOG, FIRST, "http://x", first + last)
    assert text == f"{decision}{first}" + ("" if over else last)
    assert len(text) <= LIMIT


def test_a_table_has_failures_first_and_counts_what_does_not_fit() -> None:
    def row(number: int, passed: bool = True, champion: float | None = 2.0) -> GateRow:
        metric = f"eval/task{number}"
        reason = f"{metric} is a | b"
        return GateRow(metric=metric, rule="better", candidate=1, champion=champion, passed=passed, reason=reason)

    rows = [*map(row, range(100)), row(100, passed=False), row(101, champion=None)]
    lines = gate_table(rows, TABLE).splitlines()
    assert lines[:3] == [
        "| score | rule | result |",
        "|---|---|---|",
        "| eval/task100 | better | **FAIL** eval/task100 is a / b |",
    ]
    listed = [line for line in lines if line.startswith("| eval")]
    assert f"{101 - len(listed)} more rows" in lines
    assert lines[-1] == "1 score passed because there was no champion yet to compare with"
    assert len("\n".join(lines)) < TABLE + 200
    assert len(gate_table(rows, 10**6).splitlines()) == 2 + 101 + 2


def test_checkpoints_with_an_alias_in_any_family_are_protected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, runs = Root.parse(tmp_path), Runs(Root.parse(tmp_path))
    for family in ("large", "tiny"):
        runs.save(RunRecord(name=f"{family}-1", family=family, recipe_digest="d", started="", code="c"))
    client = Client(("1", FIRST), ("2", SECOND), aliases={"champion": "2", "latest": "2"})
    named = {"large": client, "tiny": Client(("1", THIRD), aliases={"champion": "1"})}

    def search(query: str) -> list[Any]:
        return Client.search_registered_models(named[query.split("'")[1]], query)

    both = SimpleNamespace(
        search_registered_models=search,
        get_model_version=lambda name, version: named[name].get_model_version(name, version),
    )
    reach = SimpleNamespace(wait=lambda seconds, say: True)
    monkeypatch.setattr(module, "MLflowTracker", lambda *_: SimpleNamespace(client=both, reach=reach, uri="x"))
    (tmp_path / "mlflow.db").touch()
    assert labels_with_alias(root) == [SECOND, THIRD]


def test_a_run_has_the_verdict_of_its_own_last_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(Root.parse(tmp_path))
    record = RunRecord(name="tiny-1", family="tiny", recipe_digest="d", started="", code="c", mlflow_run="m")
    log = [judged_record(1, PENDING_APPROVAL), judged_record(1, REJECTED), judged_record(2)]
    tagged: list[object] = []
    tracker: Any = SimpleNamespace(stale=False, set_tags=lambda *call: tagged.append(call))
    monkeypatch.setattr(module, "show_log", lambda *_: True)
    assert apply(runs, record, tracker, SimpleNamespace(records=log))  # type: ignore[arg-type]
    assert (runs.find("tiny-1").verdict, tagged) == (REJECTED, [("m", {"verdict": REJECTED})])
