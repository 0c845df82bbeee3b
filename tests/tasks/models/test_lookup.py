from __future__ import annotations

import pytest

from herd.tasks.models.lookup import parse_span


def test_spans_are_read_as_people_write_them() -> None:
    assert parse_span("120M:121M") == (120_000_000, 121_000_000)
    assert parse_span("0:4Ki") == (0, 4096)


@pytest.mark.parametrize("text", ["120M", "1:2:3", "5M:", ":7", "9M:9M", "9M:8M"])
def test_a_span_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--tokens"):
        parse_span(text)
