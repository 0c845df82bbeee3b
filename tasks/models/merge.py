"""Merge checkpoints of stages and runs into one that is evaluated and judged as any other."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from herd.llama3.model.files import CONFIG, weight_files, weights_digest
from herd.llama3.model.merge import MergedModel
from herd.llama3.recipe.load import digest
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, tokenizer_file
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.digests import digest_file
from herd.tasks.runs.records import MERGED
from herd.tasks.step import Context, ensure_artifact

VERSION = 1
MERGE = "merge"
"""Beginning of the names of its steps, where others have the name of their stage."""


def merge_checkpoints(context: Context, parents: Sequence[Artifact], weights: Sequence[float]) -> Artifact:
    """Return the weighted mean of checkpoints as an artifact of the run of the first, whose tokens it inherits.

    Raises ValueError for models of different shape, tokenizer or chat template, and as `MergedModel` does.
    """
    from herd.llama3.model.files import open_model

    folders = {parent.label: parent.path_of("model") for parent in parents}
    if len(folders) < len(parents):
        labels = [parent.label for parent in parents]
        raise ValueError(f"merge: {max(labels, key=labels.count)} is named twice; give it a larger weight instead")
    merged = MergedModel({label: open_model(folder) for label, folder in folders.items()}, weights)
    _check_files(folders)
    inputs = {f"parent-{number}": parent.key for number, parent in enumerate(parents, 1)}
    own = {kind: key for kind, key in parents[0].manifest.inputs.items() if kind in ("tokens", "tokenizer")}
    parameters_ = {"weights": [weight / sum(weights) for weight in weights]}
    step = f"{MERGE}-{digest([parameters_, inputs])[:6]}"
    spec = ArtifactSpec("checkpoint", f"{context.recipe.name}-{step}", VERSION, parameters_, {**inputs, **own})
    end = max(int(parent.metadata["end"]) for parent in parents)

    def build(folder: Path, _: str) -> dict[str, Any]:
        model, first = folder / "model", folders[parents[0].label]
        merged.save(model)
        skipped = {CONFIG, *(path.name for path in weight_files(first).values())}
        for path in sorted(first.iterdir()):
            if path.name not in skipped and not path.name.endswith(".index.json"):
                shutil.copyfile(path, model / path.name)
        return {
            "end": end,
            MERGED: dict(zip(folders, parameters_["weights"], strict=True)),
            "model_sha256": weights_digest(model),
        }

    return ensure_artifact(context, step, spec, build)


def _check_files(folders: dict[str, Path]) -> None:
    """Raise ValueError unless all models have the tokenizer of the first, and all or none chats."""
    (first, folder), *others = folders.items()
    for label, other in others:
        if digest_file(tokenizer_file(other)).sha256 != digest_file(tokenizer_file(folder)).sha256:
            raise ValueError(f"merge: {label} has another tokenizer than {first}; merge models that share one")
        paths = [each / TEMPLATE_FILE for each in (folder, other)]
        chats = [path.read_text() if path.is_file() else "" for path in paths]
        if all(chats) and chats[0] != chats[1]:
            raise ValueError(f"merge: {label} has another chat template than {first}; merge models that share one")
        if chats[0] != chats[1]:
            raise ValueError(
                f"merge: {label if chats[1] else first} has a chat template and {first if chats[1] else label} has "
                "none; merge base models with base models"
            )
