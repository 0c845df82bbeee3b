"""Artifacts in an object store, through s3fs, against a server on loopback and a proxy that does it harm."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from herd.storage.artifact import MANIFEST, ArtifactSpec, DamagedArtifact, Store
from herd.storage.cleanup import clean_up_root
from herd.storage.digests import PAGE, digest_bytes, digest_pages
from herd.storage.object_artifact import DOWNLOADING, PAGES, RemoteStore, open_store
from herd.storage.objects import get_bytes, list_objects, put_bytes, remove
from herd.storage.root import Root
from tests.storage.commit_samples import (
    AT_ONCE,
    KINDS,
    LARGE,
    attempts,
    build,
    build_on_signal,
    download,
    in_scratch,
    started,
)
from tests.storage.fault_proxy import FaultProxy, Rule
from tests.storage.s3 import pointed_at


@pytest.fixture
def root(proxy: FaultProxy, tmp_path: Path) -> Root:
    proxy.use()
    return Root.parse(f"{proxy.uri}/{tmp_path.name}", str(tmp_path / "here"))


def elsewhere(root: Root, name: str = "there") -> Root:
    """The same root as another machine sees it."""
    return in_scratch(root, root.local.parent / name)


def artifact_spec(**parameters: object) -> ArtifactSpec:
    return ArtifactSpec("curated", "web", 1, dict(parameters), {"sources": "a" * 64})


def test_what_one_machine_commits_another_finds_and_brings(root: Root, proxy: FaultProxy) -> None:
    built = build(root, artifact_spec())
    proxy.use()
    assert (built.path / "large.bin").read_bytes() == LARGE
    assert proxy.log == [], "the staged folder is the copy"
    loaded = open_store(elsewhere(root)).find(artifact_spec())
    assert loaded is not None
    assert (loaded.label, loaded.metadata, loaded.uri) == (built.label, {"documents": 1}, built.uri)
    assert loaded.folder == root.local.parent / "there" / loaded.label
    assert not loaded.folder.exists()
    assert (loaded.path / "documents" / "a.txt").read_text() == "hello"
    assert (loaded.path / MANIFEST).read_text() == get_bytes(root.join(f"{loaded.label}.json")).decode()
    assert not (loaded.path / DOWNLOADING).exists()
    loaded.verify()
    assert open_store(root).load(built.label).manifest == built.manifest == open_store(root).all("curated")[0].manifest
    assert open_store(root).find(artifact_spec(jaccard=0.7)) is None


def test_finding_is_one_get_and_one_listing(root: Root, proxy: FaultProxy) -> None:
    build(root, artifact_spec())
    proxy.use()
    open_store(root).find(artifact_spec())
    assert [line.split()[0] for line in proxy.log] == ["GET", "GET"]
    assert "list-type=2" in proxy.log[1]


def test_a_part_is_brought_alone_and_the_rest_later(root: Root, proxy: FaultProxy) -> None:
    build(root, artifact_spec())
    loaded = open_store(elsewhere(root)).load(artifact_spec().label)
    proxy.use()
    assert loaded.path_of("documents") == loaded.folder / "documents"
    assert (loaded.path_of("documents/a.txt")).read_text() == "hello"
    assert [line.split("?")[0].rsplit("/", 1)[1] for line in proxy.log] == ["a.txt", "a.txt"]
    assert not (loaded.folder / "large.bin").exists()
    assert not (loaded.folder / MANIFEST).exists(), "not whole yet"
    proxy.use()
    loaded.verify()
    assert not [line for line in proxy.log if "a.txt" in line], "brought once"
    with pytest.raises(ValueError, match=r"has no 'model'; it has documents, large\.bin"):
        loaded.path_of("model")


def test_pages_of_large_files_can_be_verified_alone(root: Root) -> None:
    built = build(root, artifact_spec())
    assert list(built.manifest.pages) == ["large.bin"]
    stored = get_bytes(f"{built.uri}/{PAGES}/large.bin")
    assert digest_bytes(stored) == built.manifest.pages["large.bin"]
    assert stored == digest_pages(built.path / "large.bin")[1]
    assert len(stored) == 12 * 32


def test_a_copy_of_another_attempt_is_not_mixed_with_ours(root: Root) -> None:
    there = elsewhere(root)
    build(root, artifact_spec(), "first")
    open_store(there).load(artifact_spec().label).path_of("documents")
    open_store(root).delete(artifact_spec().label)
    assert open_store(there).find(artifact_spec()) is None
    assert list_objects(root.join("curated")) == {}
    build(root, artifact_spec(), "again")
    loaded = open_store(there).load(artifact_spec().label)
    assert (loaded.path / "documents" / "a.txt").read_text() == "again"
    (loaded.folder / "large.bin").write_bytes(b"short")
    loaded.verify()


def test_the_second_of_two_writers_gets_the_first_one_s(root: Root) -> None:
    first, second = build(root, artifact_spec(), "first"), build(elsewhere(root), artifact_spec(), "second")
    assert second.uri == first.uri
    assert (second.path / "documents" / "a.txt").read_text() == "first"
    assert attempts(root, artifact_spec()) == {first.manifest.attempt}


@pytest.mark.parametrize("harm", [remove, lambda uri: put_bytes(uri, b"shor")], ids=["missing", "short"])
def test_a_damaged_artifact_is_set_aside_and_made_again(root: Root, harm: object) -> None:
    built = build(root, artifact_spec())
    harm(f"{built.uri}/documents/a.txt")  # type: ignore[operator]
    assert built.missing() == ["documents/a.txt"]
    assert open_store(root).find(artifact_spec()) is None
    assert next(iter(list_objects(root.join(".damaged")))).startswith(built.label.replace("/", "-"))
    assert build(root, artifact_spec()).uri != built.uri
    assert open_store(root).find(artifact_spec()) is not None


def test_wrong_bytes_in_the_store_are_named(root: Root) -> None:
    built = build(root, artifact_spec())
    put_bytes(f"{built.uri}/documents/a.txt", b"hellp")
    loaded = open_store(elsewhere(root)).find(artifact_spec())
    assert loaded is not None
    with pytest.raises(DamagedArtifact, match=rf"{built.uri}/documents/a.txt"):
        _ = loaded.path
    assert not (loaded.folder / MANIFEST).exists()


@pytest.mark.parametrize("name", ["large.bin", "documents/a.txt"])
def test_a_copy_that_changed_here_is_brought_again(root: Root, name: str) -> None:
    built = build(root, artifact_spec())
    path = built.folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    loaded = open_store(root).find(artifact_spec(), print)
    assert loaded is not None
    assert loaded.path_of(name).read_bytes() == (LARGE if name == "large.bin" else b"hello")
    assert loaded.path == built.folder
    loaded.verify()


@pytest.mark.parametrize("name", ["large.bin", "a.txt", r"\.json"])
@pytest.mark.fault("F3")
def test_bits_that_flip_on_the_way_are_asked_for_again(root: Root, proxy: FaultProxy, name: str) -> None:
    build(root, artifact_spec())
    (rule,) = proxy.use(Rule("flip", "GET", rf"{name}$"))
    open_store(elsewhere(root)).load(artifact_spec().label).verify()
    assert rule.done == 1


def test_a_lost_reply_to_the_commit_is_our_own_commit(root: Root, proxy: FaultProxy) -> None:
    (rule,) = proxy.use(Rule("drop-reply", "PUT", r"web-\w{8}\.json$"))
    built = build(root, artifact_spec())
    assert rule.done == 1
    assert [line.split()[0] for line in proxy.log if line.split()[1].endswith(".json")] == ["PUT", "PUT", "GET"]
    loaded = open_store(root).find(artifact_spec())
    assert loaded is not None
    assert loaded.uri == built.uri


@pytest.mark.parametrize("flips", [1, 2])
def test_bits_that_flip_in_what_is_read_back_delete_no_commit_of_ours(
    root: Root, proxy: FaultProxy, flips: int
) -> None:
    with pointed_at({"HERD_S3_CHECKSUMS": "when_required"}):
        (rule,) = proxy.use(Rule("flip", "GET", rf"{artifact_spec().label}\.json$", times=flips))
        built = build(root, artifact_spec())
    assert rule.done == flips
    proxy.use()
    assert built.missing() == []
    loaded = open_store(elsewhere(root)).load(artifact_spec().label)
    assert loaded.uri == built.uri
    loaded.verify()


def test_a_new_key_is_explained_by_the_newest_of_its_name(root: Root, proxy: FaultProxy) -> None:
    store = open_store(root)
    assert store.explain(artifact_spec(jaccard=0.8)) == "curated/web: new, nothing of this name was made before"
    build(root, artifact_spec(jaccard=0.9), large=b"")
    time.sleep(1.1)  # objects carry whole seconds
    build(root, artifact_spec(jaccard=0.8), large=b"")
    proxy.use()
    assert store.explain(artifact_spec(jaccard=0.7)) == "curated/web: new, jaccard 0.8 -> 0.7"
    assert [line.split()[0] for line in proxy.log] == ["GET", "GET"], "however many there are"
    remove(root.join(".newest/curated/web"))
    assert store.explain(artifact_spec(jaccard=0.7)) == "curated/web: new, jaccard 0.8 -> 0.7"
    store.delete(artifact_spec(jaccard=0.8).label)
    assert store.explain(artifact_spec(jaccard=0.7)) == "curated/web: new, jaccard 0.9 -> 0.7"


@pytest.mark.parametrize(
    "label", ["../x-1a2b3c4d", "curated/../x-1a2b3c4d", "/etc/x-1a2b3c4d", "a/b/c-1a2b3c4d", "web"]
)
def test_names_that_leave_the_root_are_refused(root: Root, label: str) -> None:
    for store in (open_store(root), Store(root.local)):
        with pytest.raises(ValueError, match="write kind/name-key8"):
            store.load(label)
        with pytest.raises(ValueError, match="write kind/name-key8"):
            store.delete(label)
    with pytest.raises(ValueError, match="write kind/name-key8"):
        open_store(root).find(ArtifactSpec("curated", "../web", 1, {}, {}))


@pytest.mark.fault("F19")
def test_a_manifest_cannot_name_files_outside(root: Root) -> None:
    built = build(root, artifact_spec())
    for name in ("../../evil", "/etc/evil", "documents/../../evil"):
        bad = built.manifest.model_copy(update={"files": {name: digest_bytes(b"x")}})
        put_bytes(root.join(f"{built.label}.json"), bad.text().encode())
        with pytest.raises(DamagedArtifact, match="is not a file name inside an artifact"):
            open_store(root).load(built.label)


def test_processes_that_want_one_artifact_bring_it_once(root: Root, proxy: FaultProxy) -> None:
    build(root, artifact_spec(), large=b"x" * 100)
    downloaders = [started(download, elsewhere(root), artifact_spec().label) for _ in range(2)]
    proxy.use()
    for _, pipe in downloaders:
        pipe.send("go")
    for process, _ in downloaders:
        process.join()
        assert process.exitcode == 0
    assert sorted(line.rsplit("/", 1)[1] for line in proxy.log if line.startswith("GET")) == ["a.txt", "large.bin"]


def test_a_half_brought_copy_is_gone_on_with(root: Root, proxy: FaultProxy) -> None:
    build(root, artifact_spec(), large=b"x" * 100)
    process, pipe = started(download, elsewhere(root), artifact_spec().label)
    assert process.pid is not None
    (rule,) = proxy.use(Rule("kill", "GET", r"(a\.txt|large\.bin)$", skip=1, pid=process.pid))
    pipe.send("go")
    process.join()
    assert (process.exitcode, rule.done) == (-9, 1)
    loaded = open_store(elsewhere(root)).load(artifact_spec().label)
    assert not (loaded.folder / MANIFEST).exists()
    loaded.verify()
    assert (loaded.folder / MANIFEST).exists()


@pytest.mark.fault("F14")
def test_of_writers_in_processes_one_wins_and_all_get_it(root: Root, proxy: FaultProxy) -> None:
    for number in range(2):
        writers = [
            started(build_on_signal, elsewhere(root, f"w{n}"), artifact_spec(number=number), f"text {n}", b"")
            for n in range(3)
        ]
        for _, pipe in writers:
            pipe.send("go")
        [winner] = {pipe.recv().attempt for _, pipe in writers}
        for process, _ in writers:
            process.join()
        assert attempts(root, artifact_spec(number=number)) == {winner}


@pytest.mark.slow
@pytest.mark.fault("F2")
def test_a_commit_killed_at_any_request_is_whole_or_nothing(root: Root, proxy: FaultProxy) -> None:
    whole, k, ended, left, staged = 0, 0, False, [0], list[int]()
    two_pages = LARGE[: PAGE + 1]
    while not ended:
        spec = artifact_spec(k=k)
        process, pipe = started(build_on_signal, root, spec, "hello", two_pages)
        assert process.pid is not None
        (rule,) = proxy.use(Rule("kill", skip=k, pid=process.pid))
        pipe.send("go")
        process.join()
        ended = rule.done == 0
        assert process.exitcode == (0 if ended else -9)
        proxy.use()
        loaded = open_store(elsewhere(root)).find(spec)
        if loaded is not None:
            loaded.verify()
            whole += 1
        shutil.rmtree(elsewhere(root).local, ignore_errors=True)
        build(root, spec, large=two_pages if ended else b"").verify()
        staged.append(len(list((root.local / ".staging").iterdir())))
        there = len(attempts(root, spec))
        left.extend([there - 1] if loaded is None else [])
        tidied = clean_up_root(root, AT_ONCE, KINDS)
        assert (tidied.attempts, tidied.uploads) == (there - 1, 0)
        assert len(attempts(root, spec)) == 1
        assert clean_up_root(root, AT_ONCE, KINDS) == (0, 0, 0, 0, 0)
        again = open_store(root).find(spec)
        assert again is not None
        k += 1
    assert k >= 10
    assert 1 <= whole < k
    opening = staged.index(1)  # requests that find that the root is new, before anything is staged
    assert staged == [0] * opening + [1] * (k - 1 - opening) + [0]
    assert opening < 5
    assert left[-1] == 1, "the last one that is not found was killed at its manifest: its files are there"


def test_the_store_of_a_folder_is_the_local_one(tmp_path: Path) -> None:
    assert type(open_store(Root.parse(tmp_path))) is Store
    assert type(open_store(Root.parse("s3://bucket/x", str(tmp_path)))) is RemoteStore
