from __future__ import annotations

import pytest
from pydantic import ValidationError

from herd.llama3.recipe.base import Replaced
from herd.llama3.recipe.data_schema import PUBLISHED, Curate, Quality
from herd.llama3.recipe.reference import sections
from herd.llama3.recipe.schema import Recipe


@pytest.mark.parametrize("name", PUBLISHED)
def test_rule_set_fills_in_its_published_bounds(name: str) -> None:
    rules = Quality.model_validate({"rules": [name]})
    assert {field: getattr(rules, field) for field in PUBLISHED[name]} == PUBLISHED[name]


def test_c4_is_refused_with_its_two_forms() -> None:
    for given in ({"quality": {"rules": ["gopher", "c4"]}}, {"quality_for": {"de": {"rules": ["c4"]}}}):
        with pytest.raises(ValidationError, match="c4 has two forms; write c4_fineweb"):
            Curate.model_validate(given)


def test_written_bound_wins_and_null_switches_one_off() -> None:
    rules = Quality.model_validate({"rules": ["gopher"], "min_words": 20, "max_words": None})
    assert (rules.min_words, rules.max_words, rules.min_mean_word) == (20, None, 3)


def test_rules_survive_being_written_and_read() -> None:
    rules = Quality.model_validate({"rules": ["gopher", "repetition"], "max_words": None})
    assert Quality.model_validate_json(rules.model_dump_json()) == rules


def test_override_changes_its_fields_alone() -> None:
    curate = Curate.model_validate(
        {"quality": {"rules": ["gopher"], "min_words": 20}, "quality_for": {"math": {"max_braces": 5}, "zh": {}}}
    )
    math = curate.quality_of("math", "en")
    assert (math.max_braces, math.min_words, math.max_words) == (5, 20, 100_000)
    assert curate.quality_of("general", "zh") == curate.quality


def test_an_entry_does_not_remove_what_code_has_by_default() -> None:
    usual = Curate().quality_of("code", "en")
    assert (usual.max_duplicate_lines, usual.max_symbol_chars, usual.max_top_ngram) == (0.75, 0.8, {})
    for entry in ({"de": {"min_words": 5}}, {"multilingual": {"min_words": 5}}, {"code": {"rules": []}}):
        assert Curate.model_validate({"quality_for": entry}).quality_of("code", "en") == usual, entry
    longer = Curate.model_validate({"quality_for": {"code": {"min_chars": 500}}}).quality_of("code", "en")
    assert longer == usual.model_copy(update={"min_chars": 500})
    for off in ({}, {"code": {}}):
        curate = Curate.model_validate({"quality_for": off})
        assert curate.quality_of("code", "en") == curate.quality, off


def test_code_has_no_rule_that_was_made_for_prose() -> None:
    prose = Curate.model_validate({"quality": {"rules": ["gopher", "repetition", "fineweb"]}})
    assert prose.quality_of("code", "en") == Curate().quality_of("code", "en")
    named = Curate.model_validate({"quality": {"rules": ["gopher"]}, "quality_for": {"code": {"rules": ["gopher"]}}})
    assert named.quality_of("code", "en").max_words == 100_000


def test_bounds_of_ngrams_are_merged_by_length() -> None:
    rules = Quality.model_validate({"rules": ["repetition"], "max_top_ngram": {3: 0.5}})
    assert rules.max_top_ngram == {2: 0.2, 3: 0.5, 4: 0.16}
    assert Quality.model_validate({"rules": ["repetition"], "max_top_ngram": {}}).max_top_ngram == {}
    changed = rules.changed({"max_duplicate_ngrams": {5: 0.9}})
    assert (changed.max_duplicate_ngrams[5], changed.max_duplicate_ngrams[6]) == (0.9, 0.14)


def test_every_mapping_with_a_default_is_merged_or_says_that_it_is_replaced() -> None:
    checked = []
    for section in sections(Recipe):
        for name, field in section.model_fields.items():
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            if not isinstance(default, dict) or not default:
                continue
            checked.append(name)
            if any(isinstance(mark, Replaced) for mark in field.metadata):
                assert "replace the default" in " ".join((field.description or "").split()), name
            else:
                key, value = next(iter(default.items()))
                other = {max(default) + 1 if isinstance(key, int) else "math": type(value)()}
                assert getattr(section.model_validate({name: other}), name) == {**default, **other}
                assert getattr(section.model_validate({name: {}}), name) == {}
    assert {"quality_for", "max_top_ngram", "when"} <= set(checked)


def test_override_may_name_a_rule_set() -> None:
    """Its bounds once lost against the defaults that the base had written out for every field."""
    curate = Curate.model_validate(
        {"quality": {"max_duplicate_lines": 0.5}, "quality_for": {"fr": {"rules": ["repetition"]}}}
    )
    assert curate.quality_of("multilingual", "fr").max_duplicate_lines == 0.3
    assert curate.quality_of("multilingual", "fr").max_duplicate_ngrams[5] == 0.15
    assert curate.quality_of("multilingual", "de").max_duplicate_lines == 0.5


def test_fineweb2_has_bounds_by_language() -> None:
    curate = Curate.model_validate(
        {
            "quality": {"rules": ["gopher"], "min_chars": 7},
            "quality_for": {
                "multilingual": {"rules": ["fineweb2"], "min_punctuated_lines": None},
                "ja": {"max_mean_word": 4},
            },
        }
    )
    japanese, german, unknown = (curate.quality_of("multilingual", language) for language in ("ja", "de", "xx"))
    assert (japanese.max_duplicate_lines, german.max_duplicate_lines, unknown.max_duplicate_lines) == (
        0.328,
        0.263,
        0.3,
    )
    assert japanese.max_duplicate_ngrams == {5: 0.243, 6: 0.225, 7: 0.207, 8: 0.19, 9: 0.175, 10: 0.159}
    assert german.max_top_ngram == {2: 0.169, 3: 0.153, 4: 0.137}
    assert (japanese.max_mean_word, german.max_mean_word) == (4, 15), "what the recipe says of a language wins"
    assert (japanese.min_punctuated_lines, german.min_stop_words, german.min_chars) == (None, None, 7)
    assert curate.quality_of("general", "de") == curate.quality
    assert {"ja", "de"} <= set(curate.by_language)
    assert Curate.model_validate({"quality_for": {"fr": {}}}).by_language == ["fr"]


def test_language_wins_over_its_domain() -> None:
    overrides = {"multilingual": {"min_chars": 50, "min_words": 9}, "zh": {"min_chars": 30}}
    rules = Curate.model_validate({"quality_for": overrides}).quality_of("multilingual", "zh")
    assert (rules.min_chars, rules.min_words) == (30, 9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rules": ["gofer"]}, "gopher"),
        ({"max_top_ngram": {5: 0.1}}, "max_top_ngram: 5 words; write 2 to 4"),
        ({"max_duplicate_ngrams": {4: 0.1}}, "write 5 to 10"),
        ({"max_duplicate_lines": 30}, "less than or equal to 1"),
        ({"min_chars": 500, "max_chars": 50}, "min_chars 500 is above max_chars 50"),
        ({"max_duplicate_line": 0.3}, "max_duplicate_line"),
    ],
)
def test_mistake_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Quality.model_validate(given)


def test_rules_of_an_override_replace_those_of_the_base() -> None:
    base = Quality(rules=["gopher", "fineweb"], min_words=70)
    code = base.changed({"rules": ["repetition"]})
    assert (code.min_stop_words, code.min_punctuated_lines) == (None, None)
    assert code.min_words == 70, "written, not published"
    assert code.max_duplicate_ngrams == Quality(rules=["repetition"]).max_duplicate_ngrams
    assert base.changed({"rules": []}).max_short_lines is None
    assert base.changed({"max_words": 9000}).min_stop_words == 2
