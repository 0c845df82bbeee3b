"""The Prefect server of a run that was given none: started before the slow imports, so that both take the same seconds.

Prefect would start one too, once the flow begins, and import a whole server into the run's process to do so: 8 of the
12 s that an empty flow cost. It serves the API alone, without pages and schedules, and ends with the process. What this
gives up: it begins like Prefect's own temporary server does (PREFECT__SERVER_EPHEMERAL), which is Prefect's business.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack

from flows.children import LOOPBACK, await_answer, child
from flows.server import PASSWORD, server_command, server_variables
from storage.root import Root

STOP_S = 5
NAME = "HERD_TEMPORARY_SERVER"
"""Variable with its address."""


def start_temporary_server(root: Root) -> Callable[[], None]:
    """Start a server for the runs of `root`, unless Prefect knows one; return what waits until it answers."""
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL, get_current_settings

    if PREFECT_API_URL.value():
        return lambda: None
    bound = socket.socket()  # handed to the server: a free port could be another process's before the server binds it
    bound.bind((LOOPBACK, 0))
    port = bound.getsockname()[1]
    url = f"http://{LOOPBACK}:{port}/api"
    known = get_current_settings().to_environment_variables(exclude_unset=True)
    running = ExitStack()
    guarded = server_variables(root, port, LOOPBACK)
    environment = {**known, **_environment(), **guarded}
    command = server_command("--fd", str(bound.fileno()))
    process = running.enter_context(child("prefect", command, root.local, environment, STOP_S, (bound.fileno(),)))
    bound.close()
    atexit.register(running.close)  # before any handler of Prefect: last in, first out, and those still send events
    os.environ["PREFECT_API_URL"] = os.environ[NAME] = url
    os.environ[PASSWORD] = guarded[PASSWORD]
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


def _environment() -> dict[str, str]:
    switches = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
    return {**os.environ, **switches}
