"""The temporary Prefect server: there when none is known, gone with its process, told in a line when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.temporary import is_temporary, start_temporary_server

BEGIN = """
import sys, time
from pathlib import Path
from flows.temporary import is_temporary, start_temporary_server
start_temporary_server(Path(sys.argv[1]))()
from prefect.settings import PREFECT_API_URL
assert is_temporary()
print(PREFECT_API_URL.value(), flush=True)
time.sleep(60)
"""


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PREFECT_HOME": str(folder / "prefect"), "PREFECT_LOGGING_LEVEL": "CRITICAL", **more}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_none_is_started_where_one_is_known(tmp_path: Path) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        start_temporary_server(tmp_path)()
    assert not is_temporary()
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_it_ends_with_a_killed_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGIN, str(tmp_path)]
    with subprocess.Popen(command, env=surroundings(tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        health = f"{process.stdout.readline().strip()}/health"
        assert answers(health)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while answers(health):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_one_that_cannot_start_is_told_in_a_line(tmp_path: Path) -> None:
    broken = surroundings(tmp_path, PREFECT_API_DATABASE_CONNECTION_URL="sqlite+aiosqlite:////proc/none/prefect.db")
    command = [sys.executable, "-m", "flows.cli", "run", "tests/e2e/tiny.yaml", "--root", str(tmp_path / "root")]
    done = subprocess.run(command, env=broken, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the server ended with status" in done.stderr
    assert "logs" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "root" / "logs" / "prefect.log").stat().st_size > 0
