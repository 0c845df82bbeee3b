"""Files with a called function, over the processes of a small run whose calls are known."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.first_step import called_files

USED = "def call(): pass\n"
SOURCES = {
    "flows/run.py": """
import os, subprocess, sys, threading, time
import outside, storage.bodies, storage.used, tasks.late, tasks.thread, llama3.rank
outside.call()
storage.used.call()
thread = threading.Thread(target=tasks.thread.call)
thread.start()
thread.join()
subprocess.run([sys.executable, "-c", "import tasks.child; tasks.child.call()"], check=True)
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("server.pid", "w").write(str(server.pid))
if os.fork() == 0:
    import llama3.forked
    llama3.forked.call()
    llama3.rank.train_step()
    tasks.late.call()
time.sleep(600)
""",
    "storage/bodies.py": "class Body:\n    items = [one for one in range(3)]\n\ndef unused(): pass\n",
    "storage/used.py": USED,
    "tasks/thread.py": USED,
    "tasks/child.py": USED,
    "tasks/late.py": USED,
    "llama3/forked.py": USED,
    "llama3/rank.py": "def train_step(): pass\n",
    "outside.py": USED,
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "tree"))
    (tmp_path / "work").mkdir()
    return tmp_path / "tree"


def test_files_are_those_of_all_processes_up_to_the_last_function(tree: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", "import flows.run"]
    assert called_files(command, "train_step", tree, tmp_path / "work") == [
        "llama3/forked.py",
        "llama3/rank.py",
        "storage/used.py",
        "tasks/child.py",
        "tasks/thread.py",
    ]
    assert time.monotonic() - began < 60
    assert not psutil.pid_exists(int((tmp_path / "work" / "server.pid").read_text()))


def test_a_run_without_the_last_function_says_its_last_line(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="train_step was not called: ZeroDivisionError"):
        called_files([sys.executable, "-c", "1 / 0"], "train_step", tree, tmp_path / "work")
