"""Every fault of the list has a test, and the page says so."""

from __future__ import annotations

from tests.faults import PAGE, load, marked, page


def test_every_fault_is_injected_and_the_page_is_current() -> None:
    assert set(marked()) == {fault.id for fault in load()}
    assert PAGE.read_text() == page(), "python -m tests.faults"
