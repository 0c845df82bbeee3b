"""Artifacts after a fault at any call to the disk or the object store: whole or absent, and right when done again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path

import pytest

from herd.storage.artifact import MANIFEST, Artifact, ArtifactSpec, Store
from herd.storage.cleanup import clean_up_root
from herd.storage.filesystem import filesystem_of
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from tests.orders import Boundary, Fault, cut_short, walk
from tests.storage.commit_samples import AT_ONCE, in_scratch
from tests.storage.memory_store import MemoryStore
from tests.storage.simulation import PREFIX, ROOT

FILES = {"a.txt": b"first", "documents/b.txt": b"second", "m.txt": b"third", "z.txt": b"last"}
OTHERS = dict.fromkeys(FILES, b"by another writer")
SPEC = ArtifactSpec("curated", "web", 1, {"jaccard": 0.8}, {})


def commit(root: Root, files: dict[str, bytes] = FILES) -> Artifact:
    store = open_store(root)
    with store.staging() as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        return store.commit(SPEC, folder, {"documents": 1}, "test-1", "abc", 0.1)


def contents(store: Store) -> list[dict[str, bytes]]:
    """Return the files of all artifacts that a reader is offered, each verified."""
    return [
        {name: (artifact.path / name).read_bytes() for name in artifact.manifest.files}
        for artifact in store.all(SPEC.kind)
    ]


def damage(root: Root) -> None:
    """Commit, then truncate the manifest."""
    label = commit(root).label
    if root.is_local:
        (root.local / label / MANIFEST).write_text("{")
    else:
        filesystem_of(root.uri).objects[f"{PREFIX}{label}.json"].data = b"{"


def remake(root: Root) -> None:
    """Set a damaged artifact aside and make it again, as a step does."""
    if open_store(root).find(SPEC, lambda _: None) is None:
        commit(root, OTHERS)


def set_aside(root: Root) -> None:
    store = open_store(root)
    for artifact in store.all(SPEC.kind):
        store.quarantine(artifact.label, artifact.manifest)


def download(root: Root) -> None:
    open_store(root).load(SPEC.label).path  # noqa: B018


Operation = Callable[[Root], object]
OPERATIONS: dict[str, tuple[Operation, Operation, list[list[dict[str, bytes]]]]] = {
    "commit": (lambda root: None, commit, [[], [FILES]]),
    "commit second": (lambda root: commit(root, OTHERS), commit, [[OTHERS]]),
    "delete": (commit, lambda root: open_store(root).delete(SPEC.label), [[FILES], []]),
    "quarantine": (commit, set_aside, [[FILES], []]),
    "remake": (damage, remake, [[], [OTHERS]]),
    "sign": (commit, lambda root: open_store(root).sign(SPEC.label), [[FILES]]),
    "download": (lambda root: commit(in_scratch(root, root.local / "writer")), download, [[FILES]]),
}
"""What was there before, what is done, and what a reader may find: before it, and after it."""


@pytest.mark.fault("F2", "F4", "F5")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 23])
@pytest.mark.parametrize("where", ["disk", "object store"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_artifact_is_whole_or_absent_after_a_fault_at_any_call(
    name: str, where: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("herd.storage.objects.PAUSE_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the power stays on
    monkeypatch.setattr("herd.storage.artifact.YOUNG_NS", -(10**10))  # each file is stamped, however fast the test is
    monkeypatch.setattr("herd.storage.staging.FOREIGN_S", AT_ONCE)
    before, operation, allowed = OPERATIONS[name]
    numbers = count()

    def play(fault: Fault) -> int:
        """Do the operation with a fault and again without; return how many calls the first made."""
        folder, boundary = tmp_path / str(next(numbers)), Boundary(fault)
        memory = MemoryStore() if where == "object store" else None
        root = Root.parse(ROOT, str(folder / "here")) if memory else Root.parse(folder)
        with memory.in_place() if memory else nullcontext():
            here, there = open_store(root), open_store(in_scratch(root, folder / "there"))
            before(root)
            with boundary.watch_disk(root.local), memory.watched(boundary) if memory else nullcontext(), cut_short():
                operation(root)
            assert contents(there) in allowed
            assert contents(here) in allowed
            with suppress(ValueError):  # what is absent by now cannot be signed
                operation(root)
            assert contents(there) == contents(here) == allowed[-1]
            clean_up_root(root, AT_ONCE, [SPEC.kind])
            assert contents(there) == contents(here) == allowed[-1]
            files = [key for key in memory.objects if f"/{SPEC.label}/" in key] if memory else []
            assert len(files) == (len(FILES) if memory and allowed[-1] else 0), "orphans"
        assert not list((root.local / ".staging").glob("*"))
        return len(boundary.calls)

    walk(play, every)
