"""Folders of stages in progress: their names, where their checkpoints are, and the newest one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from herd.llama3.recipe.frozen import frozen_fields
from herd.llama3.recipe.load import digest
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.checkpoint.manifest import DAMAGED_MARK, MANIFEST, SUPERSEDED_MARKS, superseded_mark
from herd.storage.filesystem import is_local
from herd.storage.objects import list_children, list_objects
from herd.storage.root import Root

IN_PROGRESS = "in-progress"
"""Folder of a remote root with the checkpoints of stages in training."""


class SavedCheckpoint(NamedTuple):
    """A committed checkpoint of a stage."""

    position: int
    time: float
    """When it was committed, in seconds since 1970."""


def kept_checkpoints(root: Root, checkpoints: str, work: str) -> str | None:
    """Return the URI of the checkpoints of the work folder `work`; None: they are in it.

    `checkpoints` is the cluster's setting, empty for the default.
    """
    if not checkpoints and root.is_local:
        return None
    return f"{checkpoints.rstrip('/') or root.join(IN_PROGRESS)}/{work}"


def work_dir_name(recipe: Recipe, span: StageSpan, inputs: Mapping[str, str], work_dir_key: str) -> str:
    """Return the name of the work folder of a stage whose checkpoint has these inputs: role -> key.

    It depends on the recipe before the stage's start, not on its end: a stage that is lengthened while it trains
    continues (the trainer refuses changed frozen fields). `work_dir_key` is that of the run record.
    """
    data = " ".join(filter(None, (inputs["tokens"], inputs.get("conversations"))))
    return f"{span.name}-{digest([frozen_fields(recipe, span.start), data, inputs['parent'], work_dir_key])[:16]}"


def newest(folders: Iterable[str]) -> SavedCheckpoint | None:
    """Return the newest committed checkpoint in any of the folders or prefixes."""
    return max((saved for folder in folders for saved in islice(committed(folder), 1)), default=None)


def committed(folder: str) -> Iterator[SavedCheckpoint]:
    """Yield the committed checkpoints (those with a manifest) in a folder or prefix, newest first."""
    names = list_children(folder)
    superseded = list_children(f"{folder}/{SUPERSEDED_MARKS}") if SUPERSEDED_MARKS in names else {}
    for name in sorted(filter(str.isdigit, names), reverse=True):
        if written := _manifest_times(folder, name, superseded):
            yield SavedCheckpoint(int(name), written[0])


def _manifest_times(folder: str, position: str, superseded: Collection[str]) -> list[float]:
    """Return when the manifests of a checkpoint were written, newest first; a remote one has a folder per save."""
    if is_local(folder):
        return [path.stat().st_mtime for path in Path(folder, position).glob(MANIFEST)]
    times = []
    objects = list_objects(f"{folder}/{position}")
    for name, stored in objects.items():
        save = name.removesuffix(f"/{MANIFEST}")
        set_aside = f"{save}/{DAMAGED_MARK}" in objects or superseded_mark(f"{position}/{save}") in superseded
        if save != name and not set_aside:
            times.append(stored.modified)
    return sorted(times, reverse=True)
