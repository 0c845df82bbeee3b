from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from herd.llama3.recipe.gates import GateRule, assign_rules, default_policy, matches
from herd.llama3.recipe.sections import Promote


@pytest.mark.parametrize(
    ("pattern", "metric", "matched"),
    [
        ("eval/bpb", "eval/bpb", True),
        ("eval/bpb/*", "eval/bpb/code", True),
        ("eval/bpb/*", "eval/bpb", False),
        ("eval/*", "eval/mmlu", True),
        ("eval/*", "eval/bpb/code", False),
        ("eval/arc_*", "eval/arc_easy", True),
        ("eval/*/code", "eval/bpb/code", True),
        ("eval/a.c", "eval/abc", False),
    ],
)
def test_a_star_matches_one_part_of_a_name(pattern: str, metric: str, matched: bool) -> None:
    assert matches(pattern, metric) is matched


def test_the_most_exact_pattern_judges_a_score() -> None:
    metrics = ["eval/bpb", "eval/bpb/code", "eval/bpb/math", "eval/arc_easy", "eval/mmlu"]
    assert assign_rules(["eval/*", "eval/bpb/*", "eval/bpb/code", "eval/arc_*", "eval/piqa"], metrics) == {
        "eval/*": ["eval/bpb", "eval/mmlu"],
        "eval/bpb/*": ["eval/bpb/math"],
        "eval/bpb/code": ["eval/bpb/code"],
        "eval/arc_*": ["eval/arc_easy"],
        "eval/piqa": ["eval/piqa"],
    }
    assert assign_rules(["eval/bpb*", "eval/*bpb"], ["eval/bpb"]) == {"eval/bpb*": ["eval/bpb"], "eval/*bpb": []}


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("loss", "'loss' is not a score: names begin with eval/"),
        ("train/loss", "is not a score"),
        ("eval/BPB", "write eval/bpb, eval/bpb/math or a pattern such as"),
        ("eval/", "is not a score"),
        ("eval/bpb/maths", "'eval/bpb/maths': unknown domain; write one of general, math, code, mul"),
        ("eval/bpb_macro/x*", "unknown domain"),
        ("eval/short-context", "is measured between sequence lengths only; write it under gates"),
    ],
)
def test_a_score_that_no_evaluation_has_is_refused_at_load(metric: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Promote(when={metric: GateRule.parse("better")})


def test_patterns_are_read_from_yaml() -> None:
    text = (
        "{when: {eval/bpb: better, eval/bpb/*: no worse than 2%, eval/bpb/m*: at most 9, eval/*: no significant drop}}"
    )
    policy = Promote.model_validate(yaml.safe_load(text))
    assert list(policy.when) == ["eval/bpb", "eval/bpb/*", "eval/bpb/m*", "eval/*"]
    assert Promote.model_validate(policy.model_dump(mode="json")) == policy
    assert Promote().when == default_policy()


@pytest.mark.parametrize(
    "text",
    ["no worse than 1.2.3%", "no worse than %", "no drop over 5", "no drop over 5%", "at most .", "no drop", "", 3],
)
def test_what_is_no_rule_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not a rule: write 'better'"):
        GateRule.parse(text)


@given(
    st.sampled_from(["no worse than {}%", "no drop over {} points", "at most {}", "at least {}"]),
    st.decimals(0, 1000, places=4),
)
def test_printing_a_rule_is_exact(form: str, bound: object) -> None:
    rule = GateRule.parse(form.format(bound))
    assert GateRule.parse(str(rule)) == rule
