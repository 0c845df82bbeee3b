"""An object store in memory whose requests are calls of a boundary; it refuses what breaks a committed artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.orders import Boundary
from tests.storage.simulation import SimulatedStore, Simulation


class MemoryStore(SimulatedStore):
    """The store of the simulation without its scheduler: each request is answered at once, or fails by the boundary."""

    def __init__(self) -> None:
        super().__init__(Simulation(1, Path()))  # a seed of strong servers
        self.boundary = Boundary()

    def request(self, what: str, effect: Callable[[], Any], writes: bool = False) -> Any:
        return self.boundary.call(what, effect)

    @contextmanager
    def watched(self, boundary: Boundary) -> Iterator[None]:
        """Have the requests be calls of `boundary`."""
        self.boundary = boundary
        try:
            yield
        finally:
            self.boundary = Boundary()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Answer the requests of this process to any object store."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("herd.storage.filesystem.remote_filesystem", lambda uri: self)
            yield
