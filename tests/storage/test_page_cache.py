"""Lazy folders: right bytes or an error, within the limit, while other processes read, drop pages, or die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import herd.storage.page_cache
from herd.storage.digests import PAGE
from herd.storage.object_artifact import WrongBytes
from herd.storage.page_cache import LazyFolder, ensure_local, lazy_folder_of, make_lazy
from tests.dist import forkserver
from tests.storage.lazy_samples import PAGES, SMALL, die_while_downloading, lazily, page_of, read_at_random, written


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("store"))


def on_disk(folder: Path) -> int:
    """Return the whole pages that the disk holds."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.bin")) // PAGE


def test_a_plain_folder_is_itself(source: Path) -> None:
    assert lazy_folder_of(source / "a") is None
    assert ensure_local(source / "a" / "x.bin") == source / "a" / "x.bin"


def test_small_files_come_whole_and_once(source: Path, tmp_path: Path) -> None:
    folder = lazily(tmp_path / "lazy", source, 3)
    for name, data in SMALL.items():
        assert ensure_local(folder / name).read_bytes() == data
    before = ensure_local(folder / "a/table").stat().st_mtime_ns
    assert LazyFolder(folder).path("a/table").stat().st_mtime_ns == before
    with pytest.raises(FileNotFoundError, match="a/other: is not in the artifact's manifest"):
        ensure_local(folder / "a" / "other")


@given(
    page_lists=st.lists(
        st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=4, unique=True), min_size=1, max_size=8
    ),
    limit=st.integers(1, PAGES + 1),
)
def test_held_pages_have_their_bytes_and_the_limit_is_kept(
    source: Path, tmp_path_factory: pytest.TempPathFactory, page_lists: list[list[int]], limit: int
) -> None:
    folder = lazily(tmp_path_factory.mktemp("lazy") / "x", source, limit)
    lazy, most = LazyFolder(folder), limit
    for pages in page_lists:
        most = max(most, len(pages))
        with lazy.held(np.array(sorted(pages))):
            for page in pages:
                right, mine = page_of(source, lazy, page)
                assert right == mine
            assert on_disk(folder) <= most
    last = page_lists[-1]
    assert lazy.table.marks[last].all()


def test_the_first_that_came_is_the_first_to_go(source: Path, tmp_path: Path) -> None:
    lazy = LazyFolder(lazily(tmp_path / "lazy", source, 3))
    for page in (4, 0, 2, 4, 1):
        with lazy.held(np.array([page])):
            pass
    assert np.flatnonzero(lazy.table.marks).tolist() == [0, 1, 2]


def test_a_page_that_is_held_stays(source: Path, tmp_path: Path) -> None:
    folder = lazily(tmp_path / "lazy", source, 2)
    reader, other = LazyFolder(folder), LazyFolder(folder)
    with reader.held(np.array([0, 1, 2])):
        with other.held(np.array([3, 4])):
            pass
        for page in range(3):
            right, mine = page_of(source, reader, page)
            assert right == mine
    with other.held(np.array([5])):
        assert on_disk(folder) <= 2


def test_processes_share_and_drop_and_none_reads_a_hole(source: Path, tmp_path: Path) -> None:
    folder = lazily(tmp_path / "lazy", source, 3)
    with forkserver().Pool(3) as pool:
        wrong = pool.starmap(read_at_random, [(folder, source, seed, 60) for seed in range(3)])
    assert wrong == [0, 0, 0]
    lazy = LazyFolder(folder)
    for page in range(PAGES):
        with lazy.held(np.array([page])):
            pass
    assert on_disk(folder) <= 3


def test_who_dies_while_downloading_leaves_neither_locks_nor_marks(source: Path, tmp_path: Path) -> None:
    folder = lazily(tmp_path / "lazy", source, 4)
    process = forkserver().Process(target=die_while_downloading, args=(folder,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    lazy = LazyFolder(folder)
    assert not lazy.table.marks.any()
    assert lazy.table.kept == 2
    assert read_at_random(folder, source, 5, 20) == 0
    assert lazy.table.kept <= 4


def test_marks_of_another_boot_are_not_believed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lazily(tmp_path / "lazy", source, 9)
    with LazyFolder(folder).held(np.arange(6)):
        pass
    os.truncate(ensure_local(folder / "a" / "x.bin"), 0)  # what a power cut does to bytes that were not on the disk yet
    monkeypatch.setattr(herd.storage.page_cache, "boot_id", lambda: "another")
    lazy = LazyFolder(folder)
    with lazy.held(np.arange(6)):
        assert all(right == mine for right, mine in (page_of(source, lazy, page) for page in range(6)))


def test_damage_in_the_store_is_named(tmp_path: Path) -> None:
    source = written(tmp_path / "store")
    folder = lazily(tmp_path / "lazy", source, 9)
    with (source / "a" / "x.bin").open("r+b") as file:
        file.seek(2 * PAGE + 5)
        file.write(b"\0")
    (source / "index.json").write_bytes(b'{"documents": 4}')
    lazy = LazyFolder(folder)
    with (
        pytest.raises(WrongBytes, match=r"x.bin: bytes 1,048,576 to 4,194,304 .* \(page 2 has another SHA-256\)"),
        lazy.held(np.array([1, 2, 3])),
    ):
        raise AssertionError("the block must not run")
    assert not lazy.table.marks[2]
    with lazy.held(np.array([0, 3])):
        assert page_of(source, lazy, 3)[0] == page_of(source, lazy, 3)[1]
    with pytest.raises(WrongBytes, match=r"index.json: received 16 bytes of SHA-256"):
        lazy.path("index.json")


def test_the_limit_may_change_and_a_look_leaves_it(source: Path, tmp_path: Path) -> None:
    folder = lazily(tmp_path / "lazy", source, 9)
    with LazyFolder(folder).held(np.arange(9)):
        pass
    assert lazily(folder, source, 0) == folder
    assert LazyFolder(folder).limit == 9
    lazily(folder, source, 2)
    with LazyFolder(folder).held(np.array([9])):
        assert on_disk(folder) <= 2
    assert make_lazy(tmp_path / "new", f"file://{source}", "{}", 0).is_dir()
    with pytest.raises(AssertionError, match="is for"):
        make_lazy(folder, "file:///elsewhere", "{}", 0)


def test_a_folder_of_small_files_only_can_be_read(tmp_path: Path) -> None:
    """As many shards of less than a page are: nothing is paged, and the cache is a folder still to be made."""
    source = written(tmp_path / "store", big=())
    folder = lazily(tmp_path / "lazy", source, 1)
    assert {name: ensure_local(folder / name).read_bytes() for name in SMALL} == SMALL


def test_a_small_file_that_changed_here_is_brought_again(source: Path, tmp_path: Path) -> None:
    folder = lazily(tmp_path / "lazy", source, 3)
    LazyFolder(folder).path("a/table").write_bytes(b"some ruws")
    assert LazyFolder(folder).path("a/table").read_bytes() == SMALL["a/table"]
