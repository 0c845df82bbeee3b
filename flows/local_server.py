"""The servers and workers that herd starts as child processes, and the temporary Prefect server of a run.

Whoever can start a flow run can run a command, and a page of any site can send requests to this machine. So our Prefect
server wants a random password, new at each start, and answers only calls by its own names from its own pages.
"""

from __future__ import annotations

import atexit
import base64
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from storage.processes import die_with_parent
from storage.root import Root

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import HTMLResponse
    from starlette.types import ASGIApp


ACCESS = "prefect.env"
"""File below the root's working folder, for its owner only: how another shell reaches the servers of `herd up`."""
ORIGINS, DATABASE = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "PREFECT_SERVER_DATABASE_CONNECTION_URL"
SERVER_PASSWORD, PASSWORD = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
_CHOICES = {"connection_url", "driver", "host", "name", "password", "port", "user"}
"""Settings of Prefect by which a user chooses a database."""
SIGN_IN = """\
<!DOCTYPE html><title>herd</title><script>
localStorage.setItem("prefect-password", location.hash.slice(1)); location.replace("/v2/deployments")
</script>"""
"""Prefect's pages keep the password there. A browser sends nothing of what follows # to a server, so no log has it."""


def server_command(*address: str) -> list[str]:
    """Return the command of such a server at uvicorn's `address` options; it wants `server_variables`."""
    words = [
        "-m",
        "uvicorn",
        "--factory",
        "flows.local_server:create_app",
        "--lifespan",
        "on",
        "--log-level",
        "warning",
    ]
    return [sys.executable, *words, *address]


def server_variables(root: Root, port: int, *names: str) -> dict[str, str]:
    """Return the variables of a server that answers to `names`, and of its clients; what the user chose stays."""
    from prefect.settings import get_current_settings

    known = get_current_settings()
    origins = known.server.api.cors_allowed_origins
    own = known.server.api.auth_string
    password = own.get_secret_value() if own else f"herd:{secrets.token_urlsafe(32)}"
    variables = {
        SERVER_PASSWORD: password,
        PASSWORD: password,
        ORIGINS: ",".join(f"http://{name}:{port}" for name in dict.fromkeys(names)) if origins == "*" else origins,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    }
    if "home" not in known.model_fields_set and not _CHOICES & known.server.database.model_fields_set:
        variables[DATABASE] = f"sqlite+aiosqlite:///{database(root)}"
    return variables


def database(root: Root) -> Path:
    """Return the file of the flow runs of `root`; several object stores may share a working folder (HERD_SCRATCH)."""
    return root.local / ("prefect.db" if root.is_local else re.sub(r"\W+", "-", f"prefect {root.uri}") + ".db")


def create_app() -> ASGIApp:
    """Return Prefect's application behind a check of the name it is called by, with a page to sign in."""
    from prefect.server.api.server import create_app as prefect_app
    from prefect.settings import get_current_settings
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    async def sign_in(request: Request) -> HTMLResponse:
        return HTMLResponse(SIGN_IN)

    app: Any = prefect_app(final=True)
    app.router.routes.insert(0, Route("/sign-in", sign_in))  # the last one takes every path
    origins = get_current_settings().server.api.cors_allowed_origins.split(",")
    names = [urlsplit(origin).hostname or "*" for origin in origins]
    # around it, not in it: the server calls its own application by a name that is none of these
    return TrustedHostMiddleware(app, allowed_hosts=names, www_redirect=False)


def sign_in_link(server: str, password: str) -> str:
    """Return the address that opens the pages of `server` without a question."""
    return f"{server}/sign-in#{base64.b64encode(password.encode()).decode()}"


def write_access(root: Root, server: str, variables: dict[str, str]) -> Path:
    """Write the variables that another shell needs, as lines to source, into a file that only its owner reads."""
    lines = [f"# in a browser: {sign_in_link(server, variables[PASSWORD])}"] if PASSWORD in variables else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    path = root.local / ACCESS
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


# Servers and workers as child processes, with their output in a log. The kernel ends them when this process is killed
# (on Linux only).

CHECKOUT = Path(__file__).parent.parent
LOOPBACK = "127.0.0.1"
POOL = "local"
"""Work pool of the deployments."""
START_TIMEOUT_S = 300
"""A new database and a busy machine: measured 6 to 90 s."""
STOP_TIMEOUT_S = 40
"""A trainer that is told to stop writes a checkpoint first."""
_LOG = "its log is in the folder logs of the root"


class NoServer(RuntimeError):
    """A server that was started here does not answer."""


def prefect_command(port: int, host: str = LOOPBACK) -> list[str]:
    """Return the command of a Prefect server."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]


def worker_command() -> list[str]:
    """Return the command of a worker. The queues limit what works at the same time, never `--limit`.

    With it a Retry within a second or two of the failure ends the worker of Prefect 3.8.8: "this borrower is already
    holding one of this CapacityLimiter's tokens".
    """
    return [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]


@contextmanager
def child(
    name: str,
    command: list[str],
    root: Path,
    environment: dict[str, str],
    patience_s: float = STOP_TIMEOUT_S,
    descriptors: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, which inherits `descriptors`, until the block ends; its output goes to `logs/<name>.log`."""
    (root / "logs").mkdir(parents=True, exist_ok=True)
    with (root / "logs" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=CHECKOUT,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
    try:
        yield process
    finally:
        _stop(process, patience_s)


def _stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Ask the server to leave, then end whatever is left of its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def await_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until `url` answers. Raises NoServer if the server ends or takes longer than START_TIMEOUT_S."""
    from urllib.request import urlopen

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NoServer(f"{url}: the server ended with status {process.returncode}; {_LOG}")
        try:
            with urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise NoServer(f"{url}: no answer within {START_TIMEOUT_S} s; {_LOG}")


# The temporary Prefect server of a run without one. It starts before the slow imports and serves the API alone. Prefect
# would import a whole server into the run's process: 8 of the 12 s that an empty flow cost. It starts like Prefect's
# own temporary server (PREFECT__SERVER_EPHEMERAL), a private setting.

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
