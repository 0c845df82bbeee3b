"""The cost of a command and of all its descendants, on trees whose cost is known."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.process_tree import tree_cost

BUSY = "import time\nwhile time.process_time() < 0.4: pass\n"


def test_the_cost_of_a_tree_has_its_grandchildren(tmp_path: Path) -> None:
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}], check=True)\n"
    idle, busy = (tree_cost([sys.executable, "-c", code], tmp_path / "log") for code in ("pass", nested))
    assert busy.cpu_s > idle.cpu_s + 0.3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to another than the first process")
def test_the_cost_of_a_tree_has_those_that_outlive_their_parent(tmp_path: Path) -> None:
    slow = f"import time\ntime.sleep(0.3)\n{BUSY}"
    left = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {slow!r}])\n"
    began = time.monotonic()
    cost = tree_cost([sys.executable, "-c", left], tmp_path / "log")
    assert cost.cpu_s > 0.4
    assert 0.6 < cost.wall_s <= time.monotonic() - began


def test_a_command_that_fails_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 3: no such herd"):
        tree_cost([sys.executable, "-c", "import sys; print('no such herd'); sys.exit(3)"], tmp_path / "log")
