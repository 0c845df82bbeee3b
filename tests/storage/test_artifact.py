from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.artifact import Design, Store, flatten
from storage.filesystem import glob, write_atomic
from storage.lease import LeaseHeld, lease

FORK = multiprocessing.get_context("fork")


def design(**parameters: object) -> Design:
    return Design("curated", "web", 1, dict(parameters), {"sources": "a" * 64})


def build(store: Store, intent: Design, text: str = "hello") -> None:
    with store.staging() as folder:
        (folder / "documents").mkdir()
        (folder / "documents" / "a.txt").write_text(text)
        store.commit(intent, folder, {"documents": 1}, "test-1", "abc", 0.1)


def test_a_committed_artifact_is_found_by_what_it_is_made_from(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.find(design(jaccard=0.8)) is None
    build(store, design(jaccard=0.8))
    found = store.find(design(jaccard=0.8))
    assert found is not None
    assert found.facts == {"documents": 1}
    assert found.path.name == f"web-{found.key[:8]}"
    found.verify()
    assert store.find(design(jaccard=0.7)) is None
    assert not list((tmp_path / ".staging").iterdir())


def test_a_new_key_is_explained_by_its_first_difference(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.explain(design(jaccard=0.8)) == "curated/web: new, the first of its name"
    build(store, design(jaccard=0.8))
    assert store.explain(design(jaccard=0.7)) == "curated/web: new, jaccard 0.8 -> 0.7"
    assert store.explain(design(jaccard=0.7, bands=2)) == "curated/web: new, jaccard 0.8 -> 0.7 and 1 more"


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail_half_way() -> None:
        with store.staging() as folder:
            (folder / "half.txt").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert store.find(design()) is None
    assert not list(tmp_path.rglob("half.txt"))


def test_the_second_of_two_writers_gets_the_first_one_s_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, design(), "first")
    build(store, design(), "second")
    found = store.find(design())
    assert found is not None
    assert (found.path / "documents" / "a.txt").read_text() == "first"


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_text("hell")], ids=["missing", "truncated"])
def test_a_damaged_artifact_is_moved_aside(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    store = Store(tmp_path)
    build(store, design())
    harm(store.all("curated")[0].path / "documents" / "a.txt")
    assert store.find(design()) is None
    assert len(list((tmp_path / ".damaged").iterdir())) == 1
    build(store, design())
    assert store.find(design()) is not None


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, design())
    artifact = store.all("curated")[0]
    (artifact.path / "documents" / "a.txt").write_text("hellp")
    with pytest.raises(ValueError, match=r"documents/a.txt changed since it was committed"):
        artifact.verify()


@given(st.dictionaries(st.sampled_from("abcd"), st.one_of(st.integers(), st.text("aß漢", max_size=3)), max_size=4))
def test_keys_depend_on_content_not_on_order(parameters: dict[str, object]) -> None:
    turned = dict(reversed(list(parameters.items())))
    assert design(**parameters).key == design(**turned).key
    assert design(**parameters).key != design(**{**parameters, "e": 1}).key


def test_flattening_keeps_lists_whole_and_stops_where_told() -> None:
    data = {"a": {"b": {"c": 1}}, "d": [1, {"e": 2}]}
    assert flatten(data) == {"a.b.c": 1, "d": [1, {"e": 2}]}
    assert flatten(data, depth=2) == {"a.b": {"c": 1}, "d": [1, {"e": 2}]}


def hold(folder: Path, ready: object) -> None:
    with lease(folder, "run quickstart-1"):
        ready.set()  # type: ignore[attr-defined]
        time.sleep(60)


def test_a_lease_has_one_holder_and_dies_with_it(tmp_path: Path) -> None:
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(10)
    with pytest.raises(LeaseHeld, match=rf"run quickstart-1 \(process {process.pid}"), lease(tmp_path, "second"):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with lease(tmp_path, "second"):
        pass


def test_atomic_writes_leave_no_other_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "deep" / "a.json", "one")
    write_atomic(tmp_path / "deep" / "a.json", "two")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.json"]
    assert (tmp_path / "deep" / "a.json").read_text() == "two"


def test_a_uri_names_a_file_a_folder_or_a_glob(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c/d.md"):
        write_atomic(tmp_path / name, "x")
    assert glob(f"{tmp_path}/a.txt") == [f"{tmp_path}/a.txt"]
    assert glob(f"file://{tmp_path}/*.txt") == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert glob(str(tmp_path)) == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt", f"{tmp_path}/c/d.md"]
    assert glob(f"{tmp_path}/none") == []
