"""The weights of a saved training state as whole tensors, a few at a time.

Whoever wants the model reads it from the state on the disk instead of gathering it from processes: that works for every
layout, and memory holds one group of tensors whatever the size of the model. What it gives up: the bytes are read once
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

GROUP_BYTES = 2**30
THREADS = 4


def weights_of(folder: Path, averaged: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, whole tensor) of the training state in `folder`, sorted by name.

    `averaged` as in its manifest: above 0, the weights are the running sum over so many positions divided by it. The
    files are trusted: whoever calls has just written or verified them.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    prefix = "average." if averaged else "model."
    known = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    group: dict[str, Tensor] = {}
    for name in sorted(name for name in known if name.startswith(prefix)):
        group[name] = torch.empty(known[name].size, dtype=known[name].properties.dtype)  # type: ignore[union-attr]
        if sum(tensor.nbytes for tensor in group.values()) >= GROUP_BYTES:
            yield from _read(folder, group, averaged)
            group = {}
    yield from _read(folder, group, averaged)


def _read(folder: Path, group: dict[str, Tensor], averaged: int) -> Iterator[tuple[str, Tensor]]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(dict(group), storage_reader=HuggingFaceStorageReader(str(folder), THREADS), no_dist=True)
    for name, tensor in group.items():
        yield name.partition(".")[2], tensor / averaged if averaged else tensor
