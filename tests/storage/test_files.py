"""Copies of remote folders: no name in a store leads out of the copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.storage import files
from herd.storage.files import local_folder


@pytest.mark.parametrize("name", ["../evil", "models/../../evil", "/tmp/evil", "a\\..\\evil"])
def test_a_folder_is_not_copied_to_outside_of_its_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[Path]()
    monkeypatch.setattr(files, "list_objects", lambda uri: [name])
    monkeypatch.setattr(files, "get_file", lambda uri, path: written.append(path))
    with pytest.raises(ValueError, match="is not a name below a folder; delete or rename the object"):
        local_folder("s3://bucket/folder")
    assert written == []
