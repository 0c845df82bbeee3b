"""The documentation as a site."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Every page is in the navigation, every link and anchor leads somewhere, and the index of the search has them."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pages = {path.relative_to("docs").with_suffix(".html") for path in Path("docs").rglob("*.md")}
    written = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*.html")}
    missing = {page for page in pages if page not in written and page.name != "README.html"}
    assert not missing
    assert "out of memory" in (tmp_path / "site" / "search" / "search_index.json").read_text().lower()
    assert "fonts.googleapis" not in (tmp_path / "site" / "index.html").read_text(), "it is read offline"
