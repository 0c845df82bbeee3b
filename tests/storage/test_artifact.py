from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.artifact import Design, Store, flatten
from storage.filesystem import glob, write_atomic
from storage.manifest import DamagedArtifact, Manifest
from storage.staging import clear_staging

SPAWN = multiprocessing.get_context("spawn")


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


def test_parts_and_names(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, design())
    artifact = store.at(design().label)
    assert artifact.part("documents") == artifact.path / "documents"
    assert artifact.part("documents/a.txt").read_text() == "hello"
    assert artifact.uri == artifact.path.as_uri()
    with pytest.raises(ValueError, match=r"has no 'model'; it has documents"):
        artifact.part("model")


@pytest.mark.parametrize(
    "label", ["../x-1a2b3c4d", "curated/../x-1a2b3c4d", "/etc/x-1a2b3c4d", "a/b/c-1a2b3c4d", "web"]
)
def test_labels_that_leave_the_root_are_refused(tmp_path: Path, label: str) -> None:
    for call in (Store(tmp_path).at, Store(tmp_path).delete):
        with pytest.raises(ValueError, match="write kind/name-key8"):
            call(label)


def test_a_manifest_that_changed_is_not_believed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, design(loss=1))
    place = tmp_path / design(loss=1).label / "manifest.json"
    text = place.read_text()
    place.write_text(text.replace('"documents": 1', '"documents": 7'))
    with pytest.raises(DamagedArtifact, match="changed since it was written"):
        store.at(design(loss=1).label)
    assert store.all("curated") == []
    assert store.find(design(loss=1)) is None
    build(store, design(loss=1))
    assert len(store.all("curated")) == 1


def test_a_manifest_of_before_seals_is_believed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, design())
    place = tmp_path / design().label / "manifest.json"
    place.write_text(store.at(design().label).manifest.model_dump_json(exclude={"attempt", "pages"}))
    assert store.find(design()) is not None


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abß漢"), inner, max_size=3),
    )
)
def test_seals_survive_reading_and_writing(value: object) -> None:
    manifest = design(value=value).manifest({}, {"value": value}, "test-1", "abc", 0.1)
    read = Manifest.parse(manifest.text(), manifest.label)
    assert read.text() == manifest.text()


def test_deleting_is_idempotent(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, design())
    for _ in range(2):
        store.delete(design().label)
    assert store.find(design()) is None
    assert not list((tmp_path / "curated").iterdir())
    assert not list((tmp_path / ".staging").iterdir())


def test_the_newest_of_the_same_name_explains(tmp_path: Path) -> None:
    """Names that begin alike, and manifests that cannot be read, do not."""
    store = Store(tmp_path)
    for age, loss in ((30, 0.1), (20, 0.2), (10, 0.3)):
        build(store, design(loss=loss))
        place = tmp_path / design(loss=loss).label / "manifest.json"
        os.utime(place, (1e9 - age, 1e9 - age))
    place.write_text("{")
    other = Design("curated", "web-2", 1, {"loss": 9}, {"sources": "a" * 64})
    build(store, other)
    assert store.explain(design(loss=0.4)) == "curated/web: new, loss 0.2 -> 0.4"


def commit_when_told(text: str, go: Connection) -> None:
    """Commit in each root that comes, until there is none."""
    while root := go.recv():
        build(Store(root), design(), text)
        go.send((root / design().label / "documents" / "a.txt").read_text())


def test_of_processes_that_commit_the_same_one_wins(tmp_path: Path) -> None:
    pipes, processes = [], []
    for n in range(4):
        ours, theirs = SPAWN.Pipe()
        processes.append(SPAWN.Process(target=commit_when_told, args=(f"text {n}", theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for number in range(5):
        for pipe in pipes:
            pipe.send(tmp_path / str(number))
        assert len({pipe.recv() for pipe in pipes}) == 1
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
        assert process.exitcode == 0


def stage_and_wait(root: Path, ready: Connection) -> None:
    with Store(root).staging() as folder:
        (folder / "half").write_text("half")
        ready.send(str(folder))
        ready.recv()


def test_only_what_the_dead_left_in_staging_is_removed(tmp_path: Path) -> None:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=stage_and_wait, args=(tmp_path, theirs))
    process.start()
    half = Path(ours.recv()) / "half"
    with Store(tmp_path).staging() as mine:
        Store(tmp_path).clear_staging()
        assert mine.is_dir()
        assert half.exists(), "its process lives"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert clear_staging(tmp_path, older_than_s=60) == (0, 0), "younger"
        assert clear_staging(tmp_path)[0] == 1
        assert mine.is_dir()
        assert not half.exists()
    assert not list((tmp_path / ".staging").iterdir())
    assert not list((tmp_path / ".locks" / "staging").iterdir())


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
