from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.kernels.words import find_words, word_hash
from herd.llama3.data.text.words import ALONE, JOINED, split_words

EDGES = [
    chr(point)
    for low, high in (*ALONE, *JOINED)
    for point in (low - 1, low, high, high + 1)
    if 0 <= point < 0x110000 and not 0xD800 <= point < 0xE000
]
HOSTILE = st.lists(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from(EDGES),
        st.sampled_from(
            ["a", "Z", "7", "_", " ", "\n", "-", "é", "É", "ß", "İ", "中", "の", "ไ", "е\u0301", "𝒳", "🙂", "\0"]
        ),
    )
).map("".join)


def found(text: str, before: str = "", after: str = "") -> tuple[list[str], list[int]]:
    """Return the words that the kernel finds, and their hashes, with other text around in the buffer."""
    data = np.frombuffer((before + text + after).encode(), np.uint8)
    start, size = len(before.encode()), len(text.encode())
    room = (size + 1) // 2
    starts, stops, hashes = np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros(room, np.uint64)
    count = find_words(data, start, start + size, starts, stops, hashes)
    spans = zip(starts[:count], stops[:count], strict=True)
    return [data[low:high].tobytes().decode() for low, high in spans], hashes[:count].tolist()


@given(HOSTILE)
def test_kernel_finds_the_words_of_the_plain_definition(text: str) -> None:
    spelled, hashes = found(text)
    assert [word.translate({upper: upper + 32 for upper in range(65, 91)}) for word in spelled] == split_words(text)
    assert hashes == [word_hash(word) for word in split_words(text)]


@given(HOSTILE, HOSTILE, HOSTILE)
def test_text_around_a_document_changes_nothing(text: str, before: str, after: str) -> None:
    assert found(text, before, after) == found(text)


def test_as_many_words_as_there_is_room_for() -> None:
    for text in ["a b c", "a", "aé", "a中a中", "中文", "x y ", "_ _"]:
        assert found(text)[0] == split_words(text)


def test_hashes_never_change() -> None:
    """They are in files; a changed one would make old attributes useless."""
    assert (word_hash("herd"), word_hash("中")) == (0x9D4BC0DCDF0DA5D8, 0x50E0C10753C8FDE2)
