from __future__ import annotations

import re
import time
import unicodedata
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scripts import texts_of_kinds
from herd.llama3.data.kernels.arrow import text_buffers
from herd.llama3.data.kernels.text import GARBLED, LONG_RUN, UNCOMPOSED, scan
from herd.llama3.data.text.normalize import SIGNS, fix_mojibake, normalize, normalize_texts

TRICKY = st.text(
    "a \t\n\r\x00\x0b\x0c\x1f\x7f\x85\x9f\xa0\u0301\u2028\u2029\ufeff\uffff\ufffeé漢か\u3099가ᄀ\u1161😀", max_size=40
)
VALID = st.one_of(TRICKY, st.text(st.characters(codec="utf-8"), max_size=40))


def column(texts: list[str]) -> Any:
    return pa.array(texts, pa.large_string())


def flags_of(texts: list[str]) -> list[int]:
    data, offsets = text_buffers(column(texts))
    flags = np.zeros(len(texts), np.uint8)
    scan(data, offsets[:-1].copy(), offsets[1:].copy(), flags)
    return list(map(int, flags))


@given(st.text(st.characters(codec=None)))
def test_normalizing_twice_changes_nothing(text: str) -> None:
    once = normalize(text)
    assert normalize(once) == once
    assert once.encode().decode() == once  # no lone surrogate is left
    assert unicodedata.is_normalized("NFC", once)
    assert not any(c != "\n" and c != "\t" and unicodedata.category(c) == "Cc" for c in once)


def test_normalizing_keeps_what_means_something() -> None:
    assert normalize("\ufeffa\r\n\tb  \rc\x00\n\n\n\n\n\nx²\n") == "a\n\tb\nc\n\n\nx²"
    assert normalize("e\u0301") == "é"


@given(st.lists(VALID, max_size=6))
def test_a_column_is_normalized_as_its_texts_are(texts: list[str]) -> None:
    result = normalize_texts(column(texts))
    result.validate(full=True)
    assert result.to_pylist() == [normalize(text) for text in texts]
    assert normalize_texts(result).to_pylist() == result.to_pylist()


def test_a_slice_of_a_column_is_normalized_alone() -> None:
    assert normalize_texts(column(["x\r", "a \n", "\nb", "y "])[1:3]).to_pylist() == ["a", "b"]
    assert normalize_texts(column([])).to_pylist() == []


def test_only_characters_that_stand_alone_under_composition_are_passed_without_a_look() -> None:
    points = [point for point in range(0x80, 0x110000) if not 0xD800 <= point < 0xE000]
    joining = {0x1161 + i for i in range(21)} | {0x11A8 + i for i in range(27)}  # Hangul vowels and finals
    for point in points:
        parts = unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            joining.add(int(parts[1], 16))
    for point, flags in zip(points, flags_of(list(map(chr, points))), strict=True):
        if not flags & UNCOMPOSED:
            assert unicodedata.is_normalized("NFC", chr(point)), hex(point)
            assert unicodedata.combining(chr(point)) == 0, hex(point)
            assert point not in joining, hex(point)


def test_wrongly_decoded_text_is_set_right() -> None:
    for code in ["latin-1", "cp1252"]:
        for text in [
            "l’été à Paris",
            "naïve café Größe",
            "Привет мир",
            "Ελληνικά γράμματα",
            "emoji 😀 here",
            "日 Ä “quoted” … ok",
        ]:
            try:
                garbled = text.encode().decode(code)
            except UnicodeDecodeError:
                garbled = text.encode().decode("latin-1")
            assert fix_mojibake(garbled) == text
            assert fix_mojibake(f"right: é\n{garbled}") == f"right: é\n{text}"
            assert normalize_texts(column([garbled]), repairing=True).to_pylist() == [text]
            assert normalize_texts(column([garbled])).to_pylist() == [normalize(garbled)]


def test_right_text_is_not_repaired() -> None:
    right = [
        "été\u00a0» et «\u00a0là\u00a0»",
        "CAÑÓN, NÃO, Äpfel…",
        "„Fuß“ Spaß»",
        "Привет",
        "日本語",
        "2 × 3 ± 1",
        "Ø 5 mm",
    ]
    assert [fix_mojibake(text) for text in right] == right


@given(st.one_of(VALID, st.text("ÂÃâãé\x80\x99\xa0\xa9€™œ…a", max_size=12)))
def test_repair_looks_only_where_the_scan_saw_something(text: str) -> None:
    if not SIGNS.search(text):
        assert fix_mojibake(text) == text
    else:
        assert flags_of([text])[0] & GARBLED or SIGNS.search(text.strip("\n\t ")) is None


RUN = re.compile(
    "[" + "".join(chr(point) for point in range(0x300, 0x110000) if unicodedata.combining(chr(point))) + "]{1000}"
)
PIECES = st.lists(
    st.one_of(
        # marks of two, three and four bytes in UTF-8, some of which move in NFC
        st.tuples(st.sampled_from("\u0301\u0316\u034f\u1dc2\u20d0\u3099\U0001d165\U0001e944"), st.integers(1, 700)),
        # what cleaning drops, turns into a newline or keeps
        st.tuples(st.sampled_from("a \n\t\r\x00\x7f\x85\x9f\u2028\ufeff\uffffé漢क😀"), st.integers(1, 2)),
        st.tuples(st.sampled_from("\u0301\u0316\u1dc2\U0001d165"), st.sampled_from((999, 1000, 1001, 2000))),
    ),
    max_size=6,
).map(lambda pieces: "".join(letter * times for letter, times in pieces))


@given(PIECES)
def test_long_runs_of_marks_are_split_as_by_the_definition(text: str) -> None:
    assert normalize_texts(column([text, "e\u0301"])).to_pylist() == [normalize(text), "é"]
    lines = re.sub("\r\n?|[\x0b\x0c\x85\u2028\u2029]", "\n", text)
    cleaned = re.sub("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]", "", lines)
    assert not RUN.search(cleaned) or flags_of([text])[0] & LONG_RUN


def test_usual_text_of_any_script_is_not_searched_for_runs() -> None:
    texts = ["e\u0301" * 2000, "नमस्ते दुनिया" * 500, "สวัสดีชาวโลก" * 500, "שָׁלוֹם" * 500, "a" + "\u0301" * 999]
    assert not any(flags & LONG_RUN for flags in flags_of(texts))
    marks = [chr(point) for point in range(0x300, 0x110000) if unicodedata.combining(chr(point))]
    assert all(flags & LONG_RUN for flags in flags_of([mark * 1000 for mark in marks]))


JOINING = [
    chr(point)
    for point in (*range(0x3400), *range(0xA000, 0xAC40), *range(0xF900, 0x10000), 0x110B9, 0x110BA, 0x1D157, 0x1D165)
    if unicodedata.combining(chr(point)) or unicodedata.decomposition(chr(point))[:1] not in ("", "<")
]
KOREAN = [
    chr(point) for low, high in ((0x1100, 0x1113), (0x1161, 0x1176), (0x11A7, 0x11C3)) for point in range(low, high)
]


@given(
    st.lists(st.text(st.sampled_from([*JOINING, *KOREAN * 9, *"가각가a \u1112\u09c7\u09be"]), max_size=30), max_size=5)
)
def test_characters_are_composed_as_by_the_definition(texts: list[str]) -> None:
    apart = [unicodedata.normalize("NFD", text) for text in texts]
    assert normalize_texts(column(texts + apart)).to_pylist() == list(map(normalize, texts + apart))


def test_every_code_point_is_composed_as_by_the_definition() -> None:
    points = [chr(point) for point in range(0x80, 0x110000) if not 0xD800 <= point < 0xE000]
    texts = [
        "".join(f"{point}\u0323\u0301{point}\n" for point in points[at : at + 256]) for at in range(0, len(points), 256)
    ]
    assert normalize_texts(column(texts)).to_pylist() == list(map(normalize, texts))


def test_text_of_each_script_is_normalized_as_by_the_definition() -> None:
    texts = [text for kind in texts_of_kinds(2).values() for text in kind]
    texts += [unicodedata.normalize("NFD", text) for text in texts]
    texts += [text.replace(" ", "").replace("\n", "") for text in texts]
    assert normalize_texts(column(texts)).to_pylist() == list(map(normalize, texts))


def test_endless_marks_on_one_letter_take_time_by_their_number() -> None:
    text = "a" + "\u0301\u0316" * 100_000
    began = time.process_time()
    [found] = normalize_texts(pa.array([text, "e\u0301" * 10], pa.large_string())).to_pylist()[:1]
    assert time.process_time() - began < 10
    assert found == normalize(text)
    assert found.replace("\u034f", "").count("\u0316") == 100_000
    assert normalize("e" + "\u0301" * 40) == "é" + "\u0301" * 39  # as ever
