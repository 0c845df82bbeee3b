"""Artifacts for the fault tests, and a process that commits one and may be killed at any request."""

from __future__ import annotations

import os
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from storage.artifact import Artifact, Design
from storage.objects import files_below
from storage.remote_store import open_store
from storage.root import Root
from tests.dist import forkserver

FILES = {"weights.bin": os.urandom(2**20 + 7), "data/a.txt": b"a" * 1_000, "data/b.txt": b"b"}
"""One file of more than a page (1 MiB) and two small ones."""
AT_ONCE = -2.0
"""Age for the janitor that takes all for old; a server's clock counts whole seconds."""


def design(**parameters: object) -> Design:
    return Design("checkpoint", "fault", 1, dict(parameters), {"tokens": "a" * 64})


def commit(root: Root, intent: Design, files: dict[str, bytes] = FILES) -> Artifact:
    """Stage `files` and commit them."""
    store = open_store(root)
    with store.staging() as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return store.commit(intent, folder, {"score": 1}, "test-1", "abc", 0.1)


def contents(artifact: Artifact) -> dict[str, bytes]:
    """Return the files of an artifact, brought to this machine and verified."""
    artifact.verify()
    folder = artifact.path
    return {name: (folder / name).read_bytes() for name in artifact.manifest.files}


def committing(variables: dict[str, str], root: Root, intent: Design) -> tuple[ForkServerProcess, Event]:
    """Start a process that commits once the event is set, with `variables` in its environment."""
    go = forkserver().Event()
    process = forkserver().Process(target=_commit, args=(variables, root.uri, str(root.local), intent, FILES, go))
    process.start()
    return process, go


def _commit(
    variables: dict[str, str], uri: str, scratch: str, intent: Design, files: dict[str, bytes], go: Event
) -> None:
    os.environ.update(variables)
    go.wait()
    commit(Root.of(uri, scratch), intent, files)


def attempts(root: Root, intent: Design) -> set[str]:
    """Return the attempts at an artifact of which there is a file in the store."""
    return {name.split("/")[0] for name in files_below(root.join(*intent.label.split("/")))}


def in_scratch(root: Root, folder: Path) -> Root:
    """Return the same root as another machine sees it: with a working folder of its own."""
    return Root.of(root.uri, str(folder))
