"""`python -m benchmarks house`: each figure on a small source tree whose answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.house import HouseSession, HouseSettings, house_rows

FILES = {
    "storage/__init__.py": "",
    "storage/base.py": "def one():\n    return 1\n",
    "llama3/a.py": "from herd.storage.base import one  # why\n\n\ndef long():\n" + "    one()\n" * 9,
    "llama3/b.py": "from herd.llama3 import c\nfrom herd.storage import base\n",
    "llama3/c.py": "def late():\n    from herd.llama3.b import base\n    return base\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_figure_of_a_known_tree(folder: Path) -> None:
    only = ("files/count", "files/lines", "files/longest", "files/one-importer", "files/folder", "files/cycles")
    rows = {row.name: row for row in house_rows(HouseSession(HouseSettings(only, folder)))}
    assert {name: row.value for name, row in rows.items()} == {
        "files/count": 4,
        "files/lines": 20,
        "files/longest": 13,
        "files/one-importer": 50,
        "files/folder": 3,
        "files/cycles": 1,
    }
    assert rows["files/cycles"].note == "llama3.b llama3.c"
    assert rows["files/cycles"].ok is False


def test_functions_and_comments(folder: Path) -> None:
    rows = {row.name: row.value for row in house_rows(HouseSession(HouseSettings(("functions", "comments"), folder)))}
    assert rows["functions/median"] == 3
    assert rows["functions/longest"] == 10
    assert rows["comments/lines"] == pytest.approx(100 / 20)
