"""What the tests of taking over run in processes of their own: trainers that keep their checkpoints in a store."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Event

from herd.llama3.train.checkpoint.manifest import CheckpointManifest
from herd.llama3.train.checkpoint.storage import RemoteSave
from tests.llama3.train.test_trainer_bad_steps import poison
from tests.llama3.train.train_samples import train, train_until_signal


def train_there(environment: dict[str, str], path: Path, poisoned: list[int] | None = None) -> int:
    """Train with the store that `environment` names; a gradient comes out 1e6 times too large in `poisoned` steps."""
    os.environ.update(environment)
    poison(poisoned or [], 1e6)
    return train(path)


def killed_there(
    environment: dict[str, str], path: Path, target: str, calls: int, poisoned: list[int] | None = None
) -> int:
    """The same, until SIGKILL after call number `calls` of `target`, and once a checkpoint has reached the store."""
    os.environ.update(environment)
    poison(poisoned or [], 1e6)
    committed, commit = Event(), RemoteSave.commit

    def noticed(self: RemoteSave, manifest: CheckpointManifest) -> None:
        commit(self, manifest)
        committed.set()

    RemoteSave.commit = noticed  # type: ignore[method-assign]
    return train_until_signal(path, signal.SIGKILL, target, calls, True, lambda: committed.wait(60))
