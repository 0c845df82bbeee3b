"""Sources that stand apart, and helpings: other documents of the same mix."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama3.recipe.load import RecipeError, parse_recipe, resolved
from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS
from llama3.tokens.mix import leaves_of
from llama3.tokens.stream import TokenStream
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, write_shards

MANY = [[7, 5, 9, 4, 12, 3, 8, 6] * 20]
"""Documents of a leaf: long enough that no helping below wraps around."""
SOURCES = {domain: [{"uri": "x"}] for domain in DOMAINS}
APART = {**SOURCES, "math": [{"uri": "x"}, {"uri": "new", "name": "gsm"}]}


def drawn(draw: int, tokens: int = 160, after: int = 0) -> Recipe:
    """Return a recipe whose second stage reads helping `draw`; a third of `after` tokens follows it."""
    later = [stage("c", after)] if after else []
    return recipe([stage("a", 80), {**stage("b", tokens), "draw": draw}, *later])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("helpings"), drawn(0), MANY)


@settings(max_examples=30, deadline=None)
@given(draws=st.lists(st.integers(1, 4), min_size=2, max_size=3, unique=True), tokens=st.sampled_from([80, 160, 240]))
def test_helpings_share_no_token_and_have_the_same_mix(shards: Path, draws: list[int], tokens: int) -> None:
    windows = [TokenStream(shards, drawn(draw, tokens)).read(80, 80 + tokens) for draw in draws]
    read = Counter(int(token) for window in windows for token in window.tokens if token < 1_000_000_000)
    assert max(read.values()) == 1
    mixes = [np.bincount(window.domains, minlength=4).tolist() for window in windows]
    assert all(mix == mixes[0] for mix in mixes)


def test_what_comes_before_a_helping_is_the_same_and_nothing_after_it_repeats(shards: Path) -> None:
    plain, other = TokenStream(shards, drawn(1, 160, 80)), TokenStream(shards, drawn(2, 160, 80))
    assert np.array_equal(plain.read(0, 80).tokens, other.read(0, 80).tokens)
    assert plain.identity(0, 80) == other.identity(0, 80)
    assert plain.identity(80, 240) != other.identity(80, 240)
    whole = other.read(0, 320).tokens
    assert len(set(whole.tolist())) == len(whole)


def test_what_is_passed_over_does_not_count_as_read(shards: Path) -> None:
    plain, other = TokenStream(shards, drawn(1)), TokenStream(shards, drawn(3))
    assert plain.realised(240) == other.realised(240)
    assert plain.epochs(240) == other.epochs(240)
    assert plain.planned(0, 240) == other.planned(0, 240)
    window = other.read(0, 240)
    counts = np.bincount(window.domains, minlength=4)
    assert other.sources(0, 240) == {f"{domain}/s": int(counts[i]) for i, domain in enumerate(DOMAINS)}
    uses = other.documents(0, 240)
    tally = other.tally(["source"], 0, 240)
    assert sum(found["source"]["s"][1] for found in tally.values()) == len({(use.leaf, use.document) for use in uses})


def test_an_ordinary_stage_says_nothing_of_helpings(shards: Path) -> None:
    first, second = TokenStream(shards, drawn(0)).identity(0, 240)["spans"], drawn(0).stages[1]
    assert len(first) == 1  # equal mixes in a row stay one span
    assert second.draw == 0
    assert second.add == {}


def apart(add: dict[str, str], draw: int = 0) -> Recipe:
    return recipe([stage("a", 200), {**stage("b", 400), "add": add, "draw": draw}], sources=APART)


def test_a_source_that_stands_apart_is_a_leaf_that_no_mix_draws_from(tmp_path: Path) -> None:
    asked = apart({"gsm": "30%"})
    assert [leaf.name for leaf in leaves_of(asked)] == ["general", "math", "math.gsm", "code", "multilingual"]
    stream = TokenStream(write_shards(tmp_path, asked, LENGTHS), asked)
    taken = dict(zip((leaf.name for leaf in stream.leaves), stream.consumed(200).tolist(), strict=True))
    assert taken["math.gsm"] == 0
    later = dict(zip((leaf.name for leaf in stream.leaves), stream.consumed(600).tolist(), strict=True))
    assert {name: later[name] - taken[name] for name in later} == {
        "general": 140, "math": 70, "math.gsm": 120, "code": 48, "multilingual": 22,
    }  # fmt: skip
    assert stream.planned(200, 600)["math"] == Fraction(190)
    window = stream.read(200, 600)
    assert (window.tokens // 1_000_000 == 2).sum() == 120
    planned = stream.planned_sources(200, 600)
    assert sum(planned.values()) == 400


def test_the_arms_of_a_study_share_shards_and_the_stage_before(tmp_path: Path) -> None:
    control, arm = (apart({}, draw=1), apart({"gsm": "30%"}, draw=1))
    shards = write_shards(tmp_path, arm, LENGTHS)
    assert [leaf.name for leaf in leaves_of(control)] == [leaf.name for leaf in leaves_of(arm)]
    streams = [TokenStream(shards, asked) for asked in (control, arm)]
    assert np.array_equal(streams[0].read(0, 200).tokens, streams[1].read(0, 200).tokens)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"stages": [{**stage("a", 80), "add": {"other": "10%"}}]}, "'other' is no source that stands apart"),
    "too much": ({"stages": [{**stage("a", 80), "add": {"gsm": "100%"}}]}, "leave nothing for the mix"),
    "twice": ({"sources": {**APART, "code": [{"uri": "x"}, {"uri": "y", "name": "gsm"}]}}, "stands twice"),
    "nothing pooled": ({"sources": {**SOURCES, "math": [{"uri": "x", "name": "gsm"}]}}, "all of sources.math"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BAD.values(), ids=BAD)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({**resolved(apart({})), **change}, "recipe")
    assert words in str(caught.value)
