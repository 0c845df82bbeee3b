"""Clients of object stores, and the cache folder of the user."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from herd.storage import filesystem
from herd.storage.artifact import ArtifactSpec
from herd.storage.cleanup import clean_up_root
from herd.storage.filesystem import cache_folder, use_writable_cache, write_atomic
from herd.storage.object_artifact import open_store
from herd.storage.objects import list_objects
from herd.storage.root import Root
from tests.storage.commit_samples import build, in_scratch


class MemoryStore(MemoryFileSystem):  # type: ignore[misc]
    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("ram://")))

    def find(self, *args: Any, **given: Any) -> Any:
        files = super().find(*args, **given)
        for info in files.values():
            info["LastModified"] = datetime.fromtimestamp(info["created"], UTC)
        return files

    def server_time(self, uri: str) -> float:
        return time.time()

    def abort_uploads(self, uri: str, before: float) -> tuple[int, int]:
        return 0, 0


def test_a_store_of_another_kind_is_one_class_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'ram://team/herd' is neither a folder nor in an object store .*s3://"):
        Root.parse("ram://team/herd")
    monkeypatch.setitem(filesystem.OBJECT_STORES, "ram", f"{__name__}:MemoryStore")
    root, spec = Root.parse("ram://team/herd", str(tmp_path / "here")), ArtifactSpec("curated", "web", 1, {}, {})
    built = build(root, spec)
    loaded = open_store(in_scratch(root, tmp_path / "there")).find(spec)
    assert loaded is not None
    assert loaded.uri == built.uri
    loaded.verify()
    assert root.create("mine", "open", "a")
    assert not root.create("yours", "open", "a")
    assert root.read("open", "a") == b"mine"
    stored = set(list_objects(root.uri))
    assert sum(clean_up_root(root, 0, ["curated"])[:2]) == 0
    assert set(list_objects(root.uri)) == stored


def test_without_a_cache_folder_that_can_be_written_there_is_a_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use_writable_cache()
    assert "XDG_CACHE_HOME" not in os.environ
    monkeypatch.setenv("HOME", "/proc/nowhere")
    use_writable_cache()
    assert os.access(cache_folder().parent, os.W_OK)
    assert os.environ["MPLCONFIGDIR"] == os.environ["XDG_CACHE_HOME"]
    assert os.environ["HF_HOME"] == "/proc/nowhere/.cache/huggingface"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_a_written_file_if_the_umask_allows(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_of_an_installed_package_is_local() -> None:
    uri = "package://duckdb/__init__.py"
    assert filesystem.is_local(uri)
    assert filesystem.filesystem_of(uri).cat_file(str(filesystem.local_path(uri))).startswith(b"#")
    for missing in ("package://no_such_package/x.gguf", "package://math/x", "package:///x", "package://a.b/x"):
        with pytest.raises(ValueError, match="there is no package"):
            filesystem.local_path(missing)
