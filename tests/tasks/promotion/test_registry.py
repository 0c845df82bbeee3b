"""What the registry writes for a log: aliases, tags and descriptions, and which checkpoints it protects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from herd.storage.root import Root
from herd.tasks.promotion import registry as module
from herd.tasks.promotion.log import REJECTED
from herd.tasks.promotion.registry import LIMIT, Registry, _description, apply, labels_with_alias
from herd.tasks.runs.records import PENDING_APPROVAL, RunRecord, Runs
from tests.tasks.promotion_samples import judged_record


class Client:
    """A registered model of one family, with its calls in order; each call that writes a tag may fail once."""

    def __init__(self, *versions: tuple[str, str], aliases: dict[str, str] | None = None) -> None:
        self.listed = [
            SimpleNamespace(version=number, tags={"herd.artifact": label, "position": "100"}, description="")
            for number, label in versions
        ]
        self.aliases = aliases or {}
        self.calls: list[tuple[str, ...]] = []
        self.conflicts = 0

    def get_registered_model(self, name: str) -> Any:
        if not self.listed:
            raise MlflowException("no model", error_code=RESOURCE_DOES_NOT_EXIST)
        return SimpleNamespace(name=name, aliases=dict(self.aliases))

    def search_registered_models(self, query: str) -> list[Any]:
        return [self.get_registered_model(query.split("'")[1])]

    def search_model_versions(self, query: str) -> list[Any]:
        return self.listed

    def get_model_version(self, name: str, version: str) -> Any:
        return next(each for each in self.listed if each.version == version)

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self.calls.append(("set", alias, version))

    def delete_registered_model_alias(self, name: str, alias: str) -> None:
        self.calls.append(("delete", alias))

    def set_model_version_tag(self, name: str, version: str, key: str, value: str) -> None:
        self.calls.append(("tag", version, key, value))
        if self.conflicts:
            self.conflicts -= 1
            raise MlflowException("another process inserted it")


def registry_of(client: Client) -> Registry:
    return Registry(SimpleNamespace(client=client, family="tiny"))  # type: ignore[arg-type]


LOG = [judged_record(1), judged_record(2), judged_record(3, REJECTED)]
FIRST, SECOND, THIRD = (record.artifact for record in LOG)


def test_aliases_move_to_their_holders_and_away_from_all_others() -> None:
    aliases = {"champion": "1", "candidate": "3", "challenger": "2", "staging": "3"}
    client = Client(("3", THIRD), ("2", SECOND), ("1", FIRST), aliases=aliases)
    changes = registry_of(client).set_aliases(LOG)
    assert sorted(client.calls) == [("delete", "challenger"), ("set", "champion", "2"), ("set", "previous", "1")]
    assert sorted(changes) == ["challenger: none", "champion: version 2", "previous: version 1"]
    assert registry_of(Client(aliases=aliases)).set_aliases(LOG) == [], "no model is registered"
    assert registry_of(client).set_aliases([]) == [], "an empty log decides nothing"


def test_an_alias_whose_model_is_not_registered_is_held_by_none() -> None:
    client = Client(("1", FIRST), aliases={"champion": "1", "previous": "1"})
    assert registry_of(client).set_aliases(LOG) == ["champion: none"]
    assert client.calls == [("delete", "champion")]


def test_of_two_versions_of_a_checkpoint_the_first_that_is_listed_counts() -> None:
    client = Client(("3", SECOND), ("2", SECOND), ("1", FIRST))
    assert {label: version.version for label, version in registry_of(client).versions().items()} == {
        SECOND: "3",
        FIRST: "1",
    }


def test_only_tags_that_differ_are_written_and_again_after_a_conflict() -> None:
    client = Client(("1", FIRST))
    client.conflicts = 1
    registry_of(client).set_tags(client.listed[0], {"position": "100", "verdict": "promoted", "why": "x"})
    tag = ("tag", "1", "verdict", "promoted")
    assert client.calls == [tag, tag, ("tag", "1", "why", "x")]
    client.conflicts = 2
    with pytest.raises(MlflowException, match="another process"):
        registry_of(client).set_tags(client.listed[0], {"verdict": "promoted"})


@pytest.mark.parametrize("over", [0, 1])
def test_a_description_has_whole_sections_up_to_the_limit(over: int) -> None:
    head = "promoted · [report](http://x)"
    first, last = "Free.", "\n\n## Data\n\n"
    last += "x" * (LIMIT - len(head) - 2 - len(first + last) + over)
    text = _description("promoted", "http://x", first + last)
    assert text == f"{head}\n\n{first}" + ("" if over else last)
    assert len(text) <= LIMIT


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
