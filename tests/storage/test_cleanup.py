"""What the janitor removes, and what it leaves, against moto on loopback."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.cleanup import CleanupResult, clean_up_root
from herd.storage.filesystem import filesystem_of
from herd.storage.object_artifact import open_store
from herd.storage.objects import list_objects, put_bytes, remove
from herd.storage.root import Root
from tests.storage.commit_samples import AT_ONCE, KINDS

NOTHING = CleanupResult(0, 0, 0, 0, 0)
LATER = 3600


@pytest.fixture
def root(bucket: str, tmp_path: Path) -> Root:
    return Root.parse(f"{bucket}/{tmp_path.name}", str(tmp_path))


def build(root: Root, number: int = 1) -> Artifact:
    spec = ArtifactSpec("curated", "web", 1, {"number": number}, {})
    store = open_store(root)
    with store.staging() as folder:
        (folder / "a.txt").write_text("hello")
        return store.commit(spec, folder, {}, "test-1", "abc", 0.1)


def test_attempts_that_no_manifest_names_go(root: Root) -> None:
    artifact = build(root)
    put_bytes(root.join(artifact.label, "0" * 32, "deep/left.bin"), b"x" * 100)
    put_bytes(root.join("curated/gone-1a2b3c4d", "1" * 32, "left.bin"), b"x" * 10)
    assert clean_up_root(root, LATER, KINDS) == NOTHING
    assert clean_up_root(root, AT_ONCE, KINDS) == CleanupResult(0, 2, 0, 0, 110)
    assert clean_up_root(root, AT_ONCE, KINDS) == NOTHING
    assert set(list_objects(root.join("curated"))) == {
        f"{artifact.folder.name}.json",
        f"{artifact.folder.name}/{artifact.manifest.attempt}/a.txt",
    }


def test_what_is_not_an_attempt_stays(root: Root) -> None:
    others = ["runs/web-1a2b3c4d/" + "0" * 32 + "/x", "curated/web-1a2b3c4d/notes/x", "other/x", ".damaged/x.json"]
    for name in others:
        put_bytes(f"{root.uri}/{name}", b"x")
    assert clean_up_root(root, AT_ONCE, KINDS) == NOTHING
    assert sorted(list_objects(root.uri)) == sorted(others)


def test_a_damaged_manifest_leaves_its_attempts_alone(root: Root) -> None:
    artifact = build(root)
    put_bytes(root.join(artifact.label, "0" * 32, "left.bin"), b"x")
    put_bytes(root.join(f"{artifact.label}.json"), b"{")
    assert clean_up_root(root, AT_ONCE, KINDS) == NOTHING


def test_uploads_that_were_never_finished_go(root: Root, bucket: str) -> None:
    filesystem = filesystem_of(root.uri)
    name = bucket.removeprefix("s3://")
    prefix = root.uri.removeprefix(f"{bucket}/")
    for key in (f"{prefix}/curated/web-1a2b3c4d/{'0' * 32}/a", f"{prefix}-other/a"):
        upload = filesystem.call_s3("create_multipart_upload", Bucket=name, Key=key)["UploadId"]
        filesystem.call_s3("upload_part", Bucket=name, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * 1000)
    assert clean_up_root(root, LATER, KINDS) == NOTHING
    assert clean_up_root(root, AT_ONCE, KINDS) == CleanupResult(1, 0, 0, 0, 1000)
    assert [upload["Key"] for upload in filesystem.list_multipart_uploads(name)] == [f"{prefix}-other/a"]
    assert clean_up_root(root, AT_ONCE, KINDS) == NOTHING


def test_copies_of_what_is_gone_go(root: Root) -> None:
    kept, gone, incomplete = (build(root, number) for number in range(3))
    os.replace(incomplete.folder / "manifest.json", incomplete.folder / ".downloading")
    scratch = root.local / "work" / "main-1a2b3c4d" / "journal"
    cache = root.local / "lazy" / gone.label / gone.manifest.attempt / "shard"
    working = root.local / "work" / "ramp-1a2b3c4d" / "manifest.json"
    for path in (scratch, working, cache):
        path.parent.mkdir(parents=True)
        path.write_text("x")
    for artifact in (gone, incomplete):
        remove(root.join(f"{artifact.label}.json"))
    assert clean_up_root(root, LATER, KINDS) == NOTHING
    tidied = clean_up_root(root, AT_ONCE, KINDS)
    assert tidied[:4] == (0, 2, 0, 3)
    assert not cache.parent.parent.exists()
    assert scratch.exists()
    assert working.exists()
    assert [path.name for path in (root.local / "curated").iterdir()] == [kept.folder.name]


def test_a_local_root_has_only_staging_to_tidy(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    build(root)
    left = tmp_path / ".staging" / "left"
    left.mkdir()
    os.utime(left, (1e9, 1e9))
    with open_store(root).staging() as mine:
        assert clean_up_root(root, LATER, KINDS)[:4] == (0, 0, 1, 0)
        assert mine.exists()
    assert not left.exists()


def test_an_attempt_is_as_old_as_its_newest_file(root: Root) -> None:
    attempt = root.join("curated/gone-1a2b3c4d", "1" * 32)
    put_bytes(f"{attempt}/first.bin", b"x")
    time.sleep(4.2)  # the server's clock counts whole seconds
    put_bytes(f"{attempt}/second.bin", b"x")
    assert clean_up_root(root, 3.0, KINDS) == NOTHING
    assert clean_up_root(root, AT_ONCE, KINDS) == CleanupResult(0, 1, 0, 0, 2)
