"""Clients of the served model, in a process of their own: what they cost is not the server's."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx


def ask_all(address: str, bodies: Sequence[dict[str, Any]]) -> tuple[list[str], float]:
    """Return the completions of requests that are sent at once, and the milliseconds until all are there."""

    def ask(body: dict[str, Any]) -> str:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if not body["stream"]:
                return str(json.loads(answer.read())["choices"][0]["text"])
            lines = [line[6:] for line in answer.iter_lines() if line]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    with httpx.Client(base_url=address, timeout=None) as http, ThreadPoolExecutor(len(bodies)) as threads:
        began = time.perf_counter()
        return list(threads.map(ask, bodies)), 1000 * (time.perf_counter() - began)
