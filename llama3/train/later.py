"""Numbers on their way from the device to the host.

Reading a tensor (`.item()`, `.tolist()`) waits for everything that the device was given before the reading, so reading
the numbers of a step after the next one was handed over waits for both. Here the copy is handed over when the numbers
are made, into pinned memory, with an event behind it; reading later waits for that event only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Later:
    """The values that `tensor` has now, in stream order."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if not tensor.is_cuda:
            self._host = tensor.detach().clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def read(self) -> list[float]:
        """Wait for the copy; return the values of a vector."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values
