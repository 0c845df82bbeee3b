"""Prefect's application as herd serves it: signed in by a link, with explained forms, and repeated when it is busy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from herd.flows.local_server import refusal
from herd.tasks.tracking.moved_root import SIGN_IN_AT

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import HTMLResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


BUSY_S = 10.0
"""How long a request is repeated while another writer has the database."""
PINNED = ("pipeline/pipeline", "rerun/rerun", "promote/promote", "promote/rollback", "study/study")
"""Deployments that people start: they come first in the list until a person pins others."""
SIGN_IN = """
    if (!(await get("/api/admin/version")).ok) throw 0
    localStorage.setItem("prefect-password", key)
    if (!localStorage.getItem("prefect-pinned-deployments")) {
        const found = await Promise.all(%s.map((name) => get(`/api/deployments/name/${name}`)))
        const pinned = await Promise.all(found.filter((each) => each.ok).map((each) => each.json()))
        if (pinned.length) localStorage.setItem("prefect-pinned-deployments", JSON.stringify(pinned.map(({id}) => id)))
    }
    return "/v2/deployments"
"""


def explain_refusals() -> None:
    """Have this process's Prefect server say what a field of a form takes, in place of its regular expression.

    It also refuses unknown parameters of herd's flows: Prefect takes them, the flow run crashes before it has a state,
    and is started again.
    """
    from prefect.utilities.schema_tools import validation

    refused: Any = validation.JSONSchemaValidationError  # type: ignore[attr-defined]
    rules: dict[str, Any] = validation._VALIDATOR.VALIDATORS  # type: ignore[attr-defined]
    check, check_properties = rules["pattern"], rules["properties"]

    def explained(validator: Any, pattern: str, value: object, schema: dict[str, Any]) -> Iterator[Any]:
        for error in check(validator, pattern, value, schema) or ():
            if "description" in schema:
                error.message = refusal(str(schema.get("title", "")), value, schema["description"])
            yield error

    def known(validator: Any, properties: dict[str, Any], value: Any, schema: dict[str, Any]) -> Iterator[Any]:
        yield from check_properties(validator, properties, value, schema) or ()
        if schema.get("title") == "Parameters" and [*properties] == ["config"] and isinstance(value, dict):
            for name in value.keys() - properties.keys():
                remedy = f"write it below config: {{config: {{{name}: ...}}}}"
                yield refused(f"{name!r} is not a parameter; {remedy}")

    rules["pattern"], rules["properties"] = explained, known


def create_app() -> ASGIApp:
    """Return Prefect's application behind a check of the Host header, with a page to sign in.

    Its pages reach this server only: they ask a host of Amplitude's for settings even if analytics are disabled.
    """
    from prefect.server.api.server import create_app as prefect_app
    from prefect.settings import get_current_settings
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    explain_refusals()
    app: Any = prefect_app(final=True)
    if os.environ.get(SIGN_IN_AT):  # people open its pages
        from herd.tasks.tracking.mlflow_app import sign_in_page

        page = sign_in_page(SIGN_IN % json.dumps(PINNED))

        async def sign_in(request: Request) -> HTMLResponse:
            return HTMLResponse(page)

        app.router.routes.insert(0, Route("/sign-in", sign_in))  # first: Prefect's last route matches every path
    origins = get_current_settings().server.api.cors_allowed_origins.split(",")
    names = [urlsplit(origin).hostname or "*" for origin in origins]
    sockets = [origin.replace("http", "ws", 1) for origin in origins]
    policy = f"connect-src 'self' {' '.join([*origins, *sockets])}".encode()

    async def confined(scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", policy)]
            await send(message)

        await app(scope, receive, answer)

    # Around the application, not in it: the server calls its own application by another host name.
    return TrustedHostMiddleware(repeat_when_busy(confined), allowed_hosts=names, www_redirect=False)


def repeat_when_busy(app: ASGIApp) -> ASGIApp:
    """Return `app`, where a request that it answers 503 is repeated for BUSY_S.

    Prefect answers so while another writer has SQLite, having changed nothing. Its client repeats such requests, a
    browser does not: a person's click would be lost.
    """
    from asyncio import sleep

    async def repeated(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        body: list[Message] = []
        while not body or (body[-1]["type"] == "http.request" and body[-1].get("more_body")):
            body.append(await receive())
        deadline, pause_s, busy = time.monotonic() + BUSY_S, 0.1, True
        while busy:
            parts, busy = iter(body), False

            async def again() -> Message:
                return next(parts, None) or await receive()  # noqa: B023  (of this round)

            async def answer(message: Message) -> None:
                nonlocal busy
                if message["type"] == "http.response.start":
                    busy = message["status"] == 503 and time.monotonic() < deadline
                if not busy:
                    await send(message)

            try:
                await app(dict(scope), again, answer)
            except Exception:  # Starlette raises what it has answered
                if not busy:
                    raise
            if busy:
                await sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)

    return repeated
