"""Gains of variants: coverage and false findings by simulation, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.simulated_studies import PlantedEffects, outcomes
from herd.llama3.evaluate.scores import Score
from herd.llama3.studies.effects import Contrast, comparison_flags, findings, uncorrected_contrasts
from herd.llama3.studies.results import HELPS, HURTS, NOTHING, RunResult

DOMAINS = {"general": 48, "math": 32, "code": 64}
TRUTH = PlantedEffects(DOMAINS, {"arithmetic": 100}, {"base": {}, "gsm": {"math": 0.02, "code": -0.01}})
BPB = [f"eval/bpb/{name}" for name in DOMAINS]


def contrast(
    found: Sequence[RunResult], variant: str, control: str, scores: Sequence[str] | None = None
) -> list[Contrast]:
    """Return the gain of a single variant on each score."""
    return uncorrected_contrasts(found, control, [variant], scores)


def by_score(found: Sequence[Contrast]) -> dict[str, Contrast]:
    return {one.score: one for one in found}


def without(made: list[RunResult], variant: str, *repeats: int) -> list[RunResult]:
    return [one for one in made if one.variant != variant or one.repeat not in repeats]


def with_score(one: RunResult, key: str, **changes: object) -> RunResult:
    score: Score = dataclasses.replace(one.scores[key], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(one, scores={**one.scores, key: score})


def test_gain_is_above_zero_where_bits_fall_and_where_answers_rise() -> None:
    truth = PlantedEffects({"math": 32}, {"arithmetic": 400}, {"base": {}, "variant": {"math": 0.5, "arithmetic": 0.4}})
    made = outcomes(truth, 0)
    found = by_score(contrast(made, "variant", "base"))
    assert found["eval/bpb/math"].gain == pytest.approx(0.5, abs=0.05)
    assert found["eval/arithmetic"].gain == pytest.approx(0.4, abs=0.1)
    scores = [
        np.mean([one.scores["eval/bpb/math"].value for one in made if one.variant == variant])
        for variant in ("base", "variant")
    ]
    assert found["eval/bpb/math"].gain == pytest.approx(scores[0] - scores[1])
    assert [one.unit for one in found.values()] == ["bpb", "accuracy"]


@pytest.mark.parametrize("repeats", [2, pytest.param(3, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("luck", [pytest.param(0.0, marks=pytest.mark.slow), 0.02])
def test_intervals_cover_the_truth(repeats: int, luck: float) -> None:
    truth = dataclasses.replace(TRUTH, questions={}, repeats=repeats, luck=luck)
    effects = {f"eval/bpb/{name}": truth.effects["gsm"].get(name, 0.0) for name in DOMAINS}
    found = [one for seed in range(150) for one in uncorrected_contrasts(outcomes(truth, seed), "base", ["gsm"])]
    inside = np.mean([one.low <= effects[one.score] <= one.high for one in found])
    assert inside >= 0.93


@pytest.mark.slow
def test_variants_that_do_not_differ_are_seldom_found_to() -> None:
    truth = dataclasses.replace(TRUTH, effects={"base": {}, "one": {}, "two": {}, "three": {}})
    wrong = sum(
        any(one.says != NOTHING for one in findings(outcomes(truth, seed), "base", ["one", "two", "three"]))
        for seed in range(150)
    )
    assert wrong <= 10


def test_what_is_there_is_found() -> None:
    truth = dataclasses.replace(TRUTH, effects={"base": {}, "gsm": {"math": 0.04, "code": -0.04}}, repeats=5)
    said = [
        {one.score: one.says for one in findings(outcomes(truth, seed), "base", ["gsm"], BPB)} for seed in range(60)
    ]
    assert np.mean([one["eval/bpb/math"] == HELPS for one in said]) > 0.9
    assert np.mean([one["eval/bpb/code"] == HURTS for one in said]) > 0.9


@pytest.mark.slow
def test_three_standard_errors_are_mostly_found() -> None:
    """Five repeats, one score, noise of documents and of repeats alike."""
    truth = dataclasses.replace(TRUTH, questions={}, effects={"base": {}, "variant": {"math": 1e-9}}, repeats=5)
    gains = [contrast(outcomes(truth, seed), "variant", "base", ["eval/bpb/math"])[0].gain for seed in range(200)]
    truth = dataclasses.replace(truth, effects={"base": {}, "variant": {"math": 3 * float(np.std(gains))}})
    said = [findings(outcomes(truth, seed), "base", ["variant"], ["eval/bpb/math"])[0].says for seed in range(200)]
    assert said.count(HELPS) > 100
    assert HURTS not in said


def test_one_repeat_finds_nothing_however_large() -> None:
    truth = dataclasses.replace(TRUTH, effects={"base": {}, "gsm": {"math": 1.0}}, repeats=1)
    made = outcomes(truth, 0)
    found = {one.score: one for one in findings(made, "base", ["gsm"])}
    assert found["eval/bpb/math"].low > 0.9
    assert {one.says for one in found.values()} == {NOTHING}
    assert any("one repeat" in flag and "add seeds" in flag for flag in comparison_flags(made, "base", ["gsm"]))


def test_a_missing_repeat_is_left_out_on_both_sides() -> None:
    made = outcomes(TRUTH, 0)
    found = contrast(without(made, "gsm", 2), "gsm", "base", BPB)
    whole = without(without(made, "gsm", 2), "base", 2)
    assert found == contrast(whole, "gsm", "base", BPB)
    assert found[0].repeats == 2
    flags = comparison_flags(without(made, "gsm", 2), "base", ["gsm"])
    assert "gsm: repeat 2 of gsm is missing, its counterpart is left out; run it" in flags
    assert comparison_flags(made, "base", ["gsm"]) == []


def test_variants_without_a_common_repeat_are_not_judged() -> None:
    made = without(without(outcomes(TRUTH, 0), "gsm", 1), "base", 2, 3)
    assert findings(made, "base", ["gsm"]) == []
    assert any("no repeat in common" in flag for flag in comparison_flags(made, "base", ["gsm"]))


def test_other_questions_are_left_out_and_said() -> None:
    made = outcomes(TRUTH, 0)
    place = next(place for place, one in enumerate(made) if one.run == "gsm-2")
    made[place] = with_score(made[place], "eval/arithmetic", requests="others")
    assert "eval/arithmetic" not in by_score(uncorrected_contrasts(made, "base", ["gsm"]))
    (flag,) = comparison_flags(made, "base", ["gsm"])
    assert all(words in flag for words in ("eval/arithmetic", "gsm-2", "left out"))


def test_other_documents_are_left_out_and_said() -> None:
    made = outcomes(TRUTH, 0)
    samples = made[0].samples["eval/bpb/math"]
    moved = dataclasses.replace(samples, ids=samples.ids[::-1])
    made[0] = dataclasses.replace(made[0], samples={**made[0].samples, "eval/bpb/math": moved})
    assert "eval/bpb/math" not in by_score(uncorrected_contrasts(made, "base", ["gsm"]))
    assert any("other documents" in flag for flag in comparison_flags(made, "base", ["gsm"]))


def test_the_mean_over_domains_is_that_of_their_gains() -> None:
    made = outcomes(TRUTH, 0)
    weights = {"general": 2.0, "math": 1.0, "code": 1.0}
    found = by_score(uncorrected_contrasts(made, "base", ["gsm"], ["eval/bpb", *BPB], weights))
    parts = {name: found[f"eval/bpb/{name}"] for name in DOMAINS}
    assert found["eval/bpb"].gain == pytest.approx(sum(weights[name] / 4 * one.gain for name, one in parts.items()))
    spread = np.sqrt(sum((weights[name] / 4 * one.documents) ** 2 for name, one in parts.items()))
    assert found["eval/bpb"].documents == pytest.approx(spread)
    unmeasured = uncorrected_contrasts(made, "base", ["gsm"], ["eval/bpb"], {**weights, "multilingual": 4.0})
    assert unmeasured[0].gain == pytest.approx(found["eval/bpb"].gain)


def test_a_score_without_samples_is_compared_more_cautiously() -> None:
    made = outcomes(TRUTH, 0)
    bare = [dataclasses.replace(one, samples={}) for one in made]
    paired, apart = contrast(made, "gsm", "base", BPB[:1])[0], contrast(bare, "gsm", "base", BPB[:1])[0]
    assert apart.gain == pytest.approx(paired.gain)
    assert apart.documents > paired.documents


def test_no_variants_to_compare_are_refused() -> None:
    for control, variants, words in [
        ("nobody", ["gsm"], "control: 'nobody' has no finished run"),
        ("base", ["absent"], "absent: has no finished run"),
        ("base", [], "at least one other variant"),
        ("base", ["base"], "at least one other variant"),
    ]:
        with pytest.raises(ValueError, match=words):
            comparison_flags(outcomes(TRUTH, 0), control, variants)


def test_unequal_tokens_are_refused_with_both_numbers() -> None:
    made = outcomes(TRUTH, 0)
    made[-1] = dataclasses.replace(made[-1], tokens=200_000)
    with pytest.raises(ValueError, match=r"gsm-3 trained on 200,000 tokens, base on 160,000"):
        findings(made, "base", ["gsm"])


def test_two_runs_of_one_repeat_are_refused() -> None:
    made = outcomes(TRUTH, 0)
    with pytest.raises(ValueError, match="two runs of one repeat"):
        comparison_flags([*made, made[0]], "base", ["gsm"])
