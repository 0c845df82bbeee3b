"""The services of a team on one machine: Postgres, a Prefect server, an MLflow server and a worker, as plain processes.

    python -m herd.deploy.team up --env /etc/herd/team.env      (also: down, status, environment, purge, run SERVICE)

No containers, and nothing to install but Debian's postgresql: each service is a process with a pid file and a log below
one folder, bound to loopback; a reverse proxy with TLS goes in front (docs/tutorials/team.md). systemd runs the very
same commands by `run SERVICE`. What this gives up: one machine. A Postgres elsewhere is named by HERD_DB_HOST, and more
workers run on any machine that reaches the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]
import psutil

from herd.deploy.services import Service, Team, identity, postgres_program
from herd.flows.local_server import WORKING_DIRECTORY, failed_answer
from herd.storage.processes import PACKAGE_FOLDER
from herd.tasks.console import Wait

PURGED = "90d"
DATABASES = ("prefect", "mlflow", "mlflow_auth")
SECRET = ("HERD_DB_PASSWORD", "HERD_AUTH")
START_S, STOP_S = 120.0, 90.0
"""A first start migrates the databases; a worker that stops waits until trainers have saved."""
AUTH = """\
[mlflow]
default_permission = READ
database_uri = {uri}
admin_username = {user}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
"""


def prepare(team: Team) -> None:
    """Make folders, an empty database cluster if there is none, and MLflow's file of accounts."""
    for name in ("logs", "run", "prefect", "worker"):
        (team.folder / name).mkdir(parents=True, exist_ok=True)
    accounts = team.database("mlflow_auth", "+psycopg2").replace("%", "%%")
    private(team.folder / "mlflow-auth.ini", AUTH.format(uri=accounts, user=team.admin))
    if not team.database_host and not (team.folder / "postgres" / "PG_VERSION").exists():
        make_cluster(team)


def make_cluster(team: Team) -> None:
    """Make an empty database cluster that asks for the password. Raises ValueError with initdb's words."""
    data, user = team.folder / "postgres", team.service("postgres").user
    data.mkdir(mode=0o700, exist_ok=True)
    if user:
        shutil.chown(data, user)
    initdb = [postgres_program("initdb"), "-D", str(data), "-U", "herd", "-E", "UTF8", "-A", "scram-sha-256"]
    with tempfile.TemporaryFile("w+") as password:
        password.write(team.given["HERD_DB_PASSWORD"] + "\n")
        password.seek(0)
        if user:
            os.fchown(password.fileno(), pwd.getpwnam(user).pw_uid, -1)  # initdb opens it again, as that user
        done = subprocess.run(
            [*initdb, "--pwfile=/dev/stdin"], stdin=password, capture_output=True, text=True, cwd="/", **identity(user)
        )
    if done.returncode:
        raise ValueError(f"initdb: {done.stderr.strip()} ({data})")


async def make_databases(team: Team) -> None:
    """Create the databases that are not there yet."""
    connection = await asyncpg.connect(team.database("postgres", ""))
    try:
        there = {row["datname"] for row in await connection.fetch("select datname from pg_database")}
        for name in DATABASES:
            if name not in there:
                with suppress(asyncpg.DuplicateDatabaseError):  # another service made it since
                    await connection.execute(f'create database "{name}"')
    finally:
        await connection.close()


def register(team: Team) -> None:
    """Make pool, limits, deployments and automations on the Prefect server. Raises ValueError with its words."""
    home = {"PREFECT_HOME": str(team.folder / "prefect")}  # the worker's may belong to another user
    environment = surroundings({**team.client(), **home})
    command = [sys.executable, "-m", "herd.flows.cli.main", "setup"]
    done = subprocess.run(command, cwd=WORKING_DIRECTORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"herd setup: {(done.stdout + done.stderr)[-2000:]}")


def up(team: Team) -> None:
    """Start what does not run, in order, each when the one before answers. Raises ValueError with the end of a log."""
    prepare(team)
    for service in team.services():
        if running(team, service) is None:
            if service.name == "worker":
                register(team)
            start(team, service)
        await_answer(team, service)
        if service.name == "postgres":
            asyncio.run(make_databases(team))
        print(f"{service.name:9} up   {service.address}", flush=True)
    print(f"logs      {team.folder / 'logs'}")


def start(team: Team, service: Service) -> None:
    """Start a service in the background; it outlives this command."""
    if service.url and not fault_of(service.url):
        raise ValueError(f"{service.name}: something else answers at {service.url}; choose another port")
    with team.log(service).open("ab") as log:
        process = subprocess.Popen(
            service.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=PACKAGE_FOLDER,
            env=surroundings(service.environment), start_new_session=True, preexec_fn=heed_interrupts,
            **identity(service.user),
        )  # fmt: skip
    born = psutil.Process(process.pid).create_time()
    team.pid_file(service).write_text(f"{process.pid} {born}\n")


def run(team: Team, service: Service) -> None:
    """Become the service, in the foreground, as systemd wants it."""
    if service.name != "worker":  # which may be a user that owns nothing of this, and knows no password of the database
        prepare(team)
    if service.name in ("mlflow", "prefect"):
        wait_for_database(team)
        asyncio.run(make_databases(team))
    heed_interrupts()
    os.chdir(PACKAGE_FOLDER)
    os.execvpe(service.command[0], service.command, surroundings(service.environment))


def wait_for_database(team: Team) -> None:
    """Return when Postgres answers. Raises ValueError if it does not."""
    url, deadline = f"tcp://{team.database_place}", time.monotonic() + START_S
    wait = Wait(f"Postgres at {team.database_place}")
    while answer := fault_of(url):
        if time.monotonic() > deadline:
            raise ValueError(f"no Postgres at {team.database_place}: {answer}")
        wait.note(answer)
        time.sleep(0.5)


def down(team: Team) -> None:
    """Stop what runs, last started first, and wait until it is gone with all that it started."""
    for service in reversed(team.services()):
        process = running(team, service)
        if process is None:
            print(f"{service.name:9} down")
            continue
        everything = [process, *process.children(recursive=True)]
        process.send_signal(service.stop)
        _, left = psutil.wait_procs(everything, STOP_S)
        for late in left:
            late.kill()
        psutil.wait_procs(left, 10)
        team.pid_file(service).unlink()
        print(f"{service.name:9} stopped{f', {len(left)} process(es) killed' if left else ''}", flush=True)


def status(team: Team) -> int:
    """Print a line for each service; return 0 if all run and answer."""
    well = True
    for service in team.services():
        process = running(team, service)
        answering = process is not None and (not service.url or not fault_of(service.url))
        well &= answering
        words = "down" if process is None else f"{'up  ' if answering else 'mute'} pid {process.pid}  {service.address}"
        print(f"{service.name:9} {words.rstrip()}")
    return 0 if well else 3


def purge(team: Team) -> None:
    """Delete for good what has been in MLflow's trash for PURGED; `herd gc` knows no password of Postgres."""
    from mlflow.cli import gc  # in this process: others can read a command line

    os.environ.update(team.client())
    words = ["--backend-store-uri", team.database("mlflow", "+psycopg2"), "--older-than", PURGED]
    gc.main(words, standalone_mode=False)


def running(team: Team, service: Service) -> psutil.Process | None:
    """Return the process of a service if it lives; a number that now belongs to another process does not count."""
    try:
        pid, born = team.pid_file(service).read_text().split()
        process = psutil.Process(int(pid))
        alive = process.create_time() == float(born) and process.status() != psutil.STATUS_ZOMBIE
        return process if alive else None
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None


def await_answer(team: Team, service: Service) -> None:
    """Return when the service answers. Raises ValueError if it ends before, or takes longer than two minutes."""
    wait, deadline = Wait(f"{service.name} at {service.url}"), time.monotonic() + START_S
    while not service.url or (answer := fault_of(service.url)):
        process = running(team, service)
        if process is not None and not service.url:
            return
        if process is None or time.monotonic() > deadline:
            log = team.log(service)
            how = "ended" if process is None else f"did not answer within {START_S:.0f} s (the last: {answer})"
            raise ValueError(f"{service.name} {how}; the end of {log}:\n{log.read_text(errors='replace')[-1500:]}")
        wait.note(answer)
        time.sleep(0.2)


def fault_of(url: str) -> str:
    """Return why nothing answers there, such as "connection refused"; "" if something does."""
    place = urlsplit(url)
    if place.scheme != "tcp":
        return failed_answer(url, timeout_s=5)
    try:
        with socket.create_connection((place.hostname, place.port), timeout=2):
            return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()


def surroundings(own: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process: ours without the passwords, and what is its own."""
    return {**{name: value for name, value in os.environ.items() if name not in SECRET}, **own}


def heed_interrupts() -> None:
    """Heed SIGINT again: a background shell makes its children ignore it, and then a worker cannot be stopped."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def private(file: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(text)


def settings(file: Path | None) -> dict[str, str]:
    """Return the environment, and over it the lines NAME=value of `file`, as systemd reads them. Raises ValueError."""
    given = dict(os.environ)
    if file is None:
        return given
    if file.stat().st_mode & 0o077:
        raise ValueError(f"--env: {file} holds passwords and others may read it; chmod 600 {file}")
    for line in file.read_text().splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            given[name] = shlex.split(value)[0] if value[:1] in "'\"" and value else value
    return given


def main() -> int:
    """Do what the command line asks for; a mistake is a line on stderr and status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m herd.deploy.team", description="Services of a team on one machine."
    )
    parser.add_argument("command", choices=["up", "down", "status", "environment", "register", "purge", "run"])
    parser.add_argument("service", nargs="?", default="", help="what `run` becomes: postgres, mlflow, prefect, worker")
    parser.add_argument("--env", type=Path, help="file of NAME=value lines; without, the environment")
    words = parser.parse_args()
    try:
        return obey(Team(settings(words.env)), words.command, words.service)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def obey(team: Team, command: str, service: str) -> int:
    """Do one command and return the exit status."""
    match command:
        case "status":
            return status(team)
        case "environment":
            print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in team.client().items()))
        case "run":
            run(team, team.service(service))
        case _:
            {"up": up, "down": down, "register": register, "purge": purge}[command](team)
    return 0


if __name__ == "__main__":
    sys.exit(main())
