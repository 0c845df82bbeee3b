"""Several processes that evaluate one model together: who am I, how many are we, and what did each find.

Every process holds the whole model and all that is asked, takes its share of the batches, and hands what it found to
all, so that each can write the same report. Findings travel as JSON inside tensors: exact for numbers and text, through
any backend, and no pickle is loaded. What this gives up: a model that does not fit one device.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist


class Ranks(Protocol):
    """The processes that share the work."""

    @property
    def rank(self) -> int:
        """Which of them this is, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def gather(self, found: Any) -> list[Any]:
        """Return what each process calls this with, in order of rank. Plain JSON values; all must call."""
        ...


class Single:
    """One process does all."""

    rank = 0
    size = 1

    def gather(self, found: Any) -> list[Any]:
        return [found]


class EvalGroup:
    """The processes of the default group of torch.distributed, which must have been started."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def gather(self, found: Any) -> list[Any]:
        content = bytearray(json.dumps(found).encode())
        sizes = self._all(torch.tensor([len(content)], device=self._device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        texts = self._all(padded.to(self._device))
        return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in zip(texts, sizes, strict=True)]

    def _all(self, mine: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return everyone
