"""Lazy folders of artifacts in an S3 store: what the network does to bytes on their way is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from herd.storage.artifact import ArtifactSpec
from herd.storage.digests import PAGE
from herd.storage.object_artifact import WrongBytes, open_store
from herd.storage.page_cache import LazyFolder, lazy_folder
from herd.storage.root import Root
from tests.storage.fault_proxy import FaultProxy, Rule
from tests.storage.lazy_samples import PAGES, page_of, written

DESIGN = ArtifactSpec("tokens", "web", 1, {}, {"curated": "a" * 64})


@pytest.fixture(scope="module", autouse=True)
def shared_source(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The server holds one artifact."""
    store = open_store(Root.parse(f"{proxy.uri}/root", str(tmp_path_factory.mktemp("maker"))))
    with store.staging() as staged:
        written(staged)
        store.commit(DESIGN, staged, {}, "test", "abc", 0.1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("source"))


@pytest.fixture
def folder(proxy: FaultProxy, tmp_path: Path) -> Path:
    proxy.use()
    artifact = open_store(Root.parse(f"{proxy.uri}/root", str(tmp_path))).find(DESIGN)
    assert artifact is not None
    return lazy_folder(artifact, 4 * PAGE)


def test_on_the_machine_that_made_it_there_is_nothing_to_bring(proxy: FaultProxy, tmp_path: Path) -> None:
    root = Root.parse(f"{proxy.uri}/root", str(tmp_path))
    artifact = open_store(root).find(DESIGN)
    assert artifact is not None
    assert lazy_folder(artifact, PAGE) == root.file("lazy", artifact.label, artifact.manifest.attempt)
    whole = artifact.path
    assert lazy_folder(artifact, PAGE) == whole


def test_only_what_is_read_is_brought(proxy: FaultProxy, folder: Path, source: Path) -> None:
    lazy = LazyFolder(folder)
    assert lazy.path("index.json").read_bytes() == (source / "index.json").read_bytes()
    proxy.use()
    for page in range(10):
        with lazy.held(np.array([page])):
            right, mine = page_of(source, lazy, page)
            assert right == mine
    assert lazy.table.count == PAGES - 1  # y.bin has three bytes and comes whole
    assert sum(request.startswith("GET") for request in proxy.log) == 10 + 2, proxy.log  # and the digests of two files
    assert lazy.path("a/y.bin").read_bytes() == (source / "a" / "y.bin").read_bytes()


def test_a_bit_that_flips_on_the_way_is_asked_for_again(proxy: FaultProxy, folder: Path, source: Path) -> None:
    lazy, rules = LazyFolder(folder), [Rule("flip", "GET", name) for name in ("x.bin$", "table$", "[.]pages")]
    for rule in rules[:2]:
        rule.path = f"[0-9a-f]/a/{rule.path}"
    proxy.use(*rules)
    with lazy.held(np.array([0, 1, 2])):
        assert all(right == mine for right, mine in (page_of(source, lazy, page) for page in range(3)))
    assert lazy.path("a/table").read_bytes() == (source / "a" / "table").read_bytes()
    assert [rule.done for rule in rules] == [1, 1, 1]


def test_bits_that_go_on_flipping_are_an_error_with_a_name(proxy: FaultProxy, folder: Path) -> None:
    lazy, rule = LazyFolder(folder), Rule("flip", "GET", "[0-9a-f]/a/x.bin$", times=None)
    proxy.use(rule)
    with pytest.raises(WrongBytes, match=r"a/x.bin: bytes 1,048,576 to 2,097,152"), lazy.held(np.array([1])):
        raise AssertionError("the block must not run")
    assert rule.done == 3
    assert not lazy.table.marks.any()
