"""Editors find every caller: a language server is asked in a clone called herd, and answers with files of git."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.language_server import FUNCTIONS, SERVER, LanguageServer, callers, copy_tracked, tracked_files


@pytest.fixture(scope="module")
def server(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageServer]:
    if not (checkout / SERVER).exists():
        pytest.skip(f"no language server at {SERVER}; give: make {SERVER}")
    clone = copy_tracked(checkout, tmp_path_factory.mktemp("clone"))
    with LanguageServer([str(checkout / SERVER), "--stdio"], clone) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_language_server_finds_all_callers_in_files_of_git(name: str, server: LanguageServer, checkout: Path) -> None:
    files, expected = server.references(name, FUNCTIONS[name]), callers(name, checkout)
    assert expected
    assert expected <= files
    assert files <= tracked_files(checkout)


def test_imported_modules_are_files_that_git_names(tmp_path: Path, checkout: Path) -> None:
    code = "import herd.flows.recipe_form, herd.api, sys\nfor m in list(sys.modules.values()):\n"
    code += "    if m.__name__.split('.')[0] == 'herd': print(m.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    names = {str(Path(line).relative_to(checkout)) for line in done.stdout.split("\n") if line}
    assert "api.py" in names
    assert names <= tracked_files(checkout)
