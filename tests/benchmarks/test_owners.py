"""Ten deaths of `python -m benchmarks owners`, one of each kind that costs most."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.owners import Kill, OwnersSession, OwnersSettings, owners_rows, possible_kills

KILLS = [
    Kill("submitting", "worker", "promote/promote"),
    Kill("submitting", "herd up", "pipeline/pipeline"),
    Kill("Pending", "both", "pipeline/pipeline"),
    Kill("Pending", "worker", "rerun/rerun"),
    Kill("importing", "both", "promote/promote"),
    Kill("importing", "engine", "rerun/rerun"),
    Kill("importing", "herd up", "verify/scrub"),
    Kill("Running", "both", "promote/promote"),
    Kill("Running", "engine", "verify/scrub"),
    Kill("Running", "herd run", ""),
]


def test_every_state_and_every_victim_is_killed() -> None:
    kills = possible_kills()
    assert len(kills) == len({*kills})
    assert {kill.state for kill in kills} == {"submitting", "Pending", "importing", "Running"}
    assert {kill.victim for kill in kills} == {"worker", "engine", "both", "herd up", "herd run"}
    assert {*KILLS} <= {*kills}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_deaths_block_nothing_and_leave_no_lie(tmp_path: Path) -> None:
    session = OwnersSession(OwnersSettings(tmp_path, minutes=30), print)
    session.kill_all(KILLS)
    rows = {row.name: row for row in owners_rows(session)}
    assert rows["owners/kills"].value == len(KILLS)
    for name in ("not-run", "blocked", "slots", "not-once", "lies"):
        assert rows[f"owners/{name}"].value == 0, rows[f"owners/{name}"].note
