"""A recipe's text with one field changed: it says the old plus the change, and looks as before elsewhere."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.load import RecipeError, apply_override
from herd.llama3.studies.apply import with_element, with_field

RECIPES = sorted([*Path("recipes").glob("*.yaml"), Path("tests/e2e/tiny.yaml")])
TEXT = """\
# A recipe.
name: x   # its name
lists:
  - {name: a,   until: 1K}
  - name: b
    until: 2K   # why
    more: |
      some
      text

long: {one: 1, two: [1, 2],
       three: {}}
empty:
last: [a, b]
"""
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=60)
LEAVES = st.one_of(
    st.integers(-5, 10**13), st.booleans(), st.none(), st.floats(allow_nan=False), TEXTS,
    st.sampled_from(["30%", "1e-4", "off"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
PLACES = st.sampled_from(
    ["name", "new", "new.inner.most", "lists", "lists.a", "lists.a.until", "lists.0.add", "lists.b.until",
     "lists.b.add", "lists.b", "long", "long.one", "long.two", "long.two.1", "long.three", "long.three.four.five",
     "long.six", "empty", "last", "last.0"]
)  # fmt: skip


@given(PLACES, VALUES, st.sampled_from(["", "study mix 1a: better"]))
def test_any_change_says_the_old_plus_itself(place: str, value: Any, comment: str) -> None:
    expected = yaml.safe_load(TEXT)
    apply_override(expected, f"{place}={yaml.safe_dump(value)}")
    assert yaml.safe_load(with_field(TEXT, place.split("."), value, comment)) == expected


@given(st.sampled_from(["lists", "long.two", "last", "empty", "new", "long.three.four"]), VALUES)
def test_an_element_is_added_at_the_end(place: str, value: Any) -> None:
    expected = at = yaml.safe_load(TEXT)
    *parents, last = place.split(".")
    for key in parents:
        at = at[key]
    at[last] = [*(at.get(last) or []), value]
    assert yaml.safe_load(with_element(TEXT, place.split("."), value, "why not")) == expected


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_every_shipped_recipe_can_be_changed_in_one_place(path: Path) -> None:
    text = path.read_text()
    fields = field_values(yaml.safe_load(text))
    repeated = [next(keys for keys, _ in fields if keys[-1] == name) for name in re.findall(r"(\w+): &\w", text)]
    for keys in repeated:
        with pytest.raises(RecipeError, match="without other fields"):
            with_field(text, keys, "other")
    for keys, value in [pair for pair in fields[:: max(9, len(fields) // 6)] if pair[0] not in repeated]:
        plain = yaml.safe_load(text)
        changed = with_field(text, keys, "other")
        apply_override(plain, f"{'.'.join(keys)}=other")
        assert yaml.safe_load(changed) == plain
        if not isinstance(value, dict | list):
            differ = [pair for pair in zip(text.splitlines(), changed.splitlines(), strict=True) if pair[0] != pair[1]]
            assert len(differ) <= 1


def field_values(plain: Any, keys: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    items = enumerate(plain) if isinstance(plain, list) else plain.items() if isinstance(plain, dict) else []
    below = [pair for key, value in items for pair in field_values(value, (*keys, str(key)))]
    return [*([(keys, plain)] if keys and not any("." in key for key in keys) else []), *below]


def test_columns_comments_and_broken_lines_stay() -> None:
    changed = with_field(TEXT, ["lists", "a", "until"], "3K", "study s 1a: shorter")
    assert changed == TEXT.replace("  - {name: a,   until: 1K}", "  # study s 1a: shorter\n  - {name: a,   until: 3K}")
    changed = with_field(TEXT, ["lists", "b", "until"], "3K")
    assert "    until: 3K   # why\n    more: |" in changed
    assert "       three: {four: 5}}" in with_field(TEXT, ["long", "three", "four"], 5)
    assert "empty: {a: 1}\nlast" in with_field(TEXT, ["empty"], {"a": 1})


def test_a_comment_of_the_same_study_is_replaced() -> None:
    once = with_field(TEXT, ["long", "one"], 2, "study s 1a: more")
    again = with_field(
        with_field(once, ["long", "one"], 3, "study s 2b: still more"), ["long", "one"], 3, "study t 3c: so"
    )
    assert "# study s 1a" not in again
    assert "# study s 2b: still more\n# study t 3c: so\nlong: {one: 3," in again


def test_what_does_not_fit_gets_lines_of_its_own() -> None:
    stages = [{"name": "a", "extra_sources": {"gsm": "30%"}}, {"name": "b", "seq_len": [1, 2]}]
    changed = with_field(TEXT, ["lists"], stages)
    assert "lists:\n  - {name: a, extra_sources: {gsm: 30%}}\n  - {name: b, seq_len: [1, 2]}\n" in changed
    wide = with_element(TEXT, ["last"], {"uri": "s3://bucket/" + "x" * 100, "name": "gsm"}, "study s 1a: helps")
    assert "last: [a, b,\n       # study s 1a: helps\n       {uri: " in wide
    assert max(len(line) for line in wide.splitlines()) <= 130


@pytest.mark.parametrize(
    ("text", "place", "fault"),
    [
        (TEXT, "lists.c.until", "there is no element 'c'"),
        (TEXT, "name.more", "the field before 'more' has no fields"),
        ("a: &x {b: 1}\nc: {<<: *x}\n", "a.b", r"a\.b: cannot be changed without other fields .* by hand"),
        ("a: &x {b: 1}\nc: {<<: *x}\n", "c.b", r"c\.b: cannot be changed without other fields"),
        ("a: &x {b: 1}\nc: *x\n", "a", r"a: cannot be changed without other fields"),
        ("a: [", "a", "recipe: is not YAML"),
        ("- a\n", "a", "recipe: must be a mapping, not list"),
    ],
)
def test_what_cannot_be_changed_is_refused(text: str, place: str, fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        with_field(text, place.split("."), 9)


def test_an_anchor_is_changed_as_by_an_override() -> None:
    assert with_field("a: &x {b: 1}\nc: *x\n", ["c", "b"], 2) == "a: &x {b: 2}\nc: *x\n"


def test_no_list_takes_no_element() -> None:
    with pytest.raises(RecipeError, match="name: is not a list"):
        with_element(TEXT, ["name"], 1)


def test_the_plain_data_given_is_not_changed() -> None:
    value = {"a": [1]}
    kept = copy.deepcopy(value)
    with_field(TEXT, ["new"], value)
    assert value == kept
