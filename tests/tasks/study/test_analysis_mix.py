"""The analysis of a mix search: mixes without a domain, and variants that change something else than shares."""

from __future__ import annotations

from pathlib import Path

from benchmarks import simulated_studies
from herd.llama3.studies.expand import ExpandedStudy, load_study
from herd.llama3.studies.results import HURTS, RunResult
from herd.tasks.runs.records import RunRecord, StepRecord
from herd.tasks.study.analysis import mix_analysis, other_data

BASE = Path("recipes/experiments/base-cpu.yaml").absolute()
DOCUMENTS = dict.fromkeys(("general", "math", "code", "multilingual"), 48)


def posed(folder: Path, text: str) -> ExpandedStudy:
    path = folder / "study.yaml"
    path.write_text(f"name: tried\nrecipe: {BASE}\nseeds: [1, 2, 3]\n{text}")
    return load_study(path)


def ran(study: ExpandedStudy, **effects: dict[str, float]) -> list[RunResult]:
    """Return made-up runs of all variants; those not named in `effects` have none."""
    variants = dict.fromkeys(run.variant.name for run in study.runs)
    truth = simulated_studies.PlantedEffects(DOCUMENTS, {}, {variant: effects.get(variant, {}) for variant in variants})
    return simulated_studies.outcomes(truth, seed=1)


def test_variants_that_change_something_else_alone_are_compared(tmp_path: Path) -> None:
    study = posed(tmp_path, "mix: {others: {strict: [curate.dedup.jaccard=0.7], loose: [curate.dedup.jaccard=0.9]}}")
    math = {"math": 0.3, "general": 0.3, "code": 0.3, "multilingual": 0.3}
    made = mix_analysis(study, ran(study, strict=math, loose={key: -value for key, value in math.items()}))
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
