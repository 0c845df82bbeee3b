"""MLflow's application behind a password: `mlflow server --app-name herd`, and the page that signs a browser in.

One link, `/sign-in#PASSWORD` of either server of `herd up`, opens the pages of both. Browsers do not send the part
after #, so no log contains it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from herd.storage.secrets import LOGINS
from herd.tasks.tracking.chart_views import chart_page
from herd.tasks.tracking.moved_root import SIGN_IN_AT

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


APP = "herd"
"""Name of `create_app` for `mlflow server`, in pyproject.toml."""
LOGIN = LOGINS["MLFLOW_TRACKING_URI"]
"""Variables with user and password."""
SEEN = {
    "mlflow.workflowType_v1": "machine_learning",
    "mlflow.detectIssues.guidanceShown_v1": True,
    "mlflow.flagForReview.guidanceShown_v1": True,
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
    "_mlflow_model_registry_promo_modal_dismissed_v1": True,
}
"""What MLflow 3.17 keeps in the browser: the workflow of its pages, and introductions that hide them."""
PAGE = """\
<!DOCTYPE html><meta charset="utf-8"><title>herd</title><body style="font: 16px system-ui; margin: 3em"><script>
const key = location.hash.slice(1), framed = window !== window.top
const get = (path) => fetch(path, {headers: {Authorization: `Basic ${key}`}})
async function signIn() { %(sign_in)s }
function signInAt(server) {
    if (server === location.origin) return
    const frame = document.createElement("iframe")
    frame.hidden = true
    frame.src = `${server}/sign-in#${key}`
    return new Promise((done) => {
        addEventListener("message", (event) => event.origin === server && done())
        setTimeout(done, 3000)
        document.body.append(frame)
    })
}
signIn().then(async (next) => {
    if (framed) return window.parent.postMessage("signed in", "*")
    await Promise.all(%(servers)s.map(signInAt))
    location.replace(next)
}, () => framed || document.body.append("This link has another password than the server. " +
    "The newest link is the first line of prefect.env, in the root of herd up."))
</script>"""
SIGN_IN = """
    if (!(await fetch("/sign-in", {method: "POST", body: key})).ok) throw 0
    for (const [name, value] of Object.entries(%s))
        if (localStorage.getItem(name) === null) localStorage.setItem(name, JSON.stringify(value))
    const asked = new URLSearchParams({max_results: 1, order_by: "last_update_time DESC", filter: "name != 'Default'"})
    const found = (await (await fetch(`/ajax-api/2.0/mlflow/experiments/search?${asked}`)).json()).experiments ?? []
    return found.length ? %s.replace("EXPERIMENT", found[0].experiment_id) : "/#/experiments"
"""


def sign_in_page(script: str) -> str:
    """Return the page that signs a browser in with the password after #, here and at the other server of `herd up`."""
    return PAGE % {"sign_in": script, "servers": json.dumps(os.environ.get(SIGN_IN_AT, "").split())}


def create_app() -> ASGIApp:
    """Return MLflow's application behind the password of its clients; `mlflow server --app-name herd` serves it."""
    from mlflow.server.fastapi_app import app
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.websockets import WebSocketClose

    login = base64.b64encode(":".join(os.environ[name] for name in LOGIN).encode()).decode()
    # Browsers send cookies of a host to all its ports, so it must not be the password.
    ticket, cookie = hmac.new(login.encode(), b"mlflow", hashlib.sha256).hexdigest(), "herd-mlflow"
    page = sign_in_page(SIGN_IN % (json.dumps(SEEN), json.dumps(chart_page("", "EXPERIMENT"))))

    async def sign_in(request: Request) -> Response:
        if request.method == "GET":
            return HTMLResponse(page)
        if not hmac.compare_digest(await request.body(), login.encode()):
            return Response(status_code=401)
        answer = Response()
        answer.set_cookie(cookie, ticket, max_age=365 * 86_400, httponly=True, samesite="lax")
        return answer

    def is_known(request: HTTPConnection) -> bool:
        if hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Basic {login}".encode()):
            return True
        # A browser sends the cookie for pages of any port of this machine, and MLflow takes requests from all of them.
        origin = request.headers.get("origin", "")
        own = not origin or urlsplit(origin).netloc == request.headers.get("host", "")
        return own and hmac.compare_digest(request.cookies.get(cookie, "").encode(), ticket.encode())

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/sign-in":  # MLflow's own pages may not be framed
            answer = await sign_in(Request(scope, receive))
            await answer(scope, receive, send)
        elif scope["type"] == "lifespan" or scope["path"] == "/health" or is_known(HTTPConnection(scope)):
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(1008)(scope, receive, send)
        else:
            asked = {"WWW-Authenticate": 'Basic realm="herd"'}
            text = "sign in: a link and the password are in prefect.env, in the root of herd up\n"
            await PlainTextResponse(text, 401, asked)(scope, receive, send)

    return guarded
