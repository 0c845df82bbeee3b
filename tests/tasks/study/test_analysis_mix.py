"""The analysis of a mix search: mixes without a domain, and variants that change something else than shares."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks import simulated_studies
from herd.llama3.evaluate.scores import Score
from herd.llama3.recipe.load import RecipeError
from herd.llama3.studies.expand import ExpandedStudy, load_study
from herd.llama3.studies.results import HURTS, RunResult
from herd.tasks.runs.records import RunRecord, StepRecord
from herd.tasks.study.analysis import mix_analysis, other_data, proposed_mix

BASE = Path("recipes/experiments/base-cpu.yaml").absolute()
DOCUMENTS = dict.fromkeys(("general", "math", "code", "multilingual"), 48)


def posed(folder: Path, text: str) -> ExpandedStudy:
    path = folder / "study.yaml"
    seeds = "" if "seeds:" in text else "seeds: [1, 2, 3]\n"
    path.write_text(f"name: tried\nrecipe: {BASE}\n{seeds}{text}")
    return load_study(path)


def ran(study: ExpandedStudy, **effects: dict[str, float]) -> list[RunResult]:
    """Return made-up runs of all variants; those not named in `effects` have none."""
    variants = dict.fromkeys(run.variant.name for run in study.runs)
    repeats = max(run.repeat for run in study.runs)
    planted = {variant: effects.get(variant, {}) for variant in variants}
    truth = simulated_studies.PlantedEffects(DOCUMENTS, {}, planted, repeats)
    return simulated_studies.outcomes(truth, seed=1)


def test_variants_that_change_something_else_alone_are_compared(tmp_path: Path) -> None:
    study = posed(tmp_path, "mix: {others: {strict: [curate.dedup.jaccard=0.7], loose: [curate.dedup.jaccard=0.9]}}")
    gain = {"math": 0.3, "general": 0.3, "code": 0.3, "multilingual": 0.3}
    made = mix_analysis(study, ran(study, strict=gain, loose={key: -value for key, value in gain.items()}))
    assert made.verdict.headline[0].startswith("take strict: helps +0.")
    assert made.verdict.change == ["curate.dedup.jaccard=0.7"]
    assert {one.says for one in made.verdict.findings if one.variant == "loose"} == {HURTS}


def test_a_variant_may_leave_out_a_domain(tmp_path: Path) -> None:
    variants = "{no-code: {general: 60%, math: 30%, multilingual: 10%}}"
    study = posed(tmp_path, f"mix: {{design: {{kind: around}}, variants: {variants}}}")
    made = mix_analysis(study, ran(study))
    table = next(table for table in made.tables if table.title == "Mixes")
    (row,) = [row for row in table.rows if row[0] == "no-code"]
    assert row[table.columns.index("code")] == "0.0%"
    assert made.verdict.change == []
    assert {one.variant for one in made.verdict.findings} == {run.variant.name for run in study.runs} - {"base"}


def planted(study: ExpandedStudy, slope: float) -> dict[str, dict[str, float]]:
    """Return the effects of mixes by which more maths saves bits of all domains."""
    gains = {run.variant.name: slope * math.log(float(run.variant.shares["math"]) / 0.25) for run in study.runs}
    return {name: dict.fromkeys(DOCUMENTS, gain) for name, gain in gains.items()}


@pytest.mark.parametrize("seeds", ["[1, 2, 3]", "[1]"])
def test_what_is_proposed_is_trained_and_its_measured_gain_decides(seeds: str, tmp_path: Path) -> None:
    study = posed(tmp_path, f"seeds: {seeds}\nmix: {{design: {{kind: around}}}}")
    results = ran(study, **planted(study, 0.2))
    shares = proposed_mix(study, results)
    assert shares is not None
    assert shares["math"] > Fraction(1, 4)
    assert sum(shares.values()) == 1
    before = mix_analysis(study, results).verdict
    assert "predicted +0." in before.headline[0]
    assert "it was not trained" in before.headline[0]
    asked = study.with_proposal(shares)
    new = [run for run in asked.runs if run.variant.name == "proposed"]
    assert [run.repeat for run in new] == list(range(1, len(study.runs) // 9 + 1))
    assert [dict(run.recipe.mix["base"]) for run in new] == [shares] * len(new)
    assert [run.recipe.seed for run in new] == [run.recipe.seed for run in study.runs if run.variant.name == "base"]
    assert asked.digest == study.digest
    assert [run.digest for run in asked.runs if run not in new] == [run.digest for run in study.runs]
    for slope, says in ((0.2, "take base "), (0.0, "no significant difference: keep base; "), (-0.2, "no significant")):
        effects = {**planted(study, 0.2), "proposed": planted(asked, slope)["proposed"]}
        verdict = mix_analysis(asked, ran(asked, **effects)).verdict
        assert verdict.headline[0].startswith(says)
        assert "trained beside base: weighted " in verdict.headline[0]
        assert "; predicted +0." in verdict.headline[0]
        assert bool(verdict.change) == (slope > 0)
    others = [replace(one, scores=_asked_anew(one)) if one.variant == "proposed" else one for one in ran(asked)]
    verdict = mix_analysis(asked, [*results, *(one for one in others if one.variant == "proposed")]).verdict
    assert "keep base" in verdict.headline[0]
    assert "was trained, but cannot be compared" in verdict.headline[0]
    assert any("was measured on other questions" in flag for flag in verdict.flags)


def _asked_anew(result: RunResult) -> dict[str, Score]:
    return {key: replace(score, requests="others") for key, score in result.scores.items()}


def test_nothing_is_proposed_where_nothing_differs(tmp_path: Path) -> None:
    study = posed(tmp_path, "mix: {design: {kind: around}}")
    assert proposed_mix(study, ran(study)) is None
    assert proposed_mix(study, ran(study)[:3]) is None, "too few mixes"
    compared = posed(tmp_path, "compare: {control: a, varies: [lr.peak], variants: {a: [], b: [lr.peak=5e-3]}}")
    assert proposed_mix(compared, []) is None


@pytest.mark.parametrize(
    ("mix", "field"),
    [("variants: {proposed: {general: 60%, math: 40%}}", "variants"), ("others: {proposed: [lr.peak=1e-3]}", "others")],
)
def test_no_variant_has_the_name_of_the_proposal(mix: str, field: str, tmp_path: Path) -> None:
    study = posed(tmp_path, f"mix: {{{mix}}}")
    with pytest.raises(RecipeError, match=rf"mix\.{field}: 'proposed' is the mix that the search proposes"):
        _ = study.runs


def test_a_proposal_that_is_a_variant_is_named_and_both_gains_weigh_the_mixed_domains(tmp_path: Path) -> None:
    """`multilingual` is in no mix: neither the prediction nor the measurement counts it."""
    mixes = ", ".join(f"m{n}: {{general: {70 - n}%, math: {20 + n}%, code: 10%}}" for n in (5, 10, 20, 30))
    mixes += ", c5: {general: 65%, math: 20%, code: 15%}, c10: {general: 60%, math: 20%, code: 20%}"
    study = posed(
        tmp_path,
        f"set: ['mix.base={{general: 70%, math: 20%, code: 10%}}']\n"
        f"mix: {{weights: {{math: 50%, multilingual: 50%}}, variants: {{{mixes}}}}}",
    )
    gains = {run.variant.name: 0.2 * math.log(float(run.variant.shares["math"]) / 0.2) for run in study.runs}
    planted = {name: {"math": gain, "multilingual": -10 * gain} for name, gain in gains.items()}
    results = ran(study, **planted)
    shares = proposed_mix(study, results)
    assert shares == {"general": Fraction(2, 5), "math": Fraction(1, 2), "code": Fraction(1, 10)}
    asked = study.with_proposal(shares)
    verdict = mix_analysis(asked, ran(asked, **planted, proposed=planted["m30"])).verdict
    assert verdict.headline[0].startswith("take base 40/50/10 (general/math/code), variant m30, trained beside base")


def test_equal_recipes_with_other_token_shards_are_named(tmp_path: Path) -> None:
    """Shards may differ by what curates them; other documents from the fields that decide them are a changed source."""
    study = posed(tmp_path, "mix: {others: {strict: [curate.dedup.jaccard=0.7], fast: [lr.peak=5e-3]}}")
    records = {}
    for run in study.runs:
        shards = StepRecord(artifact=f"tokens/jaccard-{run.recipe.curate.dedup.jaccard}", outcome="created")
        records[run.name] = RunRecord(
            name=run.name, family="tried", recipe_digest="d", started="2026", code="abc", steps={"tokenize": shards}
        )
    assert other_data(records, study.runs) == []
    changed = next(run for run in study.runs if run.variant.name == "fast")
    records[changed.name].steps["tokenize"].artifact = "tokens/other"
    (line,) = other_data(records, study.runs)
    assert line.startswith(f"{changed.name}: was trained on tokens/other, {study.runs[0].name} on tokens/jaccard-")
