"""Sequences to plan for and to score, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from herd.llama3.evaluate.scoring import Scorable


@st.composite
def questions(draw: st.DrawFn) -> list[Scorable]:
    """Sequences that often share a beginning, a context or all, and some that are too long.

    A token that is scored says where it stands, ten times over, and one of two choices.
    """
    small = st.lists(st.integers(1, 3), min_size=1, max_size=6)
    shared = [[0, *[7] * draw(st.sampled_from([0, 30, 40, 100])), *draw(small)] for _ in range(draw(st.integers(1, 3)))]
    asked = []
    for _ in range(draw(st.integers(1, 8))):
        context = [*draw(st.sampled_from(shared)), *draw(small)]
        for _ in range(draw(st.integers(1, 4))):
            positions = range(len(context), len(context) + draw(st.sampled_from([1, 2, 5, 120])))
            asked.append(([*context, *(10 * place + draw(st.integers(0, 1)) for place in positions[:5]),
                           *(10 * place for place in positions[5:])], len(context)))  # fmt: skip
    return asked
