"""Artifacts for the fault tests, and processes that commit or bring one and may be killed at any request."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from herd.storage.artifact import Artifact, ArtifactSpec, Store
from herd.storage.digests import PAGE
from herd.storage.object_artifact import open_store
from herd.storage.objects import list_objects
from herd.storage.root import Root
from tests.dist import forkserver

FILES = {"weights.bin": os.urandom(2**20 + 7), "data/a.txt": b"a" * 1_000, "data/b.txt": b"b"}
"""One file of more than a page (1 MiB) and two small ones."""
LARGE = bytes(range(256)) * (11 * PAGE // 256) + b"tail"
"""11 MiB and 4 bytes: three parts of an upload (see `restless`), twelve pages."""
KINDS = ("checkpoint", "curated")
AT_ONCE = -2.0
"""Age for `clean_up_root` at which everything is old; a server's clock counts whole seconds."""


def artifact_spec(**parameters: object) -> ArtifactSpec:
    return ArtifactSpec("checkpoint", "fault", 1, dict(parameters), {"tokens": "a" * 64})


def commit(root: Root, spec: ArtifactSpec, files: dict[str, bytes] = FILES) -> Artifact:
    """Stage `files` and commit them."""
    store = open_store(root)
    with store.staging() as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return store.commit(spec, folder, {"score": 1}, "test-1", "abc", 0.1)


def contents(artifact: Artifact) -> dict[str, bytes]:
    """Return the files of an artifact, downloaded and verified."""
    artifact.verify()
    folder = artifact.path
    return {name: (folder / name).read_bytes() for name in artifact.manifest.files}


def build(root: Root, spec: ArtifactSpec, text: str = "hello", large: bytes = LARGE) -> Artifact:
    """Commit a small file and a large one."""
    store = open_store(root)
    with store.staging() as folder:
        (folder / "documents").mkdir()
        (folder / "documents" / "a.txt").write_text(text)
        (folder / "large.bin").write_bytes(large)
        return store.commit(spec, folder, {"documents": 1}, "test-1", "abc", 0.1)


def build_on_signal(pipe: Connection, root: Root, spec: ArtifactSpec, text: str, large: bytes) -> None:
    """In a process: commit on a signal, and send the manifest."""
    pipe.send("ready")
    pipe.recv()
    pipe.send(build(root, spec, text, large).manifest)


def download(pipe: Connection, root: Root, label: str) -> None:
    """In a process: download an artifact on a signal."""
    artifact = open_store(root).load(label)
    pipe.send("ready")
    pipe.recv()
    artifact.verify()


def stage_and_wait(pipe: Connection, folder: Path) -> None:
    """In a process: stage a file, send the folder and wait."""
    pipe.send("ready")
    with Store(folder).staging() as staged:
        (staged / "half").write_text("half")
        pipe.send(str(staged))
        pipe.recv()


def started(work: Callable[..., None], *arguments: object) -> tuple[ForkServerProcess, Connection]:
    """Start a process that calls `work(pipe, *arguments)`; return it and our end of the pipe, once it sent `ready`."""
    ours, theirs = forkserver().Pipe()
    process = forkserver().Process(target=_work, args=(dict(os.environ), work, theirs, arguments))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    return process, ours


def _work(
    variables: dict[str, str], work: Callable[..., None], pipe: Connection, arguments: tuple[object, ...]
) -> None:
    os.environ.update(variables)  # the server was started with others
    work(pipe, *arguments)


def attempts(root: Root, spec: ArtifactSpec) -> set[str]:
    """Return the attempts at an artifact of which there is a file in the store."""
    return {name.split("/")[0] for name in list_objects(root.join(*spec.label.split("/")))}


def in_scratch(root: Root, folder: Path) -> Root:
    """Return the same root as another machine sees it: with another working folder."""
    return Root.parse(root.uri, str(folder))


def disk_calls(patch: pytest.MonkeyPatch) -> list[int | Path]:
    """Return a list to which each fsync adds the inode and each rename the new path; both still happen."""
    calls: list[int | Path] = []

    def recorded(name: str, what: Callable[..., int | Path]) -> None:
        real = getattr(os, name)

        def call(*given: Any, **named: Any) -> None:
            real(*given, **named)
            calls.append(what(*given))

        patch.setattr(os, name, call)

    recorded("fsync", lambda handle: os.fstat(handle).st_ino)
    for name in ("rename", "replace"):
        recorded(name, lambda old, new: Path(new))
    return calls
