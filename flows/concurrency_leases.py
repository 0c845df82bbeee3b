"""Prefect's storage of leases of concurrency slots, in the working folder of the root: they outlive a server."""

from __future__ import annotations

import os
from pathlib import Path

from prefect.server.concurrency.lease_storage import filesystem

from herd.flows.local_server import LEASES


class ConcurrencyLeaseStorage(filesystem.ConcurrencyLeaseStorage):
    """Prefect's, in the folder of the variable LEASES; Prefect makes one for each use."""

    def __init__(self) -> None:
        super().__init__(Path(os.environ[LEASES]))
