from __future__ import annotations

import socket
import subprocess
import sys

import pytest


def test_nothing_but_loopback_is_reached() -> None:
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError, match="loopback"):
        probe.connect(("192.0.2.1", 80))


def test_the_guard_holds_in_started_processes() -> None:
    code = "import socket; socket.socket().connect(('192.0.2.1', 80))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "reach nothing but loopback" in done.stderr


def test_no_process_of_a_test_imports_a_module_by_two_names() -> None:
    for name in ("storage", "flows"):
        done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
        assert f"ImportError: import herd.{name} instead of {name}" in done.stderr
