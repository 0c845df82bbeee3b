"""Files of herd with a called function in `herd run quickstart`, up to the first training step, over all processes.

In each process of the run a called function names its file (`called_files/sitecustomize.py`). Bodies of modules and
classes do not count, and compiled kernels are not seen. The data steps run as a user's do; the run is killed when its
first training step begins.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.test_layers import PACKAGES

RECORDER = Path(__file__).parent / "called_files"
LONGEST_S = 1_800.0
POLL_S = 0.2


def first_step_files(checkout: Path, folder: Path) -> list[str]:
    """Run the quickstart of `checkout` in the empty `folder` up to its first step; return the files below `checkout`.

    Raises RuntimeError if the run has no first step.
    """
    command = [sys.executable, "-m", "herd.flows.cli.main", "run", str(checkout / "recipes" / "quickstart.yaml")]
    return called_files([*command, "--root", str(folder / "root")], "train_step", checkout, folder)


def called_files(command: Sequence[str], last: str, checkout: Path, folder: Path) -> list[str]:
    """Return the files of the packages of `checkout` with a called function until `command` calls the function `last`.

    Raises RuntimeError if the command does not call it.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HERD_", "MLFLOW_"))}
    environment = {
        **own,
        "PYTHONPATH": os.pathsep.join([str(RECORDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CALLED_FILES_PACKAGES": os.pathsep.join(f"{checkout / package}{os.sep}" for package in PACKAGES),
        "CALLED_FILES_FOLDER": str(folder),
        "CALLED_FILES_LAST": last,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    log, ended = folder / "run.log", folder / "ended"
    with log.open("wb") as output, _killed_at_the_end(folder):
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        deadline = time.monotonic() + LONGEST_S
        while not ended.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
    process.wait()
    if not ended.exists():
        lines = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"{last} was not called: {(lines or ['no output'])[-1]}")
    paths = {Path(line) for file in folder.glob("*.files") for line in file.read_text().splitlines()}
    return sorted(str(path.relative_to(checkout)) for path in paths)


@contextmanager
def _killed_at_the_end(folder: Path) -> Iterator[None]:
    """Kill every process of the run, servers that outlive their parent too: all have `folder` in their environment."""
    try:
        yield
    finally:
        while processes := [process for process in psutil.process_iter() if _is_of(process, folder)]:
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=5)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        return bool(process.environ().get("CALLED_FILES_FOLDER") == str(folder))
    return False
