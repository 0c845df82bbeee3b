from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate.gate import INTEGRITY, Decision, Evidence, UnjudgedScore, decide
from herd.llama3.evaluate.scores import Better, Score
from herd.llama3.recipe import gates
from herd.llama3.recipe.gates import AbsoluteRule, GateRule, NoWorseThan
from herd.llama3.statistics.estimates import normal
from herd.llama3.statistics.significance import PAIRED, Difference


def table(values: Mapping[str, float], requests: str = "d") -> dict[str, Score]:
    """Return scores; names with `bpb` are better low, others better high."""
    scores = {}
    for name, value in values.items():
        better: Better = "lower" if "bpb" in name else "higher"
        key = f"eval/{name}"
        scores[key] = Score.from_estimate(key, normal(value, 0.1, 9), "unit", better, requests, None)
    return scores


def rules(**texts: str) -> dict[str, GateRule]:
    return {f"eval/{name}": GateRule.parse(text) for name, text in texts.items()}


@pytest.mark.parametrize(
    ("rule", "candidate", "champion", "passed", "threshold", "reason"),
    [
        (
            {"bpb": "no worse than 0.5%"},
            2.913,
            2.798,
            False,
            2.81199,
            "eval/bpb 2.913 is 4.11% worse than champion 2.798; allowed 0.5%",
        ),
        (
            {"bpb": "no worse than 5%"},
            2.913,
            2.798,
            True,
            2.9379,
            "eval/bpb 2.913 is 4.11% worse than champion 2.798; allowed 5%",
        ),
        (
            {"bpb": "no worse than 0.5%"},
            2.7,
            2.8,
            True,
            2.814,
            "eval/bpb 2.700 is 3.57% better than champion 2.800; allowed 0.5%",
        ),
        (
            {"core": "no worse than 20%"},
            0.3,
            0.4,
            False,
            0.32,
            "eval/core 0.3000 is 25% worse than champion 0.4000; allowed 20%",
        ),
        (
            {"core": "better"},
            0.4,
            0.4,
            False,
            0.4,
            "eval/core 0.4000 equals champion 0.4000; it must be better",
        ),
        (
            {"core": "better"},
            0.41,
            0.4,
            True,
            0.4,
            "eval/core 0.4100 is 2.5% better than champion 0.4000; it must be better",
        ),
        (
            {"bpb": "better"},
            0.41,
            0.4,
            False,
            0.4,
            "eval/bpb 0.4100 is 2.5% worse than champion 0.4000; it must be better",
        ),
        ({"bpb": "at most 2.5"}, 2.6, 2.9, False, 2.5, "eval/bpb 2.600 is not at most 2.5"),
        ({"core": "at least 0.3"}, 0.3, 0.9, True, 0.3, "eval/core 0.3000 is at least 0.3"),
        # a champion below zero: 10 % of its magnitude is allowed
        (
            {"core": "no worse than 10%"},
            -0.021,
            -0.02,
            True,
            -0.022,
            "eval/core -0.02100 is 5% worse than champion -0.02000; allowed 10%",
        ),
        # a champion at zero has no percent
        (
            {"core": "no worse than 10%"},
            -0.02,
            0.0,
            False,
            0.0,
            "eval/core -0.02000 is 0.02 worse than champion 0.000; allowed 10%",
        ),
    ],
)
def test_gate_table(
    rule: dict[str, str], candidate: float, champion: float, passed: bool, threshold: float, reason: str
) -> None:
    (name,) = rule
    decision = decide(rules(**rule), table({name: candidate}), table({name: champion}))
    integrity, row = decision.rows
    assert integrity.passed
    assert (row.metric, row.rule) == (f"eval/{name}", rule[name])
    assert (row.candidate, row.champion) == (candidate, champion)
    assert (row.passed, decision.accepted) == (passed, passed)
    assert row.threshold == pytest.approx(threshold)
    assert row.reason == reason
    assert decision.refusals == ([] if passed else [reason])


EDGE = 2.0**-20


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize(
    ("rule", "champion", "allowed", "at_the_bound"),
    [
        ("better", 2.0, 0.0, False),
        ("no worse than 25%", 2.0, 0.5, True),
        ("no worse than 25%", -2.0, 0.5, True),
        ("no drop over 25 points", 2.0, 0.25, True),
    ],
)
def test_a_relative_rule_is_kept_up_to_its_bound(
    rule: str, champion: float, allowed: float, at_the_bound: bool, lower: bool
) -> None:
    """By the scores alone, and by the end of the interval of their difference, whatever the scores."""
    name, sign = ("bpb", 1.0) if lower else ("core", -1.0)
    for worse, passed in ((allowed - EDGE, True), (allowed, at_the_bound), (allowed + EDGE, False)):
        value = sign * worse
        ours, theirs = table({name: champion + value}), table({name: champion})
        assert decide(rules(**{name: rule}), ours, theirs).accepted == passed, worse
        low, high = (value - 1, value) if lower else (value, value + 1)
        difference = Difference(
            value=(low + high) / 2,
            low=low,
            high=high,
            p=0.5,
            n=64,
            method=PAIRED,
            better="lower" if lower else "higher",
        )
        decision = decide(rules(**{name: rule}), theirs, theirs, {f"eval/{name}": difference})
        assert decision.accepted == passed, worse


@pytest.mark.parametrize(("rule", "sign"), [("at most 0.5", 1.0), ("at least 0.5", -1.0)])
@pytest.mark.parametrize("name", ["bpb", "core"])
def test_an_absolute_rule_is_kept_up_to_its_bound(rule: str, sign: float, name: str) -> None:
    for over, passed in ((-EDGE, True), (0.0, True), (EDGE, False)):
        assert decide(rules(**{name: rule}), table({name: 0.5 + sign * over}), table({name: 0.5})).accepted == passed


@pytest.mark.parametrize(("p", "worse", "passed"), [(0.0499, 0.1, False), (0.05, 0.1, True), (0.0499, -0.1, True)])
def test_a_drop_is_significant_below_five_percent(p: float, worse: float, passed: bool) -> None:
    for name, sign in (("bpb", 1.0), ("core", -1.0)):
        better: Better = "lower" if sign > 0 else "higher"
        ends = {"value": sign * worse, "low": sign * worse - 0.01, "high": sign * worse + 0.01}
        difference = Difference(**ends, p=p, n=64, method=PAIRED, better=better)
        asked, same = rules(**{name: "no significant drop"}), table({name: 1.0})
        assert decide(asked, same, same, {f"eval/{name}": difference}).accepted == passed


def test_without_champion_relative_rules_pass_and_absolute_ones_hold() -> None:
    asked = rules(bpb="no worse than 0.5%", core="better", arithmetic="at least 0.5")
    decision = decide(asked, table({"bpb": 2.9, "core": 0.1, "arithmetic": 0.4}), None)
    assert [row.passed for row in decision.rows] == [True, True, True, False]
    assert [row.without_champion for row in decision.rows] == [False, True, True, False]
    compared = decide(asked, table({"bpb": 2.9, "core": 0.1}), table({"bpb": 2.9, "core": 0.1}))
    assert not any(row.without_champion for row in compared.rows)
    assert decision.rows[1].reason == "eval/bpb is 2.900; no champion yet"
    assert decision.refusals == ["eval/arithmetic 0.4000 is not at least 0.5"]
    assert not decision.accepted


def test_every_rule_must_pass() -> None:
    decision = decide(
        rules(bpb="better", core="better"), table({"bpb": 2.0, "core": 0.1}), table({"bpb": 2.5, "core": 0.2})
    )
    assert [row.passed for row in decision.rows] == [True, True, False]
    assert not decision.accepted


@pytest.mark.parametrize("text", ["better", "no worse than 5%", "at most 9", "at least 0"])
@pytest.mark.parametrize("champion", [None, {"bpb": 2.0}])
def test_a_metric_that_is_missing_fails_by_name(text: str, champion: dict[str, float] | None) -> None:
    decision = decide(rules(bpb=text), table({"core": 0.3}), None if champion is None else table(champion))
    assert not decision.accepted
    assert decision.refusals == [
        "eval/bpb is not among the candidate's scores (eval/core); evaluate it with this recipe"
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", ["better", "no worse than 5%", "at most 9", "at least 0"])
def test_a_value_that_is_not_finite_never_passes(value: float, text: str) -> None:
    for champion in (None, table({"bpb": 2.0})):
        decision = decide(rules(bpb=text), table({"bpb": value}), champion)
        assert not decision.accepted
        assert decision.refusals == [f"not finite: eval/bpb is {value}", f"eval/bpb of the candidate is {value}"]
        assert decision.rows[1].candidate is None
        json.loads(decision.model_dump_json(), parse_constant=pytest.fail)


def test_scores_without_a_rule_must_be_finite_too() -> None:
    decision = decide(rules(bpb="better"), table({"bpb": 1.9, "core": math.nan}), table({"bpb": 2.0}))
    assert [(row.metric, row.passed) for row in decision.rows] == [(INTEGRITY, False), ("eval/bpb", True)]
    assert not decision.accepted
    assert not decide({}, {}, None).accepted
    assert decide({}, table({"bpb": 1.0}), None).accepted


def test_a_champion_that_was_not_scored_cannot_be_compared_with() -> None:
    missing = decide(rules(bpb="better"), table({"bpb": 1.9}), table({"core": 0.2}))
    broken = decide(rules(bpb="better"), table({"bpb": 1.9}), table({"bpb": math.nan}))
    assert missing.refusals == ["eval/bpb is not among the champion's scores (eval/core); evaluate it with this recipe"]
    assert broken.refusals == ["eval/bpb of the champion is nan"]


def test_scores_of_other_requests_are_named() -> None:
    decision = decide(rules(bpb="better"), table({"bpb": 1.9}), table({"bpb": 2.0}, "another"))
    assert decision.accepted
    assert decision.rows[1].reason.endswith("(the champion was scored on other requests)")


finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, finite, st.floats(0, 1), st.sampled_from(["bpb", "core"]))
def test_no_worse_than_is_monotone_and_never_stricter_than_equal(
    candidate: float, champion: float, bound: float, name: str
) -> None:
    rule = {f"eval/{name}": NoWorseThan(bound)}
    sign = 1 if name == "bpb" else -1
    accepted = decide(rule, table({name: candidate}), table({name: champion})).accepted
    assert decide(rule, table({name: champion}), table({name: champion})).accepted
    if sign * (candidate - champion) <= 0:
        assert accepted
    assert accepted == (sign * (candidate - champion) <= bound * abs(champion)) or math.isclose(
        sign * (candidate - champion), bound * abs(champion), rel_tol=1e-6, abs_tol=1e-6
    )


@given(st.dictionaries(st.sampled_from(["bpb", "core", "arithmetic"]), st.floats(), min_size=1))
def test_decisions_survive_json(values: dict[str, float]) -> None:
    asked = rules(bpb="no worse than 0.5%", core="at least 0.1", arithmetic="better")
    decision = decide(asked, table(values), table({"bpb": 2.0, "arithmetic": 0.5}))
    assert Decision.model_validate_json(decision.model_dump_json()) == decision
    assert decide(asked, table(values), table({"bpb": 2.0, "arithmetic": 0.5})) == decision


def test_an_unknown_rule_is_refused_until_it_is_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'about 1' is not a rule: write 'better'"):
        GateRule.parse("about 1")

    class About(AbsoluteRule):
        example, syntax = "about 1", "about {}"

        def holds(self, value: float) -> bool:
            return abs(value - self.bound) < 0.1

    monkeypatch.setattr(gates, "GATE_RULES", (*gates.GATE_RULES, About))
    row = decide(rules(bpb="about 1"), table({"bpb": 1.5}), None).rows[1]
    assert (row.passed, row.rule, row.reason) == (False, "about 1", "eval/bpb 1.500 is not about 1")


def test_what_a_machine_could_not_judge_is_no_verdict_on_a_model() -> None:
    """Neither a refusal nor an acceptance, of candidate and champion alike; a score without a rule may be so."""
    whole, policy = table({"bpb": 2.0, "code": 0.5, "other": 0.5}), rules(bpb="better", code="at least 0.4")
    part = {**whole, "eval/code": replace(whole["eval/code"], unjudged=3), "eval/other": whole["eval/other"]}
    told = r"eval/code of the {}: 3 questions were not judged .*; evaluate again .*: herd rerun RUN --from evaluate"
    with pytest.raises(UnjudgedScore, match=told.format("candidate")):
        Evidence.from_scores(policy, part, None)
    with pytest.raises(UnjudgedScore, match=told.format("champion")):
        Evidence.from_scores(policy, whole, part)
    assert Evidence.from_scores(policy, {**whole, "eval/other": part["eval/code"]}, None).decide().accepted
    with pytest.raises(UnjudgedScore):
        Evidence.from_scores({"eval/*": GateRule.parse("no significant drop")}, part, None)
