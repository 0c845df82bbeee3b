"""`python -m benchmarks data --only scripts`: the texts, the slowest kind, and endless texts through the same paths."""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks import scripts
from benchmarks.ours.scripts import _joined
from benchmarks.rows import measured
from benchmarks.session import DataSettings, Session
from herd.llama3.data.text.extract import plain_text
from herd.llama3.data.text.language import detect_language
from herd.llama3.data.text.markdown import strip_markdown
from herd.llama3.data.text.normalize import normalize_texts
from herd.llama3.data.text.pii import redact
from herd.llama3.data.text.tex import plain_tex


def test_kinds_have_many_scripts_and_documents_of_one_size() -> None:
    kinds = scripts.texts_of_kinds(2)
    names = {unicodedata.name(letter, "none").split()[0] for texts in kinds.values() for letter in texts[0][:400]}
    assert {"HEBREW", "ARABIC", "DEVANAGARI", "BENGALI", "TAMIL", "THAI", "HANGUL", "CJK", "GREEK", "CYRILLIC"} <= names
    assert len(kinds) >= 40
    assert all(2_000 < len(text.encode()) < 16_000 for texts in kinds.values() for text in texts)


def test_a_row_is_of_the_slowest_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {path: {"en": 50.0, "hi": 20.0, "addresses": 1.0} for path in scripts.PATHS}
    monkeypatch.setattr(scripts, "_rates", lambda run: rates)
    run = Session(DataSettings(tmp_path))
    assert scripts.slowest(run, "scripts/redact").value == 20
    assert scripts.slowest(run, "scripts/redact").ok is False
    assert scripts.slowest(run, "scripts/normalize").value == 1
    assert scripts.address(run, "scripts/addresses").value == pytest.approx(len(scripts.ADDRESSES) / 3)
    assert measured("scripts/html", 5.0).ok is True
    assert json.dumps(scripts.slowest(run, "scripts/html").detail)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["\u0301", "a\u0316\u0301", "\u09be", "\u1161", "नमस्तेदुनिया", "図書館は", "ห้องสมุด", "שָׁלוֹם", "도서관은"]
)
def test_ten_megabytes_without_a_blank_take_time_by_their_length(unit: str) -> None:
    text = unit * (10_000_000 // len(unit.encode()))
    column: Any = pa.array([text], pa.large_string())
    began = time.process_time()
    assert len(normalize_texts(column, True)) == 1
    assert redact(column, ("email", "ip")).texts is column
    assert strip_markdown(text) == plain_tex(text) == text
    assert plain_text(text[:60_000], "html", "resiliparse")
    assert detect_language(text)
    _joined(column)
    assert time.process_time() - began < 60  # about 1 s; quadratic work takes hours
