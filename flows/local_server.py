"""The servers and workers that herd starts as child processes, and the temporary Prefect server of a run."""

# A flow run runs commands, and a page of any web site can send requests to this machine. So a Prefect server of herd
# needs a random password, and answers only requests to its own host names from its own origins.

from __future__ import annotations

import atexit
import base64
import errno
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from herd.storage.processes import PACKAGE_FOLDER, die_with_parent
from herd.storage.root import Root
from herd.storage.secrets import kept_secret
from herd.tasks.console import Wait
from herd.tasks.tracking.moved_root import ACCESS, follow_root

WORKING_DIRECTORY = PACKAGE_FOLDER if (PACKAGE_FOLDER / "pyproject.toml").is_file() else Path.cwd()
"""Where deployments look for recipes of relative paths: the checkout, or for an installed herd the current folder."""
LOOPBACK = "127.0.0.1"
POOL = "local"
"""Work pool of the deployments."""
START_TIMEOUT_S = 300
"""Measured 6 to 90 s with a new database on a busy machine."""
STOP_TIMEOUT_S = 40
"""A trainer that gets SIGTERM writes a checkpoint first."""
_LOG = "its log is in the folder logs of the root"
UNREACHABLE = os.strerror(errno.ENETUNREACH).lower()
STOP_S = 5
NAME = "HERD_TEMPORARY_SERVER"
"""Variable with the address of the temporary server."""
PASSWORD_FILE = "prefect.password"
ORIGINS, DATABASE = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "PREFECT_SERVER_DATABASE_CONNECTION_URL"
SERVER_PASSWORD, PASSWORD = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
_CHOICES = {"connection_url", "driver", "host", "name", "password", "port", "user"}
"""Prefect settings that choose a database."""
LEASES = "HERD_CONCURRENCY_LEASES"
"""Variable with the folder of Prefect's leases of the concurrency slots of deployments."""


def server_command(*address: str) -> list[str]:
    """Return the command of a Prefect server at uvicorn's `address` options; it needs `server_variables`."""
    options = ["--factory", "herd.flows.prefect_app:create_app", "--lifespan", "on", "--log-level", "warning"]
    return [sys.executable, "-m", "uvicorn", *options, *address]


def server_variables(root: Root, port: int, *names: str) -> dict[str, str]:
    """Return the variables of a server with host names `names`, and of its clients; the user's settings stay."""
    from prefect.settings import get_current_settings

    known = get_current_settings()
    origins = known.server.api.cors_allowed_origins
    own = known.server.api.auth_string
    password = own.get_secret_value() if own else kept_password(root)
    variables = {
        SERVER_PASSWORD: password,
        PASSWORD: password,
        ORIGINS: ",".join(f"http://{name}:{port}" for name in dict.fromkeys(names)) if origins == "*" else origins,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # of a statement: 10 s, the default, are too few on a busy disk
        # Kept in memory, a restart of the server would lose them, and a flow run whose lease is lost ends.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "herd.flows.concurrency_leases",
        LEASES: str(root.local / "concurrency-leases"),
    }
    if "home" not in known.model_fields_set and not _CHOICES & known.server.database.model_fields_set:
        # Several object stores may share a working folder (HERD_SCRATCH).
        name = "prefect" if root.is_local else re.sub(r"\W+", "-", f"prefect {root.uri}")
        variables[DATABASE] = f"sqlite+aiosqlite:///{root.local / name}.db"
    return variables


def kept_password(root: Root) -> str:
    """Return the password of the root's servers, as user:password."""
    root.local.mkdir(parents=True, exist_ok=True)
    return kept_secret(root.local / PASSWORD_FILE, "herd:")


def refusal(title: str, value: object, description: str) -> str:
    """Return why a field of a form does not take a value, with its help."""
    return f"{title}: {value!r} is not taken; expected: {description}"


def sign_in_link(server: str, password: str) -> str:
    """Return the address that opens the pages of all servers of a `herd up` without a login."""
    return f"{server}/sign-in#{base64.b64encode(password.encode()).decode()}"


def write_access(root: Root, links: Sequence[str], variables: dict[str, str]) -> Path:
    """Write links and the variables for another shell, as lines to source, into a file that only its owner can read."""
    lines = [f"# in a browser: {link}" for link in links]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    path = root.local / ACCESS
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


class NoServer(RuntimeError):
    """A server that herd needs does not answer, or refuses."""


def prefect_command(port: int, host: str = LOOPBACK) -> list[str]:
    """Return the command of a Prefect server."""
    return [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]


def worker_command() -> list[str]:
    """Return the command of a worker with the name of its process; the queues limit concurrent flow runs."""
    # Not --limit: with it a Retry within 2 s of the failure ends the worker of Prefect 3.8.8 ("this borrower is already
    # holding one of this CapacityLimiter's tokens").
    return [sys.executable, "-m", "herd.flows.worker"]


@contextmanager
def child(
    name: str,
    command: list[str],
    root: Path,
    environment: dict[str, str],
    patience_s: float = STOP_TIMEOUT_S,
    descriptors: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, which inherits `descriptors`, until the block ends; its output goes to `logs/<name>.log`.

    The kernel sends it SIGTERM if this process is killed.
    """
    (root / "logs").mkdir(parents=True, exist_ok=True)
    with (root / "logs" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=PACKAGE_FOLDER,  # uvicorn imports from the current folder first
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        with suppress(ProcessLookupError):  # the rest of its process group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until `url` answers, and say after some seconds what answered last.

    Raises NoServer if the server ends, takes longer than START_TIMEOUT_S, or cannot be reached on this machine.
    """
    wait, deadline = Wait(url), time.monotonic() + START_TIMEOUT_S
    while (answer := failed_answer(url)) and time.monotonic() < deadline:
        if process.poll() is not None:
            raise NoServer(f"{url}: the server ended with status {process.returncode}; {_LOG}")
        if UNREACHABLE in answer and LOOPBACK in url:
            raise NoServer(f"{LOOPBACK}: this machine has no loopback interface; start it: ip link set lo up")
        wait.note(answer)
        time.sleep(0.1)
    if answer:
        raise NoServer(f"{url}: no answer within {START_TIMEOUT_S} s (the last: {answer}); {_LOG}")


def failed_answer(url: str, timeout_s: float = 2.0) -> str:
    """Return why `url` does not answer: "connection refused", "the proxy answered 503"; "" if it does."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import build_opener, getproxies, proxy_bypass

    address = urlsplit(url)
    proxied = address.scheme in getproxies() and not proxy_bypass(address.netloc)
    try:
        with build_opener().open(url, timeout=timeout_s):
            return ""
    except HTTPError as error:
        return f"the proxy answered {error.code}" if proxied else f"status {error.code}"
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)  # URLError has the system's error inside
        text = os.strerror(reason.errno) if isinstance(reason, OSError) and reason.errno else str(reason)
        return f"the proxy: {text.lower()}" if proxied else text.lower()


def start_temporary_server(root: Root) -> Callable[[], None]:
    """Start a server for the runs of `root`, unless one is configured; return a function that waits for its answer."""
    # Prefect would import a whole server into the run's process: 8 of the 12 s of an empty flow. This one starts before
    # the slow imports and serves the API alone.
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL, get_current_settings

    if PREFECT_API_URL.value():
        return lambda: None
    follow_root(root)
    bound = socket.socket()  # the server inherits it: another process cannot take the port before the server binds
    bound.bind((LOOPBACK, 0))
    port = bound.getsockname()[1]
    url = f"http://{LOOPBACK}:{port}/api"
    known = get_current_settings().to_environment_variables(exclude_unset=True)
    running = ExitStack()
    guarded = server_variables(root, port, LOOPBACK)
    # Prefect's private switches for its own temporary server
    ephemeral = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
    environment = {**known, **os.environ, **ephemeral, **guarded}
    command = server_command("--fd", str(bound.fileno()))
    process = running.enter_context(child("prefect", command, root.local, environment, STOP_S, (bound.fileno(),)))
    bound.close()
    atexit.register(running.close)  # before Prefect's handlers, which run first (last in, first out) and send events
    os.environ["PREFECT_API_URL"] = os.environ[NAME] = url
    os.environ[PASSWORD] = guarded[PASSWORD]
    refresh_global_settings_context()
    return lambda: await_answer(f"{url}/health", process)


def quiet_prefect() -> None:
    """Keep Prefect's log lines and its copies of tracebacks out of the terminal."""
    os.environ["HERD_CONSOLE"] = "terminal"
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")  # a lost event would print a kilobyte
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # with 5, the default, each call takes a minute once the server is gone
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "2")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    for name in ("websockets", "EventsWorker"):  # a server that dies would print a traceback of theirs
        logging.getLogger(name).setLevel(logging.CRITICAL)


def is_temporary() -> bool:
    """Return whether Prefect's server ends with this process, so that its pages cannot be opened."""
    return NAME in os.environ
