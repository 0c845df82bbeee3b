"""A Prefect worker whose name says which process it is: `python -m herd.flows.worker`, with the options of Prefect's.

The reconciler reads it in the labels of flow runs and asks the process whether it lives (tasks/operate/owners.py).
"""

from __future__ import annotations

import os
import sys

from herd.flows.local_server import POOL
from herd.storage.processes import process_name

if __name__ == "__main__":
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", process_name()]
    os.execv(sys.executable, [*command, *sys.argv[1:]])  # the process, and so its name, stays the same
