"""Events reach a server that is there, and are nothing where none is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from herd.tasks.tracking.events import resource_id

ALONE = """
import time
from herd.tasks.tracking.events import emit
began = time.monotonic()
emit("herd.alert.disk", "herd.run.tiny-1", "tiny-1", {"run": "tiny-1"})
emit("herd.alert.disk", "herd.run.tiny-1", "tiny-1", {"run": object()})
import threading
print(sorted(t.name for t in threading.enumerate()), flush=True)
"""


@pytest.mark.parametrize(
    ("label", "resource"),
    [
        ("checkpoint/quickstart-main-1a2b3c4d", "herd.checkpoint.quickstart-main-1a2b3c4d"),
        ("run/tiny.x-1", "herd.run.tiny.x-1"),
        ("a b/c*d", "herd.a.b.c.d"),
    ],
)
def test_resources_are_dotted_names(label: str, resource: str) -> None:
    assert resource_id(label) == resource


def test_without_a_server_and_outside_of_a_flow_nothing_is_started(tmp_path: Path) -> None:
    """Prefect would start a temporary server, only to be told."""
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['MainThread']"
    assert not (tmp_path / "prefect.db").exists()
