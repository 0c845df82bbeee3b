"""The Prefect server of a run that was given none: started before the slow imports, so that both take the same seconds.

Prefect would start one too, once the flow begins, and import a whole server into the run's process to do so: 8 of the
12 s that an empty flow cost. It serves the API alone, without pages and schedules, and ends with the process. What this
gives up: it begins like Prefect's own temporary server does (PREFECT__SERVER_EPHEMERAL), which is Prefect's business.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from flows.children import await_answer, child
from storage.processes import free_port

STOP_S = 5
NAME = "HERD_TEMPORARY_SERVER"
"""Variable with its address."""


def start_temporary_server(root: Path) -> Callable[[], None]:
    """Start a server that logs below `root`, unless Prefect knows one; return what waits until it answers."""
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL, get_current_settings

    if PREFECT_API_URL.value():
        return lambda: None
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    known = get_current_settings().to_environment_variables(exclude_unset=True)
    running = ExitStack()
    process = running.enter_context(child("prefect", _command(port), root, {**known, **_environment()}, STOP_S))
    atexit.register(running.close)  # before any handler of Prefect: last in, first out, and those still send events
    os.environ["PREFECT_API_URL"] = os.environ[NAME] = url
    refresh_global_settings_context()
    return lambda: await_answer(f"{url}/health", process)


def quiet_prefect() -> None:
    """Keep Prefect's own lines and its copy of every traceback out of the terminal; herd says what matters."""
    os.environ["HERD_CONSOLE"] = "terminal"
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")  # a lost event would print a kilobyte
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # 5, the default, is a minute for each call once the server is gone for good
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "2")
    os.environ.setdefault("DO_NOT_TRACK", "1")


def is_temporary() -> bool:
    """Return whether Prefect's server ends with this process: nobody can open its pages, now or later."""
    return NAME in os.environ


def _command(port: int) -> list[str]:
    words = ["-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
    return [sys.executable, *words, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]


def _environment() -> dict[str, str]:
    switches = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
    return {**os.environ, **switches}
