"""Gains of variants: coverage and false findings by simulation, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from benchmarks.simulated_studies import PlantedEffects, outcomes
from herd.llama3.evaluate.scores import Score
from herd.llama3.studies.effects import Contrast, comparison_flags, findings, uncorrected_contrasts
from herd.llama3.studies.results import HELPS, HURTS, NOTHING, RunResult

DOMAINS = {"general": 48, "math": 32, "code": 64}
TRUTH = PlantedEffects(DOMAINS, {"arithmetic": 100}, {"base": {}, "gsm": {"math": 0.02, "code": -0.01}})
BPB = [f"eval/bpb/{name}" for name in DOMAINS]


def contrasts_of(
    results: Sequence[RunResult], variant: str, control: str, scores: Sequence[str] | None = None
) -> list[Contrast]:
    """Return the gain of a single variant on each score."""
    return uncorrected_contrasts(results, control, [variant], scores)


def by_score(contrasts: Sequence[Contrast]) -> dict[str, Contrast]:
    return {contrast.score: contrast for contrast in contrasts}


def without(results: list[RunResult], variant: str, *repeats: int) -> list[RunResult]:
    return [result for result in results if result.variant != variant or result.repeat not in repeats]


def with_score(result: RunResult, key: str, **changes: object) -> RunResult:
    score: Score = dataclasses.replace(result.scores[key], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(result, scores={**result.scores, key: score})


def test_gain_is_above_zero_where_bits_fall_and_where_answers_rise() -> None:
    truth = PlantedEffects({"math": 32}, {"arithmetic": 400}, {"base": {}, "variant": {"math": 0.5, "arithmetic": 0.4}})
    results = outcomes(truth, 0)
    contrasts = by_score(contrasts_of(results, "variant", "base"))
    assert contrasts["eval/bpb/math"].gain == pytest.approx(0.5, abs=0.05)
    assert contrasts["eval/arithmetic"].gain == pytest.approx(0.4, abs=0.1)
    scores = [
        np.mean([result.scores["eval/bpb/math"].value for result in results if result.variant == variant])
        for variant in ("base", "variant")
    ]
    assert contrasts["eval/bpb/math"].gain == pytest.approx(scores[0] - scores[1])
    assert [contrast.unit for contrast in contrasts.values()] == ["bpb", "accuracy"]


def test_documents_of_few_sites_widen_the_interval_and_are_named() -> None:
    results = outcomes(TRUTH, 1)
    few = [clustered(result, "eval/bpb/code", 4) for result in results]
    wide, narrow = (by_score(contrasts_of(runs, "gsm", "base"))["eval/bpb/code"] for runs in (few, results))
    assert wide.high - wide.low > narrow.high - narrow.low
    new = set(comparison_flags(few, "base", ["gsm"])) - set(comparison_flags(results, "base", ["gsm"]))
    (flag,) = new
    assert flag.startswith("eval/bpb/code: its 64 samples are of 4 sites, files or passages")
    many = [clustered(result, "eval/bpb/code", 20) for result in results]
    assert comparison_flags(many, "base", ["gsm"]) == comparison_flags(results, "base", ["gsm"])


def clustered(result: RunResult, key: str, count: int) -> RunResult:
    samples = result.samples[key]
    names = tuple(f"site {place % count}" for place in range(len(samples.ids)))
    return dataclasses.replace(result, samples={**result.samples, key: dataclasses.replace(samples, clusters=names)})


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [2, 3, 5])
@pytest.mark.parametrize("luck", [0.0, 0.02])
def test_intervals_cover_the_truth(repeats: int, luck: float) -> None:
    truth = dataclasses.replace(TRUTH, questions={}, repeats=repeats, luck=luck)
    effects = {f"eval/bpb/{name}": truth.effects["gsm"].get(name, 0.0) for name in DOMAINS}
    contrasts = [
        contrast for seed in range(150) for contrast in uncorrected_contrasts(outcomes(truth, seed), "base", ["gsm"])
    ]
    inside = np.mean([contrast.low <= effects[contrast.score] <= contrast.high for contrast in contrasts])
    assert inside >= 0.93


@pytest.mark.slow
def test_variants_that_do_not_differ_are_seldom_found_to() -> None:
    truth = dataclasses.replace(TRUTH, effects={"base": {}, "one": {}, "two": {}, "three": {}})
    wrong = sum(
        any(contrast.says != NOTHING for contrast in findings(outcomes(truth, seed), "base", ["one", "two", "three"]))
        for seed in range(150)
    )
    assert wrong <= 10


def test_what_is_there_is_found() -> None:
    truth = dataclasses.replace(TRUTH, effects={"base": {}, "gsm": {"math": 0.04, "code": -0.04}}, repeats=5)
    verdicts_by_seed = [
        {contrast.score: contrast.says for contrast in findings(outcomes(truth, seed), "base", ["gsm"], BPB)}
        for seed in range(60)
    ]
    assert np.mean([verdicts["eval/bpb/math"] == HELPS for verdicts in verdicts_by_seed]) > 0.9
    assert np.mean([verdicts["eval/bpb/code"] == HURTS for verdicts in verdicts_by_seed]) > 0.9


@pytest.mark.slow
def test_three_standard_errors_are_mostly_found() -> None:
    """Five repeats, one score, noise of documents and of repeats alike."""
    truth = dataclasses.replace(TRUTH, questions={}, effects={"base": {}, "variant": {"math": 1e-9}}, repeats=5)
    gains = [contrasts_of(outcomes(truth, seed), "variant", "base", ["eval/bpb/math"])[0].gain for seed in range(200)]
    truth = dataclasses.replace(truth, effects={"base": {}, "variant": {"math": 3 * float(np.std(gains))}})
    verdicts = [findings(outcomes(truth, seed), "base", ["variant"], ["eval/bpb/math"])[0].says for seed in range(200)]
    assert verdicts.count(HELPS) > 100
    assert HURTS not in verdicts


def test_one_repeat_finds_nothing_however_large() -> None:
    truth = dataclasses.replace(TRUTH, effects={"base": {}, "gsm": {"math": 1.0}}, repeats=1)
    results = outcomes(truth, 0)
    contrasts = {contrast.score: contrast for contrast in findings(results, "base", ["gsm"])}
    assert contrasts["eval/bpb/math"].low > 0.9
    assert {contrast.says for contrast in contrasts.values()} == {NOTHING}
    assert any("one repeat" in flag and "add seeds" in flag for flag in comparison_flags(results, "base", ["gsm"]))


def test_a_missing_repeat_is_left_out_on_both_sides() -> None:
    results = outcomes(TRUTH, 0)
    contrasts = contrasts_of(without(results, "gsm", 2), "gsm", "base", BPB)
    whole = without(without(results, "gsm", 2), "base", 2)
    assert contrasts == contrasts_of(whole, "gsm", "base", BPB)
    assert contrasts[0].repeats == 2
    flags = comparison_flags(without(results, "gsm", 2), "base", ["gsm"])
    assert "gsm: repeat 2 of gsm is missing, its counterpart is left out; run it" in flags
    assert comparison_flags(results, "base", ["gsm"]) == []


def test_variants_without_a_common_repeat_are_not_judged() -> None:
    results = without(without(outcomes(TRUTH, 0), "gsm", 1), "base", 2, 3)
    assert findings(results, "base", ["gsm"]) == []
    assert any("no repeat in common" in flag for flag in comparison_flags(results, "base", ["gsm"]))


def test_other_questions_are_left_out_and_said() -> None:
    results = outcomes(TRUTH, 0)
    index = next(index for index, result in enumerate(results) if result.run == "gsm-2")
    results[index] = with_score(results[index], "eval/arithmetic", requests="others")
    assert "eval/arithmetic" not in by_score(uncorrected_contrasts(results, "base", ["gsm"]))
    (flag,) = comparison_flags(results, "base", ["gsm"])
    assert all(text in flag for text in ("eval/arithmetic", "gsm-2", "left out"))


def test_other_documents_are_left_out_and_said() -> None:
    results = outcomes(TRUTH, 0)
    samples = results[0].samples["eval/bpb/math"]
    moved = dataclasses.replace(samples, ids=samples.ids[::-1])
    results[0] = dataclasses.replace(results[0], samples={**results[0].samples, "eval/bpb/math": moved})
    assert "eval/bpb/math" not in by_score(uncorrected_contrasts(results, "base", ["gsm"]))
    assert any("other documents" in flag for flag in comparison_flags(results, "base", ["gsm"]))


def test_a_domain_without_a_score_has_no_weight_in_the_mean() -> None:
    results = outcomes(TRUTH, 0)
    weights = {"general": 2.0, "math": 1.0, "code": 1.0}
    measured, unmeasured = (
        uncorrected_contrasts(results, "base", ["gsm"], ["eval/bpb"], given)
        for given in (weights, {**weights, "multilingual": 4.0})
    )
    assert unmeasured == measured


def test_gains_and_intervals_are_those_of_plain_numpy() -> None:
    """Of two variants with three repeats: the documents' noise, and the larger of a variant's own and the pooled."""
    effects = {"base": {}, "gsm": {"math": 0.02}, "more": {"code": 0.03, "arithmetic": 0.1}}
    results = outcomes(dataclasses.replace(TRUTH, effects=effects, luck=0.01), 3)
    variants, weights = ["gsm", "more"], {"general": 2.0, "math": 1.0, "code": 5.0}
    runs = {(run.variant, run.repeat): run for run in results}

    def table(variant: str, score: str) -> np.ndarray:
        return np.array([runs[variant, repeat].samples[score].numerators for repeat in (1, 2, 3)])

    gains: dict[tuple[str, str], np.ndarray] = {}
    sampling: dict[tuple[str, str], float] = {}
    counts = {}
    for score in [*BPB, "eval/arithmetic"]:
        sizes = runs["base", 1].samples[score].denominators
        counts[score] = len(sizes)
        for variant in variants:
            better = table("base", score) - table(variant, score)
            better = better if score in BPB else -better
            gains[variant, score] = better.sum(axis=1) / sizes.sum()
            mean = better.mean(axis=0)
            rest = mean - mean.sum() / sizes.sum() * sizes
            sampling[variant, score] = len(sizes) / (len(sizes) - 1) * (rest @ rest) / sizes.sum() ** 2
            if score not in BPB:
                sampling[variant, score] += 1 / (len(sizes) + 2) ** 2
    for variant in variants:
        parts = [(weights[name] / 8, (variant, f"eval/bpb/{name}")) for name in DOMAINS]
        gains[variant, "eval/bpb"] = np.sum([weight * gains[key] for weight, key in parts], axis=0)
        sampling[variant, "eval/bpb"] = sum(weight**2 * sampling[key] for weight, key in parts)
    counts["eval/bpb"] = min(DOMAINS.values())
    scores = ["eval/bpb", *BPB, "eval/arithmetic"]
    contrasts = uncorrected_contrasts(results, "base", variants, scores, weights)
    assert len(contrasts) == len(scores) * len(variants)
    for contrast in contrasts:
        key, n = (contrast.variant, contrast.score), counts[contrast.score]
        block = np.array([np.zeros(3), *(gains[variant, contrast.score] for variant in variants)])
        rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
        own, pooled = gains[key].var(ddof=1) / 3, 2 * (rest**2).sum() / 4 / 3
        noise = max(stats.t.isf(0.025, 2) ** 2 * own, stats.t.isf(0.025, 4) ** 2 * pooled)
        half = np.sqrt(stats.t.isf(0.025, n - 1) ** 2 * sampling[key] + noise)
        assert contrast.gain == pytest.approx(gains[key].mean())
        assert contrast.documents == pytest.approx(np.sqrt(sampling[key]))
        assert (contrast.low, contrast.high) == pytest.approx((contrast.gain - half, contrast.gain + half))


def test_a_score_without_samples_is_compared_more_cautiously() -> None:
    results = outcomes(TRUTH, 0)
    bare = [dataclasses.replace(result, samples={}) for result in results]
    paired, apart = contrasts_of(results, "gsm", "base", BPB[:1])[0], contrasts_of(bare, "gsm", "base", BPB[:1])[0]
    assert apart.gain == pytest.approx(paired.gain)
    assert apart.documents > paired.documents


def test_no_variants_to_compare_are_refused() -> None:
    for control, variants, message in [
        ("nobody", ["gsm"], "control: 'nobody' has no finished run"),
        ("base", ["absent"], "absent: has no finished run"),
        ("base", [], "at least one other variant"),
        ("base", ["base"], "at least one other variant"),
    ]:
        with pytest.raises(ValueError, match=message):
            comparison_flags(outcomes(TRUTH, 0), control, variants)


def test_unequal_tokens_are_refused_with_both_numbers() -> None:
    results = outcomes(TRUTH, 0)
    results[-1] = dataclasses.replace(results[-1], tokens=200_000)
    with pytest.raises(ValueError, match=r"gsm-3 trained on 200,000 tokens, base on 160,000"):
        findings(results, "base", ["gsm"])


def test_two_runs_of_one_repeat_are_refused() -> None:
    results = outcomes(TRUTH, 0)
    with pytest.raises(ValueError, match="two runs of one repeat"):
        comparison_flags([*results, results[0]], "base", ["gsm"])
