from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.storage.digests import digest_file, digest_folder
from herd.storage.filesystem import filesystem_of, write_atomic
from herd.storage.objects import create_bytes, get_bytes, list_children, put_bytes, put_file, remove, remove_all


@given(st.dictionaries(st.sampled_from(["a", "b/c", "b/d.bin", "z.txt"]), st.binary(max_size=300)), st.booleans())
def test_a_folder_is_every_file_by_size_and_content(files: dict[str, bytes], sync: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(data)
        digests = digest_folder(Path(folder), sync)
        assert list(digests) == sorted(files, key=lambda name: Path(name).parts)
        for name, data in files.items():
            assert digests[name] == digest_file(Path(folder) / name)
            assert (digests[name].bytes, digests[name].sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "gone")


def test_objects_come_and_go(tmp_path: Path) -> None:
    """The same calls serve a folder; the object store is tested where checkpoints use it."""
    (tmp_path / "file").write_bytes(b"12345")
    uri = str(tmp_path / "store")
    (tmp_path / "store" / "deep").mkdir(parents=True)
    put_file(tmp_path / "file", f"{uri}/a")
    put_bytes(f"{uri}/deep/b", b"12")
    assert list_children(uri) == {"a": 5, "deep": list_children(uri)["deep"]}
    assert list_children(f"{uri}/deep") == {"b": 2}
    assert get_bytes(f"{uri}/deep/b") == b"12"
    assert list_children(f"{uri}/nowhere") == {}
    for _ in range(2):
        remove(f"{uri}/a")
        remove_all(f"{uri}/deep")
    assert list_children(uri) == {}


def test_files_that_are_created_can_be_read_by_others_as_those_that_are_replaced_can(tmp_path: Path) -> None:
    assert create_bytes(str(tmp_path / "runs" / "claim"), b"mine")
    assert not create_bytes(str(tmp_path / "runs" / "claim"), b"theirs")
    write_atomic(tmp_path / "record", b"mine")
    for path in (tmp_path / "runs" / "claim", tmp_path / "record"):
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"mine", 0o644)


def test_a_store_that_loses_bytes_is_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    filesystem = filesystem_of(str(tmp_path))
    (tmp_path / "file").write_bytes(b"12345")
    monkeypatch.setattr(filesystem, "put_file", lambda path, uri: Path(uri).write_bytes(b"1234"))
    with pytest.raises(OSError, match="4 bytes are stored, 5 were sent"):
        put_file(tmp_path / "file", str(tmp_path / "stored"))
    monkeypatch.setattr(filesystem, "pipe_file", lambda uri, data: Path(uri).write_bytes(b"12346"))
    with pytest.raises(OSError, match="holds other bytes than were sent"):
        put_bytes(str(tmp_path / "stored"), b"12345")
