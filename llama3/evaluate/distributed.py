"""Several processes that evaluate one model together: rank, number of ranks, and an all-gather of JSON values.

Every process holds the whole model, takes its share of the batches and gathers all results.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist


class EvalRanks(Protocol):
    """The processes that share the work."""

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def gather(self, found: Any) -> list[Any]:
        """Return what each process passes, in order of rank. Plain JSON values; all processes must call."""
        ...


class SingleProcess:
    """One process does everything."""

    rank = 0
    size = 1

    def gather(self, found: Any) -> list[Any]:
        return [found]


class EvalGroup:
    """The processes of the default group of torch.distributed, which must be initialized."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def gather(self, found: Any) -> list[Any]:
        def all_gather(tensor: Tensor) -> list[Tensor]:
            tensors = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(tensors, tensor)
            return tensors

        # JSON in tensors: exact for numbers and text on any backend, and no pickle is loaded
        content = bytearray(json.dumps(found).encode())
        sizes = all_gather(torch.tensor([len(content)], device=self._device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        texts = all_gather(padded.to(self._device))
        return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in zip(texts, sizes, strict=True)]
