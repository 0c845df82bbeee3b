from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.gates import GateRule, StageRate
from herd.llama3.recipe.units import Bytes, Cadence, Duration, Share, Span, Tokens, tokens

COUNTS = st.one_of(
    st.integers(1, 10**15),
    st.builds(lambda n, scale: n * scale, st.integers(1, 9999), st.sampled_from([10**3, 10**6, 10**9, 2**10, 2**20])),
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("252M", 252 * 10**6), ("2.87T", 2_870 * 10**9), ("4Mi", 4 * 2**20), ("16Ki", 16384), ("500 tokens", 500)],
)
def test_tokens_read_as_people_write_them(text: str, count: int) -> None:
    assert Tokens.parse(text) == count
    assert str(Tokens.parse(text)) == text


@given(COUNTS)
def test_printing_is_exact(count: int) -> None:
    assert Tokens.parse(str(Tokens(count))) == count
    assert Bytes.parse(str(Bytes(count))) == count
    assert Span.parse(str(Span(count, "steps"))) == Span(count, "steps")
    assert Span.parse(str(Span(count, "tokens"))) == Span(count, "tokens")
    assert Duration.parse(str(Duration(count))) == count
    assert Cadence.parse(str(Cadence(count, "seconds"))) == Cadence(count, "seconds")
    assert Cadence.parse(str(Cadence(count, "tokens"))) == Cadence(count, "tokens")


def test_quantities_print_as_people_write_them() -> None:
    texts = {
        Tokens: ["1M", "1Ki", "1.5M", "1_000 tokens"],
        Duration: ["45 s", "10 min", "2 h", "1 d", "0 s"],
        Bytes: ["40MB", "2GiB", "512B", "0 B"],
        Span: ["1.2M steps", "7 steps", "252M"],
        Cadence: ["10 min", "100B"],
    }
    printed = [str(kind.parse(text)) for kind, each in texts.items() for text in each]
    assert printed == [text.replace("1_000 tokens", "1K") for each in texts.values() for text in each]


@given(st.integers(0, 10_000))
def test_shares_are_exact(hundredths: int) -> None:
    share = Share(Fraction(hundredths, 10_000))
    assert Share.parse(str(share)) == share


@pytest.mark.parametrize(
    ("kind", "text", "remedy"),
    [
        (Tokens, 252, "write 252M"),
        (Tokens, "252", "write 252M"),
        (Tokens, "1.5 tokens", "'1.5 tokens' is not a whole number of tokens"),
        (Span, "1.5 steps", "'1.5 steps' is not a whole number of steps"),
        (Duration, "0.5 s", "'0.5 s' is not a whole number of seconds"),
        (Bytes, "0.5 B", "'0.5 B' is not a whole number of bytes"),
        (Span, "many", "'many' is not a length: write 8000 steps, 1.2M steps or 252M"),
        (Duration, "long", "'long' is not a time: write 30 s, 10 min, 2 h or 1 d"),
        (Bytes, "few", "'few' is not a size in bytes: write 40MB or 2GiB"),
        (Tokens, "few", "'few' is not a number of tokens: write 252M, 4Mi or 500 tokens"),
        (Share, "half", "'half' is not a share: write 25%"),
        (Span, "8000", "write 252M"),
        (Span, "4Mi steps", "powers of 1000"),
        (Share, "0.5", "write 25%"),
        (Share, 50, "write 25%"),
        (Duration, "10", "write 30 s"),
        (Bytes, "40", "write 40MB"),
        (StageRate, "linear", "linear to 0"),
        (GateRule, "good", "no worse than"),
    ],
)
def test_a_bare_or_odd_quantity_is_refused_with_the_form_to_use(kind: Any, text: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        kind.parse(text)


@pytest.mark.parametrize("text", ["better", "no worse than 0.5%", "at most 2.5", "at least 0.3"])
def test_gate_rules_read_and_print(text: str) -> None:
    assert str(GateRule.parse(text)) == text


def test_rounded_counts_are_for_reading() -> None:
    assert [tokens(n) for n in (512, 200_704, 15.6e12)] == ["512", "200.7K", "15.6T"]
