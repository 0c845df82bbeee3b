from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import herd.storage.artifact
from herd.storage.artifact import ArtifactSpec, DamagedArtifact, Manifest, Store, flatten, verify_folder
from herd.storage.digests import FileDigest, digest_file, digest_json
from herd.storage.filesystem import glob, write_atomic
from herd.storage.root import Root
from herd.storage.staging import clear_staging
from tests.storage.commit_samples import build_on_signal, disk_calls, stage_and_wait, started


def artifact_spec(**parameters: object) -> ArtifactSpec:
    return ArtifactSpec("curated", "web", 1, dict(parameters), {"sources": "a" * 64})


def build(store: Store, spec: ArtifactSpec, text: str = "hello") -> None:
    with store.staging() as folder:
        (folder / "documents").mkdir()
        (folder / "documents" / "a.txt").write_text(text)
        store.commit(spec, folder, {"documents": 1}, "test-1", "abc", 0.1)


def test_a_committed_artifact_is_found_by_what_it_is_made_from(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.find(artifact_spec(jaccard=0.8)) is None
    build(store, artifact_spec(jaccard=0.8))
    artifact = store.find(artifact_spec(jaccard=0.8))
    assert artifact is not None
    assert artifact.metadata == {"documents": 1}
    assert artifact.path.name == f"web-{artifact.key[:8]}"
    artifact.verify()
    assert store.find(artifact_spec(jaccard=0.7)) is None
    assert not list((tmp_path / ".staging").iterdir())


def test_a_new_key_is_explained_by_its_first_difference(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.explain(artifact_spec(jaccard=0.8)) == "curated/web: new, nothing of this name was made before"
    build(store, artifact_spec(jaccard=0.8))
    assert store.explain(artifact_spec(jaccard=0.7)) == "curated/web: new, jaccard 0.8 -> 0.7"
    assert store.explain(artifact_spec(jaccard=0.7, bands=2)) == "curated/web: new, jaccard 0.8 -> 0.7 and 1 more"


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail_half_way() -> None:
        with store.staging() as folder:
            (folder / "half.txt").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert store.find(artifact_spec()) is None
    assert not list(tmp_path.rglob("half.txt"))


def test_the_second_of_two_writers_gets_the_first_one_s_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, artifact_spec(), "first")
    build(store, artifact_spec(), "second")
    artifact = store.find(artifact_spec())
    assert artifact is not None
    assert (artifact.path / "documents" / "a.txt").read_text() == "first"


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_text("hell")], ids=["missing", "truncated"])
def test_a_damaged_artifact_is_moved_aside(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    store = Store(tmp_path)
    build(store, artifact_spec())
    harm(store.all("curated")[0].path / "documents" / "a.txt")
    assert store.find(artifact_spec()) is None
    assert len(list((tmp_path / ".damaged").iterdir())) == 1
    build(store, artifact_spec())
    assert store.find(artifact_spec()) is not None


def test_parts_and_names(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, artifact_spec())
    artifact = store.load(artifact_spec().label)
    assert artifact.path_of("documents") == artifact.path / "documents"
    assert artifact.path_of("documents/a.txt").read_text() == "hello"
    assert artifact.uri == artifact.path.as_uri()
    with pytest.raises(ValueError, match=r"has no 'model'; it has documents"):
        artifact.path_of("model")


@pytest.mark.parametrize(
    "label", ["../x-1a2b3c4d", "curated/../x-1a2b3c4d", "/etc/x-1a2b3c4d", "a/b/c-1a2b3c4d", "web"]
)
def test_labels_that_leave_the_root_are_refused(tmp_path: Path, label: str) -> None:
    for call in (Store(tmp_path).load, Store(tmp_path).delete):
        with pytest.raises(ValueError, match="write kind/name-key8"):
            call(label)


def test_a_manifest_that_changed_is_not_believed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, artifact_spec(loss=1))
    path = tmp_path / artifact_spec(loss=1).label / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"documents": 1', '"documents": 7'))
    with pytest.raises(DamagedArtifact, match="changed since it was written"):
        store.load(artifact_spec(loss=1).label)
    assert store.all("curated") == []
    assert store.find(artifact_spec(loss=1)) is None
    build(store, artifact_spec(loss=1))
    assert len(store.all("curated")) == 1


def test_a_manifest_without_a_seal_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, artifact_spec())
    path = tmp_path / artifact_spec().label / "manifest.json"
    path.write_text(store.load(artifact_spec().label).manifest.model_dump_json(exclude={"attempt", "pages"}))
    with pytest.raises(DamagedArtifact, match="has no seal"):
        store.load(artifact_spec().label)


def sealed(folder: Path, **changes: object) -> None:
    """Change a manifest and seal it, as somebody who can write the root would."""
    data = json.loads((folder / "manifest.json").read_text())
    del data["seal"]
    data |= changes
    (folder / "manifest.json").write_text(json.dumps(data | {"seal": digest_json(data)}))


def deep(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"metadata": ' + '{"a":' * 100_000 + "1" + "}" * 100_001)


def is_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


BROKEN: dict[str, Callable[[Path], None]] = {
    "lost": lambda folder: (folder / "manifest.json").unlink(),
    "a folder": is_folder,
    "nested deeply": deep,
    "no object": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "not text": lambda folder: (folder / "manifest.json").write_bytes(bytes(range(256))),
    "made yesterday": lambda folder: sealed(folder, created="yesterday"),
    "made without a time zone": lambda folder: sealed(folder, created="0001-01-01T00:00:00"),
}


@pytest.mark.parametrize("harm", BROKEN.values(), ids=BROKEN)
def test_one_broken_manifest_hides_nothing_else_and_its_artifact_is_made_again(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    store = Store(tmp_path)
    build(store, artifact_spec(n=1))
    build(store, artifact_spec(n=2))
    harm(tmp_path / artifact_spec(n=1).label)
    assert [artifact.label for artifact in store.all("curated")] == [artifact_spec(n=2).label]
    assert store.all("curated")[0].created > 0
    with pytest.raises(DamagedArtifact, match="web-"):
        store.load(artifact_spec(n=1).label)
    build(store, artifact_spec(n=1), "again")
    artifact = store.find(artifact_spec(n=1))
    assert artifact is not None
    assert artifact.path_of("documents/a.txt").read_text() == "again"
    assert len(list((tmp_path / ".damaged").iterdir())) == 1


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def test_every_flipped_bit_is_found_on_reuse_named_and_mended(tmp_path: Path) -> None:
    store, random = Store(tmp_path), Random(1)
    spec, text = artifact_spec(), "".join(random.choices("abcdefgh", k=10_000))
    messages: list[str] = []
    for _ in range(100):
        build(store, spec, text)
        assert store.find(spec, messages.append) is not None
        flipped(tmp_path / spec.label / "documents" / "a.txt", random.randrange(80_000))
        with pytest.raises(DamagedArtifact, match=r"documents/a\.txt changed"):
            _ = store.load(spec.label).path
        assert store.find(spec, messages.append) is None
    assert len(messages) == len(list((tmp_path / ".damaged").iterdir())) == 100
    assert all(word.startswith(f"artifact {spec.label}: documents/a.txt changed") for word in messages)


def test_a_file_is_read_once_a_boot_and_again_after_a_write_or_a_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = Store(tmp_path), []
    build(store, artifact_spec())
    path = tmp_path / artifact_spec().label / "documents" / "a.txt"
    os.utime(path, (1e9, 1e9))

    def digest(path: Path) -> FileDigest:
        read.append(path.name)
        return digest_file(path)

    monkeypatch.setattr(herd.storage.artifact, "digest_file", digest)
    for _ in range(3):
        assert store.load(artifact_spec().label).path_of("documents/a.txt") == path
    assert read == ["a.txt"]
    os.utime(path, (1e9, 1e9 + 1))
    assert store.find(artifact_spec(), print) is not None
    assert store.find(artifact_spec(), print) is not None
    assert read == ["a.txt"] * 2
    monkeypatch.setattr(herd.storage.artifact, "_boot_name", lambda: "another boot")
    assert store.find(artifact_spec(), print) is not None
    assert read == ["a.txt"] * 3
    store.load(artifact_spec().label).verify()
    assert read == ["a.txt"] * 4
    store.delete(artifact_spec().label)
    assert not (tmp_path / ".verified" / artifact_spec().label).exists()


def test_hosts_that_share_a_root_verify_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(Store(tmp_path), artifact_spec())
    together = threading.Barrier(2)

    def digest(path: Path) -> FileDigest:
        together.wait(10)
        return digest_file(path)

    monkeypatch.setattr(herd.storage.artifact, "digest_file", digest)
    monkeypatch.setattr(herd.storage.artifact, "_boot_name", lambda: threading.current_thread().name)
    with ThreadPoolExecutor(2, thread_name_prefix="host") as hosts:
        list(hosts.map(verify_folder, [tmp_path / artifact_spec().label] * 2))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abß漢"), inner, max_size=3),
    )
)
def test_seals_survive_reading_and_writing(value: object) -> None:
    manifest = artifact_spec(value=value).manifest({}, {"value": value}, "test-1", "abc", 0.1)
    read = Manifest.parse(manifest.text(), manifest.label)
    assert read.text() == manifest.text()


def test_deleting_is_idempotent(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, artifact_spec())
    for _ in range(2):
        store.delete(artifact_spec().label)
    assert store.find(artifact_spec()) is None
    assert not list((tmp_path / "curated").iterdir())
    assert not list((tmp_path / ".staging").iterdir())


def test_the_newest_of_the_same_name_explains(tmp_path: Path) -> None:
    """Names that begin alike, and manifests that cannot be read, do not."""
    store = Store(tmp_path)
    for age, loss in ((30, 0.1), (20, 0.2), (10, 0.3)):
        build(store, artifact_spec(loss=loss))
        path = tmp_path / artifact_spec(loss=loss).label / "manifest.json"
        os.utime(path, (1e9 - age, 1e9 - age))
    path.write_text("{")
    other = ArtifactSpec("curated", "web-2", 1, {"loss": 9}, {"sources": "a" * 64})
    build(store, other)
    assert store.explain(artifact_spec(loss=0.4)) == "curated/web: new, loss 0.2 -> 0.4"


@pytest.mark.slow
def test_of_processes_that_commit_the_same_one_wins(tmp_path: Path) -> None:
    for number in range(5):
        root = Root.parse(tmp_path / str(number))
        writers = [started(build_on_signal, root, artifact_spec(), f"text {n}", b"") for n in range(4)]
        for _, pipe in writers:
            pipe.send("go")
        assert len({pipe.recv().text() for _, pipe in writers}) == 1
        for process, _ in writers:
            process.join()
            assert process.exitcode == 0


def test_only_what_the_dead_left_in_staging_is_removed(tmp_path: Path) -> None:
    process, pipe = started(stage_and_wait, tmp_path)
    half = Path(pipe.recv()) / "half"
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
    build(store, artifact_spec())
    artifact = store.all("curated")[0]
    (artifact.path / "documents" / "a.txt").write_text("hellp")
    with pytest.raises(ValueError, match=r"documents/a.txt changed since it was committed"):
        artifact.verify()


@given(st.dictionaries(st.sampled_from("abcd"), st.one_of(st.integers(), st.text("aß漢", max_size=3)), max_size=4))
def test_keys_depend_on_content_not_on_order(parameters: dict[str, object]) -> None:
    turned = dict(reversed(list(parameters.items())))
    assert artifact_spec(**parameters).key == artifact_spec(**turned).key
    assert artifact_spec(**parameters).key != artifact_spec(**{**parameters, "e": 1}).key


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


def test_an_atomic_write_is_on_the_disk_before_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, path = disk_calls(monkeypatch), tmp_path / "file"
    write_atomic(path, "text")
    assert calls == [path.stat().st_ino, path, tmp_path.stat().st_ino]


def test_an_artifact_is_on_the_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, store = disk_calls(monkeypatch), Store(tmp_path)
    build(store, artifact_spec())
    artifact = store.find(artifact_spec())
    assert artifact is not None
    visible = calls.index(artifact.folder)
    assert {path.stat().st_ino for path in artifact.folder.rglob("*")} < set(calls[:visible])
    assert artifact.folder.parent.stat().st_ino in calls[visible:]
