"""What every test lives with: no network but loopback, one thread, folders of its own."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import herd
from tests.servers import one_of

TESTS = Path(__file__).parent
CHECKOUT = TESTS.parent

# before a test can pass on the code of another checkout
assert Path(herd.__file__).parent.samefile(CHECKOUT), f"herd is imported from {herd.__file__}; give: make install-dev"

_spec = importlib.util.spec_from_file_location("network_guard", TESTS / "guard" / "sitecustomize.py")
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))

os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "guard"), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "240"  # 20 s are too few on a busy machine
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # more wait for one another on small matrices
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "1"
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # hundreds of processes start here; each would compile herd anew
    sys.dont_write_bytecode = False
# xdist ignores it, as does what a shell starts with `&`; and so would every child that we start
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" not in os.environ:
    _run = tempfile.TemporaryDirectory(prefix="herd-tests-")  # the workers use it too
    os.environ["HERD_TEST_RUN"], os.environ["XDG_CACHE_HOME"] = _run.name, f"{_run.name}/cache"
    os.environ["XDG_STATE_HOME"] = f"{_run.name}/state"
for _name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "HERD_ROOT"):
    os.environ.pop(_name, None)

# few examples and always the same ones, so that a run says something about the change; `make test-all` looks for more
settings.register_profile("dev", max_examples=20, derandomize=True, database=None, deadline=None)
settings.register_profile("nightly", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def _may_contain() -> bool:
    """Return whether this machine gives a process namespaces of its own, asked of a tool that is not ours."""
    kinds = ["--mount", "--ipc", "--pid", "--net", *(["--user"] if os.geteuid() else [])]
    with suppress(OSError):
        return subprocess.run(["unshare", *kinds, "--fork", "true"], capture_output=True).returncode == 0
    return False


needs_sandbox = pytest.mark.skipif(not _may_contain(), reason="this machine gives no namespaces to contain programs")
"""Not by `sandbox_error()`: a broken sandbox would skip its own tests."""

gc.disable()  # of what collecting imports, a million objects, next to nothing is garbage


def pytest_collection_finish() -> None:
    """Have the garbage collector never look at what was imported: each look takes half a second."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter free what was frozen: duckdb prints each object that is left, 60 lines."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes one worker longest; begun last, it would end alone."""
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/e2e/", "tests/test_imports.py")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests of many cases have counted, on whatever worker they ran."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(text)


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


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[dict[str, str]]:
    """The Prefect server of the whole run: `api` and `home`. What a test makes on it has names of its own."""
    from herd.flows.local_server import await_answer, child, prefect_command
    from herd.storage.processes import free_port

    @contextmanager
    def start(home: Path) -> Iterator[dict[str, str]]:
        port = free_port()
        with child("prefect", prefect_command(port), home, {**os.environ, "PREFECT_HOME": str(home)}) as server:
            await_answer(f"http://127.0.0.1:{port}/api/health", server)
            yield {"api": f"http://127.0.0.1:{port}/api", "home": str(home)}

    with one_of("prefect", start) as found:
        yield found
