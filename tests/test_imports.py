"""What a command may import: a library that it does not need is seconds of every user's time.

Modules are counted, not seconds, so that a busy machine changes nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    *("boto3", "botocore", "duckdb", "fastapi", "fsspec", "httpx", "matplotlib", "mlflow", "numba", "numpy", "pandas"),
    *("prefect", "pyarrow", "s3fs", "safetensors", "scipy", "sqlalchemy", "tiktoken", "tokenizers", "torch"),
    *("transformers", "uvicorn"),
}
DATA = {"numpy", "pyarrow", "tiktoken", "tokenizers"}
COMMANDS = {
    "--help": (set(), 420),
    "--version": (set(), 340),
    "nothing": (set(), 540),
    "status": (set(), 520),
    "plan RECIPE": ({*DATA, "fsspec"}, 830),
}
"""Command -> the heavy libraries that it may import, and the most modules: a fifth more than measured."""
MODULES = {
    "herd": (set(), 120),
    "herd.tasks.operate.preflight": (DATA, 800),
    "herd.flows.pipeline": (
        {*DATA, "duckdb", "fsspec", "httpx", "prefect", "safetensors"},
        1900,
    ),
    "herd.llama3.train.launch": (set(), 380),
    "herd.tasks.promotion.rollback": (set(), 410),
    "herd.tasks.promotion.approval": (set(), 440),
}
"""The same for the checks before `herd run`, the engine of a flow run, a trainer's agent, rollback and approval."""


def imported(program: str, folder: Path, *words: str) -> set[str]:
    """Return the modules of a process that runs `program`."""
    found = folder / "modules.json"
    ending = f"import atexit, json, sys; atexit.register(lambda: json.dump([*sys.modules], open({str(found)!r}, 'w')))"
    command = [sys.executable, "-c", f"{ending}\n{program}", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert found.exists(), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return set(json.loads(found.read_text()))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_what_it_needs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERD_ROOT", str(tmp_path / "root"))
    text, recipe = tmp_path / "text.jsonl", tmp_path / "recipe.yaml"
    text.write_text(json.dumps({"text": "one document " * 1000}) + "\n")
    tiny = Path("tests/e2e/tiny.yaml").read_text()
    recipe.write_text(re.sub(r"uri: installed[^}]*", f"uri: {text}", tiny))
    modules = imported(
        "from herd.flows.cli.main import main; main()", tmp_path, *command.replace("RECIPE", str(recipe)).split()
    )
    allowed, most = COMMANDS[command]
    assert modules & HEAVY <= allowed
    assert len(modules) <= most


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_it_needs(module: str, tmp_path: Path) -> None:
    modules = imported(f"import {module}", tmp_path)
    allowed, most = MODULES[module]
    assert modules & HEAVY <= allowed
    assert len(modules) <= most


def test_the_interval_of_a_share_needs_no_scipy(tmp_path: Path) -> None:
    """Every rank of an evaluation computes some."""
    assert "scipy" not in imported(
        "from herd.llama3.statistics.estimates import proportion; proportion(1, 3)", tmp_path
    )
