"""What of an answer counts, and when it is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate import answer_extraction
from herd.llama3.evaluate.answer_extraction import (
    RegexTimeout,
    clean_answer,
    extract_answer,
    is_correct,
)
from herd.llama3.evaluate.generation_settings import GenerationSettings, check_generation_settings

NUMBERS = GenerationSettings(
    extract=(r"#### (-?[0-9.,]+)", r"(-?\$?[0-9][0-9.,]*)"), ignore=(",", r"\$", r"(?s)^.*####", r"\.$")
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("5 + 7 = 12\n#### 12", "12"),
        ("first #### 3, no: #### 4", "4"),
        ("It is 5, no 7.", "7."),
        ("They pay $1,000.", "$1,000."),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_match_of_the_first_expression_that_matches(text: str, found: str | None) -> None:
    assert extract_answer(text, NUMBERS) == found


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("so 3-5", "5", True),
        ("so 3-5", "-5", False),
        ("so 3 - 5", "5", True),
        ("(2+1)-5", "5", True),
        ("so -5", "-5", True),
        ("it is $-5.00", "-5", True),
        ("so 18.50", "18.5", True),
        ("so 18.50", "18.05", False),
        ("#### 1,800.0", "1800", True),
        ("so 200", "2", False),
        ("it is 100.", "100", True),
    ],
)
def test_gsm8k_reads_ranges_and_trailing_zeros_as_people_do(text: str, gold: str, right: bool, checkout: Path) -> None:
    task = yaml.safe_load((checkout / "llama3/evaluate/library/tasks/gsm8k.yaml").read_text())
    assert is_correct(text, [gold], GenerationSettings(**task["writing"])) == right


def test_without_expressions_the_whole_text_counts() -> None:
    assert extract_answer(" Paris\n", GenerationSettings()) == " Paris\n"
    assert is_correct(" Paris\n", ["London", "Paris"], GenerationSettings())
    assert not is_correct(" Paris\n", [], GenerationSettings())


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("They pay $1,000.", True),
        ("so #### 1000", True),
        ("1 000", False),
        ("it costs 1000.5", False),
        ("I cannot say", False),
    ],
)
def test_numbers_are_compared_without_what_does_not_matter(text: str, right: bool) -> None:
    assert is_correct(text, ["Half of 2,000 is 1,000.\n#### 1,000"], NUMBERS) is right


def test_a_group_that_took_no_part_is_no_answer() -> None:
    assert extract_answer("yes or maybe", GenerationSettings(extract=("maybe|(yes)", "(or)"))) == "yes"
    assert extract_answer("maybe or not", GenerationSettings(extract=("maybe|(yes)", "(or)"))) == "or"


@given(st.integers(-(10**9), 10**9))
def test_a_number_however_written_is_right(number: int) -> None:
    for written in (f"{number}", f"{number:,}", f"{number:,}.", f"so\n#### {number}\n"):
        assert is_correct(written, [f"because\n#### {number:,}"], NUMBERS)
    assert not is_correct(f"{number + 1:,}", [f"#### {number}"], NUMBERS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extract": ("(a", "(b)")}, r"writing.extract '\(a' is not a regular expression \(missing \)"),
        ({"ignore": ("[",)}, r"writing.ignore '\[' is not a regular expression"),
        ({"extract": ("[0-9]+",)}, r"writing.extract '\[0-9\]\+' has no group"),
        ({"until": ("\n", "")}, "writing.until has an empty text"),
        ({"max_tokens": 0}, "writing.max_tokens 0 must be at least 1"),
        ({"samples": 0}, "writing.samples 0 must be at least 1"),
        ({"samples": 5}, "writing.samples 5 at temperature 0"),
        ({"seconds": 0.0}, "writing.seconds 0.0 must be above 0"),
        ({"temperature": -1.0}, "temperature -1.0 must be 0 or more"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_k": -2}, "top_k -2 must be 0 or more"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 must be above 0"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_generation_settings(GenerationSettings(**settings))


def test_an_expression_may_be_ignored_and_extracted() -> None:
    check_generation_settings(GenerationSettings(ignore=(",",), extract=("(,)",), temperature=0.8, samples=3))


def test_an_expression_that_would_take_years_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the C code of the expression too, and by processor time, so that a busy machine changes nothing."""
    monkeypatch.setattr(answer_extraction, "SECONDS", 0.1)
    text, pattern = "a" * 40 + "!", "((a|aa)+)$"
    with pytest.raises(
        RegexTimeout, match=r"writing\.extract .* takes more than 0.1 s of processor time; write one without"
    ):
        extract_answer(text, GenerationSettings(extract=(pattern,)))
    with pytest.raises(RegexTimeout, match=r"takes more than 0\.1 s"):
        clean_answer(text, GenerationSettings(ignore=(pattern,)))
