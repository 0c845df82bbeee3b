"""The Prefect server that herd starts: it answers its user and nobody else on the machine's browsers.

Who may start a flow run may run a command, and a page of any site can send requests to this machine. So a server of
ours wants a random password, new at each start, takes calls from its own pages only, and answers to its own names only:
another site's name that resolves to this machine is that site's way around the rest. What this gives up: who can read
the user's files or memory can still read the password.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

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
    words = ["-m", "uvicorn", "--factory", "flows.server:create_app", "--lifespan", "on", "--log-level", "warning"]
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
