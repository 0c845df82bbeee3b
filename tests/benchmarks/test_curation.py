from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data import MEASURES
from benchmarks.session import DataSettings, Session


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rules/default", "decontaminate/questions"])
def test_no_translation_is_taken_and_no_leak_is_missed(
    name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERD_SHARED", str(shared))
    row = MEASURES[name](Session(DataSettings(tmp_path)), name)
    assert row.ok, f"{row.value:.1f} {row.unit}: {row.note}"
