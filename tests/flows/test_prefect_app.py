"""Prefect's pages as herd serves them: no click is lost while a database is busy, and what people start comes first."""

from __future__ import annotations

import sqlite3

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from herd.flows.prefect_app import PINNED, repeat_when_busy
from herd.flows.setup import flow_of
from herd.storage.processes import PACKAGE_FOLDER


@pytest.mark.parametrize(("times", "status"), [(0, 201), (3, 201), (10**6, 503)])
def test_a_click_while_the_database_is_busy_is_not_lost(
    times: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Prefect does: the answer is sent, and then the error is raised."""
    monkeypatch.setattr("herd.flows.prefect_app.BUSY_S", 2.0)
    bodies = list[bytes]()

    async def save(request: Request) -> Response:
        bodies.append(await request.body())
        if len(bodies) <= times:
            raise sqlite3.OperationalError("database is locked")
        return Response(b"saved", 201)

    async def refuse(request: Request, error: Exception) -> Response:
        return Response(b"", 503)

    app = Starlette(routes=[Route("/save", save, methods=["POST"])], exception_handlers={Exception: refuse})
    client = TestClient(repeat_when_busy(app), raise_server_exceptions=False)
    assert client.post("/save", content=b"schedule" * 9999).status_code == status
    assert set(bodies) == {b"schedule" * 9999}
    assert len(bodies) == times + 1 or status == 503
    assert client.get("/save").status_code == 405


def test_the_pinned_deployments_are_there() -> None:
    shipped = yaml.safe_load((PACKAGE_FOLDER / "prefect.yaml").read_text())["deployments"]
    assert set(PINNED) <= {f"{flow_of(each['entrypoint'])}/{each['name']}" for each in shipped}
