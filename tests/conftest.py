"""What every test lives with: no network but loopback, one thread, folders of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
CHECKOUT = TESTS.parent

_spec = importlib.util.spec_from_file_location("network_guard", TESTS / "guard" / "sitecustomize.py")
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))

os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "guard"), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "240"  # 20 s are too few on a busy machine
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "1"
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # hundreds of processes start here; each would compile herd anew
    sys.dont_write_bytecode = False
# xdist ignores it, as does what a shell starts with `&`; and so would every child that we start
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="herd-cache-")  # the workers use it too
    os.environ["XDG_CACHE_HOME"] = _cache.name
for _name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "HERD_ROOT"):
    os.environ.pop(_name, None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file on one worker, and all of e2e, which shares one server and one undisturbed run, on another.

    The mark `xdist_group` would say so, but xdist 3.8 sets it in a way that pytest 9.2 does not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "e2e" if nodeid.startswith("tests/e2e/") else nodeid.partition("::")[0]

    return Scheduler(config, log)


@pytest.fixture(scope="session")
def checkout() -> Path:
    return CHECKOUT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data; a test that needs it is skipped, aloud, where it is absent."""
    folder = Path(os.environ.get("HERD_SHARED", CHECKOUT.parent / "shared"))
    if not (folder / "corpora").is_dir():
        pytest.skip(f"no real data at {folder}; set HERD_SHARED")
    return folder
