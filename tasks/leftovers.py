"""Work in progress that nobody finished: folders below `work/`, and checkpoints of stages below `in-progress/`.

A step that is done removes its own. What stays is of runs that were given up: their checkpoints are the largest files
under a root that no artifact names. What this gives up: whose they are is not written on them, so time decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.objects import children, files_below, remove_all
from storage.root import Root
from storage.staging import discard, newest, size
from tasks.standing import IN_PROGRESS

WORK = "work"


@dataclass(frozen=True)
class Leftover:
    """Half-done work of one step."""

    name: str
    bytes: int
    last: float
    """When it was last written to, in seconds since 1970."""

    @property
    def label(self) -> str:
        """What its lease is called."""
        return f"{WORK}/{self.name}"


def leftovers(root: Root) -> list[Leftover]:
    """Return what is in progress on this machine and, under a remote root, in the object store; sorted by name."""
    names = set(_local_names(root)) | set(_remote_names(root))
    return [_leftover(root, name) for name in sorted(names)]


def remove_leftover(root: Root, name: str) -> None:
    """Delete what is there of the work `name`; the caller holds its lease. Raises OSError if some of it stays."""
    if not root.is_local:
        remove_all(root.join(IN_PROGRESS, name))
    discard(root.local, root.local / WORK / name)


def _leftover(root: Root, name: str) -> Leftover:
    folder = root.local / WORK / name
    stored = [] if root.is_local else [*files_below(root.join(IN_PROGRESS, name)).values()]
    total = size(folder) + sum(each.bytes for each in stored)
    return Leftover(name, total, max([newest(folder), *(each.modified for each in stored)]))


def _local_names(root: Root) -> list[str]:
    place = root.local / WORK
    return [path.name for path in place.iterdir() if path.is_dir()] if place.is_dir() else []


def _remote_names(root: Root) -> list[str]:
    return [] if root.is_local else list(children(root.join(IN_PROGRESS)))
