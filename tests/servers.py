"""One server of each kind for all workers of a test run: the first to ask starts it, the last to leave stops it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient

RUN = "HERD_TEST_RUN"
"""Variable with the folder of the run, which tests/conftest.py makes."""


@contextmanager
def one_of(name: str, start: Callable[[Path], AbstractContextManager[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield what `start(folder)` yields, plain values, from whichever worker started it.

    The worker that did stays until no other uses the server: its children die with it, so nothing outlives a run.
    """
    folder = Path(os.environ[RUN]) / name
    folder.mkdir(exist_ok=True)
    found = folder / "server.json"
    with (
        (folder / "change").open("w") as change,
        (folder / "owner").open("w") as owner,
        (folder / "use").open("w") as use,
    ):
        fcntl.flock(change, fcntl.LOCK_EX)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(use, fcntl.LOCK_SH)
            fcntl.flock(change, fcntl.LOCK_UN)
            yield json.loads(found.read_text())
            return
        with start(folder) as values:
            found.write_text(json.dumps(values))
            fcntl.flock(change, fcntl.LOCK_UN)
            yield values
            fcntl.flock(change, fcntl.LOCK_EX)
            fcntl.flock(use, fcntl.LOCK_EX)


@contextmanager
def only_flow_runs_of(flow: Flow[..., Any], client: SyncPrefectClient) -> Iterator[None]:
    """Have the reconciler see flow runs of `flow` only: others, also killed ones, are on the shared server too."""
    from herd.tasks.operate import ledgers, owners, queues, recovery

    known, flow_id = owners.unfinished_flow_runs, client.create_flow(flow)
    with pytest.MonkeyPatch.context() as patch:
        for module in (ledgers, queues, recovery):
            ours = lambda *given, **how: (each for each in known(*given, **how) if each.flow_id == flow_id)  # noqa: E731
            patch.setattr(module, "unfinished_flow_runs", ours)
        yield
