"""What a team's machine runs: each service's command and environment, from one set of variables.

Secrets stand in environments only, never on a command line, where every user of the machine could read them. Everything
listens on loopback; a reverse proxy with TLS goes in front. What this gives up: one password for all of a team, with
Prefect's own basic authentication, which knows a single account.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict
from urllib.parse import quote, urlsplit

from herd.flows.local_server import prefect_command, worker_command

NEEDED = ("HERD_TEAM", "HERD_ROOT", "HERD_DB_PASSWORD", "HERD_AUTH")
PORTS = {"postgres": 5433, "prefect": 4200, "mlflow": 5000}
CLIENT = ("AWS_", "HERD_ROOT", "HERD_SCRATCH", "HERD_THREADS")
"""What a worker and a person need of the file of settings; not the password of the database."""


@dataclass(frozen=True)
class Service:
    """A process: its command, what it finds in its environment, and the address that answers when it is up."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    url: str = ""
    """http://..., or tcp://127.0.0.1:port; empty: it listens nowhere."""
    user: str = ""
    stop: signal.Signals = signal.SIGTERM

    @property
    def address(self) -> str:
        """What people open, without the path that tells of its health."""
        return self.url.removesuffix("/health").removesuffix("/api")


class Team:
    """What the environment says, and the services that follow from it."""

    def __init__(self, given: dict[str, str]) -> None:
        """Raises ValueError for what is missing or unsafe."""
        missing = [name for name in NEEDED if not given.get(name)]
        if missing:
            raise ValueError(f"{', '.join(missing)}: not set; see deploy/team.env.example")
        self.given, self.folder = given, Path(given["HERD_TEAM"]).absolute()
        self.admin, _, self.password = given["HERD_AUTH"].partition(":")
        if not self.admin or len(self.password) < 12:
            raise ValueError("HERD_AUTH: write user:password, with 12 characters of password or more")
        self.database_host = given.get("HERD_DB_HOST", "")
        self.ports = {name: int(given.get(f"HERD_{name.upper()}_PORT", usual)) for name, usual in PORTS.items()}

    def services(self) -> list[Service]:
        """Return what runs here, in the order in which it starts."""
        own = [] if self.database_host else [self._postgres()]
        return [*own, self._mlflow(), self._prefect(), self._worker()]

    def service(self, name: str) -> Service:
        """Return a service by name. Raises ValueError for one that is not there."""
        known = {service.name: service for service in self.services()}
        if name not in known:
            raise ValueError(f"{name}: no such service; there are {', '.join(known)}")
        return known[name]

    def database(self, name: str, driver: str) -> str:
        """Return the URI of a database."""
        password = quote(self.given["HERD_DB_PASSWORD"], safe="")
        return f"postgresql{driver}://herd:{password}@{self.database_place}/{name}"

    @property
    def prefect_page(self) -> str:
        """The address of Prefect's pages."""
        return self.given.get("HERD_PREFECT_URL", "").rstrip("/") or f"http://127.0.0.1:{self.ports['prefect']}"

    @property
    def database_place(self) -> str:
        """Host and port of Postgres."""
        return self.database_host or f"127.0.0.1:{self.ports['postgres']}"

    def log(self, service: Service) -> Path:
        """The file with what a service prints."""
        return self.folder / "logs" / f"{service.name}.log"

    def pid_file(self, service: Service) -> Path:
        """The file with the process id and the time of birth of a service that runs in the background."""
        return self.folder / "run" / f"{service.name}.pid"

    def client(self) -> dict[str, str]:
        """Return the variables with which herd, Prefect and MLflow find the servers and the root."""
        return {
            **{name: value for name, value in self.given.items() if name.startswith(CLIENT)},
            "PREFECT_API_URL": f"http://127.0.0.1:{self.ports['prefect']}/api",
            "PREFECT_UI_URL": f"{self.prefect_page}/v2",
            "PREFECT_API_AUTH_STRING": self.given["HERD_AUTH"],
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.ports['mlflow']}",
            "MLFLOW_TRACKING_USERNAME": self.admin,
            "MLFLOW_TRACKING_PASSWORD": self.password,
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }

    def _postgres(self) -> Service:
        port = self.ports["postgres"]
        options = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories="]
        words = [word for option in options for word in ("-c", option)]
        command = [postgres_program("postgres"), "-D", str(self.folder / "postgres"), *words]
        user = self.given.get("HERD_POSTGRES_USER", "postgres") if os.geteuid() == 0 else ""
        return Service("postgres", command, {}, f"tcp://127.0.0.1:{port}", user, signal.SIGINT)  # its fast shutdown

    def _mlflow(self) -> Service:
        port = self.ports["mlflow"]
        options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--app-name", "basic-auth"]
        if public := urlsplit(self.given.get("HERD_MLFLOW_URL", "")).hostname:  # it refuses hosts that it was not told
            origin = self.given["HERD_MLFLOW_URL"].rstrip("/")
            options += [
                "--allowed-hosts",
                f"{public},{public}:*,localhost:*,127.0.0.1:*",
                "--cors-allowed-origins",
                origin,
            ]
        environment = {
            **self.client(),
            "MLFLOW_BACKEND_STORE_URI": self.database("mlflow", "+psycopg2"),
            "MLFLOW_ARTIFACTS_DESTINATION": self.given.get(
                "HERD_MLFLOW_ARTIFACTS", f"{self.given['HERD_ROOT'].rstrip('/')}/mlflow-artifacts"
            ),
            "MLFLOW_AUTH_CONFIG_PATH": str(self.folder / "mlflow-auth.ini"),
            "MLFLOW_AUTH_ADMIN_USERNAME": self.admin,
            "MLFLOW_AUTH_ADMIN_PASSWORD": self.password,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # 15 processes and 3 GB else
        }
        command = [sys.executable, "-m", "mlflow", "server", *options]
        return Service("mlflow", command, environment, f"http://127.0.0.1:{port}/health")

    def _prefect(self) -> Service:
        port = self.ports["prefect"]
        environment = {
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": self.database("prefect", "+asyncpg"),
            "PREFECT_SERVER_API_AUTH_STRING": self.given["HERD_AUTH"],
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.prefect_page,
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,orphans",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_UI_API_URL": f"{self.prefect_page}/api",
        }
        return Service("prefect", prefect_command(port), environment, f"http://127.0.0.1:{port}/api/health")

    def _worker(self) -> Service:
        return Service("worker", worker_command(), {**self.client(), "PREFECT_HOME": str(self.folder / "worker")})


class Identity(TypedDict, total=False):
    """As whom a process runs, in the words of subprocess."""

    user: str
    group: int
    extra_groups: list[int]


def identity(user: str) -> Identity:
    """Return how to run a process as `user`, or as ourselves. Raises ValueError if there is no such user."""
    if not user:
        return {}
    try:
        return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    except KeyError:
        raise ValueError(f"HERD_POSTGRES_USER: there is no user {user}; Postgres refuses to run as root") from None


def postgres_program(name: str) -> str:
    """Return the path of a program of Postgres: Debian keeps them off the PATH. Raises ValueError if there is none."""
    found = shutil.which(name) or max((str(p) for p in Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), default="")
    if not found:
        raise ValueError(f"{name}: not found; apt-get install postgresql, or name a database in HERD_DB_HOST")
    return found
