"""An object store of another kind is one class and one line of `OBJECT_STORES`."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from herd.storage import filesystem
from herd.storage.artifact import ArtifactSpec
from herd.storage.cleanup import clean_up_root
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
    made = build(root, spec)
    found = open_store(in_scratch(root, tmp_path / "there")).find(spec)
    assert found is not None
    assert found.uri == made.uri
    found.verify()
    assert root.create("mine", "open", "a")
    assert not root.create("yours", "open", "a")
    assert root.read("open", "a") == b"mine"
    stored = set(list_objects(root.uri))
    assert sum(clean_up_root(root, 0)[:2]) == 0
    assert set(list_objects(root.uri)) == stored
