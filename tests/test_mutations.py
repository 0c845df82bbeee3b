"""The planted faults fit the code."""

from __future__ import annotations

from tests.mutations import load


def test_each_planted_fault_has_its_line_and_its_tests() -> None:
    """Else `make mutate` does not begin. Correct tests/mutations.yaml after a change of the code."""
    assert load()
