"""Lines that belong together: wrapped text is told from verse, lists, code and tables, and no rule cuts into it."""

from __future__ import annotations

import random
import sysconfig
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.dedup.lines import flags_of
from herd.llama3.data.kernels.lines import BOUND, CONTINUES
from herd.llama3.data.kernels.paragraphs import join_paragraphs

WORDS = (
    "the of and a to in is that it was for on are with as his they be at one have this from or had by hot "
    "but some what there we can out other were all your when up use word how said an each she which do "
    "their time if will way about many then them would write like so these her long make thing see him "
    "two has look more day could go come whereas notwithstanding responsibility "
)
VERSE = """The morning walks across the hill,
And every stone is wet with light;
The little wheel inside the mill
Has turned its patience all the night.

O miller, let the water run,
The sacks are full, the cats are fed;
Go out and stand below the sun,
And put the numbers from your head."""
TABLE = "| name | value | unit |\n|------|-------|------|\n" + "\n".join(
    f"| width of the row number {number} | {number * 7} | mm |" for number in range(12)
)
LIST = "\n".join(f"- item {number} with a few words of its own" for number in range(20))
NAMES = "\n".join(f"Copyright (c) {2000 + number} A Person Called Number{number}" for number in range(20))


def flags(text: str) -> list[int]:
    data = np.frombuffer(text.encode(), np.uint8)
    return flags_of(data, np.array([0, len(data)], np.int64)).tolist()


def joined(text: str) -> str:
    """Return `text` as the rules see it: each paragraph on one line."""
    data = np.frombuffer(text.encode(), np.uint8).copy()
    offsets = np.array([0, len(data)], np.int64)
    join_paragraphs(data, offsets, flags_of(data, offsets))
    return data.tobytes().decode()


def paragraphs(seed: int, count: int = 8) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS.split(), k=dice.randint(30, 120))).capitalize() + "." for _ in range(count)]


@given(st.integers(0, 10**6), st.sampled_from([60, 66, 72, 79, 100]), st.sampled_from(["", "    ", "  "]))
def test_wrapped_paragraphs_are_joined(seed: int, width: int, indent: str) -> None:
    said = paragraphs(seed)
    text = "\n\n".join(
        textwrap.fill(one, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for one in said
    )
    found = [" ".join(line.split()) for line in joined(text).split("\n") if line]
    # the last word of a paragraph may have had room: the end of a line is then not known to be a wrap
    assert sum(one in found for one in said) >= len(said) - 1


@given(st.integers(0, 10**6))
def test_paragraphs_of_a_list_are_joined_and_its_items_stay(seed: int) -> None:
    said = paragraphs(seed, 6)
    text = "\n".join(textwrap.fill(one, 70, initial_indent="- ", subsequent_indent="  ") for one in said)
    lines = joined(text).split("\n")
    assert len(lines) <= len(said) + 1
    assert sum(line.startswith("- ") for line in lines) == len(said)


@pytest.mark.parametrize(
    "text",
    [VERSE, TABLE, LIST, NAMES, "\n\n".join(paragraphs(1)), "one line", "", "\n\n", "a\nb\nc\nd\ne\nf"],
    ids=["verse", "table", "list", "names", "one line each", "one line", "nothing", "blank", "short"],
)
def test_other_lines_stay_lines(text: str) -> None:
    assert joined(text) == text


def test_hardly_a_line_of_code_is_joined() -> None:
    """At most 1 % of the breaks of 200 files, those of comments and docstrings, which are wrapped prose, included."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:200]
    assert len(paths) > 100
    breaks = wrapped = 0
    for path in paths:
        lines = path.read_text("utf-8", "replace").split("\n")
        code = "\n".join(line for line in lines if '"""' not in line and not line.lstrip().startswith("#"))
        found = flags(code)
        breaks += len(found)
        wrapped += sum(flag & int(CONTINUES) for flag in found)
    assert wrapped < 0.02 * breaks


def test_tables_fences_tags_and_pairs_are_bound() -> None:
    text = (
        "prose here\n| a | b |\n|---|---|\n```py\nx = 1\n\ny = 2\n```\n<div class='x'>\n</div>\n"
        '{"detail": [\n]\nTerm of law\n:   its meaning\n/// tip\n///\nlast words'
    )
    bound = [line for line, flag in zip(text.split("\n"), flags(text), strict=True) if flag & BOUND]
    assert bound == [line for line in text.split("\n") if line not in ("prose here", "last words")]


def test_a_fence_without_an_end_binds_only_itself() -> None:
    text = "```\n" + "\n".join(f"a line of words number {number}" for number in range(5))
    assert flags(text) == [int(BOUND), 0, 0, 0, 0, 0]


def test_texts_are_told_apart() -> None:
    """Flags of a text do not depend on the texts beside it."""
    texts = [textwrap.fill(" ".join(paragraphs(2)), 72), VERSE, "", TABLE]
    data = "".join(texts).encode()
    ends = np.cumsum([0, *(len(text.encode()) for text in texts)]).astype(np.int64)
    together = flags_of(np.frombuffer(data, np.uint8), ends).tolist()
    assert together == [flag for text in texts for flag in flags(text)]
    assert joined(texts[0]).count("\n") == 0
