"""Refuses connections that leave this machine, and modules under a second name: `herd.storage.root`.

On the path of the tests and of all they start.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

_connect = socket.socket.connect
_connect_ex = socket.socket.connect_ex
LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


def _check(address: Any) -> None:
    if isinstance(address, tuple) and not str(address[0]).startswith(LOOPBACK):
        raise ConnectionRefusedError(f"tests reach nothing but loopback; refused {address[0]}:{address[1]}")


def connect(self: socket.socket, address: Any) -> None:
    _check(address)
    return _connect(self, address)


def connect_ex(self: socket.socket, address: Any) -> int:
    _check(address)
    return _connect_ex(self, address)


socket.socket.connect = connect  # type: ignore[method-assign]
socket.socket.connect_ex = connect_ex  # type: ignore[method-assign]


class _OneName:
    """Refuses the folders of the checkout as packages of their own; their modules are those of herd."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in ("flows", "tasks", "llama3", "storage", "deploy"):
            raise ImportError(f"import herd.{name} instead of {name}")


sys.meta_path.insert(0, _OneName)  # type: ignore[arg-type]

if _started := os.environ.get("HERD_TEST_STARTED"):  # tests/costs.py counts the interpreters
    with open(_started, "a") as _file:
        _file.write(f"{os.getpid()}\n")

if _context := os.environ.get("HERD_TEST_CONTEXT"):  # tests/line_tests.py counts what each test runs, also in processes
    import coverage

    def _enter() -> None:
        if (measured := coverage.Coverage.current()) is not None:
            with open(_context) as file:
                measured.switch_context(file.read())

    _enter()
    os.register_at_fork(after_in_child=_enter)
