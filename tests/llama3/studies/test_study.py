"""A study's file and its variants: what is refused, what variants share, and that budgets are kept."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from herd.llama3.recipe.load import RecipeError
from herd.llama3.studies.checks import check_study
from herd.llama3.studies.expand import ExpandedStudy, changed_fields, flops_per_ladder_token, load_study
from herd.llama3.studies.results import data_digest, distinct_stages, stage_flops
from herd.llama3.studies.study import ANNEAL, BASE, DEFAULT

RECIPES = Path(__file__).parents[3] / "recipes" / "experiments"
SHIPPED = sorted(path for path in RECIPES.rglob("*.yaml") if not path.name.startswith("base"))


def posed(folder: Path, text: str) -> ExpandedStudy:
    """Return the study that `text` says, on the base recipe of the shipped studies."""
    path = folder / "study.yaml"
    path.write_text(f"name: tried\nrecipe: {RECIPES / 'base-cpu.yaml'}\n{text}")
    return load_study(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(RECIPES)))
def test_shipped_studies_can_be_run_and_their_variants_share_data(path: Path) -> None:
    study = load_study(path)
    check_study(study)
    assert len({run.digest for run in study.runs}) == len(study.runs)
    assert len({data_digest(run.recipe) for run in study.runs}) == 1


def test_a_shipped_study_is_found_by_its_name() -> None:
    assert load_study(Path("ramp-cpu")).digest == load_study(RECIPES / "ramp-cpu.yaml").digest
    with pytest.raises(RecipeError, match="study ramp-cpo: no such file or shipped study; did you mean ramp-cpu"):
        load_study(Path("ramp-cpo"))


def test_a_ladder_spends_its_budgets() -> None:
    study = load_study(RECIPES / "ladder-cpu.yaml")
    ladder = study.study.ladder
    assert ladder is not None
    for run in study.runs:
        vocab_size = run.recipe.tokenizer.train.vocab + 256 if run.recipe.tokenizer.train else 0
        spent = run.tokens * flops_per_ladder_token(ladder, run.recipe.model, vocab_size)
        assert 0.9 * run.variant.budget < spent <= run.variant.budget
    assert {run.variant.budget for run in study.runs} == set(ladder.budgets)


def test_rates_and_batches_of_a_ladder_reach_their_ends() -> None:
    study = load_study(RECIPES / "ladder-cpu.yaml")
    ladder = study.study.ladder
    assert ladder is not None
    peaks = {run.parameters: run.recipe.lr.peak for run in study.runs}
    falling = [peaks[count] for count in sorted(peaks)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == pytest.approx(ladder.peak[0])
    assert falling[-1] == pytest.approx(ladder.peak[1])
    batches = {run.variant.budget: run.recipe.stages[0].batch for run in study.runs}
    assert [batches[budget] for budget in sorted(batches)] == sorted(batches.values())
    for run in study.runs:
        assert run.recipe.lr.cosine is not None
        assert run.recipe.lr.cosine.to == pytest.approx(0.1 * run.recipe.lr.peak)


def test_annealing_variants_differ_in_the_last_stage_alone() -> None:
    study = load_study(RECIPES / "judge-cpu.yaml")
    control, *others = [run for run in study.runs if run.repeat == 1]
    assert control.variant.name == DEFAULT
    for run in others:
        assert {key.rpartition(".extra_sources")[0] for key in changed_fields(run.recipe, control.recipe)} == {
            f"stages.{ANNEAL}"
        }


def test_annealing_trains_the_first_half_once() -> None:
    study = load_study(RECIPES / "judge-cpu.yaml")
    first = [next(iter(stage_flops(run))).lineage for run in study.runs]
    assert len(set(first)) == 1
    stages = sum(len(list(stage_flops(run))) for run in study.runs)
    assert len(distinct_stages(study.runs)) == stages - len(study.runs) + 1


def test_repeats_of_an_annealing_study_read_other_documents() -> None:
    study = load_study(RECIPES / "judge-cpu.yaml")
    draws = [run.recipe.stages[-1].data_offset for run in study.runs if run.variant.name == DEFAULT]
    assert draws == list(range(1, len(draws) + 1))


def test_mix_variants_differ_in_the_mix_alone_and_train_one_tokenizer() -> None:
    study = load_study(RECIPES / "mix-cpu.yaml")
    control, *others = [run for run in study.runs if run.repeat == 1]
    assert control.variant.name == BASE
    for run in others:
        assert {key.split(".")[1] for key in changed_fields(run.recipe, control.recipe)} == {"base"}
        assert sum(run.variant.shares.values()) == Fraction(1)
        train = run.recipe.tokenizer.train
        assert train is not None
        assert train.mix is not None
        assert run.recipe.mix[train.mix] == control.recipe.mix["base"]


def test_seeds_are_repeats(tmp_path: Path) -> None:
    study = posed(tmp_path, "seeds: [3, 5]\ncompare: {control: a, varies: [lr], variants: {a: [], b: [lr.peak=1e-3]}}")
    assert [(run.variant.name, run.repeat, run.recipe.seed) for run in study.runs] == [
        ("a", 1, 3), ("a", 2, 5), ("b", 1, 3), ("b", 2, 5),
    ]  # fmt: skip
    assert {run.recipe.data_seed for run in study.runs} == {1}


COMPARE = "compare: {control: a, varies: [lr.warmup], variants: {a: [], b: [%s]}}"
ALIKE = {
    f"m{n}": {"general": f"{50 - n}%", "math": f"{25 + n}%", "code": "17%", "multilingual": "8%"} for n in range(1, 6)
}
BAD = {
    "two kinds": ("ladder: {budgets: [1e12], sizes: {t: {preset: tiny}}}\n" + COMPARE % "", "exactly one of"),
    "no kind": ("seeds: [1]", "exactly one of"),
    "unknown key": ("compares: {}", "did you mean 'compare'"),
    "a seed twice": ("seeds: [1, 1]\n" + COMPARE % "lr.warmup=9 steps", "contains a duplicate"),
    "missing control": ("compare: {control: c, varies: [lr], variants: {a: [], b: []}}", "'c' is not a variant"),
    "differs in more": (COMPARE % "lr.warmup=9 steps, lr.peak=1e-3", "also differs from a in lr.peak"),
    "unequal tokens": (
        "compare: {control: a, varies: [stages], variants: {a: [], b: [stages.main.until=900K]}}",
        "tokens, a on",
    ),
    "two variants that are one": (COMPARE % "", "is the same recipe as a"),
    "too few budgets": (
        "ladder: {budgets: [1e12, 2e12], sizes: {a: {preset: tiny}, b: {preset: 3m}, c: {preset: 6m}}, seq_len: 256, "
        "batch: [1Ki, 1Ki], warmup: 5 steps, tokens_per_parameter: [0.01, 1e6]}",
        "2 budgets, a law needs 3",
    ),
    "too few sizes": (
        "ladder: {budgets: [1e12, 2e12, 4e12], sizes: {a: {preset: tiny}, b: {preset: 3m}}, seq_len: 256, "
        "batch: [1Ki, 1Ki], warmup: 5 steps, tokens_per_parameter: [0.01, 1e6]}",
        "2 sizes fit the budget",
    ),
    "twins": (
        "ladder: {budgets: [1e12], sizes: {a: {preset: tiny}, b: {preset: tiny}}}",
        "leave one out",
    ),
    "no such stage": ("annealing: {after: half, for: 10K, new: {x: {domain: math, uri: installed}}}", "is not a stage"),
    "no such mix": ("mix: {of: other, design: {kind: around}}", "'other' is not a mix"),
    "too few mixes": (
        "mix: {variants: {m: {general: 40%, math: 35%, code: 17%, multilingual: 8%}}}",
        "2 mixes, where a fit over 4 domains takes 6",
    ),
    "mixes that tell nothing apart": (f"mix: {{variants: {ALIKE}}}", "code has one share in all of them"),
    "a mix that does not sum": ("mix: {variants: {m: {general: 50%, math: 40%}}}", "sum to 90%"),
    "too dear": ("limits: {flops: 1e9}\n" + COMPARE % "lr.warmup=9 steps", "limits.flops"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_what_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_study(posed(tmp_path, text))
    assert words in str(caught.value)


def test_a_search_that_varies_no_shares_needs_no_mixes(tmp_path: Path) -> None:
    check_study(posed(tmp_path, "mix: {others: {longer: [evaluate.documents=9]}}"))


def test_a_mix_may_leave_a_domain_out(tmp_path: Path) -> None:
    study = posed(
        tmp_path, "mix: {design: {kind: around}, variants: {no-code: {general: 60%, math: 30%, multilingual: 10%}}}"
    )
    check_study(study)
    (run, *_) = [run for run in study.runs if run.variant.name == "no-code"]
    assert run.recipe.mix["base"].get("code", 0) == 0


def test_a_study_keeps_its_digest_where_it_is_copied(tmp_path: Path) -> None:
    study = posed(tmp_path, COMPARE % "lr.warmup=9 steps")
    other = tmp_path / "elsewhere"
    other.mkdir()
    plain = study.study.model_dump(mode="json", by_alias=True, exclude_unset=True)
    (other / "base.yaml").write_text(yaml.safe_dump(study.data))
    (other / "study.yaml").write_text(yaml.safe_dump({**plain, "recipe": "base.yaml"}))
    assert load_study(other / "study.yaml").digest == study.digest


def test_further_variants_come_from_the_form(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"name: tried\nrecipe: {RECIPES / 'base-cpu.yaml'}\n{COMPARE % 'lr.warmup=9 steps'}")
    study = load_study(path, further={"c": ["lr.warmup=5 steps"]})
    assert [run.variant.name for run in study.runs] == ["a", "b", "c"]
    with pytest.raises(RecipeError, match="takes no further variants"):
        load_study(RECIPES / "ladder-cpu.yaml", further={"c": []})
