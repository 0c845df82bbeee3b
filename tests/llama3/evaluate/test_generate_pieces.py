"""Pieces of a growing text: joined they are the text, whatever the cuts, and none has to be taken back."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate.generate import TextStream

FEW = st.text("ab\né☃", max_size=12)
STOPS = st.lists(st.text("ab\né☃", min_size=1, max_size=4), max_size=3)


def pieces_of(data: bytes, cuts: list[int], until: list[str]) -> list[str]:
    pieces, places = TextStream(until), sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    made = [pieces.add(data[begin:end]) for begin, end in pairwise(places)]
    return [*made, pieces.finish()]


@given(st.binary(max_size=20), st.lists(st.integers(0, 20)))
def test_pieces_are_the_text_whatever_the_bytes(data: bytes, cuts: list[int]) -> None:
    assert "".join(pieces_of(data, cuts, [])) == data.decode(errors="replace")


@given(FEW, st.lists(st.integers(0, 50)))
def test_no_character_is_cut(text: str, cuts: list[int]) -> None:
    assert "\ufffd" not in "".join(pieces_of(text.encode(), cuts, []))


@given(FEW, st.lists(st.integers(0, 50)), STOPS)
def test_a_text_ends_before_the_stop_text_that_is_complete_first(text: str, cuts: list[int], until: list[str]) -> None:
    ends = [(end, -len(stop)) for stop in until for end in range(len(text) + 1) if text[:end].endswith(stop)]
    due = text[: sum(min(ends))] if ends else text
    assert "".join(pieces_of(text.encode(), cuts, until)) == due


@given(FEW, FEW, STOPS)
def test_what_was_given_out_stays_whatever_comes(begin: str, more: str, until: list[str]) -> None:
    pieces = TextStream(until)
    given_out = pieces.add(begin.encode())
    whole = given_out + pieces.add(more.encode()) + pieces.finish()
    assert whole == "".join(pieces_of((begin + more).encode(), [], until))


def test_only_what_may_be_a_stop_text_is_held() -> None:
    pieces = TextStream(["\n\nQuestion:"])
    assert [pieces.add(part) for part in (b"42.\n", b"\nQues", b"ts end", b"\n\nQuestion: 2")] == [
        "42.", "", "\n\nQuests end", "",
    ]  # fmt: skip
    assert pieces.ended
    assert pieces.add(b"more") + pieces.finish() == ""


def test_half_a_character_at_the_end_is_marked() -> None:
    pieces = TextStream()
    assert pieces.add("né".encode()[:-1]) == "n"
    assert pieces.finish() == "\ufffd"
